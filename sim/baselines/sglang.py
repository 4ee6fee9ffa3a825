"""SGLang's cache-aware routing: the longest known prefix while loads are balanced, the shortest queue while not.

Source: sgl-project/sglang, ``sgl-router/src/policies/cache_aware.rs`` at 026f853, whose header states the rule, and the
command line's defaults in ``py_src/sglang_router/router_args.py`` at 083d601 (router 0.3). Load is imbalanced where
max − min > 64 *and* max > 1.5 · min. A match counts above 30 % of the prompt; else the instance with the smallest tree
gets it. With separate pools the prefill pool is chosen like this, the decode pool by the least load (the same file).

Different here: trees hold names of blocks instead of characters; eviction is at once instead of each 120 s; of equal
trees, which an empty start has many of, the one with the fewest requests is taken, where theirs depends on the order of
a hash table.
"""

from __future__ import annotations

from typing import Final

from cluster.ids import InstanceId
from router.core.arrays import Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.filters import least
from sim.baselines.pools import by_rule
from sim.baselines.sent import SentRequests

CACHE_THRESHOLD: Final = 0.3
BALANCE_ABS: Final = 64
BALANCE_REL: Final = 1.5
MAX_TREE_CHARACTERS: Final = 1 << 26
CHARACTERS_PER_TOKEN: Final = 4
"""English text under today's vocabularies; only bounds the tree."""


class CacheAware:
    """SGLang's cache-aware policy: a tree for each instance, and the choice."""

    def __init__(
        self,
        cache_threshold: float = CACHE_THRESHOLD,
        balance_abs: int = BALANCE_ABS,
        balance_rel: float = BALANCE_REL,
    ) -> None:
        self.cache_threshold: Final = cache_threshold
        self.balance_abs: Final = balance_abs
        self.balance_rel: Final = balance_rel
        self.sent: Final = SentRequests(MAX_TREE_CHARACTERS // CHARACTERS_PER_TOKEN)

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        of = fleet.columns

        def least_load(rows: Ints) -> int:
            found = least(rows, of.inflight, of.sent, of.order)
            assert found is not None
            return found

        def cache_aware(rows: Ints) -> int:
            loads = of.inflight[rows]
            low, high = int(loads.min()), int(loads.max())
            if high - low > self.balance_abs and high > low * self.balance_rel:
                row = least_load(rows)
            else:
                row = self._by_tree(fleet, rows, wanted)
            self.sent.add(fleet.at(row).id, wanted)
            return row

        return by_rule(fleet, wanted, "cache-aware (SGLang)", cache_aware, least_load, cache_aware)

    def _by_tree(self, fleet: FleetSnapshot, rows: Ints, wanted: Wanted) -> int:
        """The row with the longest match if that is long enough, else the one with the smallest tree."""
        of = fleet.columns

        def rank(row: int) -> tuple[int, int, int]:
            return int(of.inflight[row]), int(of.sent[row]), int(of.order[row])

        names: dict[int, InstanceId] = {row: fleet.at(row).id for row in rows.tolist()}
        matches = {row: self.sent.matched(name, wanted) for row, name in names.items()}
        best = min(matches, key=lambda row: (-matches[row], *rank(row)))
        if matches[best] > self.cache_threshold * max(1, wanted.prompt_tokens):
            return best
        return min(names, key=lambda row: (self.sent.tokens(names[row]), *rank(row)))
