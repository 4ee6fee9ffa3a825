"""Whether a fleet would suffice, by a simulation of the current load: a controller asks before an instance leaves.

Requests are drawn from the distributions that routers have published, at the rate for which capacity is kept, with the
measured burstiness; the same `Check` draws the same requests. Their number bounds the time: `REQUESTS` of them take one
CPU second on the interpreter, or two with very long answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput.decision import Check, Checked
from loadgen.arrival import Arrival
from sim.evaluate import Goal, tried
from sim.fleet import SimulatedMember, as_ranks

REQUESTS: Final = 400
TOKENS: Final = 600_000
"""The most tokens of all answers together: a simulation spends its time on their steps."""
REQUESTS_MIN: Final = 60
"""With fewer requests no verdict is given: of 60, three may miss at an attainment of 95 %."""


def checker(pools: Mapping[str, SimulatedMember], goals: Mapping[str, Goal], usual: str) -> Callable[[Check], Checked]:
    """The function that answers a controller's checks.

    Args:
        pools: by name, what one instance is.
        goals: by class, what is promised.
        usual: the class of requests that name none, or one without a goal.
    """

    def check(asked: Check) -> Checked:
        if any(pool not in pools for pool in asked.fleet):
            return Checked(asked.number, None, "a pool is not known to the simulation")
        members = members_of(pools, asked.fleet)
        arrivals = drawn(asked)
        if len(arrivals) < REQUESTS_MIN:
            return Checked(asked.number, None, f"{len(arrivals)} requests can be drawn in the time")
        said = tried(members, arrivals, goals, usual)
        because = f"{said.attained_at_most:.1%} of {len(arrivals)} requests drawn from recent ones would be in time"
        return Checked(asked.number, said.holds, because)

    return check


def members_of(pools: Mapping[str, SimulatedMember], fleet: Mapping[str, Mapping[Role, int]]) -> list[SimulatedMember]:
    """The members of a simulated fleet: every data parallel rank of each instance. `fleet`: by pool and role."""
    return [
        rank
        for pool, roles in fleet.items()
        for role, count in roles.items()
        for number in range(count)
        for rank in as_ranks(replace(pools[pool], name=InstanceId(f"{role.value}-{pool}-{number}"), role=role))
    ]


def drawn(asked: Check) -> list[Arrival]:
    """Requests with the lengths and the rate of recent ones; empty: there is no rate, or no class has a share."""
    rng = np.random.default_rng(asked.number)
    names = [name for name, each in asked.lengths.items() if each.share > 0]
    if not names or asked.rate <= 0:
        return []
    shares = np.array([asked.lengths[name].share for name in names])
    mean = sum(
        share * asked.lengths[name].answers.mean for name, share in zip(names, shares / shares.sum(), strict=True)
    )
    count = min(REQUESTS, int(TOKENS / max(1.0, mean)))
    gaps = rng.gamma(1 / asked.dispersion, asked.dispersion / asked.rate, count)
    found = []
    for at_s, name in zip(np.cumsum(gaps), rng.choice(names, count, p=shares / shares.sum()), strict=True):
        lengths = asked.lengths[name]
        prompt, answer = (
            max(1, round(float(rng.choice(values, p=parts))))
            for values, parts in (lengths.prompts.lengths(), lengths.answers.lengths())
        )
        new = max(1, round(prompt * (1 - lengths.cached)))
        found.append(Arrival(at_s=float(at_s), input_tokens=new, output_tokens=answer, slo_class=str(name)))
    return found
