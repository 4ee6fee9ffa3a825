"""llm-d's scorers: weighted sums of scores from 0 to 1, the highest wins.

Source: llm-d/llm-d-inference-scheduler, ``deploy/config/pd-epp-config.yaml`` at 0bb9fa8 for separate pools:
prefix-cache-scorer 2 and queue-scorer 1 in both profiles, prefix-based-pd-decider with nonCachedTokens 16,
maxPrefixBlocksToMatch 256, lruCapacityPerServer 31250. For aggregated serving the sample
``epp-prefix-cache-tracking-config.yaml`` at a3ccb61: prefix 3, kv-cache-utilization 1, queue 1. The scorers are those
of the Gateway API inference extension:

    queue   (most waiting − waiting) / (most − fewest), 1 where all are equal
    kv      1 − KV usage
    prefix  blocks known there / blocks of the prompt

The decider hands over unless at most 16 tokens of the prompt are missing on the chosen decode instance.

Different here: waiting and KV usage are as old as the agents' heartbeat (1 s; their metrics are scraped each 50 ms),
and of equal scores the fewest legs sent wins where their picker shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.instance import Role
from router.core.arrays import Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.filters import of_role, ready, with_place
from sim.baselines.pools import by_rule
from sim.baselines.sent import SentRequests

BLOCK_TOKENS: Final = 16
MATCH_TOKENS_MAX: Final = 256 * BLOCK_TOKENS
LRU_TOKENS: Final = 31_250 * BLOCK_TOKENS
NON_CACHED_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the scorers in one profile."""

    prefix: float = 0.0
    queue: float = 0.0
    kv: float = 0.0


PAIR: Final = Weights(prefix=2, queue=1)
WHOLE: Final = Weights(prefix=3, queue=1, kv=1)


class Llmd:
    """llm-d's policy: the prompts that were sent to each instance, and the scores."""

    def __init__(
        self, pair: Weights = PAIR, whole: Weights = WHOLE, non_cached_tokens: int = NON_CACHED_TOKENS
    ) -> None:
        self.pair: Final = pair
        self.whole: Final = whole
        self.non_cached_tokens: Final = non_cached_tokens
        self.sent: Final = SentRequests(LRU_TOKENS)

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        def by(weights: Weights, rows: Ints) -> int:
            row = self.best(fleet, rows, wanted, weights)
            self.sent.add(fleet.at(row).id, wanted)
            return row

        near = self._has_it_already(fleet, wanted)
        if near is not None:
            self.sent.add(fleet.at(near).id, wanted)
            return Chosen(None, fleet.at(near).id, "scores (llm-d): its decode instance has nearly all of it")
        return by_rule(
            fleet,
            wanted,
            "scores (llm-d)",
            lambda rows: by(self.pair, rows),
            lambda rows: by(self.pair, rows),
            lambda rows: by(self.whole, rows),
        )

    def _has_it_already(self, fleet: FleetSnapshot, wanted: Wanted) -> int | None:
        """The row of the best decode instance, if it has so much of the prompt that it serves the request alone; else
        None.
        """
        found = ready(fleet, wanted)
        decodes = with_place(fleet, np.concatenate([of_role(found, each) for each in (Role.DECODE, Role.BOTH)]), wanted)
        if not wanted.hand_over or not len(decodes) or not len(of_role(found, Role.PREFILL)):
            return None
        row = self.best(fleet, decodes, wanted, self.pair)
        missing = wanted.prompt_tokens - self.sent.matched(fleet.at(row).id, wanted)
        return row if missing <= self.non_cached_tokens else None

    def best(self, fleet: FleetSnapshot, rows: Ints, wanted: Wanted, weights: Weights) -> int:
        """The row with the highest score."""
        of = fleet.columns
        waiting = of.waiting[rows]
        most, spread = int(waiting.max()), int(waiting.max() - waiting.min())

        def score(row: int) -> float:
            queue = (most - int(of.waiting[row])) / spread if spread else 1.0
            match = self.sent.matched(fleet.at(row).id, wanted, MATCH_TOKENS_MAX) / max(1, wanted.prompt_tokens)
            return weights.prefix * match + weights.queue * queue + weights.kv * (1 - float(of.kv_usage[row]))

        ranked = [(-score(row), int(of.sent[row]), int(of.order[row]), int(row)) for row in rows.tolist()]
        return min(ranked)[3]
