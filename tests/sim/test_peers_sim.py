"""Prefixes pulled from peers, on virtual time: conversations get first tokens sooner, and faults do no harm.

Under faults of sources, pulling instances and networks, no answer is wrong, no request hangs and no hold stays. All of
the simulator's own checks are on.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace
from support.chaos_sources import sourced
from support.simulated import HANDS_OVER, members, of_roles

from cluster.ids import InstanceId
from cluster.instance import Role
from engine.mock.settings import SimpleCosts
from loadgen.arrival import Arrival
from router.core import journey as j
from router.core.events import Chosen, PrefixSource
from router.core.journey import PATIENCE_S
from router.core.values import Wanted
from router.fleet import events as d
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.decision_log import DecisionLog
from router.scheduler.scoring.policies import POLICIES
from sim import sourcing
from sim.faults import KINDS, Fault, Faults
from sim.instance import SimulatedLeg
from sim.kernel import NS
from sim.replay import replay
from sim.result import WRONG, Result
from sim.settings import SimSettings
from sim.world import World

P, D = Role.PREFILL, Role.DECODE


def conversations(
    count: int, turns: int, *, gap_s: float, first: int, more: int, answer: int, block: int = 16
) -> list[Arrival]:
    """Conversations of several turns, by time of arrival. A turn's prompt begins with all of the turn before."""
    found = []
    for talk in range(count):
        for turn in range(turns):
            blocks = (first + turn * more) // block
            found.append(Arrival(
                at_s=round(talk * 0.013 + turn * gap_s, 6), input_tokens=blocks * block + 7, output_tokens=answer,
                prefix=tuple(1000 * talk + number for number in range(blocks)), block_tokens=block,
            ))  # fmt: skip
    return sorted(found, key=lambda each: each.at_s)


def asked_of(world: World) -> list[Chosen]:
    """The list to which a run will add each choice that has a source."""
    found: list[Chosen] = []
    for front in world.fronts:
        front.on_choice = lambda _passage, chosen: found.append(chosen) if chosen.source is not None else None
    return found


# --- chaos ------------------------------------------------------------------------------------------------------------


