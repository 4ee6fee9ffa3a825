"""Narwhal's rule for roles in a fixed fleet, written from its documentation (narwhal-inference 0.7.0). Pure.

Once a second every split next to the present one is scored by its worst projected ratio to a target: TTFT from prompt
work in flight, TPOT from what decodes. A split that is 5 % better in three looks in a row is taken, at most once in
ten seconds. It never starts or ends an instance: its fleet is the one it is given.
"""

from __future__ import annotations

from typing import Final

from cluster.instance import Role
from goodput import actions as do
from goodput.demand import ClassPromise
from goodput.observation import InstanceSeen, Phase
from goodput.sizing import LoadToServe, RecentLengths, Sizer
from goodput.sketch import sketch_of
from sim.baselines.scaling.laws import Law
from sim.scaling import Sight

MARGIN: Final = 0.05
SUSTAINED: Final = 3
COOLDOWN_S: Final = 10.0
WINDOW_S: Final = 30.0
MOST: Final = 0.8
"""Utilisation at which a role counts as full."""


class Narwhal:
    """A scaler that only flips roles."""

    every_s = 1.0

    def __init__(self, law: Law) -> None:
        self._law: Final = law
        self._sizers: Final = {role: Sizer(pool.engine, pool.first_token_ms) for role, pool in law.pools.items()}
        self._flipped_s = -COOLDOWN_S
        self._better = 0
        self._way = 0

    def act(self, sight: Sight) -> None:
        """Look once: flip an instance if a split next to the present one was better for long enough."""
        if Role.PREFILL not in self._law.pools or Role.DECODE not in self._law.pools:
            return
        ready = [each for each in sight.instances() if each.phase is Phase.READY and not each.leaving]
        prefills = [each for each in ready if each.role is Role.PREFILL]
        decodes = [each for each in ready if each.role is Role.DECODE]
        load = self._load(sight)
        if load is None:
            return
        here = self._worst(load, len(prefills), len(decodes))
        ways = {way: self._worst(load, len(prefills) + way, len(decodes) - way) for way in (-1, 1)}
        way = min(ways, key=lambda each: ways[each])
        better = ways[way] < here * (1 - MARGIN)
        self._better = self._better + 1 if better and way == self._way else int(better)
        self._way = way
        if self._better >= SUSTAINED and sight.now_s - self._flipped_s >= COOLDOWN_S:
            self._flip(sight, decodes if way > 0 else prefills, Role.PREFILL if way > 0 else Role.DECODE)

    def _flip(self, sight: Sight, of: list[InstanceSeen], role: Role) -> None:
        if len(of) > 1:
            least = min(of, key=lambda each: ((each.running or 0) + (each.waiting or 0), each.id))
            sight.actuator.flip(do.Flip(instance=least.id, role=role, because="a better split"))
            self._flipped_s, self._better = sight.now_s, 0

    def _load(self, sight: Sight) -> LoadToServe | None:
        arrived, ended = sight.meters.arrived_since(sight.now_s - WINDOW_S), sight.meters.since(sight.now_s - 300.0)
        if not arrived or not ended:
            return None
        prompts = sketch_of(each.input_tokens for each in arrived)
        lengths = RecentLengths(prompts=prompts, answers=sketch_of(each.made_tokens for each in ended if each.served))
        targets = self._law.targets
        promise = ClassPromise(ttft_ms=targets.ttft_ms, tpot_ms=targets.tpot_ms)
        return LoadToServe(rate=len(arrived) / WINDOW_S, lengths={"": lengths}, promises={"": promise})

    def _worst(self, load: LoadToServe, prefills: int, decodes: int) -> float:
        """The worse of two projections, each 1 where a role is as full as it may be."""
        if prefills < 1 or decodes < 1:
            return float("inf")
        prompts = self._sizers[Role.PREFILL].prompt_work(load) / prefills / MOST
        answers = load.rate / (decodes * self._sizers[Role.DECODE].answers_a_second(load)) / MOST
        return max(prompts, answers)
