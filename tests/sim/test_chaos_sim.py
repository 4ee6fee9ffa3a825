"""The chaos suite's scenarios on virtual time, where the simulator has the fault: at exactly the stage, for each seed.

A first run without a fault shows when a request reaches each stage. In a second run the fault strikes at that time. The
simulator checks its invariants after every event (`sim.checks`): no block has two owners, no request is forgotten,
nothing is held at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from support.chaos_scenarios import EARLY_LEGS, SCENARIOS, UNSEEN, Hurts, Scenario, Side, Stage
from support.simulated import HANDS_OVER, members

from cluster.ids import InstanceId
from cluster.instance import Role
from engine.twin import events as ev
from loadgen.arrival import Arrival
from sim.faults import Fault, Faults
from sim.fleet import SimulatedMember
from sim.instance import SimInstance
from sim.kernel import NS
from sim.result import BROKE_OFF, RESUMED, WRONG, Result
from sim.settings import SimSettings
from sim.world import World

IN_SIM = [each for each in (*SCENARIOS, *UNSEEN) if each.sim]
SETTINGS: dict[str, Any] = {"greedy": True, "first_token_s": 20.0, "stall_s": 2.0}


def fleet() -> list[SimulatedMember]:
    return members(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH, config={"lease_s": 3.0})


def load(rng: Random, count: int = 60) -> list[Arrival]:
    tokens = [(rng.randint(1, 400), rng.randint(6, 60)) for _ in range(count)]
    return [
        Arrival(at_s=round(0.004 * number, 6), input_tokens=prompt, output_tokens=answer)
        for number, (prompt, answer) in enumerate(tokens)
    ]


@dataclass
class Passed:
    """When one request reached each stage in the run without faults, in nanoseconds, and its instances."""

    prefill: InstanceId | None = None
    held: int = 0
    decode: InstanceId | None = None
    pull: int = 0
    first: int = 0
    end: int = 0

    def at(self, stage: Stage) -> int:
        return {
            Stage.BEFORE: 0,
            Stage.LEG_1: self.held - NS // 1000,
            Stage.BETWEEN: self.held + 1,
            Stage.PULL: self.pull + 1,
            Stage.PULLED: self.first + 1,
            Stage.STREAM: (self.first + self.end) // 2,
            Stage.END: self.end - 1,
        }[stage]


def calm(arrivals: Sequence[Arrival]) -> list[Passed]:
    """Run without faults. Returns all requests that were handed over."""
    world, passed = World(fleet(), SimSettings(**SETTINGS), policy=HANDS_OVER), {}

    def hear(at: SimInstance, effect: ev.Effect) -> None:
        if isinstance(effect, ev.RequestFinished):
            entry = passed.setdefault(int(effect.request.partition("/")[0]), Passed())
            if effect.hold is not None:
                entry.prefill, entry.held = at.name, world.kernel.now_ns
            else:
                entry.end = world.kernel.now_ns
        elif isinstance(effect, ev.PullBlocks):
            entry = passed.setdefault(int(effect.request.partition("/")[0]), Passed())
            entry.decode, entry.pull = at.name, world.kernel.now_ns
        elif isinstance(effect, ev.StepRun):
            for share in effect.shares:
                entry = passed.get(int(share.request.partition("/")[0]))
                if entry is not None and entry.pull and at.name == entry.decode:
                    entry.first = entry.first or world.kernel.now_ns

    world.on_effect = hear
    world.run(arrivals)
    return [each for each in passed.values() if each.prefill and each.pull and each.end]


def faults(scenario: Scenario, rng: Random, arrivals: Sequence[Arrival]) -> list[Fault]:
    """The scenario's faults, at its instances, at the time when a randomly chosen request reaches its stage."""
    chosen = rng.choice(calm(arrivals))
    at_s = chosen.at(scenario.stage) / NS
    victim = chosen.prefill if scenario.side is Side.P else chosen.decode
    everybody = [each.name for each in fleet() if each.role is scenario.role]
    found = []
    for fields in scenario.sim:
        if fields["kind"] == "leave":
            found.append(Fault(at_s=0.15, **fields))
            continue
        # In the simulator, notices are lost and pulls are corrupted at the producer.
        producers = [each.name for each in fleet() if each.role is not Role.DECODE]
        window = fields["kind"] in {"notices", "corrupt"}
        struck = producers if window else everybody if scenario.everywhere else [victim]
        when_s = 0.0 if scenario.everywhere else at_s
        lasts_s = {"duration_s": 5.0} if window else {"duration_s": 0.5}
        found += [Fault(at_s=when_s, instance=name, **lasts_s, **fields) for name in struck]
    return sorted(found, key=lambda each: each.at_s)


