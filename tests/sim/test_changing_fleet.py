"""Instances start, drain, flip and end while the fleet serves: no request is lost, and no budget is ever exceeded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.simulated import MODEL, every, one

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.budget import Budget
from loadgen.arrival import Arrival
from router.fleet import events as log_entries
from router.scheduler.decision_log import DecisionLog
from router.scheduler.scoring.policies import POLICIES
from sim.faults import Fault, Faults
from sim.fleet import SimulatedMember
from sim.kernel import NS
from sim.provisioning import Site, Timed
from sim.replay import replay
from sim.result import BROKE_OFF, RESUMED, Result
from sim.settings import SimSettings
from sim.startup import StartUp
from sim.world import World

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
START_UP_S = 2.0
"""Start-up time of an instance of `support.simulated.one`."""


def members(*roles: Role, **rest: Any) -> list[SimulatedMember]:
    """One instance for each role listed; instances of each role are numbered from 0."""
    return [one(f"{role.value}-{roles[:at].count(role)}", role, **rest) for at, role in enumerate(roles)]


def named(name: str) -> InstanceId:
    return InstanceId(name)


def start(name: str, pool: str = "decode") -> do.Start:
    return do.Start(instance=named(name), pool=pool)


def drain(name: str, deadline_s: float = 60.0, *, leave: bool = True) -> do.Drain:
    return do.Drain(instance=named(name), deadline_s=deadline_s, leave=leave)


def site(*, flips: bool = False, startup: StartUp | None = None, **rest: Any) -> Site:
    kinds = {"prefill": P, "decode": D}
    pools = {pool: one(pool, role, flips=flips, startup=startup, gpu="H100") for pool, role in kinds.items()}
    return Site(pools=pools, **rest)


def changing(
    fleet: Sequence[SimulatedMember],
    arrivals: Sequence[Arrival],
    *timed: tuple[float, do.ScriptedAction],
    around: Site | None = None,
    faults: Sequence[Fault] = (),
    log: DecisionLog | None = None,
    **settings: Any,
) -> tuple[World, Result]:
    world = World(fleet, SimSettings(**settings), policy=POLICIES["least_load"], site=around or site(), log=log)
    Faults(world, faults, world.settings.seed)
    world.provisioning.schedule(Timed(*each) for each in timed)
    return world, world.run(arrivals)


def what_happened(result: Result, name: str) -> list[tuple[float, str]]:
    return [(round(each.at_ns / NS, 3), each.what) for each in result.fleet_events if each.instance == name]


def refused(result: Result) -> list[tuple[str, str]]:
    """The instances of refused actions, and why each was refused."""
    return [(each.instance, each.because) for each in result.fleet_events if each.what == "refused"]


def all_served(result: Result) -> bool:
    return bool(result.good().all())


def test_an_instance_that_starts_serves_once_it_is_ready() -> None:
    world, result = changing(members(P, D), every(0.1, 100), (1.0, start("decode-1")))
    assert all_served(result)
    assert what_happened(result, "decode-1") == [(1.0, "asked"), (1.0, "starting"), (1.0 + START_UP_S, "ready")]
    there = result.columns["decode"] == world.by_name[named("decode-1")].index
    assert there.any()
    assert result.columns["at_ns"][there].min() >= (1.0 + START_UP_S) * NS
    assert result.gpus == 3


def test_gpu_time_counts_starting_and_draining_too() -> None:
    _, result = changing(members(P, D, gpu="H100"), every(0.1, 100), (1.0, start("decode-1")), (5.0, drain("decode-1")))
    left = next(at_s for at_s, what in what_happened(result, "decode-1") if what == "stopped")
    assert 7.0 < left < 9.0  # 5 s, 2 s without a request, 1 s until its process has ended
    assert result.gpu_seconds["H100"] == pytest.approx(2 * result.columns["end_ns"].max() / NS + left - 1.0, abs=0.1)


def test_a_drained_instance_ends_what_it_has_first() -> None:
    long = [Arrival(at_s=0.0, input_tokens=100, output_tokens=800)]
    world, result = changing(members(P, D, D), long, (0.3, drain("decode-0")), (0.3, drain("decode-1")))
    assert all_served(result)
    assert result.counts["instances_left"] == 2
    assert all(at.gone for at in world.instances if at.member.role is D)
    ended_s = float(result.columns["end_ns"].max()) / NS
    first, last = sorted(
        next(at_s for at_s, what in what_happened(result, f"decode-{n}") if what == "stopped") for n in (0, 1)
    )
    assert first < last  # the idle one does not wait for the busy one
    assert ended_s < last


LONG = [Arrival(at_s=3.0, input_tokens=100, output_tokens=800)] * 4
"""Four requests of 0.9 s each."""


def test_a_drain_that_does_not_end_in_time_cuts_and_streams_are_resumed_elsewhere() -> None:
    timed = [(0.0, start("decode-1")), (3.3, drain("decode-0", 0.1))]
    _, result = changing(members(P, D), LONG, *timed, greedy=True, exit_s=0.1)
    assert all_served(result)
    assert sorted(result.columns["flags"] & RESUMED) == [0, 0, RESUMED, RESUMED]


def test_without_another_instance_a_cut_stream_ends_with_an_error() -> None:
    stops = [(3.3, do.Stop(instance=named(f"decode-{number}"))) for number in (0, 1)]
    _, result = changing(members(P, D, D), LONG, *stops, exit_s=0.1)
    assert (result.columns["flags"] & BROKE_OFF).all()


def test_a_drain_that_is_not_to_leave_can_be_resumed() -> None:
    paused = (1.0, drain("decode-1", leave=False))
    world, result = changing(members(P, D, D), every(0.1, 100), paused, (6.0, do.Resume(instance=named("decode-1"))))
    assert all_served(result)
    sent = result.columns["at_ns"][result.columns["decode"] == world.by_name[named("decode-1")].index] / NS
    assert not ((sent > 2.0) & (sent < 6.0)).any()
    assert (sent > 6.5).any()


def test_a_flip_keeps_the_engine_and_its_settings() -> None:
    fleet = [one("a", P, config={"max_num_seqs": 7}, flips=True), *members(P, D, flips=True)]
    world, result = changing(fleet, every(0.05, 200), (3.0, do.Flip(instance=named("a"), role=D)))
    assert all_served(result)
    flipped = world.by_name[named("a")]
    assert flipped.epoch == 1
    assert flipped.agent.role is D
    assert flipped.agent.credits == flipped.member.config.max_num_seqs == 7
    prompts, answers = (
        result.columns["at_ns"][result.columns[side] == flipped.index] / NS for side in ("prefill", "decode")
    )
    assert prompts.max() < 3.5
    assert answers.min() > 2.9


def test_what_was_started_for_one_role_does_not_flip() -> None:
    world, result = changing(members(P, D), every(0.1, 10), (0.5, do.Flip(instance=named("decode-0"), role=P)))
    assert world.by_name[named("decode-0")].agent.role is D
    assert "--flips" in refused(result)[0][1]


def test_a_budget_holds_at_every_instant_draining_included() -> None:
    """One GPU of the budget is left. A second start is refused, and so is a start in place of a draining instance."""
    around = site(budget=Budget(gpus={"H100": 3}))
    world, result = changing(
        members(P, D, gpu="H100"),
        every(0.1, 200),
        (1.0, start("decode-1")),
        (1.0, start("decode-2")),
        (5.0, drain("decode-0")),
        (5.1, start("decode-3")),
        (12.0, start("decode-4")),
        around=around,
    )
    assert all_served(result)
    told = dict(refused(result))
    assert set(told) == {"decode-2", "decode-3"}
    assert "0 of 3 left" in told["decode-3"]
    assert result.gpus == 3
    assert world.by_name[named("decode-4")].ready


@pytest.mark.parametrize(
    ("budget", "word"), [(Budget(price_per_hour=5.0), "an hour"), (Budget(power_w=1500.0), "W would exceed")]
)
def test_money_and_watts_are_budgets_too(budget: Budget, word: str) -> None:
    rest = {"price_per_hour": 2.0, "power_w": 700.0}
    around = Site(pools={"decode": one("decode", D, **rest)}, budget=budget)
    _, result = changing(members(P, D, **rest), every(0.1, 10), (0.5, start("decode-1")), around=around)
    assert word in refused(result)[0][1]


def test_a_fleet_beyond_its_budget_does_not_begin() -> None:
    with pytest.raises(ValueError, match="decode-0: 1 × H100 wanted, 0 of 1 left"):
        World(members(P, D, gpu="H100"), site=site(budget=Budget(gpus={"H100": 1})))


def test_without_a_free_gpu_an_instance_waits_for_one() -> None:
    world, result = changing(
        members(P, D, D, gpu="H100"),
        every(0.1, 200),
        (1.0, start("decode-9")),
        (4.0, drain("decode-1")),
        around=site(gpus={"H100": 3}),
    )
    assert all_served(result)
    left = next(at_s for at_s, what in what_happened(result, "decode-1") if what == "stopped")
    assert what_happened(result, "decode-9")[:3] == [(1.0, "asked"), (1.0, "pending"), (left, "starting")]
    assert world.by_name[named("decode-9")].ready


def test_what_waits_for_a_gpu_can_be_cancelled_and_a_run_does_not_wait_for_it() -> None:
    world, result = changing(
        members(P, D, gpu="H100"),
        every(0.1, 20),
        (0.5, start("decode-8")),
        (0.5, start("decode-9")),
        (1.0, drain("decode-8")),
        around=site(gpus={"H100": 2}),
    )
    assert [what for _, what in what_happened(result, "decode-8")] == ["asked", "pending", "cancelled"]
    assert world.provisioning.pending == ("decode-9",)
    assert result.end_ns < 10 * NS


def test_a_start_that_fails_gives_its_gpus_back() -> None:
    around = site(startup=StartUp(median_s=3.0, fails=1.0), gpus={"H100": 3})
    world, result = changing(members(P, D, gpu="H100"), every(0.1, 100), (1.0, start("decode-1")), around=around)
    assert all_served(result)
    assert what_happened(result, "decode-1")[-1] == (4.0, "failed")
    assert world.by_name[named("decode-1")].gone
    assert not world.view.knows(named("decode-1"))
    assert result.counts["starts_failed"] == result.counts["instances_failed"] == 1


@pytest.mark.parametrize(("killed_s", "ends"), [(2.0, "failed"), (4.0, "ready")])
def test_a_kill_during_start_up_ends_an_instance_and_a_later_one_restarts_it(killed_s: float, ends: str) -> None:
    """As with the agents' supervisor: an engine that was never ready is given up; one that was ready starts again."""
    fault = Fault(at_s=killed_s, kind="kill", instance=named("decode-1"))
    world, result = changing(members(P, D), every(0.1, 100), (1.0, start("decode-1")), faults=[fault])
    assert all_served(result)
    assert what_happened(result, "decode-1")[-1][1] == ends
    assert world.by_name[named("decode-1")].epoch == (1 if ends == "failed" else 2)


