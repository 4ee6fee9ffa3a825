"""Which bytes count as an engine's answer, and which do not. Pure and total: any bytes get a judgement.

A completion in one piece is a JSON object with choices that hold a text or a message. (A truncated JSON object does not
parse, so an object that parses is complete, also where only the connection's end marks the answer's end.) A stream
begins with an event that has such choices; the client gets no status before that event. Anything else that an engine
sends with status 200 is the engine's failure, and another engine may succeed.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cluster.errors import ApiError
from cluster.readable import json_in
from router.core.timing_parts import Choice, EngineTold

UNREADABLE: Final = (ValueError, RecursionError)
"""What msgspec raises for bytes that are not JSON: its own errors and Unicode errors are ValueErrors, deep nesting is a
RecursionError."""

BEGINNING_BYTES_MAX: Final = 1 << 20
"""A stream's first token must come within this many bytes. A longer first event, with a long prompt's token ids, must
begin correctly."""

_QUOTED: Final = 200
"""The number of an answer's bytes that an error message quotes."""

_QUOTE: Final = ord('"')
_BRACE: Final = ord("{")
_BRACKET: Final = ord("[")

_TOLD: Final = msgspec.json.Decoder(EngineTold)
_PARTS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_HOLD, _BLOCKS = "kv_transfer_params", "remote_block_ids"

_LONG_ANSWER: Final = 4096
"""From this many bytes on, most of a prefill leg's answer is the list of its blocks: 1,600 numbers in 100 KB."""

_CLIENTS_FAULTS: Final = frozenset({400, 413, 422})
"""Statuses with which every engine would answer. Others (401, 404, 429) may be this engine's alone."""

