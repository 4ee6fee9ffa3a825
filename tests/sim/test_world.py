"""Whole fleets on virtual time: no request is lost, the same seed gives the same bytes, faults only cost time."""

import inspect

import msgspec
import numpy as np
import pytest
from support.simulated import HANDS_OVER, MODEL, every, members, one, simulate

import engine.twin.machine
import router.core.journey
import router.fleet.view
import router.scheduler.flow_control.queue
import router.scheduler.scheduler
import router.scheduler.scoring.policies
import sim.answering
import sim.checks
import sim.front
import sim.instance
import sim.legs
import sim.passage
import sim.prefilling
import sim.sourcing
import sim.world
from cluster.instance import Role
from cluster.registry.membership import TTL_S
from engine.twin import events as ev
from loadgen.arrival import Arrival
from loadgen.arrivals import poisson
from loadgen.record import line_of
from loadgen.report import Targets
from sim.checks import LawBroken
from sim.faults import Fault, preset
from sim.result import BROKE_OFF, RESUMED, WRONG
from sim.settings import SimSettings
from sim.world import World

RULES = (
    engine.twin.machine.Twin,
    router.core.journey.Journey,
    router.fleet.view.FleetView,
    router.scheduler.flow_control.queue.FlowControlQueue,
    router.scheduler.scheduler.Scheduler,
)
"""Classes that the simulator shares with what serves: it must have no copy of them."""

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def mixed_load(seed: int, count: int = 120, rate: float = 60.0) -> list[Arrival]:
    """Random lengths, shared prefixes, and some answers of one token."""
    rng = np.random.default_rng(seed)
    times = poisson(rate, rng)
    return [
        Arrival(
            at_s=next(times),
            input_tokens=int(rng.integers(1, 400)),
            output_tokens=int(rng.choice([1, 2, 10, 60])),
            prefix=(1, 2)[: int(rng.integers(3))],
            block_tokens=32,
        )
        for _ in range(count)
    ]


def bytes_of(seed: int, **more: object) -> bytes:
    fleet = members(P, P, D, D)
    load = mixed_load(seed)
    faults = preset("chaos", seed, [each.name for each in fleet], load[-1].at_s)
    _, result = simulate(fleet, load, faults=faults, seed=seed, **more)
    report = msgspec.json.encode(result.report(Targets(ttft_ms=500)))
    return b"".join(map(line_of, result.records())) + report + repr((result.counts, result.events)).encode()


def test_the_parts_are_the_products_own() -> None:
    world = World(members(P, D))
    assert type(world.view) is router.fleet.view.FleetView
    assert type(world.front.scheduler) is router.scheduler.scheduler.Scheduler
    assert world.front.scheduler.policy is router.scheduler.scoring.policies.POLICIES["workload"]
    assert type(world.instances[0].twin) is engine.twin.machine.Twin
    assert sim.passage.j is router.core.journey
    passage = sim.passage.Passage(world.front, 0, Arrival(at_s=0, input_tokens=1, output_tokens=2), MODEL)
    assert type(passage.journey) is router.core.journey.Journey
    for module in (
        sim.front,
        sim.legs,
        sim.passage,
        sim.prefilling,
        sim.answering,
        sim.sourcing,
        sim.world,
        sim.instance,
    ):
        own = {name for name, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__}
        assert not own & {kind.__name__ for kind in RULES}, module


def test_every_request_ends_once_and_nothing_is_held() -> None:
    world, result = simulate(members(P, P, D, D), mixed_load(1))
    assert (result.columns["outcome"] == 1).all()
    assert (result.columns["made_tokens"] == result.columns["output_tokens"]).all()
    assert all(world.kv_usage(at) == 0 for at in world.instances)
    assert result.counts["pulls"] > 0


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    assert bytes_of(5) == bytes_of(5)
    assert bytes_of(5) != bytes_of(6)


def test_checks_change_nothing() -> None:
    assert bytes_of(7) == bytes_of(7, checks=False)


@pytest.mark.parametrize("seed", range(6))
def test_chaos_breaks_no_law(seed: int) -> None:
    fleet = members(*[(P, D), (P, P, D, D), (B, B), (P, D, B)][seed % 4], config={"lease_s": 3.0})
    load = mixed_load(seed, 80)
    faults = preset("chaos", seed, [each.name for each in fleet], load[-1].at_s, every_s=0.3)
    _, result = simulate(fleet, load, faults=faults, seed=seed, stall_s=2.0, first_token_s=20.0, greedy=seed % 2 == 0)
    assert len(result.columns) == 80
    assert (result.columns["outcome"] > 0).all()
    assert result.counts["killed"] + result.counts["cut_off"] > 0


def test_a_decode_instance_that_dies_mid_stream() -> None:
    load = every(1.0, 1, answer=200)
    kill = [Fault(at_s=0.1, kind="kill", instance=members(P, D, D)[1].name)]
    _, result = simulate(members(P, D, D), load, faults=kill)
    (row,) = result.columns
    assert (row["outcome"], bool(row["flags"] & BROKE_OFF), row["status"]) == (3, True, 200)
    _, result = simulate(members(P, D, D), load, faults=kill, greedy=True)
    (row,) = result.columns
    assert (row["outcome"], bool(row["flags"] & RESUMED), row["made_tokens"]) == (1, True, 200)


