"""SLO classes: what they promise, and whether the promise was kept. Pure.

Admission keeps promises about the first token and about the mean time per later token
(`router.scheduler.flow_control.queue`). Whether a request *met* its class is judged by all targets of its own class, on
what the client saw. So a request that was served on its class's second promise (`degrade`) has missed the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cluster.spec import SloClass, WhenMissed
from router.core.timing_parts import Totals
from router.core.values import NO_PROMISE, Promise

MET: Final = "met"
MISSED: Final = "missed"
SHED: Final = "shed"
LEFT: Final = "left"
"""The client left before any target was missed."""
REFUSED: Final = "refused"
"""The engine refused the request: a request that can never succeed was promised nothing."""
UNKNOWN: Final = "unknown"
"""An answer in one piece whose first token was not seen."""

COUNTED: Final = frozenset({MET, MISSED, SHED})
"""Results that attainment counts; only `MET` raises it."""


class ClientSeen:
    """What a client saw, in milliseconds; None: it did not happen, or was not seen."""

    __slots__ = ("e2e_ms", "streamed", "tokens", "tpot_ms", "tt2t_ms", "ttft_ms")

    def __init__(
        self,
        *,
        ttft_ms: float | None,
        tt2t_ms: float | None,
        tpot_ms: float | None,
        e2e_ms: float,
        tokens: int | None,
        streamed: bool,
    ) -> None:
        """`tt2t_ms`: from the first token to the second. `e2e_ms`: to the answer's end, or until now."""
        self.ttft_ms: Final = ttft_ms
        self.tt2t_ms: Final = tt2t_ms
        self.tpot_ms: Final = tpot_ms
        self.e2e_ms: Final = e2e_ms
        self.tokens: Final = tokens
        self.streamed: Final = streamed

    def as_json(self) -> dict[str, float | None]:
        """The values rounded to microseconds."""
        named = {"ttft_ms": self.ttft_ms, "tt2t_ms": self.tt2t_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        return {name: None if value is None else round(value, 3) for name, value in named.items()}


class Judged:
    """The judgement of one request. Without a class (`slo` is None) nothing was promised: `result`, `late` and
    `degraded` mean nothing.
    """

    __slots__ = ("degraded", "foretold_ms", "late", "result", "seen", "slo")

    def __init__(
        self,
        *,
        foretold_ms: tuple[float, float],
        seen: ClientSeen,
        slo: SloClass | None,
        result: str,
        late: bool,
        degraded: bool,
    ) -> None:
        """Keep a judgement.

        Args:
            foretold_ms: the predicted TTFT and TPOT.
            seen: what the client saw.
            slo: the request's class.
            result: see `judge`.
            late: the TTFT target was expected to be missed in any case (`Wanted.late`).
            degraded: the request was served on its class's second promise.
        """
        self.foretold_ms: Final = foretold_ms
        self.seen: Final = seen
        self.slo: Final = slo
        self.result: Final = result
        self.late: Final = late
        self.degraded: Final = degraded

    def as_json(self) -> dict[str, Any]:
        """The judgement for `/explain`, formatted on demand only, as few requests are asked about."""
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
    """The prediction rounded to microseconds."""
    return {"ttft_ms": round(ttft_ms, 3), "tpot_ms": round(tpot_ms, 3)}


def promises_of(classes: Mapping[str, SloClass]) -> dict[str, Promise]:
    """The promises by class; requests without a class have none."""
    return {name: _promise(classes, name, frozenset()) for name in classes}


def _promise(classes: Mapping[str, SloClass], name: str, above: frozenset[str]) -> Promise:
    said = classes[name]
    second = said.degrade_to if said.when_missed is WhenMissed.DEGRADE else None
    goes_on = second is not None and second in classes and second not in above | {name}
    return Promise(
        ttft_ms=said.ttft_ms or 0.0,
        tpot_ms=said.tpot_ms or 0.0,
        sheds=said.when_missed is WhenMissed.SHED,
        lengths_within=said.lengths_within,
        degraded=_promise(classes, second, above | {name}) if goes_on and second is not None else None,
    )


def promise_of(promises: Mapping[str, Promise], slo_class: str) -> Promise:
    """The promise for one request."""
    return promises.get(slo_class, NO_PROMISE)


def seen_in(times: Totals, tokens: int | None, *, streamed: bool) -> ClientSeen:
    """What the client saw, from a request's times and the tokens of its answer.

    For an answer in one piece, the first token counts as sent when it was generated, if that was seen.
    """
    total_ms = times.total_s * 1000
    made_s = times.ttft_s if streamed else times.first_made_s
    ttft_ms = None if made_s is None else made_s * 1000
    tpot_ms = None if ttft_ms is None or tokens is None or tokens < 2 else (total_ms - ttft_ms) / (tokens - 1)
    tt2t_ms = None if times.tt2t_s is None else times.tt2t_s * 1000
    return ClientSeen(
        ttft_ms=ttft_ms, tt2t_ms=tt2t_ms, tpot_ms=tpot_ms, e2e_ms=total_ms, tokens=tokens, streamed=streamed
    )


def judge(slo: SloClass, seen: ClientSeen, outcome: str) -> str:
    """The result that counts for the request: `MET`, `MISSED`, `SHED`, `LEFT`, `REFUSED` or `UNKNOWN`.

    `outcome`: how its journey ended (`router.core.journey.OUTCOMES`), `SHED`, or ``broken`` (a bug of the router).
    """
    if outcome in {SHED, REFUSED}:
        return outcome
    if _broken(slo, seen) or outcome in {"failed", "expired", "broken"}:
        return MISSED
    if outcome == "client_left":
        return LEFT
    if seen.streamed or seen.ttft_ms is not None or slo.ttft_ms is None:
        return MET
    return _in_one_piece(slo, seen)


def _broken(slo: SloClass, seen: ClientSeen) -> bool:
    """Whether the client saw a missed target."""
    return any(late_by(slo, seen)) or _over(slo.tt2t_ms, seen.tt2t_ms) or _over(slo.e2e_ms, seen.e2e_ms)


def late_by(slo: SloClass, seen: ClientSeen) -> tuple[bool, bool]:
    """Whether the first token came too late, and whether the later tokens did. A wait without a first token that is
    longer than its target is late.
    """
    ttft_ms = seen.e2e_ms if seen.ttft_ms is None and seen.streamed else seen.ttft_ms
    return _over(slo.ttft_ms, ttft_ms), _over(slo.tpot_ms, seen.tpot_ms)


def _over(target_ms: float | None, seen_ms: float | None) -> bool:
    return target_ms is not None and seen_ms is not None and seen_ms > target_ms


def _in_one_piece(slo: SloClass, seen: ClientSeen) -> str:
    """Judge an answer in one piece by its last token, which must come within the first token's target plus the later
    ones'.
    """
    assert slo.ttft_ms is not None
    if seen.e2e_ms <= slo.ttft_ms:
        return MET
    if slo.tpot_ms is None or not seen.tokens:
        return UNKNOWN
    return MET if seen.e2e_ms <= slo.ttft_ms + slo.tpot_ms * (seen.tokens - 1) else MISSED
