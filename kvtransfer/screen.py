"""Whether a request may reach an engine: which transfer fields its body holds, and what its ticket permits. Pure.

The rule: a body without transfer fields passes as it came. One that has them in the one place where the router writes
them, and beside them a ticket for exactly these fields, this instance and this minute, that was not seen before, passes
as it came, too. Everything else is refused: no body is ever changed, so what was judged is what the engine reads.

Refused, not stripped: whoever sends such a field wants a transfer, and would silently get another answer than he asked
for (a router without keys: every prompt computed twice, and nobody told). ``null`` and ``{}`` ask for nothing and pass.

Fields are looked for wherever vLLM might look: in every object at every depth, in JSON that stands as text in a
free-form field, in multipart forms, under escaped and doubled keys, in the encodings that Python's JSON accepts.
Nothing here raises on any body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from cluster.wire import (
    FREE_FORM_KEYS,
    TICKET,
    TICKET_REFUSED,
    TRANSFER_KEYS,
    FormUnreadable,
    fields_digest,
    form_parts,
)
from kvtransfer.alarms import Memory
from kvtransfer.keys import InstanceKeys
from kvtransfer.ticket import SKEW_S, Accepted, Expected, Refused, check

LIFE_S: Final = 60.0
"""How long a router's tickets for guards live: a leg is sent at once, and its body has 30 s to arrive."""

SPENT_MAX: Final = 1 << 18
"""Tickets that are remembered as used. More than 3,000 legs a second for a ticket's whole life; then more are refused.
"""

_NAME: Final = b"transfer_params"
"""What all names of transfer fields end in. A body that has it nowhere, and no escape that could spell it, has none."""
_ESCAPE: Final = b"\\u00"
_PLACE: Final = "kv_transfer_params"


class Why(StrEnum):
    """Why a request was refused: a label of few values."""

    FIELDS = "transfer fields without a ticket"
    TICKET = "a ticket that is not good here"
    REPLAYED = "a ticket that was used before"
    UNREADABLE = "a body that could hide such fields"
    SIZE = "a body that is too large"
    SLOW = "a body that did not arrive"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer in place of the engine's."""

    status: int
    why: Why
    message: str

    def body(self) -> bytes:
        """In the shape of vLLM's own errors."""
        kind = TICKET_REFUSED if self.status == 403 else "BadRequestError"
        told = {"message": self.message, "type": kind, "param": None, "code": self.status}
        return json.dumps({"error": told}).encode()


class Screen:
    """Judges the bodies of one API server, and remembers which tickets it has seen. Its clock is `now`, Unix time."""

    __slots__ = ("_spent", "_started")

    def __init__(self, started: float) -> None:
        self._started: Final = started
        self._spent: Final[Memory[str]] = Memory(SPENT_MAX)

    def judge(self, raw: bytes, content_type: str, keys: InstanceKeys | None, now: float) -> Refusal | None:
        """None: it may pass."""
        try:
            fields = transfer_fields(raw, content_type)
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
        expected = Expected(producer=None, consumer=keys.instance, fields=fields_digest(fields))
        answer = check(text, keys.keys, now, expected)
        if isinstance(answer, Refused):
            return Refusal(403, Why.TICKET, f"The ticket is refused by {keys.instance}: {answer.because}.")
        return self._fresh(answer, now)

    def _fresh(self, answer: Accepted, now: float) -> Refusal | None:
        """Used once; and not before this server remembers, where an engine takes longer to start than clocks differ."""
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


def transfer_fields(raw: bytes, content_type: str) -> Mapping[str, Any] | Refusal | None:
    """The transfer fields of a body, if they stand where the router puts them and nowhere else. None: it has none."""
    said = content_type.lower()
    if "multipart" in said:
        return _screen_form(raw, content_type)
    if "urlencoded" in said and raw:
        return Refusal(400, Why.UNREADABLE, "Unsupported Media Type: send `application/json` or `multipart/form-data`.")
    if _NAME not in raw and _ESCAPE not in raw and json.detect_encoding(raw) == "utf-8":
        return None
    finder = _Finder()
    try:
        body = json.loads(raw, object_pairs_hook=finder)
    except ValueError:
        return Refusal(400, Why.UNREADABLE, "The body is not valid JSON.")
    if finder.found == 0:
        return None
    fields = body.get(_PLACE) if isinstance(body, dict) else None
    return fields if finder.found == 1 and isinstance(fields, dict) and fields else _without_ticket()


def _screen_form(raw: bytes, content_type: str) -> Refusal | None:
    """Forms never carry a ticket: the router hands over JSON only."""
    try:
        parts = form_parts(raw, content_type)
    except FormUnreadable as error:
        return Refusal(400, Why.UNREADABLE, str(error))
    finder = _Finder()
    for name, content in parts:
        finder.visit(name, content.decode("utf-8", "replace") if name in FREE_FORM_KEYS else content)
    return _without_ticket() if finder.found else None


def _without_ticket() -> Refusal:
    names = ", ".join(f"`{name}`" for name in sorted(TRANSFER_KEYS))
    return Refusal(
        403,
        Why.FIELDS,
        f"Transfer fields ({names}) are taken from this fleet's routers only, with a ticket; send none.",
    )


class _Finder:
    """Counts transfer fields while JSON is parsed: each object passes here, also one that a later key replaces."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, value in pairs:
            self.visit(name, value)
        return dict(pairs)

    def visit(self, name: str, value: Any) -> None:
        """One field of one object."""
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
            return  # no JSON for an engine either
