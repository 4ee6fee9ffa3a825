"""The parts of a request's times (`router.telemetry.timing`): their sums, and what an engine says about the request.
Pure.

They are a module of their own because compiled modules cannot contain such classes (docs/compiled.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

_ABSENT: Final = msgspec.Raw()


class Choice(msgspec.Struct):
    """One of an answer's choices, just far enough to tell whether it holds an answer; the values are not parsed."""

    text: msgspec.Raw = _ABSENT
    message: msgspec.Raw = _ABSENT
    delta: msgspec.Raw = _ABSENT


class EngineTold(msgspec.Struct):
    """What an engine says about a request, beside its answer."""

    metrics: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    choices: list[Choice] | None = None
    error: Any = None


class Sum(msgspec.Struct, frozen=True):
    """One sum, in seconds."""

    total_s: float
    parts: Mapping[str, float | None]
    """Seconds by part, in order; None: no clock measured the part."""
    residual_s: float
    """The seconds of the total that are in no part."""

    def as_json(self) -> dict[str, float | None]:
        """The sum in milliseconds."""
        parts = {name: None if seconds is None else _ms(seconds) for name, seconds in self.parts.items()}
        return {"total": _ms(self.total_s), **parts, "residual": _ms(self.residual_s)}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class Totals(NamedTuple):
    """Times of one request, in seconds from its arrival; None: the event did not happen, or was not seen."""

    ttft_s: float | None
    tt2t_s: float | None
    """From the first token to the second."""
    first_made_s: float | None
    total_s: float
    """To the answer's end, or until now."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request's time went."""

    way: str
    """seeded, plain or aggregated."""
    ttft: Sum | None
    """From arrival until the first token is sent. None: not streamed, or no first token came."""
    tt2t: Sum | None
    """From the first token until the second is sent."""
    answer: Sum | None
    """From arrival until the answer is sent, if it comes in one piece."""
    first_made_s: float | None
    """Seconds from arrival until the router had the first token, sent or not: shows what seeding gains in TTFT."""
    total_s: float
    """From arrival until the last byte is sent."""

    def as_json(self) -> dict[str, Any]:
        """The timing in milliseconds; absent sums are left out."""
        sums = {"ttft": self.ttft, "tt2t": self.tt2t, "answer": self.answer}
        said: dict[str, Any] = {"way": self.way, "total_ms": _ms(self.total_s)}
        if self.first_made_s is not None:
            said["first_made_ms"] = _ms(self.first_made_s)
        return said | {f"{name}_ms": each.as_json() for name, each in sums.items() if each is not None}
