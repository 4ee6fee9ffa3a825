"""Whether a request may reach an engine: the transfer fields in its body, and what its ticket permits. Pure.

The rule: a body without transfer fields passes. A body with transfer fields passes if these stand in the one place
where the router writes them, with a ticket beside them. The ticket must be valid for exactly these fields, this
instance and this minute, and unused. Everything else is refused. No body is ever changed, so the engine reads exactly
what was judged.

Transfer fields without a valid ticket are not removed: the body is refused. A client that sends them wants a transfer,
and would silently get another answer than it asked for. (With a router without keys, every prompt would be computed
twice, without any message.) ``null`` and ``{}`` ask for nothing and pass.

The screen looks for the fields wherever vLLM might: in every object at every depth, in JSON that stands as text in a
free-form field, in multipart forms, under escaped and doubled keys, and in all encodings that Python's JSON accepts.
Nothing here raises on any body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from cluster.scan import KEYS_MAX, FoundKey, Names, Steps, TooDeep, TooMany, survey
from cluster.wire import (
    DEPTH_MAX,
    FREE_FORM_KEYS,
    TICKET,
    TICKET_REFUSED,
    TRANSFER_KEYS,
    FormUnreadable,
    fields_digest,
    form_parts,
)
from kvtransfer.keys import InstanceKeys
from kvtransfer.ticket import SKEW_S, Accepted, ExpectedTicket, TicketRefused, check
from kvtransfer.timers import TimedKeys

LIFE_S: Final = 60.0
"""The lifetime of a router's tickets for guards: the router signs a leg as it sends it, and a guard waits at most as
long for its body (`kvtransfer.guard.BODY_S`)."""

SPENT_MAX: Final = 1 << 18
"""The number of used tickets remembered: more than 3,000 legs a second for a ticket's whole life. Further ones are
refused."""

_NAME: Final = b"transfer_params"
"""All names of transfer fields end in this. A body without it, and without an escape that could spell it, has no such
field."""
_ESCAPE: Final = b"\\u00"
_PLACE: Final = "kv_transfer_params"

BUILT_BYTES_MAX: Final = 1 << 16
"""Larger bodies are searched instead of parsed: parsing a megabyte of small values takes 300 ms and 30 MB."""

FIELDS_BYTES_MAX: Final = 1 << 21
"""Four times the block ids of a million tokens."""

FREE_BYTES_MAX: Final = 1 << 17
"""The limit of a free-form field: the router looks into 64 KiB of text, which escapes may double."""

REST_BYTES_MAX: Final = 1 << 16
"""The limit of what follows the transfer fields in a large body: the router writes the fields last."""

_NAMES: Final = Names(TRANSFER_KEYS | FREE_FORM_KEYS)
_DECODER: Final = json.JSONDecoder()
_SPACES: Final = " \t\r\n"


class Why(StrEnum):
    """Why a request was refused: a metric label with few values."""

    FIELDS = "transfer fields without a ticket"
    TICKET = "a ticket that is not good here"
    REPLAYED = "a ticket that was used before"
    UNREADABLE = "a body that could hide such fields"
    SIZE = "a body that is too large"
    SLOW = "a body that did not arrive"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer that the client gets in place of the engine's."""

    status: int
    why: Why
    message: str

    def body(self) -> bytes:
        """The answer in the shape of vLLM's own errors."""
        kind = TICKET_REFUSED if self.status == 403 else "BadRequestError"
        told = {"message": self.message, "type": kind, "param": None, "code": self.status}
        return json.dumps({"error": told}).encode()


