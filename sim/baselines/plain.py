"""Policies that need no knowledge of prompts: taking turns, the fewest requests, the better of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cluster.ids import InstanceId
from engine.twin.tokens import mix
from router.core.arrays import Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.filters import least
from sim.baselines.pools import by_rule


class RoundRobin:
    """Each pool in turn, whatever runs there.

    Source: vLLM's ``toy_proxy_server.py`` (NIXL integration test) and production-stack's round robin (a6c01db): one
    counter per pool. A full instance is passed over.
    """

    def __init__(self) -> None:
        self.turns: Final = {"prefill": 0, "decode": 0, "whole": 0}
        """Choices made so far in each pool."""

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        prefill, decode, whole = (_Turn(self, fleet, pool) for pool in self.turns)
        return by_rule(fleet, wanted, "round robin", prefill, decode, whole)


class _Turn:
    """Chooses rows in turn, in the order of their names."""

    def __init__(self, policy: RoundRobin, fleet: FleetSnapshot, pool: str) -> None:
        self._policy, self._fleet, self._pool = policy, fleet, pool

    def __call__(self, rows: Ints) -> int:
        turn = self._policy.turns[self._pool]
        self._policy.turns[self._pool] = turn + 1
        ordered = rows[self._fleet.columns.order[rows].argsort()]
        return int(ordered[turn % len(ordered)])


def least_requests(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The instance with the fewest requests of ours in flight; equal ones take turns.

    Source: "least outstanding requests" of load balancers; DistServe's dispatch (OSDI 2024, section 4.3: shortest
    prefill queue, least loaded decoding instance) is the same rule on static pools.
    """

    def pick(rows: Ints) -> int:
        of = fleet.columns
        found = least(rows, of.inflight, of.sent, of.order)
        assert found is not None
        return found

    return by_rule(fleet, wanted, "fewest requests", pick, pick, pick)


class WeightedRequests:
    """The fewest requests for its speed: `least_requests` where instances are not equal.

    Source: "weighted least connections" of load balancers (Linux Virtual Server, Envoy's weighted least request).
    The operator gives the `speeds`, as relative numbers.
    """

    def __init__(self, speeds: Mapping[InstanceId, float]) -> None:
        self.speeds: Final = speeds

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        def pick(rows: Ints) -> int:
            of = fleet.columns

            def rank(row: int) -> tuple[float, int, int]:
                load = (int(of.inflight[row]) + 1) / self.speeds[fleet.at(row).id]
                return load, int(of.sent[row]), int(of.order[row])

            among: list[int] = rows.tolist()
            return min(among, key=rank)

        return by_rule(fleet, wanted, "fewest requests for its speed", pick, pick, pick)


class PowerOfTwo:
    """Two at random, the one with fewer requests in flight.

    Source: Mitzenmacher 2001; the policy of that name in vllm-router 0.1.17 and sglang-router 0.3.2, for either pool.
    Draws come from a counter through splitmix64, so that equal runs choose alike.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed: Final = seed
        self.draws = 0

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        def pick(rows: Ints) -> int:
            if len(rows) == 1:
                return int(rows[0])
            first = self._draw(len(rows))
            second = (first + 1 + self._draw(len(rows) - 1)) % len(rows)
            inflight = fleet.columns.inflight
            one, other = int(rows[first]), int(rows[second])
            return one if inflight[one] <= inflight[other] else other

        return by_rule(fleet, wanted, "power of two", pick, pick, pick)

    def _draw(self, below: int) -> int:
        self.draws += 1
        return (mix(self.seed, self.draws) >> 11) % below
