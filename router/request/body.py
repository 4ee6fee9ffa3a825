"""From bytes to a request: parsing, bounds and the removal of transfer fields. Bad input ends here, with a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from cluster import wire
from cluster.errors import bad_request
from cluster.scan import Steps, run
from router.request.heavy import Heavy

_REFUSED_PARTS = wire.TRANSFER_KEYS | wire.TOP_LEVEL_KEYS | wire.FREE_FORM_KEYS | {"cache_salt"}

_KEYS: Final = frozenset(name.encode() for name in _REFUSED_PARTS | {wire.MEDIA_NAME})
_KEY_BYTES_MAX: Final = 6 * max(map(len, _KEYS))
"""Bytes of the longest key with every letter escaped."""

_ESCAPED: Final = rb"\u00"
"""The escape of a key's letter: all keys are ASCII."""

_JSON: Final = "application/json"

_NESTING: Final = (dict, list)

_QUOTES_MAX: Final = 1 << 10
"""A body with more quotes is read field by field, which is cheaper than looking at each."""

_COPIED_MAX: Final = 1 << 16
"""Longer bodies are copied once at most."""

_SPLIT_MAX: Final = 1 << 12
"""Bodies of this size are split at once: copying one long text is cheaper than looking for each quote."""

_FEW, _APART = 16, 512
"""Quotes, and mean distance in bytes, from which splitting the rest is faster (measured)."""


def parse_json(raw: bytes, content_type: str) -> dict[str, Any]:
    """A JSON object from a body that must be one, as vLLM's server demands it.

    Raises:
        ApiError: 400 naming what is wrong: content type, syntax with its position, or not an object.
    """
    check_type(content_type)
    body = _decode(raw)
    if not isinstance(body, dict):
        raise bad_request(f"The body must be a JSON object, not {_kind(body)}.")
    return body


def check_type(content_type: str) -> None:
    """Raises ApiError: 400 if the content type of a body that must be JSON is not JSON."""
    media_type = content_type.split(";", 1)[0].strip().lower() if content_type != _JSON else _JSON
    if media_type != _JSON:
        said = f"`{media_type[:80]}`" if media_type else "missing"
        raise bad_request(f"Unsupported Media Type: Content-Type is {said}; send `Content-Type: application/json`.")


def object_of(read: Heavy) -> dict[str, Any]:
    """The fields of a heavy body. Raises ApiError: 400 if it is not an object."""
    if not read.is_object:
        raise bad_request("The body must be a JSON object.")
    return read.body


def clean_json(
    raw: bytes,
    content_type: str,
    *,
    namespace: str = "",
    salt: Callable[[dict[str, Any]], None] | None = None,
) -> bytes:
    """A body for an endpoint that the router does not read itself, without transfer fields, whatever its content type.

    JSON is parsed and written anew, so that duplicate or escaped keys cannot have one meaning here and another there.
    `namespace` is `wire.strip`'s; `salt` may add to an object.

    Raises:
        ApiError: 400 for a body that is neither JSON in UTF-8 nor a form, as an engine might find fields in it that the
            router does not; and for forms with the router's own fields.
    """
    if is_form(content_type):
        run(form_steps(raw, content_type))
        return raw
    check_no_form(content_type)
    if not raw:
        return raw
    body = _decode(raw)
    if not isinstance(body, dict):
        return msgspec.json.encode(strip({"": body})[""])
    clean = strip(body, namespace=namespace)
    if salt is not None:
        salt(clean)
    return msgspec.json.encode(clean)


def is_form(content_type: str) -> bool:
    """Whether the content type is a multipart form."""
    return content_type.split(";", 1)[0].strip().lower() == "multipart/form-data"


def check_no_form(content_type: str) -> None:
    """Raises ApiError: 400 for a form that is not multipart: no engine takes one, and the router does not read it."""
    if content_type.split(";", 1)[0].strip().lower() == "application/x-www-form-urlencoded":
        raise bad_request("Unsupported Media Type: send `application/json` or `multipart/form-data`.")


def form_steps(raw: bytes, content_type: str) -> Steps[list[wire.FormField]]:
    """Read a form, in steps. A form is refused if its field names are not plain, or if it has a field that a client
    must not set.

    Raises:
        ApiError: 400.
    """
    try:
        parts = yield from wire.form_parts(raw, content_type)
    except wire.FormUnreadable as error:
        raise bad_request(str(error)) from None
    for part in parts:
        if part.field in _REFUSED_PARTS:
            raise bad_request(f"The form field `{part.field}` is not accepted here.", part.field)
    return parts


def is_plain(raw: bytes, body: dict[str, Any]) -> bool:
    """Whether the bytes of this JSON object may go to engines unchanged.

    They may if no field that is removed or changed stands anywhere in them, and if no value nests too deep. Escaped
    keys, and keys that a later key replaces, are found, too: this reads `raw`, not a parser's result. A text value that
    equals such a name also makes it False: then the body is written anew, which is always right.
    """
    short = _short_texts(raw)
    if short is None or not _KEYS.isdisjoint(short) or _ESCAPED in b'"'.join(short):
        return False
    return _shallow(raw) or not _deeper(body, wire.DEPTH_MAX)