class Screen:
    """Judges the bodies of one API server and remembers the tickets it has seen. Its clock is `now`, Unix time."""

    __slots__ = ("_spent", "_started")

    def __init__(self, started: float) -> None:
        self._started = started
        self._spent: Final[TimedKeys[str]] = TimedKeys(SPENT_MAX)

    def judge(self, raw: bytes, content_type: str, keys: InstanceKeys | None, now: float) -> Steps[Refusal | None]:
        """Whether a request is refused; None: it may pass. A generator of steps: other requests may run between two
        of them.
        """
        try:
            fields = yield from transfer_fields(raw, content_type)
            if fields is None or isinstance(fields, Refusal):
                return fields
            return self._permit(fields, keys, now)
        except (RecursionError, MemoryError):
            return Refusal(400, Why.UNREADABLE, "The body is nested too deep.")

    def _permit(self, fields: Mapping[str, Any], keys: InstanceKeys | None, now: float) -> Refusal | None:
        text = fields.get(TICKET)
        if text is None:
            return _without_ticket()
        if keys is None:
            return Refusal(403, Why.TICKET, "This engine has no ticket keys (BATON_TICKET_KEYS_FILE): no transfers.")
        expected = ExpectedTicket(producer=None, consumer=keys.instance, fields=fields_digest(fields))
        answer = check(text, keys.keys, now, expected)
        if isinstance(answer, TicketRefused):
            return Refusal(403, Why.TICKET, f"The ticket is refused by {keys.instance}: {answer.because}.")
        return self._fresh(answer, now)

    def _fresh(self, answer: Accepted, now: float) -> Refusal | None:
        """Accept a ticket once. Refuse tickets from before this server's start: it cannot know whether they
        were used. If the clock was set back beyond that start, this moment counts as the start.
        """
        self._started = min(self._started, now)
        issued = answer.ticket.expires_ms / 1000 - LIFE_S
        if issued > now + 2 * SKEW_S:
            return Refusal(403, Why.TICKET, f"The ticket lives longer than {LIFE_S:.0f} s.")
        if issued + SKEW_S < self._started:
            return Refusal(403, Why.REPLAYED, "The ticket is older than this server, which cannot know if it was used.")
        if self._spent.knows(answer.tag, now):
            return Refusal(403, Why.REPLAYED, "The ticket was used before.")
        if not self._spent.remember(answer.tag, now + answer.left_s, now):
            return Refusal(403, Why.REPLAYED, "Too many tickets in one minute to remember another.")
        return None


def transfer_fields(raw: bytes, content_type: str) -> Steps[Mapping[str, Any] | Refusal | None]:
    """The transfer fields of a body that has them where the router puts them and nowhere else. None: the body
    has none.
    """
    said = content_type.lower()
    if "multipart" in said:
        return (yield from _screen_form(raw, content_type))
    if "urlencoded" in said and raw:
        return Refusal(400, Why.UNREADABLE, "Unsupported Media Type: send `application/json` or `multipart/form-data`.")
    if _NAME not in raw and _ESCAPE not in raw and json.detect_encoding(raw) == "utf-8":
        return None
    if len(raw) > BUILT_BYTES_MAX:
        return (yield from _fields_of_large(raw))
    finder = _FieldCounter()
    try:
        body = json.loads(raw, object_pairs_hook=finder)
    except ValueError:
        return Refusal(400, Why.UNREADABLE, "The body is not valid JSON.")
    if finder.found == 0:
        return None
    fields = body.get(_PLACE) if isinstance(body, dict) else None
    return fields if finder.found == 1 and isinstance(fields, dict) and fields else _without_ticket()