def test_a_prefill_instance_that_dies_is_replaced_by_another() -> None:
    fleet = [one("p0", P, prompt_front_ns=50_000_000), one("p1", P, prompt_front_ns=50_000_000), one("d", D)]
    load = every(1.0, 1, tokens=400)
    _, calm = simulate(fleet, load)
    first = calm.members[calm.columns[0]["prefill"]]
    _, result = simulate(fleet, load, faults=[Fault(at_s=0.052, kind="kill", instance=first)])
    (row,) = result.columns
    assert (row["outcome"], row["attempts"]) == (1, 2)
    assert result.members[row["prefill"]] != first


def test_a_hold_whose_producer_died_is_computed_again() -> None:
    fleet = [one("p", P), one("d", D, block_bytes=100_000_000)]
    _, result = simulate(fleet, every(1.0, 1), faults=[Fault(at_s=0.02, kind="kill", instance=fleet[0].name)])
    (row,) = result.columns
    assert (row["outcome"], row["made_tokens"], result.counts["pulls_failed"]) == (1, 20, 1)


def test_lost_notices_hold_blocks_until_the_lease_ends() -> None:
    fleet = members(P, D, config={"lease_s": 4.0})
    lost = [Fault(at_s=0.0, kind="notices", instance=fleet[0].name, duration_s=1.0)]
    for faults, free in ((lost, False), ([], True)):
        world = World(fleet, SimSettings(), policy=HANDS_OVER)
        sim.faults.Faults(world, faults, 0)  # type: ignore[attr-defined]
        held = []
        world.kernel.at(
            2_000_000_000, lambda _, world=world, held=held: held.append(world.kv_usage(world.instances[0]))
        )
        world.run([*every(1.0, 1), Arrival(at_s=6.0, input_tokens=10, output_tokens=2)])
        assert (held[0] == 0) is free
        assert world.kv_usage(world.instances[0]) == 0


def test_a_corrupt_pull_is_seen_as_wrong_text() -> None:
    """Engines without digests cannot detect it; the simulation must."""
    fleet = members(P, D)
    spoilt = [Fault(at_s=0.0, kind="corrupt", instance=fleet[0].name, duration_s=0.5)]
    _, result = simulate(fleet, every(1.0, 2), faults=spoilt)
    assert [bool(flags & WRONG) for flags in result.columns["flags"]] == [True, False]
    assert result.counts["wrong_text"] == 1


def test_with_digests_a_corrupt_pull_is_recomputed() -> None:
    fleet = members(P, D)
    spoilt = [Fault(at_s=0.0, kind="corrupt", instance=fleet[0].name, duration_s=0.5)]
    world, result = simulate(fleet, every(1.0, 2), faults=spoilt, digests=True)
    assert not (result.columns["flags"] & WRONG).any()
    assert (result.columns["outcome"] == 1).all()
    assert (result.counts["pulls_corrupt"], result.counts["pulls_refused"]) == (1, 1)
    assert (world.pulls.ended, world.pulls.failed) == (1, 1)
    assert world.kv_usage(world.instances[0]) == 0


def test_a_partition_is_waited_out_by_those_that_can() -> None:
    fleet = members(P, D, D)
    away = [Fault(at_s=0.05, kind="partition", instance=fleet[1].name, duration_s=1.0)]
    _, result = simulate(fleet, every(0.02, 30, answer=50), faults=away)
    assert (result.columns["outcome"] == 1).all(), "a second of silence breaks no stream"
    assert result.columns["end_ns"].max() > 1_050_000_000


@pytest.mark.parametrize("end", [0, 1])
def test_a_pull_whose_end_is_cut_off_before_its_first_byte_reads_nothing(end: int) -> None:
    """The pull was ordered while both instances could be reached; one cannot be reached when its handshake ends."""
    fleet, ordered_ns = members(P, D), []
    slow = {"handshake_ms": 100.0, "pull_timeout_s": 1.0}
    world = World(fleet, SimSettings(**slow), policy=HANDS_OVER)
    world.on_effect = lambda _, effect: (
        ordered_ns.append(world.kernel.now_ns) if isinstance(effect, ev.PullBlocks) else None
    )
    world.run(every(1.0, 1))
    assert (world.pulls.ended, len(ordered_ns)) == (1, 1)
    away = [Fault(at_s=ordered_ns[0] / 1e9 + 0.001, kind="partition", instance=fleet[end].name, duration_s=0.5)]
    world, result = simulate(fleet, every(1.0, 1), faults=away, **slow)
    assert (world.pulls.ended, world.pulls.failed, world.pulls.bytes_moved) == (0, 1, 0)
    (row,) = result.columns
    assert row["outcome"] == 1
    assert row["end_ns"] > ordered_ns[0] + 1_100_000_000, "the reader waits for the pull's timeout"


