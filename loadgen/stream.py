"""Counts and times the tokens of one streamed answer without parsing its middle. Pure: time comes as `now`.

Each piece of the body costs one search for event marks and one clock value per event. The first and the last pieces are
kept and parsed once, at the end. They hold the role chunk (no token), the finish reason, `usage`, errors and `[DONE]`.
An event is counted where its `data:` begins. Several events in one piece get one time, because they came together.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

MARK = b"\ndata:"
"""Raw line feeds cannot stand inside JSON, so this is always the start of an event's data."""

HEAD_BYTES_MAX, TAIL_BYTES = 1 << 16, 1 << 13
"""Bytes kept from the start, until the first event is whole, and from the end: the last events with their `usage`."""

TIMING_HEADER = "x-baton-timing"
"""Sent with the value 1, it makes Baton's router end a stream with a comment of this name (docs/timing.md)."""

TIMING = b"\n: " + TIMING_HEADER.encode() + b" "

TAIL_EVENTS = 4
"""Events parsed at the end: the last token, a finish chunk without text, usage and [DONE]; or an error and [DONE]."""

DETAIL_CHARS = 200
"""Longest error message that a record keeps."""


@dataclass(frozen=True, slots=True)
class StreamContent:
    """The content of a stream, after its end."""

    token_s: array[float]
    """When each event with a token came, on the caller's clock in seconds."""
    prompt_tokens: int | None
    completion_tokens: int | None
    """Both from `usage`; None if the server sent none."""
    error: str | None
    """`stream_error`, `cut_off` or `no_stream`; None if the answer is whole."""
    detail: str = ""
    timing: dict[str, Any] | None = None
    """The router's own timing parts, if it gave them."""
    text: str = ""
    """The text of the answer, if it was to be kept."""


class Tally:
    """One stream being read. `keep`: keep its text, at the price of memory."""

    __slots__ = ("_carry", "_head", "_head_open", "_kept", "_tail", "_tail_bytes", "event_s")

    def __init__(self, *, keep: bool = False) -> None:
        self._kept: list[bytes] | None = [] if keep else None
        self.event_s: array[float] = array("d")
        self._carry = b"\n"
        self._head = b"\n"
        self._head_open = True
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def feed(self, piece: bytes, now: float) -> None:
        """Take the next bytes of the body."""
        if self._kept is not None:
            self._kept.append(piece)
        seen = self._carry + piece
        events = seen.count(MARK)
        self._carry = seen[-len(MARK) + 1 :]
        if events == 1:
            self.event_s.append(now)
        elif events:
            self.event_s.extend([now] * events)
        if self._head_open:
            self._head += piece
            self._head_open = len(self.event_s) <= 1 and len(self._head) < HEAD_BYTES_MAX
        tail = self._tail
        tail.append(piece)
        self._tail_bytes += len(piece)
        while self._tail_bytes - len(tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(tail.popleft())

    def end(self) -> StreamContent:
        """The content of the stream. Call it once, after the last piece."""
        if not self.event_s:
            return StreamContent(array("d"), None, None, "no_stream", "the answer holds no event")
        head = self._head.split(MARK, 2)[1:2]
        first = _event(_data(head[0])) if head else _Event()
        tail = b"\n" + b"".join(self._tail)
        tail_events = [_event(_data(each)) for each in tail.rsplit(MARK, TAIL_EVENTS)[1:]]
        usage = next((event.usage for event in reversed(tail_events) if event.usage), None) or {}
        completion = _count(usage.get("completion_tokens"))
        leading = 1 if first.role_only else 0
        times = self.event_s[
            leading : len(self.event_s) - _trailing(tail_events, len(self.event_s) - leading, completion)
        ]
        error, detail = _error([first, *tail_events])
        prompt = _count(usage.get("prompt_tokens"))
        return StreamContent(times, prompt, completion, error, detail, _timing(tail), _text(self._kept))


@dataclass(frozen=True, slots=True)
class _Event:
    done: bool = False
    choices: bool = False
    text: bool = False
    finished: bool = False
    role_only: bool = False
    usage: dict[str, Any] | None = None
    error: str | None = None


def _timing(tail: bytes) -> dict[str, Any] | None:
    """The router's comment at the end; None if it is missing or unreadable."""
    told = tail.rpartition(TIMING)[2] if TIMING in tail else b""
    try:
        found = msgspec.json.decode(told.split(b"\n", 1)[0])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(kept: list[bytes] | None) -> str:
    """The texts of all events, joined."""
    if not kept:
        return ""
    return "".join(_said(_data(each)) for each in (b"\n" + b"".join(kept)).split(MARK)[1:])


def _said(data: bytes) -> str:
    try:
        choice = msgspec.json.decode(data)["choices"][0]
        piece = choice.get("text") or (choice.get("delta") or {}).get("content")
    except (msgspec.DecodeError, UnicodeError, RecursionError, LookupError, TypeError, AttributeError):
        return ""
    return piece if isinstance(piece, str) else ""


def _data(raw: bytes) -> bytes:
    """The data of the event that begins here: one line."""
    return raw.split(b"\n", 1)[0].strip()


def _event(data: bytes) -> _Event:
    if data == b"[DONE]":
        return _Event(done=True)
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _Event()
    if not isinstance(found, dict):
        return _Event()
    usage = found.get("usage")
    usage = usage if isinstance(usage, dict) else None
    if found.get("error") is not None:
        return _Event(usage=usage, error=_message(found["error"]))
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return _Event(usage=usage)
    delta = choices[0].get("delta")
    delta = delta if isinstance(delta, dict) else {}
    text = any([choices[0].get("text"), *(value for key, value in delta.items() if key != "role")])
    finished = choices[0].get("finish_reason") is not None
    return _Event(
        choices=True, text=text, finished=finished, role_only="role" in delta and not text and not finished, usage=usage
    )


def _trailing(events: list[_Event], counted: int, completion: int | None) -> int:
    """How many of the last events carry no token. An empty finish chunk carries one only if `usage` counts it."""
    trailing = 0
    for event in reversed(events):
        if event.choices and event.finished and not event.text and completion is not None:
            if counted - trailing > completion:
                trailing += 1
            break
        if event.choices:
            trailing += 1 if event.finished and not event.text else 0
            break
        trailing += 1
    return min(trailing, counted)


def _error(events: list[_Event]) -> tuple[str | None, str]:
    for event in events:
        if event.error is not None:
            return "stream_error", event.error
    if any(event.done or event.finished for event in events):
        return None, ""
    return "cut_off", "the stream ended without a finish reason or [DONE]"


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:DETAIL_CHARS]


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
