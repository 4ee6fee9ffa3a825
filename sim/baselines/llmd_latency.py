"""llm-d's predicted-latency scorer: the instance whose predicted latency leaves the least headroom that is enough.

Source: llm-d's documentation, "Latency Predictor" and "Predicted Latency-Based Routing" (v0.7 and dev), and the
defaults that the Gateway API inference extension's plugin states:

- For each candidate TTFT and TPOT are predicted, and headroom = target − prediction for each of the two.
- Where both are positive the scores are weighted 0.8 (TTFT) and 0.2 (TPOT), and the *least* headroom wins: requests are
  packed so that room is left for those that need more. Candidates with none are taken one time in a hundred.
- If none has headroom, the one that misses by the least, with the same weights. Without targets: the least predicted
  latency.
- An instance that is known to have 0.8 of the prompt or more is preferred to all others that have not.

Different here: theirs learns a gradient-boosted model of one pod shape from live traffic. Here the predictions are the
engines' own costs (`Make`) and a book of what was sent: prompt tokens ahead of this one, and the answers under way with
their contexts. That is the model that theirs would learn at best, and it knows mixed fleets, which theirs does not.
Explorations are drawn from a counter. With separate pools prompts are judged by TTFT alone, answers by TPOT alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.ids import InstanceId
from engine.twin.tokens import mix
from router.core.arrays import Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.step_model import UNKNOWN, Make
from sim.baselines.llmd import LRU_TOKENS
from sim.baselines.pools import by_rule
from sim.baselines.sent import SentRequests

TTFT_WEIGHT: Final = 0.8
TPOT_WEIGHT: Final = 0.2
EXPLORE_ONE_IN: Final = 100
AFFINITY: Final = 0.8

_Latency = Callable[[InstanceId], tuple[float, float]]
"""Predicted TTFT and TPOT, in milliseconds; 0: not asked for."""


@dataclass(frozen=True, slots=True)
class LatencyBooking:
    """The tokens of one placed request, and the instances that they count at."""

    prompt_at: InstanceId
    prompt_tokens: int
    answer_at: InstanceId
    context: int


class LlmdLatency:
    """llm-d's policy by predicted latency: load in flight, the predictions, the headroom."""

    def __init__(
        self, makes: Mapping[InstanceId, Make] | None = None, ttft_ms: float = 0.0, tpot_ms: float = 0.0
    ) -> None:
        """`makes`: what is known of each instance's speed. `ttft_ms`, `tpot_ms`: targets of all requests; 0: none."""
        self.makes: Final = makes or {}
        self.ttft_ms: Final = ttft_ms
        self.tpot_ms: Final = tpot_ms
        self.sent: Final = SentRequests(LRU_TOKENS)
        self.pending: Final[Counter[InstanceId]] = Counter()
        """Prompt tokens sent there and not computed yet."""
        self.answers: Final[Counter[InstanceId]] = Counter()
        self.contexts: Final[Counter[InstanceId]] = Counter()
        self._active: Final[dict[int, LatencyBooking]] = {}
        self._prefilling: Final[set[int]] = set()
        self._draws = 0

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        def pick(latency: _Latency) -> Callable[[Ints], int]:
            return lambda rows: self._best(fleet, rows, wanted, latency)

        return by_rule(
            fleet,
            wanted,
            "headroom (llm-d)",
            pick(lambda name: (self.predicted_ttft_ms(name, wanted), 0.0)),
            pick(lambda name: (0.0, self.predicted_tpot_ms(name, wanted))),
            pick(lambda name: (self.predicted_ttft_ms(name, wanted), self.predicted_tpot_ms(name, wanted))),
        )

    def predicted_ttft_ms(self, name: InstanceId, wanted: Wanted) -> float:
        """Milliseconds of the prompts ahead, of this one, and of the answers that share each of its steps."""
        make = self.makes.get(name, UNKNOWN)
        new = max(1, wanted.prompt_tokens - self.sent.matched(name, wanted))
        tokens = self.pending[name] + new
        beside = make.decode.request_ms * self.answers[name] + make.decode.context_ms * self.contexts[name]
        own = make.prompt_ms(new, wanted.prompt_tokens - new)
        ahead = self.pending[name] * make.prompt_ms(make.budget_tokens) / make.budget_tokens
        return make.first_ms + own + ahead + beside * make.steps(tokens)

    def predicted_tpot_ms(self, name: InstanceId, wanted: Wanted) -> float:
        """Milliseconds of a step with one more answer."""
        cost = self.makes.get(name, UNKNOWN).decode
        context = self.contexts[name] + wanted.prompt_tokens
        return cost.requests_ms(self.answers[name] + 1) + cost.context_ms * context

    def _best(self, fleet: FleetSnapshot, rows: Ints, wanted: Wanted, latency: _Latency) -> int:
        names: dict[int, InstanceId] = {row: fleet.at(row).id for row in rows.tolist()}
        near = [
            row for row in names if self.sent.matched(names[row], wanted) >= AFFINITY * max(1, wanted.prompt_tokens)
        ]
        among = near or list(names)
        heads = {row: self._headroom(*latency(names[row])) for row in among}
        enough = [row for row in among if heads[row][0] >= 0]
        self._draws += 1
        explores = mix(0, self._draws) % EXPLORE_ONE_IN == 0
        if enough and not (explores and len(enough) < len(among)):
            return min(enough, key=lambda row: (heads[row][1], *_turn(fleet, row)))
        rest = [row for row in among if row not in enough]
        return min(rest, key=lambda row: (-heads[row][1], *_turn(fleet, row)))

    def _headroom(self, ttft_ms: float, tpot_ms: float) -> tuple[float, float]:
        """The lesser headroom, and the weighted one, in shares of the targets; without targets minus the latencies."""
        ttft = 1 - ttft_ms / self.ttft_ms if self.ttft_ms else -ttft_ms
        tpot = 1 - tpot_ms / self.tpot_ms if self.tpot_ms else -tpot_ms
        return min(ttft, tpot), TTFT_WEIGHT * ttft + TPOT_WEIGHT * tpot

    # --- load in flight (sim.baselines.following) ---------------------------------------------------------------------

    def placed(self, request: int, wanted: Wanted, chosen: Chosen) -> None:
        self.ended(request)
        assert chosen.decode is not None
        at = chosen.prefill or chosen.decode
        new = max(1, wanted.prompt_tokens - self.sent.matched(at, wanted))
        self.sent.add(at, wanted)
        self._active[request] = LatencyBooking(at, new, chosen.decode, wanted.prompt_tokens)
        self._prefilling.add(request)
        self.pending[at] += new
        self.answers[chosen.decode] += 1
        self.contexts[chosen.decode] += wanted.prompt_tokens

    def prefilled(self, request: int) -> None:
        if request in self._prefilling:
            self._prefilling.remove(request)
            booked = self._active[request]
            self.pending[booked.prompt_at] -= booked.prompt_tokens

    def ended(self, request: int) -> None:
        self.prefilled(request)
        booked = self._active.pop(request, None)
        if booked is not None:
            self.answers[booked.answer_at] -= 1
            self.contexts[booked.answer_at] -= booked.context


def _turn(fleet: FleetSnapshot, row: int) -> tuple[int, int]:
    of = fleet.columns
    return int(of.sent[row]), int(of.order[row])