def forced(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """Hand over, and pull every prompt's prefix from some other instance, whether it has the prefix or not."""
    at = (wanted.prefix[0] // 1000 if wanted.prefix else 0) + wanted.prompt_tokens // 48
    return sourced(fleet, HANDS_OVER(fleet, wanted), at, (0.001, 0.05, 1.0))


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_wrong_hung_or_held(seed: int) -> None:
    rng = Random(seed)
    fleet = members(P, P, D, D, Role.BOTH, config={"lease_s": 3.0, "num_blocks": 120})
    kinds = [each for each in KINDS if each not in {"leave", "corrupt"}]
    faults = [
        Fault(
            at_s=rng.uniform(0.0, 2.0), kind=rng.choice(kinds), instance=rng.choice(fleet).name,
            duration_s=rng.uniform(0.01, 0.5), factor=rng.choice((4, 400)),
        )
        for _ in range(6)
    ]  # fmt: skip
    settings = SimSettings(seed=seed, peers=True, greedy=True, first_token_s=20.0, stall_s=2.0)
    world = World(fleet, settings, policy=forced)
    Faults(world, faults, seed)
    asked = asked_of(world)
    result = world.run(conversations(13, 4, gap_s=0.5, first=96, more=48, answer=12))
    assert len(asked) > 20, "enough pulls from sources that faults can strike"
    assert not (result.columns["flags"] & WRONG).any()
    statuses = result.columns["status"]
    assert (statuses == 200).mean() > 0.8 and (statuses > 0).all(), "all requests ended"


@pytest.mark.interpreted
def test_clients_that_leave_while_sources_are_asked_leave_no_leg_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    forgone: list[int] = []
    real = sourcing.forgo

    def forgo(leg: SimulatedLeg) -> j.Lost | None:
        lost = real(leg)
        forgone.extend([] if lost is None else [leg.passage.number])
        return lost

    monkeypatch.setattr(sourcing, "forgo", forgo)
    fleet = members(P, P, D, D, Role.BOTH, config={"lease_s": 3.0})
    world = World(fleet, SimSettings(peers=True, greedy=True), policy=forced)
    slow = [Fault(at_s=0.0, kind="slow", instance=each.name, duration_s=2.0, factor=20) for each in fleet]
    Faults(world, [*slow, *(Fault(at_s=0.1 * at, kind="leave", share=0.5) for at in range(1, 20))], 0)
    result = world.run(conversations(13, 4, gap_s=0.5, first=96, more=48, answer=12))
    assert forgone and not world.book.prefilling
    assert not (result.columns["flags"] & WRONG).any()


def test_without_faults_all_is_served_and_prefixes_are_pulled() -> None:
    """The runs above do pull from sources: beside each request's hand-over, every third request pulls a prefix."""
    fleet = members(P, P, D, D, config={"lease_s": 3.0})
    world = World(fleet, SimSettings(peers=True, greedy=True), policy=forced)
    result = world.run(conversations(13, 4, gap_s=0.5, first=96, more=48, answer=12))
    assert (result.columns["status"] == 200).all()
    assert world.pulls.ended > 60, "more than one pull for each of 52 requests"


# --- a source that stands still ---------------------------------------------------------------------------------------


COLD_S, WAIT_S = 0.02, 0.3
BEFORE, SOURCE = InstanceId("decode-1"), InstanceId("decode-2")


def pulls_from_the_last(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """Hand over; the first turn to one decode instance, and the second, with that one as its source, to another one."""
    second = wanted.prompt_tokens > 110
    chosen = HANDS_OVER(fleet, replace(wanted, excluded=wanted.excluded | {BEFORE if not second else SOURCE}))
    return replace(chosen, source=PrefixSource(SOURCE, 96, WAIT_S, 0.0, COLD_S)) if second else chosen


@pytest.mark.parametrize("another", [True, False], ids=["another P", "the same P"])
def test_a_source_that_stands_still_during_the_pull_costs_the_cold_time_and_its_wait(another: bool) -> None:
    """The source's network stops in the middle of a pull that takes 120 ms, and goes on a minute later."""
    fleet = members(P, D, D, *([P] if another else []), nic_gb_s=0.05, config={"lease_s": 300.0})
    world = World(fleet, SimSettings(peers=True, greedy=True, first_token_s=60.0), policy=pulls_from_the_last)
    pullers = [InstanceId("prefill-0"), *([InstanceId("prefill-3")] if another else [])]
    kills = [Fault(at_s=1.0, kind="kill", instance=each) for each in pullers]  # only decode instances have the prefix
    stop_s = 5.08
    Faults(world, [*kills, Fault(at_s=stop_s, kind="link", instance=SOURCE, factor=10**9, duration_s=60.0)], 0)
    _stands_still(world, pullers, stop_s, later_s=stop_s + COLD_S + WAIT_S + PATIENCE_S + 0.5)


def whole_from_the_last(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """Serve whole: the first turn on one decode instance, and the second, with that one as its source, elsewhere."""
    second = wanted.prompt_tokens > 110
    names = (InstanceId("decode-3"), BEFORE, SOURCE) if second else (SOURCE,)
    at = next((each for each in names if each in fleet.by_id and each not in wanted.excluded), None)
    return Chosen(None, at, "", source=PrefixSource(SOURCE, 96, WAIT_S, 0.0, COLD_S) if second and at else None)


@pytest.mark.parametrize("another", [True, False], ids=["another instance", "the same instance"])
def test_a_source_that_stands_still_costs_an_aggregated_request_the_cold_time_and_its_wait(another: bool) -> None:
    fleet = members(P, D, D, *([D] if another else []), nic_gb_s=0.05, config={"lease_s": 300.0})
    world = World(fleet, SimSettings(peers=True, greedy=True, first_token_s=60.0), policy=whole_from_the_last)
    stop_s = 5.08
    Faults(world, [Fault(at_s=stop_s, kind="link", instance=SOURCE, factor=10**9, duration_s=60.0)], 0)
    puller = InstanceId("decode-3") if another else BEFORE
    result = _stands_still(world, [puller], stop_s, later_s=stop_s + COLD_S + WAIT_S + 0.5)
    assert result.columns["decode"].tolist()[1] != world.by_name[SOURCE].index


def _stands_still(world: World, pullers: Sequence[InstanceId], stop_s: float, later_s: float) -> Result:
    """Run two turns, the second with a source that stops at `stop_s`, and look at `later_s` (both in seconds)."""
    source = world.by_name[SOURCE]
    seen: list[tuple[int, float, float]] = []

    def look(_: object) -> None:
        usage = max(world.kv_usage(world.by_name[each]) for each in pullers)
        seen.append((len(source.nic.sending), world.kv_usage(source), usage))

    for at_s in (stop_s, later_s):
        world.kernel.at(round(at_s * NS), look)
    result = world.run(conversations(1, 2, gap_s=5.0, first=96, more=48, answer=12))
    (flows, held, _), (flows_later, held_later, pulled_later) = seen
    assert flows == flows_later == 1 and held > 0
    assert held_later == 0, "the source's hold is given up"
    assert pulled_later > 0, "a read under way may still write"
    rows = result.columns
    assert (rows["outcome"] == 1).all() and rows["attempts"].tolist() == [1, 2], result.details
    ttft_s = float(result.latency_s("ttft")[1])
    assert COLD_S + WAIT_S < ttft_s < COLD_S + WAIT_S + 0.3, "the deadline is 60 s"
    assert not (rows["flags"] & WRONG).any()
    return result


# --- the gain ---------------------------------------------------------------------------------------------------------


def talk_on(*, peers: bool, log: DecisionLog | None = None, others: int = 40) -> tuple[Result, int]:
    """Conversations with long second turns. Both prefill instances have restarted, so that only decode instances have
    the prefixes; those are busy with other answers.

    Returns the run, and the number of choices with a source.
    """
    costs = SimpleCosts(step_ms=6.0, prefill_ms_per_1k=50.0)
    world = World(of_roles(P, P, D, D, costs=costs), SimSettings(peers=peers), policy=POLICIES["workload"], log=log)
    for name in ("prefill-0", "prefill-1"):
        Faults(world, [Fault(at_s=5.0, kind="kill", instance=InstanceId(name))], 0)
    asked = asked_of(world)
    talks = conversations(16, 2, gap_s=10.0, first=4096, more=1024, answer=100, block=256)
    answers = [Arrival(at_s=8.0 + 0.01 * at, input_tokens=100, output_tokens=1500) for at in range(others)]
    return world.run(sorted([*talks, *answers], key=lambda each: each.at_s)), len(asked)


def test_peers_make_next_turns_faster_where_decode_instances_have_the_prefix() -> None:
    """First tokens take 0.22 s without peers and 0.14 s with them, by the default policy, which knows no costs.

    This is the mean of two runs: one choice changes the later ones, so that single runs take 0.12 to 0.17 s.
    """
    medians_s = []
    for others in (40, 60):
        (plain, none), (peers, asked) = talk_on(peers=False, others=others), talk_on(peers=True, others=others)
        both = plain, peers
        medians_s.append([np.median(each.latency_s("ttft")[each.columns["at_ns"] > 9.99e9]) for each in both])
        assert none == 0 and asked >= 4
        tpot_s = [float(np.nanmean(each.latency_s("tpot")[each.columns["at_ns"] > 7.9e9])) for each in both]
        assert tpot_s[1] <= 1.02 * tpot_s[0], f"other answers must not become slower: {tpot_s}"
    ttft_s = np.mean(medians_s, axis=0)
    print(f"first tokens of next turns: {ttft_s[0]:.3f} s, with peers {ttft_s[1]:.3f} s")
    assert ttft_s[1] <= 0.75 * ttft_s[0], medians_s


def test_the_choices_can_be_made_again_from_the_log() -> None:
    lines: list[bytes] = []
    _, asked = talk_on(peers=True, log=DecisionLog(lines.append, "workload"))
    entries = [d.entry_of(line) for line in lines]
    assert sum(isinstance(each, d.Sourced) for each in entries) >= 4 <= asked
    assert sum(isinstance(each, d.Decided) and each.chosen.source is not None for each in entries) == asked
    assert replay(entries).differences == ()
