"""Reads bodies that are too large, or have too many values, to be parsed whole: in slices, without copying large
fields. Pure.

A body up to a megabyte with a usual number of values is parsed whole (`router.request.body`). This module takes all
others. It checks their syntax and limits, parses small fields, and leaves large ones as raw JSON (`Unread`). Engines
get the client's own bytes; a small field with a transfer field in it is written anew; if a transfer field stands inside
a large field, the body is refused.

Every function here works in steps (`cluster.scan.Steps`), none of which should take more than 10 ms on an EPYC core.
The parser takes one step, so it gets the body without the insides of long texts and without long spaces (`_Shortened`):
33 MB of escapes took it 35 ms.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np

from cluster import scan, wire
from cluster.errors import ApiError, bad_request
from router.core.unread import Sort, Unread
from router.request import media

LIGHT_BYTES: Final = 1 << 16
"""Bodies up to this size are light whatever they contain: the worst one takes 25 ms."""

HEAVY_BYTES: Final = 1 << 20
"""Larger bodies are heavy whatever they contain: a text with one emoji takes four times its size once it is parsed."""

LIGHT_VALUES: Final = 20_000
"""Parsing, checking and writing this many objects, arrays and texts takes 10 ms."""

LIGHT_NUMBERS: Final = 50_000
"""Bodies with more commas are heavy: a list of numbers has one for each."""

_OPENINGS_FEW, _QUOTES_FEW, _LONG = 64, 256, 256
"""`_mostly_text` looks at so many brackets of each kind and so many quotes; a text from so many bytes on is long."""
_OUTSIDE: Final = b"0123456789+-.eE[]{},: \t\r\ntruefalsn"
"""The bytes that stand outside of texts."""
_NO_MARKS: Final = bytes(set(range(256)) - set(b'[{",'))

FIELDS_MAX: Final = 1024
"""The most fields of a heavy body at its top level; vLLM knows about a hundred."""

SMALL_BYTES: Final = 1 << 16
"""A field up to this size is parsed."""

BUILT_BYTES_MAX: Final = 1 << 20
"""The most bytes of all parsed fields together."""

SINGLE_VALUES_MAX: Final = 50_000
"""In a body with more values, no large list is searched for its only element."""

_TEXT_BYTES: Final = 1 << 20
"""The bytes that one step decodes, checks or copies."""
_PIECES: Final = 64
"""The pieces that one step writes. To make the longest name of a medium takes 0.1 ms."""

_LOOKED_FOR: Final = wire.TRANSFER_KEYS | wire.FREE_FORM_KEYS
_NAMES: Final = scan.Names(_LOOKED_FOR, common=[wire.MEDIA_NAME])
_NAME_BYTES: Final = 4096
_NAME: Final = re.compile(rb'null|"(?:[^"\\]{0,%d}+|(?:[^"\\]|\\.){0,%d}+)"' % (_NAME_BYTES, _NAME_BYTES))
"""The name of a medium, as JSON, or null."""
_GONE_THROUGH: Final = 4096
"""After so many bytes of spaces before one value, other tasks may run."""
_FOLLOWING_MAX: Final = 3
"""The most bytes of a UTF-8 character after its first."""
_HASHED: Final = "cache_salt"
_NUMBERS: Final = b"0123456789-, \t\r\n"
_LIST: Final = (ord("["), ord("]"))
_SPACES_MAX: Final = 64
_SPACES: Final = b" \t\r\n"
_SPACES_RUN: Final = re.compile(rb"[ \t\r\n]*+")
_at: Final = attrgetter("at")
_MAY_HOLD: Final = re.compile(rb'\[|"[\[{ \\]')
"""The beginning of a free-form field's value that is JSON as text, or a list that may contain some."""
_PLACE: Final = re.compile(r"\(byte (\d+)\)")
_TEXTS: Final = frozenset({b'"', b"["})


@dataclass(slots=True)
class Heavy:
    """A heavy body that was read."""

    body: dict[str, Any]
    """Its fields, without those that no client may set; empty if it is not an object."""
    raw: bytes
    """The bytes that engines may read."""
    is_object: bool


