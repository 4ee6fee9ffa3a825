"""Reads foreign JSON with one kind of error, flags as vLLM reads them, and small JSON objects in HTTP bodies. Pure.

A parser gives up on deep nesting with RecursionError, and on bytes that are no UTF-8 with UnicodeDecodeError. A caller
that catches only the parser's own error lets the others through; `json_in` turns all of them into one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec

from cluster.errors import ApiError, bad_request

SMALL_BYTES_MAX = 64 << 10
"""Largest body that an operator or a router peer may send. The largest, a router's list of quarantined and
readmitted instances for its peers, has some 50 KB at worst and mostly under 10."""


def json_in(raw: bytes) -> Any:
    """The value of these bytes.

    Raises:
        msgspec.DecodeError: the bytes are no JSON, are no UTF-8, or nest too deep to be read.
    """
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is no UTF-8: {error.reason} at byte {error.start}") from None


_FLAGS: Final = {
    **dict.fromkeys(("1", "t", "y", "on", "yes", "true"), True),
    **dict.fromkeys(("0", "f", "n", "no", "off", "false"), False),
}


def lax_flag(given: object) -> bool | None:
    """A flag of a request as vLLM reads it (pydantic's lax `bool`). None: vLLM takes it for absent, or refuses it."""
    if isinstance(given, bool):
        return given
    if isinstance(given, str):
        return _FLAGS.get(given.lower()) if given.isascii() else None
    return bool(given) if isinstance(given, int | float) and given in (0, 1) else None


def object_in(raw: bytes, fields: Collection[str]) -> dict[str, Any]:
    """The JSON object of a body. An empty body is an empty object.

    Args:
        raw: the body.
        fields: the fields that the object may have.

    Raises:
        ApiError: 400: no JSON, no object, or an unknown field; the message names the known fields.
    """
    if not raw:
        return {}
    may = f"It may have {', '.join(f'`{name}`' for name in fields)}." if fields else "It has no fields: send none."
    try:
        said = json_in(raw)
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not JSON: {error}. Send an object, or nothing. {may}") from None
    if not isinstance(said, dict):
        raise bad_request(f"The body must be a JSON object, or empty. {may}")
    for name in said:
        if name not in fields:
            raise bad_request(f"There is no field `{name[:80]}` here. {may}", name[:80])
    return said


def too_large_here(bytes_max: int) -> ApiError:
    """413 for a limit that no setting changes."""
    return ApiError(
        413, "RequestTooLargeError", f"The body is larger than {bytes_max} bytes, the most that is read here."
    )


DEADLINE_S_MAX = 86_400.0
"""Longest deadline of a drain, one day: a drain that may take longer needs no deadline, and can be resumed."""


def deadline_in(said: dict[str, Any], usual_s: float) -> float:
    """``deadline_s`` of a drain, in seconds; `usual_s` if the request has none.

    Raises:
        ApiError: 400: no number, below 0, or above `DEADLINE_S_MAX`.
    """
    given = said.get("deadline_s", usual_s)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= DEADLINE_S_MAX:
        most = f"{DEADLINE_S_MAX:.0f}"
        raise bad_request(
            f"`deadline_s` is {str(given)[:40]}: it must be a number of seconds, 0 to {most}.", "deadline_s"
        )
    return float(given)


def text_in(said: dict[str, Any], name: str) -> str:
    """The text of a field; empty if the field is missing.

    Raises:
        ApiError: 400: the field is no text.
    """
    given = said.get(name, "")
    if not isinstance(given, str):
        raise bad_request(f"`{name}` is {str(given)[:40]}: it must be a text.", name)
    return given