def _fields_of_large(raw: bytes) -> Steps[Mapping[str, Any] | Refusal | None]:
    """As `transfer_fields`, for a body that is too large to parse: search it for the keys, and parse their values only.

    The judgement is right for JSON; an engine reads nothing else.
    """
    if json.detect_encoding(raw) != "utf-8":
        return Refusal(400, Why.UNREADABLE, f"A body over {BUILT_BYTES_MAX} bytes must be UTF-8, without a mark.")
    try:
        found = yield from survey(raw, _NAMES, depth_max=DEPTH_MAX + 1)
    except TooDeep:
        return Refusal(400, Why.UNREADABLE, f"The body is nested more than {DEPTH_MAX} levels deep.")
    except TooMany as error:
        return Refusal(400, Why.UNREADABLE, str(error))
    if len(found.keys) == KEYS_MAX:
        return Refusal(400, Why.UNREADABLE, f"The body names transfer fields {KEYS_MAX} times.")
    finder, fields = _FieldCounter(), None
    for key in found.keys:
        value, end = _value_at(raw, key)
        if end < 0:
            return Refusal(400, Why.UNREADABLE, f"`{key.name}` is no JSON here, or too large.")
        before = finder.found
        finder.visit(key.name, value)
        if finder.found > before and key.name == _PLACE and _ends_the_body(raw, end):
            fields = value
        yield
    if finder.found == 0:
        return None
    return fields if finder.found == 1 and isinstance(fields, dict) and fields else _without_ticket()


def _value_at(raw: bytes, key: FoundKey) -> tuple[Any, int]:
    """The value of a key that was found, and the position of its end; -1: it is not JSON, or too large. In free-form
    fields, texts and lists are parsed; in an object each key is found by itself.
    """
    text = raw[key.at : key.at + (FIELDS_BYTES_MAX if key.name in TRANSFER_KEYS else FREE_BYTES_MAX)].decode(
        "utf-8", "ignore"
    )
    start = len(text) - len(text.lstrip(_SPACES))
    if key.name in FREE_FORM_KEYS and not text.startswith(('"', "["), start):
        return None, key.at
    try:
        value, end = _DECODER.raw_decode(text, start)
    except ValueError:
        return None, -1
    return value, key.at + len(text[:end].encode())


def _ends_the_body(raw: bytes, at: int) -> bool:
    """Whether the bytes from `at` are the short rest of one object, which is then the body itself. A later field of the
    same name would replace this one.
    """
    rest = raw[at : at + REST_BYTES_MAX]
    try:
        behind = json.loads(b'{"":0' + rest) if at + len(rest) == len(raw) else None
    except ValueError:
        return False
    return isinstance(behind, dict) and _PLACE not in behind


def _screen_form(raw: bytes, content_type: str) -> Steps[Refusal | None]:
    """Judge a form. Forms never carry a ticket: the router hands over JSON only."""
    try:
        parts = yield from form_parts(raw, content_type)
    except FormUnreadable as error:
        return Refusal(400, Why.UNREADABLE, str(error))
    finder, left = _FieldCounter(), FREE_BYTES_MAX
    for part in parts:
        free = part.field in FREE_FORM_KEYS
        left -= part.end - part.begin if free else 0
        if left < 0:
            return Refusal(400, Why.UNREADABLE, f"`{part.field}` has more than {FREE_BYTES_MAX} bytes.")
        finder.visit(part.field, raw[part.begin : part.end].decode("utf-8", "replace") if free else b"")
    return _without_ticket() if finder.found else None


def _without_ticket() -> Refusal:
    names = ", ".join(f"`{name}`" for name in sorted(TRANSFER_KEYS))
    return Refusal(
        403,
        Why.FIELDS,
        f"Transfer fields ({names}) are taken from this fleet's routers only, with a ticket; send none.",
    )


class _FieldCounter:
    """Counts transfer fields while JSON is parsed. Each object passes here, also one that a later key replaces."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, value in pairs:
            self.visit(name, value)
        return dict(pairs)

    def visit(self, name: str, value: Any) -> None:
        """Look at one field of one object."""
        if name in TRANSFER_KEYS:
            self.found += value is not None and value != {}
        elif name in FREE_FORM_KEYS:
            for text in value if isinstance(value, list) else (value,):
                if isinstance(text, str):
                    self._look_into(text)

    def _look_into(self, text: str) -> None:
        try:
            json.loads(text, object_pairs_hook=self)
        except ValueError:
            return  # the engine cannot parse this JSON either