class _Shortened:
    """A body without the insides of long texts and without long spaces: a parser finds the same fields in it."""

    __slots__ = ("_ends", "_lost", "_raw", "_starts", "_texts", "raw")

    def __init__(self, raw: bytes, plain: Sequence[scan.Plain]) -> None:
        """`plain`: from the scan's `Survey`."""
        lost, end = 0, 0
        pieces = []
        starts, sums = [0], [0]
        for each in plain:
            pieces.append(memoryview(raw)[end : each.start])
            starts.append(each.start - lost)
            lost += each.end - each.start
            sums.append(lost)
            end = each.end
        self._raw: Final = raw
        self._starts: Final = starts
        """The positions in `raw`, ascending, from which `_lost` bytes are missing."""
        self._lost: Final = sums
        self._ends: Final = [each.end for each in plain]
        self._texts: Final = [each.start for each in plain if each.is_text]
        self.raw: Final = b"".join([*pieces, memoryview(raw)[end:]]) if plain else raw

    def at(self, short: int) -> int:
        """The position in the body of the byte at `short`."""
        return short + self._lost[bisect_right(self._starts, short) - 1]

    def place(self, at: int) -> int:
        """The position in `raw` of the body's byte at `at`, which must be in `raw`."""
        return at - self._lost[bisect_right(self._ends, at)]

    def value(self, key: scan.FoundKey) -> int:
        """The position in the body of a key's value, behind the spaces before it."""
        spaces = _SPACES_RUN.match(self.raw, self.place(key.at))
        assert spaces is not None
        return self.at(spaces.end())

    def whole(self, part: memoryview) -> memoryview:
        """The body's bytes for this part of `raw`."""
        start = _address(part) - _address(self.raw)
        return memoryview(self._raw)[self.at(start) : self.at(start + len(part) - 1) + 1]

    def position(self, view: memoryview) -> int:
        """The position in the body of a view of it."""
        return _address(view) - _address(self._raw)

    def is_within(self, parts: Iterable[memoryview]) -> bool:
        """Whether every shortened text stands in one of these parts of the body, which do not overlap."""
        ranges = sorted((_address(part) - _address(self._raw), len(part)) for part in parts)
        found = (bisect_right(ranges, (start, len(self._raw))) - 1 for start in self._texts)
        return all(at >= 0 and start < sum(ranges[at]) for at, start in zip(found, self._texts, strict=True))

    def said(self, error: Exception) -> str:
        """A parser's complaint about `raw`, with its position in the body."""
        return _PLACE.sub(lambda found: f"(byte {self.at(int(found[1]))})", str(error))


class _TooManyFields(Exception):
    """An object has more than `FIELDS_MAX` fields."""


class _Field(str):
    """A field's name, for msgspec's hook: msgspec calls the hook for each name, so names are counted before they take
    memory.
    """

    __slots__ = ()


def is_heavy(raw: bytes) -> bool:
    """Whether this module reads the body: never up to `LIGHT_BYTES`, always above `HEAVY_BYTES`, and between them by
    the number of values that the body may contain.
    """
    size = len(raw)
    if size <= LIGHT_BYTES or size > HEAVY_BYTES:
        return size > HEAVY_BYTES
    if _mostly_text(raw):
        return False
    marks = raw.translate(None, _NO_MARKS)
    if len(marks) <= LIGHT_VALUES:
        return False
    values = marks.count(b"[") + marks.count(b"{") + marks.count(b'"') // 2
    return values > LIGHT_VALUES or marks.count(b",") > LIGHT_NUMBERS


def _mostly_text(raw: bytes) -> bool:
    """Whether a few texts are nearly all of the body, as in most prompts. This takes some microseconds; counting takes
    30 µs for 100 kB. The bytes between two quotes are either one text, or outside of all texts, where JSON allows few
    characters (`_OUTSIDE`).
    """
    for opening in (b"{", b"["):
        at = -1
        for _ in range(_OPENINGS_FEW):
            at = raw.find(opening, at + 1)
            if at < 0:
                break
        else:
            return False
    start = rest = 0
    for _ in range(_QUOTES_FEW):
        end = raw.find(b'"', start)
        size = (len(raw) if end < 0 else end) - start
        if size < _LONG or not raw[start : start + _LONG].translate(None, _OUTSIDE):
            rest += size
        if end < 0:
            return rest <= LIGHT_BYTES
        start = end + 1
    return False