_STATUS_NAMES: Final = {401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError"}


def object_in(raw: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        found = json_in(raw)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) else None


def prefilled_in(raw: bytes, *, reads_blocks: bool) -> dict[str, Any] | None:
    """The fields of a prefill leg's answer; None: it is no whole completion. `reads_blocks`: parse the hold's list of
    blocks; without it, a long list stays JSON (`msgspec.Raw`), as it is only passed on.
    """
    fields = object_in(raw) if reads_blocks or len(raw) < _LONG_ANSWER else _without_blocks(raw)
    return fields if fields is not None and _are_choices(fields.get("choices")) else None


def _without_blocks(raw: bytes) -> dict[str, Any] | None:
    """As `object_in`, with the list of a hold's blocks as JSON."""
    try:
        parts = _PARTS.decode(raw)
        held = _PARTS.decode(parts.pop(_HOLD)) if _HOLD in parts else {}
        fields: dict[str, Any] = {name: msgspec.json.decode(part) for name, part in parts.items()}
        hold = {name: part if name == _BLOCKS else msgspec.json.decode(part) for name, part in held.items()}
    except UNREADABLE:
        return object_in(raw)
    blocks = memoryview(hold.get(_BLOCKS, b""))
    if len(blocks) < _LONG_ANSWER // 4 or blocks[0] != _BRACKET:
        return object_in(raw)
    return {**fields, _HOLD: hold}


ABORTED: Final = b'"finish_reason":"abort"'
"""vLLM answers so, with status 200, what it ends before its end: as it is told to stop, is paused or put to sleep
(0.32: `v1/engine/core.py`). In the model's text its quotes would be escaped."""

ABORT: Final = "its engine aborted it"


def completion_in(raw: bytes) -> EngineTold | str:
    """What an answer in one piece reports beside its text (`EngineTold`); or why it is not a completion."""
    try:
        told = _TOLD.decode(raw)
    except UNREADABLE:
        # Odd counts do not make an answer invalid: they are left out.
        if _are_choices((object_in(raw) or {}).get("choices")):
            return EngineTold()
    else:
        if told.choices and all(map(_says_something, told.choices)) and (raw.isascii() or _is_utf8(raw)):
            told.choices = None  # the choices hold the whole answer: drop them
            return told
    return f"it answered 200 with something that is no completion: {described(raw)}"


def _says_something(choice: Choice) -> bool:
    """Whether the choice has a text, or an object that may hold one."""
    if choice.text:
        return memoryview(choice.text)[0] == _QUOTE
    said = choice.message or choice.delta
    return bool(said) and memoryview(said)[0] == _BRACE


def _are_choices(found: object) -> bool:
    """Whether these are a completion's choices, each with a text or an object that may hold one (decoded JSON)."""
    return isinstance(found, list) and bool(found) and all(map(_is_choice, found))


def _is_choice(found: object) -> bool:
    if not isinstance(found, dict):
        return False
    if "text" in found:
        return isinstance(found["text"], str)
    return isinstance(found.get("message", found.get("delta")), dict)


def _is_utf8(raw: bytes) -> bool:
    """Whether the bytes are UTF-8: msgspec checks only the texts that it decodes."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def beginning(raw: bytes) -> str | None:
    """Whether these bytes begin a valid stream. Empty: yes; None: too few bytes to tell; else the reason why not."""
    at = 0
    while (end := raw.find(b"\n\n", at)) >= 0:
        verdict = _first_event(raw[at:end])
        if verdict is not None:
            return verdict
        at = end + 2
    if len(raw) < BEGINNING_BYTES_MAX:
        return None
    if len(raw) - at >= BEGINNING_BYTES_MAX // 2 and b'"choices":' in raw[at : at + 4096]:
        return ""
    return f"no token in the first {len(raw)} bytes of its stream"


def refusal_in(raw: bytes) -> tuple[int, bytes] | None:
    """The error that a stream begins with, if it is the client's fault: its HTTP status and JSON; None otherwise.

    vLLM validates some fields (a token id out of range) only after it has sent the stream's status.
    """
    whole = raw[: max(raw.rfind(b"\n\n"), 0)]
    data = next(filter(None, map(_data_in, whole.split(b"\n\n"))), b"")[5:].strip()  # comments may stand before it
    error = (object_in(data) or {}).get("error") if data else None
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and not isinstance(code, bool) and code in _CLIENTS_FAULTS:
        return code, bytes(data)
    return None


def _first_event(event: bytes) -> str | None:
    """The same as `beginning`, for one event. None: the event is a comment, or has no choices yet."""
    data = event if event.startswith(b"data:") else _data_in(event)
    if not data:
        return None
    data = data[5:].strip()
    if data == b"[DONE]":
        return "the stream ended before its first token"
    try:
        told = _TOLD.decode(data)
    except UNREADABLE:
        fields = object_in(data) or {}
        choices, error, good = fields.get("choices"), fields.get("error"), _are_choices(fields.get("choices"))
    else:
        choices, error = told.choices, told.error
        good = bool(told.choices) and all(map(_says_something, told.choices or ()))
    if error is not None:
        return data[: _QUOTED - 6].decode(errors="replace")
    if good:
        return ""
    return None if choices == [] else f"its stream begins with an event that is no completion: {described(data)}"


def _data_in(event: bytes) -> bytes:
    """The data line of an event that has other lines before it."""
    return next((line for line in event.split(b"\n") if line.startswith(b"data:")), b"")


def described(raw: bytes) -> str:
    """A description of a wrong answer for a log, without text that a model may have generated."""
    if not raw:
        return "nothing"
    try:
        found = msgspec.json.decode(raw)
    except UNREADABLE:
        return f"{len(raw)} bytes of HTML" if raw[:1] == b"<" else f"{len(raw)} bytes that are no JSON"
    if not isinstance(found, dict):
        return "JSON that is no object"
    if "error" in found:
        return f"an error, {quoted(msgspec.json.encode(found['error']))}"
    return "choices without text" if found.get("choices") else "a JSON object without choices"


def quoted(raw: bytes) -> str:
    """The beginning of an answer, for a message."""
    return repr(raw[:_QUOTED].decode(errors="replace")) if raw else "nothing"


def json_type(content_type: str) -> str:
    """The content type under which an engine's JSON goes to a client."""
    return content_type if "json" in content_type else "application/json"


def refusal(status: int, raw: bytes) -> ApiError:
    """The error for a client if an engine refused without JSON, as proxies in front of engines do."""
    kind = _STATUS_NAMES.get(status, "BadRequestError")
    return ApiError(status, kind, f"The engine refused this request with HTTP {status}, and said {quoted(raw)}.")