def _short_texts(raw: bytes) -> list[bytes] | None:
    """The texts between two quotes that are as short as a key may be; None if there are too many quotes.

    Quotes are searched one by one while they are far apart: CPython finds a byte many times faster than it splits or
    counts, and most of a long prompt's bytes are one text.
    """
    short: list[bytes] = []
    if len(raw) <= _SPLIT_MAX:
        return _split_short(raw, _QUOTES_MAX, short)
    start = 0
    for number in range(_QUOTES_MAX):
        if start < number * _APART and number >= _FEW:
            return _split_short(raw[start:], _QUOTES_MAX - number, short)
        end = raw.find(b'"', start)
        if end < 0:
            return short
        if end - start <= _KEY_BYTES_MAX:
            short.append(raw[start:end])
        start = end + 1
    return None


def _split_short(raw: bytes, quotes_max: int, short: list[bytes]) -> list[bytes] | None:
    """The rest of `_short_texts` for quotes that are close together: `short`, with the short texts of `raw` added."""
    pieces = raw.split(b'"', quotes_max)
    if len(pieces) > quotes_max:
        return None
    short.extend([piece for piece in pieces if len(piece) <= _KEY_BYTES_MAX])
    return short


def _shallow(raw: bytes) -> bool:
    """Whether the body has so few brackets that nothing nests too deep."""
    left = wire.DEPTH_MAX
    for opening in (b"{", b"["):
        at = raw.find(opening)
        while at >= 0:
            left -= 1
            if left < 0:
                return False
            at = raw.find(opening, at + 1)
    return True


def _deeper(value: Any, levels: int) -> bool:
    """Whether `levels` or more lists and objects stand inside each other within the value."""
    if levels == 0:
        return True
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, _NESTING) and _deeper(each, levels - 1):
            return True
    return False


def spliced(raw: bytes, fields: Mapping[str, Any]) -> bytes:
    """A JSON object with these fields at its end. Of equal keys the last counts, for every engine's JSON parser."""
    return b"".join((*opened(raw), closing(fields))) if fields else raw


def opened(raw: bytes) -> tuple[bytes | memoryview, ...]:
    """A JSON object to which more fields may be added with `closing`. In pieces, as a large one is not copied."""
    end = raw.rindex(b"}")
    if end > _COPIED_MAX:
        last = raw[end - _COPIED_MAX : end].rstrip() or raw[:end].rstrip()
        kept = memoryview(raw)[:end]
        return (kept,) if last.endswith(b"{") else (kept, b",")
    start = raw[:end].rstrip()
    return (start if start.endswith(b"{") else start + b",",)


def closing(fields: Mapping[str, Any]) -> bytes:
    """The end of an object that was `opened`: these fields, at least one, which win over equal ones before them."""
    return msgspec.json.encode(fields)[1:]


def model_of(body: dict[str, Any]) -> str | None:
    """The model that the body names; None: it names none (vLLM then uses its first).

    Raises:
        ApiError: 400 if it is not a text.
    """
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise bad_request(f"`model` must be a string, not {_kind(name)}.", "model")
    return name or None


def strip(body: dict[str, Any], *, namespace: str = "") -> dict[str, Any]:
    """`wire.strip`, with its failures as errors for the client.

    Raises:
        ApiError: 400 for a body nested too deep, or with too much JSON as text.
    """
    try:
        return wire.strip(body, namespace=namespace)
    except (wire.NestedTooDeep, wire.TextTooLong) as error:
        raise bad_request(str(error)) from None


def _decode(raw: bytes) -> Any:
    if not raw:
        raise bad_request("The body is empty; send a JSON object.")
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {_other_form(raw) or error}") from None
    except RecursionError:
        raise bad_request(f"The body is nested more than {wire.DEPTH_MAX} levels deep.") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


_FORMS: Final = (
    (b"\x1f\x8b", "it is compressed (gzip). Send it plain, without Content-Encoding."),
    (b"\x28\xb5\x2f\xfd", "it is compressed (zstd). Send it plain, without Content-Encoding."),
    (b"\xef\xbb\xbf", "it begins with a byte order mark. Send UTF-8 without one."),
    (b"\xff\xfe", "it is UTF-16. Send it as UTF-8."),
    (b"\xfe\xff", "it is UTF-16. Send it as UTF-8."),
    (b"{\x00", "it is UTF-16. Send it as UTF-8."),
    (b"\x00{", "it is UTF-16. Send it as UTF-8."),
)
"""How bodies begin that are JSON in another form, and what to do about them."""


def _other_form(raw: bytes) -> str:
    """In which form the body is, if it is JSON in a form that the router does not read; empty: unknown."""
    return next((what for begin, what in _FORMS if raw.startswith(begin)), "")