def read(raw: bytes, *, namespace: str = "") -> scan.Steps[Heavy]:
    """Read a heavy body. `namespace` is `wire.strip`'s.

    Raises:
        ApiError: 400 that names what is wrong: syntax with its position, a limit, or a field that no client may set.
    """
    found = yield from _surveyed(raw)
    yield from _check_utf8(raw)
    short = _Shortened(raw, found.plain)
    fields = _fields(raw, short)
    if fields is not None and not short.is_within(short.whole(memoryview(each)) for each in fields.values()):
        raise bad_request(
            f"A field's name takes over {scan.SLICE_BYTES:,} bytes, or a field so long is given twice: give it once."
        )
    yield
    if fields is None:
        if found.keys:
            raise _refused("the body", found.keys[0].name)
        return Heavy({}, raw, is_object=False)
    body = yield from _built(short, fields, found.values + found.commas)
    if not found.keys and not found.common and wire.TOP_LEVEL_KEYS.isdisjoint(body) and _HASHED not in body:
        return Heavy(body, raw, is_object=True)
    return (yield from _clean(short, fields, body, found, namespace))


def _surveyed(raw: bytes) -> scan.Steps[scan.Survey]:
    try:
        return (yield from scan.survey(raw, _NAMES, depth_max=wire.DEPTH_MAX + 1))
    except scan.TooDeep:
        raise bad_request(f"The body is nested more than {wire.DEPTH_MAX} levels deep.") from None
    except scan.TooMany as error:
        fewer = "fewer" if error.key else "less"
        raise bad_request(f"{error} Send {fewer} in one request.", error.key or None) from None


def _check_utf8(raw: bytes) -> scan.Steps[None]:
    if raw.isascii():
        return
    start = 0
    while start < len(raw):
        end = min(start + _TEXT_BYTES, len(raw))
        for _ in range(_FOLLOWING_MAX):
            if end < len(raw) and raw[end] & 0xC0 == 0x80:
                end -= 1
        try:
            raw[start:end].decode()
        except UnicodeDecodeError as error:
            at = start + error.start
            raise bad_request(f"The body is not valid JSON: no UTF-8 at byte {at}. Send it as UTF-8.") from None
        start = end
        yield


