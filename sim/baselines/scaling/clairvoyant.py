"""A scaler that knows every request in advance: the cheapest schedule of fleets that has what each moment needs. Pure.

For each window the sizes that the requests of it and its neighbours need are known. An instance is paid from when it is
asked for, so a gap in which it is not needed is worth a stop only if it lasts longer than stopping and starting again
takes. That is a dynamic program over fleets (how many exist, window by window, with a lead of one start). As prices add
up, it splits into one program for each level. Level k is needed in the windows that need k instances at least, and for
each gap of a level the choice to keep it is independent. Roles change at once where they may, so levels count both
roles together.

`ease` is how much more than the sizes say an instance is taken to serve. The bound is the cheapest schedule that still
attains, of several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.demand import ClassPromise
from goodput.observation import InstanceSeen, Phase
from goodput.sizing import LoadToServe, RecentLengths, Sizer
from goodput.sketch import sketch_of
from loadgen.arrival import Arrival
from sim.baselines.scaling.laws import Law
from sim.scaling import Sight

WINDOW_S: Final = 15.0
AROUND: Final = 3
"""Windows over which the load is averaged: queues smooth it as much."""
STOP_S: Final = 30.0
"""Seconds that draining and ending take."""


def needs(law: Law, arrivals: Sequence[Arrival], ease: float, attainment: float) -> dict[Role, list[int]]:
    """By role, the instances that each window needs, if each serves `ease` times what its size says."""
    end_s = arrivals[-1].at_s
    count = math.ceil(end_s / WINDOW_S) + 1
    at = np.array([each.at_s for each in arrivals])
    promise = ClassPromise(ttft_ms=law.targets.ttft_ms, tpot_ms=law.targets.tpot_ms, attainment=attainment)
    found: dict[Role, list[int]] = {role: [] for role in law.pools}
    sizers = {role: Sizer(pool.engine, pool.first_token_ms) for role, pool in law.pools.items()}
    for number in range(count):
        low, high = (number - AROUND // 2) * WINDOW_S, (number + AROUND // 2 + 1) * WINDOW_S
        first, last = np.searchsorted(at, [low, high])
        here = arrivals[int(first) : int(last)]
        around = arrivals[max(0, int(first) - 20) : int(last) + 20]
        lengths = RecentLengths(
            prompts=sketch_of(each.input_tokens for each in around),
            answers=sketch_of(max(1, each.output_tokens) for each in around),
        )
        # A window at the end of the run may be shorter: a rate over so short a time would be too high.
        seconds = max(WINDOW_S, min(high, end_s) - max(0.0, low))
        rate = len(here) / seconds / ease
        load = LoadToServe(rate=rate, lengths={"": lengths}, promises={"": promise})
        for role, sizer in sizers.items():
            found[role].append(sizer.need(role, load, attainment)[0] if here else 1)
    return found


def schedule(needed: Sequence[int], lead_s: float) -> list[int]:
    """The instances that must exist in each window: a level's gaps are kept where a new start would cost more."""
    exist = [0] * len(needed)
    lead = math.ceil(lead_s / WINDOW_S)
    keep = math.ceil((lead_s + STOP_S) / WINDOW_S)
    for level in range(1, max(needed) + 1):
        spans: list[list[int]] = []
        for at, need in enumerate(needed):
            if need < level:
                continue
            if spans and at - spans[-1][1] <= keep:
                spans[-1][1] = at
            else:
                spans.append([at, at])
        for first, last in spans:
            for at in range(max(0, first - lead), last + 1):
                exist[at] += 1
    return exist


class Clairvoyant:
    """Carries the schedule out."""

    every_s = WINDOW_S

    def __init__(self, law: Law, arrivals: Sequence[Arrival], lead_s: float, ease: float, attainment: float) -> None:
        self._law: Final = law
        self._needs: Final = needs(law, arrivals, ease, attainment)
        roles = list(law.pools)
        total = [sum(self._needs[role][at] for role in roles) for at in range(len(self._needs[roles[0]]))]
        self._exist: Final = schedule(total, lead_s)
        self._names = 0

    def start(self) -> dict[Role, int]:
        """The instances of each role at the start of the run."""
        return {role: needed[0] for role, needed in self._needs.items()}

    def act(self, sight: Sight) -> None:
        """Change the fleet to what the schedule has for this window."""
        at = min(len(self._exist) - 1, round(sight.now_s / WINDOW_S))
        there = [each for each in sight.instances() if not each.leaving and each.phase is not Phase.FAILED]
        self._shift(sight, [each for each in there if each.phase is Phase.READY], at)
        wanted = self._exist[at]
        for _ in range(wanted - len(there)):
            self._names += 1
            role = self._shortest(there, at)
            name = InstanceId(f"{self._law.pools[role].name}-{self._names:04d}")
            sight.actuator.start(do.Start(instance=name, pool=self._law.pools[role].name, because="known"))
        for _ in range(len(there) - wanted):
            spare = self._spare(there, at)
            if spare is None:
                return
            there.remove(spare)
            sight.actuator.drain(do.Drain(instance=spare.id, deadline_s=self._law.drain_s, because="known"))

    def _shift(self, sight: Sight, ready: list[InstanceSeen], at: int) -> None:
        """Roles as this window needs them; instances that no role needs decode."""
        if Role.BOTH in self._law.pools:
            return
        for to, of in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            givers = [each for each in ready if each.role is of and each.flips]
            takers = sum(each.role is to for each in ready)
            for each in givers[: max(0, min(self._needs[to][at] - takers, len(givers) - self._needs[of][at]))]:
                sight.actuator.flip(do.Flip(instance=each.id, role=to, because="known"))

    def _shortest(self, there: list[InstanceSeen], at: int) -> Role:
        ahead = min(len(self._exist) - 1, at + 4)
        return max(
            self._needs,
            key=lambda role: self._needs[role][ahead] - sum(each.role is role for each in there),
        )

    def _spare(self, there: list[InstanceSeen], at: int) -> InstanceSeen | None:
        """An instance that its role can do without; None: there is none."""
        for role in sorted(self._needs, key=lambda role: -self._over(there, role, at)):
            mine = [each for each in there if each.role is role]
            ready = [each for each in mine if each.phase is Phase.READY]
            if len(mine) > 1 and (len(ready) > 1 or not ready):
                return min(mine, key=lambda each: (each.phase is Phase.READY, each.kv_usage or 0.0, each.id))
        return None

    def _over(self, there: list[InstanceSeen], role: Role, at: int) -> int:
        return sum(each.role is role for each in there) - self._needs[role][at]