def struck(scenario: Scenario, seed: int) -> Result:
    rng = Random(f"{scenario.name}/{seed}")
    arrivals = load(rng)
    world = World(fleet(), SimSettings(seed=seed, digests=scenario.digests, **SETTINGS), policy=HANDS_OVER)
    Faults(world, faults(scenario, rng, arrivals), seed)
    return world.run(arrivals)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scenario", IN_SIM, ids=[each.name for each in IN_SIM])
def test_a_scenario_holds_on_virtual_time(scenario: Scenario, seed: int) -> None:
    result = struck(scenario, seed)
    rows = result.columns
    ended = {1, 5} if scenario.leave else {1}
    if scenario.hurts is Hurts.NOBODY:
        assert set(rows["outcome"].tolist()) <= ended, result.details
        assert not (rows["flags"] & BROKE_OFF).any()
    assert (rows["outcome"] > 0).all(), "every request ended"
    if scenario.hurts is Hurts.UNSEEN:
        assert (rows["flags"] & WRONG).any(), "the simulation must detect wrong text"
    else:
        assert not (rows["flags"] & WRONG).any()
    happened = ("killed", "slowed", "cut_off", "notices_lost", "pulls_corrupt", "clients_left")
    assert sum(result.counts.get(each, 0) for each in happened) > 0, "the fault never struck"
    if scenario.name == "kill D mid-stream":
        assert (rows["flags"] & RESUMED).any()
    good = rows[result.good()]
    assert (good["made_tokens"] == good["output_tokens"]).all()
    waited_s = (rows["end_ns"] - rows["at_ns"]) / NS
    assert np.max(waited_s) < SETTINGS["first_token_s"] + 1.0


def seen_of_overlapping(kind: str, at_s: Sequence[float], *pairs: tuple[float, float, int, float]) -> list[Any]:
    """What an instance suffers at these times, of faults of one kind: begin, duration, factor and share of each."""
    world = World(fleet(), SimSettings(**SETTINGS), policy=HANDS_OVER)
    name = fleet()[0].name
    faults = Faults(
        world,
        [
            Fault(at_s=begin, kind=kind, instance=name, duration_s=duration, factor=factor, share=share)
            for begin, duration, factor, share in pairs
        ],
        seed=1,
    )
    found: list[Any] = []

    def look(_: object) -> None:
        at = world.by_name[name]
        found.append(
            {
                "slow": at.rates.get("fault", (1, 1))[1],
                "link": at.member.nic_gb_s / at.nic.gb_s,
                "partition": at.cut_off,
                "notices": faults.share_of("notices", name),
                "corrupt": faults.share_of("corrupt", name),
            }[kind]
        )

    for each in at_s:
        world.kernel.at(round(each * NS), look, None)
    world.run([Arrival(at_s=max(at_s) + 1, input_tokens=1, output_tokens=1)])
    return found


TIMES_S = (0.5, 1.5, 2.5, 3.5)


@pytest.mark.parametrize(
    ("kind", "calm", "weak", "strong"),
    [("slow", 1, 2, 8), ("link", 1, 2, 8), ("notices", 0, 0.25, 1), ("corrupt", 0, 0.25, 1)],
)
def test_of_overlapping_faults_each_lasts_its_time_and_the_strongest_acts(
    kind: str, calm: float, weak: float, strong: float
) -> None:
    first_weak = seen_of_overlapping(kind, TIMES_S, (0, 2, 2, 0.25), (1, 2, 8, 1))
    assert first_weak == [weak, strong, strong, calm]
    first_strong = seen_of_overlapping(kind, TIMES_S, (0, 2, 8, 1), (1, 2, 2, 0.25))
    assert first_strong == [strong, strong, weak, calm]
    inside = seen_of_overlapping(kind, TIMES_S, (0, 3, 2, 0.25), (1, 1, 8, 1))
    assert inside == [weak, strong, weak, calm]


def test_an_instance_is_reachable_again_when_its_last_partition_ends() -> None:
    assert seen_of_overlapping("partition", TIMES_S, (0, 2, 4, 1), (1, 2, 4, 1)) == [True, True, True, False]
    assert seen_of_overlapping("partition", TIMES_S, (0, 3, 4, 1), (1, 1, 4, 1)) == [True, True, True, False]


def test_each_scenario_is_in_the_simulator_or_says_why_not() -> None:
    listed = (*SCENARIOS, *UNSEEN)
    assert all(bool(each.sim) != bool(each.not_in_sim) for each in listed)
    names = [each.name for each in listed]
    assert len(set(names)) == len(names)
    kills = {(each.side, each.stage) for each in (*SCENARIOS, *EARLY_LEGS) if each.name.startswith("kill")}
    assert {stage for _, stage in kills} == set(Stage), "an instance is killed at each stage"