def test_an_engine_that_dies_again_and_again_is_given_up() -> None:
    faults = [Fault(at_s=5.0 * number, kind="kill", instance=named("decode-1")) for number in range(1, 30)]
    world, result = changing(members(P, D, D), every(0.5, 300), faults=faults)
    assert all_served(result)
    assert world.by_name[named("decode-1")].gone
    assert "5 restarts in 600 s did not help" in next(
        each.because for each in result.fleet_events if each.what == "failed"
    )


def test_a_fault_of_an_instance_that_is_not_there_does_nothing() -> None:
    fault = Fault(at_s=0.5, kind="slow", instance=named("decode-7"))
    _, result = changing(members(P, D), every(0.1, 20), (1.0, start("decode-7")), faults=[fault])
    assert all_served(result)
    assert result.counts["faults_missed"] == 1


def test_a_name_is_given_once_and_pools_are_known() -> None:
    _, result = changing(members(P, D), every(0.1, 20), (0.5, start("decode-0")), (0.6, start("x", "nowhere")))
    told = [because for _, because in refused(result)]
    assert told == ["the name decode-0 is taken, or was", "there is no pool 'nowhere'; there is prefill, decode"]


def test_the_decision_log_of_a_fleet_that_changes_can_be_replayed() -> None:
    lines: list[bytes] = []
    timed = [(1.0, start("decode-2")), (4.0, drain("decode-0")), (5.0, do.Flip(instance=named("prefill-1"), role=D))]
    fleet = members(P, P, D, D, flips=True)
    _, result = changing(fleet, every(0.03, 300), *timed, log=DecisionLog(lines.append, "least_load"))
    assert all_served(result)
    again = replay(map(log_entries.entry_of, lines), {"least_load": POLICIES["least_load"]})
    assert again.choices >= 300
    assert again.differences == ()
    roles = {
        each.instance.role
        for entry in map(log_entries.entry_of, lines)
        if isinstance(entry, log_entries.Folded)
        for each in entry.reported
        if each.instance.id == "prefill-1"
    }
    assert roles == {P, D}


