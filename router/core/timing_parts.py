"""What comes of a request's times (`router.telemetry.timing`): its sums, and what an engine says of it. Pure.

They stand apart since compiled modules can have no such classes (docs/compiled.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

_ABSENT: Final = msgspec.Raw()


class Choice(msgspec.Struct):
    """One of an answer's choices, as far as it tells whether there is an answer: their values are not looked into."""

    text: msgspec.Raw = _ABSENT
    message: msgspec.Raw = _ABSENT
    delta: msgspec.Raw = _ABSENT


class Told(msgspec.Struct):
    """What an engine says about a request, beside its answer."""

    metrics: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    choices: list[Choice] | None = None
    error: Any = None


class Sum(msgspec.Struct, frozen=True):
    """One sum, in seconds."""

    total_s: float
    parts: Mapping[str, float | None]
    """By name, in order; None: nobody's clock saw it."""
    residual_s: float
    """What of the total is in no part."""

    def as_json(self) -> dict[str, float | None]:
        """Milliseconds."""
        parts = {name: None if seconds is None else _ms(seconds) for name, seconds in self.parts.items()}
        return {"total": _ms(self.total_s), **parts, "residual": _ms(self.residual_s)}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class Totals(NamedTuple):
    """Of one request, in seconds from its arrival; None: it did not come, or nobody saw it."""

    ttft_s: float | None
    tt2t_s: float | None
    """From the first token to the second."""
    first_made_s: float | None
    total_s: float
    """To its answer's end, or until now."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request's time went."""

    way: str
    """seeded, plain or aggregated."""
    ttft: Sum | None
    """Arrival to the first token's way out. None: not streamed, or it never came."""
    tt2t: Sum | None
    """From then to the second token's way out."""
    answer: Sum | None
    """Arrival to the answer's way out, where that comes in one piece."""
    first_made_s: float | None
    """Arrival to when the first token was there for us to give, whoever got it: what seeding makes of TTFT."""
    total_s: float
    """Arrival to the last byte's way out."""

    def as_json(self) -> dict[str, Any]:
        """Milliseconds; sums that there are not, are left out."""
        sums = {"ttft": self.ttft, "tt2t": self.tt2t, "answer": self.answer}
        said: dict[str, Any] = {"way": self.way, "total_ms": _ms(self.total_s)}
        if self.first_made_s is not None:
            said["first_made_ms"] = _ms(self.first_made_s)
        return said | {f"{name}_ms": each.as_json() for name, each in sums.items() if each is not None}