def _fields(raw: bytes, short: _Shortened) -> dict[str, msgspec.Raw] | None:
    """The fields of an object, unread; None if it is not an object. The whole syntax is checked."""
    count = 0

    def name(kind: type, said: Any) -> _Field:  # noqa: ARG001 - msgspec's signature
        nonlocal count
        count += 1
        if count > FIELDS_MAX:
            raise _TooManyFields
        return _Field(said)

    try:
        first = raw[:SMALL_BYTES].lstrip(_SPACES)[:1]
        if not first:
            raise bad_request(f"The body begins with {SMALL_BYTES:,} spaces: send JSON without them.")
        if first != b"{":
            msgspec.json.decode(short.raw, type=msgspec.Raw)
            return None
        return {str(each): value for each, value in _decoded(short.raw, name).items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {short.said(error)}") from None
    except _TooManyFields:
        raise bad_request(
            f"The body has more than {FIELDS_MAX:,} fields: leave out those that no engine knows."
        ) from None
    except RecursionError:
        raise bad_request(f"The body is nested more than {wire.DEPTH_MAX} levels deep.") from None


def _decoded(raw: bytes, name: Any) -> dict[_Field, msgspec.Raw]:
    return msgspec.json.decode(raw, type=dict[_Field, msgspec.Raw], dec_hook=name)


def _built(short: _Shortened, fields: dict[str, msgspec.Raw], values: int) -> scan.Steps[dict[str, Any]]:
    """Small fields parsed, large ones unread."""
    body: dict[str, Any] = {}
    built = since = 0
    for name, value in fields.items():
        view = short.whole(memoryview(value))
        if len(view) <= SMALL_BYTES:
            built += len(view)
            if built > BUILT_BYTES_MAX:  # it cannot stay unread: `stream` and other fields decide what the router does
                limit = f"the fields of up to {SMALL_BYTES:,} bytes together take over {BUILT_BYTES_MAX:,}"
                raise bad_request(f"The body has too much beside its large fields: {limit}.", name[:80])
            since += len(view)
            body[name] = _value(name, view)
            if since > SMALL_BYTES:
                since = 0
                yield
        else:
            body[name] = yield from _unread(short, memoryview(value), values)
            yield
    return body


def _value(name: str, view: memoryview) -> Any:
    try:
        return msgspec.json.decode(view)
    except msgspec.DecodeError as error:  # a number that no float can hold: only parsing finds that
        raise bad_request(f"`{name[:80]}` is not valid JSON: {error}", name[:80]) from None


def _unread(short: _Shortened, part: memoryview, values: int) -> scan.Steps[Unread]:
    view = short.whole(part)
    first = bytes(view[:1])
    if first == b'"':
        return Unread(view, Sort.TEXT, values)
    if first != b"[":
        return Unread(view, Sort.OTHER, values)
    count = yield from _ids(view)
    if count:
        return Unread(view, Sort.IDS, values, count)
    inner = _within(view)
    count = (yield from _ids(inner)) if inner and (inner[0], inner[-1]) == _LIST else 0
    if count:
        return Unread(inner, Sort.IDS, values, count)
    if values <= SINGLE_VALUES_MAX:
        elements = msgspec.json.decode(part, type=list[msgspec.Raw])
        yield
        if len(elements) == 1 and memoryview(elements[0])[0] == ord('"'):
            return Unread(short.whole(memoryview(elements[0])), Sort.TEXT, values)
    return Unread(view, Sort.LIST, values)


def _within(view: memoryview) -> memoryview:
    """The content between a list's brackets, without up to `_SPACES_MAX` bytes of spaces around it."""
    start, end = 1, len(view) - 1
    while start < min(end, _SPACES_MAX) and view[start] in _SPACES:
        start += 1
    while end > max(start, len(view) - _SPACES_MAX) and view[end - 1] in _SPACES:
        end -= 1
    return view[start:end]


def _ids(view: memoryview) -> scan.Steps[int]:
    """The number of a list's whole numbers; 0 if it contains anything else, or nothing."""
    commas, size, empty = 0, len(view), True
    start = 1
    while start < size - 1:
        piece = bytes(view[start : min(start + _TEXT_BYTES, size - 1)])
        if piece.translate(None, _NUMBERS):
            return 0
        commas += piece.count(b",")
        empty = empty and not piece.strip(_SPACES)
        start += len(piece)
        yield
    return 0 if empty else commas + 1


# --- what no client may set -------------------------------------------------------------------------------------------


def _clean(
    short: _Shortened,
    fields: dict[str, msgspec.Raw],
    body: dict[str, Any],
    found: scan.Survey,
    namespace: str,
) -> scan.Steps[Heavy]:
    """The body without fields that no client may set. Small fields are stripped and written anew; a large field that
    contains such a field is refused.

    Raises:
        ApiError: 400.
    """
    for name in wire.TRANSFER_KEYS | wire.TOP_LEVEL_KEYS:
        if isinstance(body.get(name), Unread):
            del body[name]
    large = {name: short.whole(memoryview(fields[name])) for name, value in body.items() if isinstance(value, Unread)}
    for name, view in large.items():
        yield from _check_large(short, name, view, found.keys)
    try:
        clean = wire.strip({name: each for name, each in body.items() if name not in large}, namespace=namespace)
    except (wire.NestedTooDeep, wire.TextTooLong) as error:
        raise bad_request(str(error)) from None
    yield
    kept = {
        name: value if name in large else clean[name] for name, value in body.items() if name in large or name in clean
    }
    named = {}
    for name, view in large.items():
        named[name] = yield from _named(short, view, found.common)
    written = yield from _joined(_pieces(short, kept, large, named, namespace))
    return Heavy(kept, written, is_object=True)


def _named(short: _Shortened, view: memoryview, keys: Sequence[scan.FoundKey]) -> scan.Steps[list[scan.FoundKey]]:
    """The keys of a large field that name media, of all keys with that name in the body."""
    start = short.position(view)
    first, last = (bisect_left(keys, at, key=_at) for at in (start, start + len(view)))
    here = keys[first:last]
    if not here:
        return []
    are = yield from media.named(short.raw, short.place(start), here, [short.place(key.at) for key in here])
    return [key for key, is_ in zip(here, are, strict=True) if is_]


def _pieces(
    short: _Shortened,
    kept: Mapping[str, Any],
    large: Mapping[str, memoryview],
    named: Mapping[str, Sequence[scan.FoundKey]],
    namespace: str,
) -> Iterator[bytes | memoryview | None]:
    """A body with these fields, in pieces; None: other tasks may run. They are made one by one: all pieces of a body
    with many names of media would take more memory than the body.
    """
    before = b"{"
    for name, value in kept.items():
        yield before + msgspec.json.encode(name) + b":"
        before = b","
        if name in large:
            yield from _apart(short, large[name], named[name], namespace)
        else:
            yield msgspec.json.encode(value)
    yield b"}" if kept else b"{}"


def _joined(pieces: Iterable[bytes | memoryview | None]) -> scan.Steps[bytes]:
    """The pieces as one text, in steps: most of the cost is the kernel's, for fresh memory."""
    written = BytesIO()
    size = count = 0
    for piece in pieces:
        for at in range(0, len(piece or b""), _TEXT_BYTES):
            size += written.write(memoryview(piece or b"")[at : at + _TEXT_BYTES])
            if size >= _TEXT_BYTES:
                size = count = 0
                yield
        count += 1
        if piece is None or count == _PIECES:
            size = count = 0
            yield
    return written.getvalue()


def _apart(
    short: _Shortened, view: memoryview, named: Sequence[scan.FoundKey], namespace: str
) -> Iterator[bytes | memoryview | None]:
    """A field with clients' names of media kept apart from other tenants' (`wire.strip`)."""
    start = short.position(view)
    done = 0
    for key in named:
        begin = short.value(key) - start
        if begin - key.at + start > _GONE_THROUGH:
            yield None
        found = _NAME.match(view, begin)
        if found is None or len(found[0]) > _NAME_BYTES + 2:
            raise bad_request(
                f"`{key.name}` must be a text of up to {_NAME_BYTES:,} bytes, as written in JSON, in a body of this "
                "size: give a shorter name.",
                key.name,
            )
        if found[0] == b"null":
            yield b""
            continue
        yield view[done:begin]
        yield msgspec.json.encode(wire.apart(namespace, msgspec.json.decode(found[0], type=str)))
        done = found.end()
    yield view[done:]


def _check_large(short: _Shortened, name: str, view: memoryview, keys: Sequence[scan.FoundKey]) -> scan.Steps[None]:
    """Raises ApiError: 400 if a large field could contain a field that no client may set."""
    if name in wire.FREE_FORM_KEYS and bytes(view[:1]) in _TEXTS:
        raise bad_request(
            f"`{name}` is a text of {len(view):,} bytes that may hold JSON; up to {SMALL_BYTES:,} are looked into. "
            "Send an object, or less.",
            name,
        )
    if len(keys) == scan.KEYS_MAX:
        raise _refused(f"`{name[:80]}`", keys[-1].name)
    start = short.position(view)
    for key in keys:
        if not start <= key.at < start + len(view):
            continue
        if key.name in wire.TRANSFER_KEYS or _MAY_HOLD.match(view, short.value(key) - start):
            raise _refused(f"`{name[:80]}`", key.name)
        yield
    yield


def _address(data: bytes | memoryview) -> int:
    """The address of the data in memory. Differences give positions: msgspec's `Raw` is a view of the body itself."""
    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _refused(where: str, key: str) -> ApiError:
    return bad_request(
        f"`{key}` stands inside {where}, which is too large to take it out. Send the request without that field.", key
    )