def test_starts_are_drawn_from_their_distribution() -> None:
    drawn = StartUp(median_s=60.0, p95_s=120.0, fails=0.1)
    found = [drawn.draw(7, named(f"decode-{number}"), 1) for number in range(4000)]
    seconds = sorted(delay_ns / NS for delay_ns, _ in found)
    assert seconds[2000] == pytest.approx(60.0, rel=0.03)
    assert seconds[3800] == pytest.approx(120.0, rel=0.05)
    assert sum(fails for _, fails in found) / 4000 == pytest.approx(0.1, abs=0.02)
    assert drawn.draw(7, named("decode-3"), 1) == found[3]
    assert drawn.draw(8, named("decode-3"), 1) != found[3]


@pytest.mark.parametrize(
    "wrong", [{"median_s": -1.0}, {"median_s": 5.0, "p95_s": 4.0}, {"median_s": 5.0, "fails": 1.5}]
)
def test_an_invalid_distribution_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        StartUp(**wrong)


def test_a_start_that_takes_longer_than_the_supervisor_waits_fails() -> None:
    around = site(startup=StartUp(median_s=700.0))
    _, result = changing(members(P, D), every(1.0, 700), (1.0, start("decode-1")), around=around)
    assert what_happened(result, "decode-1")[-1][1] == "failed"


def test_members_that_could_not_hand_over_are_refused_before_the_run() -> None:
    pools = {"decode": one("decode", D, config={"block_size": 32, "num_blocks": 100})}
    with pytest.raises(ValueError, match="block sizes"):
        World(members(P, D), site=Site(pools=pools))


def test_model_of_new_instances_is_told() -> None:
    world, _ = changing(members(P, D), every(0.1, 50), (0.5, start("decode-1")))
    assert world.view.get(named("decode-1")).models == (MODEL,)