@pytest.mark.parametrize("more", [0, 1], ids=["the same D", "another D"])
def test_a_hold_whose_instance_is_lost_costs_the_time_to_notice_it(more: int) -> None:
    """Not the time until the pull fails, as when a host loses its power."""
    fleet, ordered_ns = members(P, *[D] * (1 + more)), []
    slow = {"handshake_ms": 100.0, "pull_timeout_s": 60.0}
    world = World(fleet, SimSettings(**slow), policy=HANDS_OVER)
    world.on_effect = lambda _, effect: (
        ordered_ns.append(world.kernel.now_ns) if isinstance(effect, ev.PullBlocks) else None
    )
    world.run(every(1.0, 1))
    lost = [Fault(at_s=ordered_ns[0] / 1e9 + 0.001, kind="partition", instance=fleet[0].name, duration_s=100.0)]
    world, result = simulate(fleet, every(1.0, 1), faults=lost, **slow)
    (row,) = result.columns
    assert (row["outcome"], row["attempts"], world.pulls.failed) == (1, 2, 1)
    assert (row["end_ns"] - ordered_ns[0]) / 1e9 < TTL_S + 1.0


def test_a_slow_instance_is_slow_and_recovers() -> None:
    fleet = members(B)
    load = every(1.0, 1, answer=100)
    _, calm = simulate(fleet, load)
    _, slow = simulate(fleet, load, faults=[Fault(at_s=0.02, kind="slow", instance=fleet[0].name, duration_s=0.05)])
    lost_ns = slow.columns[0]["end_ns"] - calm.columns[0]["end_ns"]
    assert abs(lost_ns - 50_000_000 * 3 // 4) <= 4, "at a quarter of the speed, three quarters of the time are lost"


def test_requests_for_a_full_fleet_wait_and_are_served_in_order() -> None:
    """The fleet has fewer credits than requests: the others wait in the router's flow-control queue, in order."""
    load = [Arrival(at_s=0.0, input_tokens=50, output_tokens=5)] * 150
    world, result = simulate(members(P, D), load)
    assert (result.columns["outcome"] == 1).all()
    assert np.all(np.diff(result.columns["first_ns"]) >= 0)
    assert max(view.sent for view in world.view.all()) == 150


def test_a_request_that_cannot_be_served_is_refused_as_vllm_does() -> None:
    _, result = simulate(members(P, D), every(1.0, 1, tokens=1000))
    (row,) = result.columns
    assert (row["outcome"], row["status"]) == (2, 400)
    assert "1000 tokens" in result.details[0]
    assert result.report(Targets(ttft_ms=1e6)).attainment == 0


def test_a_deadline_ends_a_request_that_no_instance_serves() -> None:
    fleet = members(P, D)
    away = [Fault(at_s=0.001, kind="partition", instance=fleet[0].name, duration_s=60.0)]
    _, result = simulate(fleet, every(1.0, 1), faults=away, first_token_s=2.0, connect_s=30.0, ttl_s=40.0)
    (row,) = result.columns
    assert (row["outcome"], row["status"]) == (4, 504)
    assert row["end_ns"] <= 34_000_000_000


def test_clients_that_leave_leave_nothing_behind() -> None:
    world, result = simulate(
        members(P, D), every(0.01, 40, answer=100), faults=[Fault(at_s=0.2, kind="leave", share=0.7)]
    )
    left = result.columns["outcome"] == 5
    assert 5 < left.sum() < 40
    assert all(world.kv_usage(at) == 0 for at in world.instances)


@pytest.mark.interpreted
def test_a_place_that_is_never_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.scheduler.scheduler.Scheduler, "finish", lambda *_args, **_more: ())
    with pytest.raises(LawBroken, match="places taken"):
        simulate(members(P, D), every(0.1, 5))


@pytest.mark.interpreted
def test_a_request_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim.passage.Passage, "answered", lambda *_: None)
    with pytest.raises(LawBroken, match="waits for nothing"):
        simulate(members(B), every(0.1, 5))


@pytest.mark.interpreted
def test_a_stream_whose_engine_died_is_lost_only_when_the_router_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the stream waits for bytes that never come; the simulator's checks must accept that."""
    monkeypatch.setattr(sim.checks, "_EVERYTHING_EVERY", 1)
    fleet = members(B, B)
    fault = Fault(at_s=2.0, kind="kill", instance=fleet[1].name)
    load = [Arrival(at_s=1.5 + 0.01 * number, input_tokens=50, output_tokens=400) for number in range(6)]
    _, result = simulate(fleet, load, faults=[fault], greedy=True)
    assert (result.columns["flags"] & RESUMED).any()
    assert (result.columns["outcome"] == 1).all()


def test_blocks_without_an_owner_are_noticed() -> None:
    world = World(members(P, D))
    world.kernel.at(50_000_000, lambda _: world.instances[0].twin._life.scheduler.pool.take(3))
    with pytest.raises(LawBroken, match=r"prefill-0 still holds 1\.5% of its blocks"):
        world.run(every(0.1, 5))
