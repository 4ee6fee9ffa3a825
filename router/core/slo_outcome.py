"""What a client saw of a request, beside what was foretold and promised. Pure.

Apart from `router.core.slo`, which judges, since compiled modules can have no such classes (docs/compiled.md).
"""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.spec import SloClass


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a client saw, in milliseconds; None: it did not come, or nobody saw it."""

    ttft_ms: float | None
    tt2t_ms: float | None
    """From the first token to the second."""
    tpot_ms: float | None
    e2e_ms: float
    """Until the answer's end, or until now."""
    tokens: int | None
    streamed: bool

    def as_json(self) -> dict[str, float | None]:
        """Rounded to microseconds."""
        named = {"ttft_ms": self.ttft_ms, "tt2t_ms": self.tt2t_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        return {name: None if value is None else round(value, 3) for name, value in named.items()}


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One request's. Without a class (`slo`) nothing was promised, and what comes after it means nothing."""

    foretold_ms: tuple[float, float]
    """TTFT and TPOT."""
    seen: Seen
    slo: SloClass | None
    result: str
    late: bool
    degraded: bool

    def as_json(self) -> dict[str, Any]:
        """For `/explain`: put into words when somebody asks, which is of few requests."""
        told: dict[str, Any] = {
            "foretold": foretold_json(*self.foretold_ms),
            "seen": self.seen.as_json(),
            "tokens": self.seen.tokens,
        }
        if self.slo is None:
            return told
        targets = dict(self.slo.targets())
        return told | {"targets": targets, "late": self.late, "degraded": self.degraded, "result": self.result}


def foretold_json(ttft_ms: float, tpot_ms: float) -> dict[str, float]:
    """Rounded to microseconds."""
    return {"ttft_ms": round(ttft_ms, 3), "tpot_ms": round(tpot_ms, 3)}
