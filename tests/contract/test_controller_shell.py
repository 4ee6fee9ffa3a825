"""The controller's shell: one of several leads, a killed one starts nothing twice, unknown values are not zero."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.scaling import InMemory, Scripted

from baton.scaling_log import _lives
from cluster.flow import Backlog, FlowCounts
from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberKind, MemberState
from cluster.registry.memory import MemoryRegistry
from goodput.actions import Action, Drain, Start
from goodput.actuate.existing import Existing, InstanceLife
from goodput.actuate.journal import Journal, lines
from goodput.actuate.lease import MARGIN_S, LeaderClaim
from goodput.actuate.protocol import carry_out
from goodput.actuate.scaler import ScaledFleet, Scaler
from goodput.budget import Footprint
from goodput.decision import Observed, Pause, What
from goodput.decisionlog import decode

URL = "http://127.0.0.1:1"
POOLS = {"prefill": (Role.PREFILL, False), "decode": (Role.DECODE, True)}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def router(seq: int, counted: tuple[FlowCounts, ...] | None, waiting: int = 0) -> Heartbeat:
    return Heartbeat(
        id=InstanceId("router-1"),
        agent="r",
        kind=MemberKind.ROUTER,
        seq=seq,
        url="http://h:1",
        state=MemberState.READY,
        counted=counted,
        backlog=(Backlog(model="m", waiting=waiting, oldest_s=2.5),) if waiting else (),
    )


def instance(name: str, role: Role, state: MemberState, seq: int = 1) -> Heartbeat:
    return Heartbeat(id=InstanceId(name), agent=f"a-{name}", seq=seq, role=role, url="http://h:2", state=state)


class Rig:
    """One registry, one actuator, and as many controllers as a test starts."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.registry = MemoryRegistry(self.clock)
        self.actuator = InMemory()

    def scaler(self, machine: Scripted, journal: Journal | None = None, **more: Any) -> Scaler:
        lease = LeaderClaim(self.registry, URL, clock=self.clock)
        fleet = ScaledFleet(model="", pools=POOLS, machine=machine)
        return Scaler(self.registry, lease, self.actuator, (fleet,), journal, clock=self.clock, **more)


# --- the lease --------------------------------------------------------------------------------------------------------


async def test_of_two_controllers_one_leads_and_the_other_takes_over_when_the_leader_leaves() -> None:
    rig = Rig()
    first, second = (LeaderClaim(rig.registry, URL, clock=rig.clock) for _ in range(2))
    await first.turn()
    await second.turn()
    assert (first.held, second.held) == (True, False)
    assert "controller" in second.holder
    await first.leave()
    await second.turn()
    assert (first.held, second.held) == (False, True)
    assert second.epoch > first.epoch


async def test_a_leader_that_died_is_followed_after_its_ttl() -> None:
    rig = Rig()
    first, second = (LeaderClaim(rig.registry, URL, clock=rig.clock) for _ in range(2))
    await first.turn()
    rig.clock.now += rig.registry.ttl_s - 0.1
    await second.turn()
    assert not second.held
    for _ in range(7):
        assert not second.held and second.holder, "the registry may have lost its data, and the first one not know yet"
        rig.clock.now += 1.0
        await second.turn()
    assert second.held and not second.holder
    await first.turn()
    assert not first.held, "it comes back, and another one leads"


async def test_a_paused_leader_stops_acting_before_another_one_can_begin() -> None:
    """The two never hold the lease at once. The first takes no turns while the clock goes on."""
    rig = Rig()
    first, second = (LeaderClaim(rig.registry, URL, clock=rig.clock) for _ in range(2))
    await first.turn()
    for _ in range(130):
        rig.clock.now += 0.1
        await second.turn()
        assert not (first.held and second.held)
        if second.held:
            break
    assert second.held
    assert rig.clock.now >= 1000.0 + rig.registry.ttl_s
    assert rig.registry.ttl_s > MARGIN_S


@pytest.mark.parametrize("turn_s", [0.1, 0.7, 1.0])
async def test_a_registry_that_loses_its_data_has_no_two_leaders(turn_s: float) -> None:
    """The name is free then, although its owner does not know; the other one's next turn may come first."""
    rig = Rig()
    first, second = (LeaderClaim(rig.registry, URL, clock=rig.clock) for _ in range(2))
    await first.turn()
    await second.turn()
    rig.registry.forget()
    while rig.clock.now < 1010.0:
        await second.turn()
        assert not (first.held and second.held)
        rig.clock.now += turn_s
        if rig.clock.now > 1001.0:
            await first.turn()
    assert second.held, "it has the name, and acts once the first one has noticed"


async def test_a_controller_that_comes_to_a_fleet_waits_for_a_leader_that_the_registry_has_lost() -> None:
    """Instances announce themselves again within a second; the former leader may come later."""
    rig = Rig()
    first, new = (LeaderClaim(rig.registry, URL, clock=rig.clock) for _ in range(2))
    await first.turn()
    rig.registry.forget()
    await rig.registry.beat(instance("d", Role.DECODE, MemberState.READY))
    await new.turn()
    assert first.held and not new.held
    for _ in range(int(rig.registry.ttl_s)):
        rig.clock.now += 1.0
        await new.turn()
        assert not (first.held and new.held)
    assert new.held


@pytest.mark.parametrize("turn_s", [0.1, 0.7, 1.0])
async def test_a_leader_that_was_cut_off_does_not_act_beside_its_successor(turn_s: float) -> None:
    """The registry then loses its data, so that the former leader gets the name back and hears of no successor."""
    rig = Rig()
    first, second = (LeaderClaim(rig.registry, URL, clock=rig.clock) for _ in range(2))
    await first.turn()
    while rig.clock.now < 1020.0:
        rig.registry.down = True
        await first.turn()
        rig.registry.down = False
        await second.turn()
        assert not (first.held and second.held)
        rig.clock.now += turn_s
    assert second.held
    rig.registry.forget()
    while rig.clock.now < 1030.0:
        await first.turn()
        assert not (first.held and second.held)
        rig.clock.now += turn_s
        assert not (first.held and second.held)
        if rig.clock.now > 1021.0:
            await second.turn()
    assert first.held and not second.held


async def test_a_leader_without_the_registry_acts_no_more() -> None:
    rig = Rig()
    lease = LeaderClaim(rig.registry, URL, clock=rig.clock)
    await lease.turn()
    rig.registry.down = True
    for _ in range(4):
        rig.clock.now += 1.0
        await lease.turn()
    assert not lease.held


# --- actions ----------------------------------------------------------------------------------------------------------


async def test_a_controller_that_does_not_lead_changes_nothing() -> None:
    rig = Rig()
    other = LeaderClaim(rig.registry, URL, clock=rig.clock)
    await other.turn()
    machine = Scripted(lambda _: {"decode": 3})
    scaler = rig.scaler(machine)
    await scaler.lease.turn()
    await scaler.look()
    assert not rig.actuator.started
    assert machine.looks[-1].leads is False


@pytest.mark.parametrize("killed_after", range(6))
async def test_a_controller_killed_between_any_two_actions_starts_nothing_twice(killed_after: int) -> None:
    rig = Rig()
    first = rig.scaler(Scripted(lambda _: {"prefill": 2, "decode": 3}))
    await first.lease.turn()
    given = 0

    async def act(action: Action) -> str:
        nonlocal given
        if given == killed_after:
            raise asyncio.CancelledError
        given += 1
        return await carry_out(rig.actuator, action)

    first._act = act  # type: ignore[method-assign]
    if killed_after < 5:
        with pytest.raises(asyncio.CancelledError):
            await first.look()
    else:
        await first.look()
    rig.clock.now += rig.registry.ttl_s + 1
    second = rig.scaler(Scripted(lambda _: {"prefill": 2, "decode": 3}))
    await second.lease.turn()
    await second.look()
    assert sorted(rig.actuator.started) == ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1"]


async def test_a_leader_that_lost_the_lease_within_a_look_takes_no_further_action() -> None:
    rig = Rig()
    scaler = rig.scaler(Scripted(lambda _: {"decode": 3}))
    await scaler.lease.turn()
    start = rig.actuator.start

    async def slow(action: Start) -> str:
        rig.clock.now += rig.registry.ttl_s
        return await start(action)

    rig.actuator.start = slow  # type: ignore[method-assign]
    await scaler.look()
    assert rig.actuator.started == ["decode-0"]


async def test_a_fleet_is_brought_up_once_and_by_the_leader_alone() -> None:
    rig = Rig()
    machine = Scripted(lambda _: {})
    first, second = (rig.scaler(machine, at_start={"prefill": 1, "decode": 2}) for _ in range(2))
    await first.look()
    assert not rig.actuator.started, "nobody leads yet"
    await first.lease.turn()
    await second.lease.turn()
    for scaler in (first, second, first):
        await scaler.look()
    assert sorted(rig.actuator.started) == ["decode-0", "decode-1", "prefill-0"]
    await rig.actuator.drain(Drain(instance=InstanceId("decode-0")))
    await first.look()
    assert len(rig.actuator.started) == 3, "after the start sizes are the machine's"


async def test_each_model_sees_the_gpus_that_others_have_just_taken() -> None:
    rig = Rig()
    lease = LeaderClaim(rig.registry, URL, clock=rig.clock)
    one, other = Scripted(lambda _: {"prefill": 2}), Scripted(lambda _: {})
    uses = Footprint(gpu="H100", gpus=4)
    fleets = (
        ScaledFleet(model="m", pools={"prefill": (Role.PREFILL, False)}, machine=one, footprints={"prefill": uses}),
        ScaledFleet(model="n", pools={"n-both": (Role.BOTH, False)}, machine=other, footprints={"n-both": uses}),
    )
    scaler = Scaler(rig.registry, lease, rig.actuator, fleets, clock=rig.clock)
    await lease.turn()
    for _ in range(2):
        await scaler.look()
        assert other.looks[-1].elsewhere == {"H100": 8}, "of the same look, too"
    assert one.looks[-1].elsewhere == {}


AT_START = {"prefill": 1, "decode": 4}


async def test_a_new_controller_begins_with_the_fleet_that_exists() -> None:
    """The fleet began with four decode instances and was scaled down to one. A restart starts none of them again."""
    rig = Rig()
    for name in ("prefill-0", "decode-2"):
        await rig.actuator.start(Start(instance=InstanceId(name), pool=name.partition("-")[0]))
    machine = Scripted(lambda _: {})
    scaler = rig.scaler(machine, at_start=AT_START)
    await scaler.lease.turn()
    await scaler.look()
    assert rig.actuator.started == ["prefill-0", "decode-2"]
    assert machine.looks[-1].instances is not None, "the machine decides at once"
    await rig.actuator.drain(Drain(instance=InstanceId("decode-2")))
    await scaler.look()
    assert len(rig.actuator.started) == 2, "after the start sizes are the machine's"


async def test_a_fleet_that_one_controller_began_is_sized_by_its_successor() -> None:
    """The first controller leads no more after two of four starts. Pools without an instance are brought up all the
    same; the sizes of the others are the machine's, also once the first controller leads again.
    """
    rig = Rig()
    first, second = (rig.scaler(Scripted(lambda _: {}), at_start={"decode": 4, "prefill": 1}) for _ in range(2))
    await first.lease.turn()
    start = rig.actuator.start

    async def slow(action: Start) -> str:
        rig.clock.now += rig.registry.ttl_s / 2
        return await start(action)

    rig.actuator.start = slow  # type: ignore[method-assign]
    await first.look()
    rig.actuator.start = start  # type: ignore[method-assign]
    begun = len(rig.actuator.started)
    assert 0 < begun < 4
    rig.clock.now += rig.registry.ttl_s
    await second.lease.turn()
    await first.lease.turn()
    for scaler in (first, second, second):
        await scaler.look()
    assert rig.actuator.started[begun:] == ["prefill-0"]
    await second.lease.leave()
    await first.lease.turn()
    assert first.lease.held
    await first.look()
    assert rig.actuator.started[begun:] == ["prefill-0"]


async def test_a_bring_up_that_is_refused_goes_on_at_the_next_look() -> None:
    rig = Rig()
    scaler = rig.scaler(Scripted(lambda _: {}), at_start=AT_START)
    await scaler.lease.turn()
    start, answers = rig.actuator.start, iter(["", "", "no answer"])

    async def refuses(action: Start) -> str:
        return next(answers, "") or await start(action)

    rig.actuator.start = refuses  # type: ignore[method-assign]
    await scaler.look()
    assert len(rig.actuator.started) == 2
    await scaler.look()
    assert sorted(rig.actuator.started) == ["decode-0", "decode-1", "decode-2", "decode-3", "prefill-0"]


async def test_a_fleet_that_begins_under_a_pause_goes_on_after_a_refused_start() -> None:
    rig = Rig()
    scaler = rig.scaler(Scripted(lambda _: {}), at_start={"prefill": 1, "decode": 1})
    await scaler.lease.turn()
    await scaler.pause(paused=True, who="me")
    start, answers = rig.actuator.start, iter(["", "no answer"])

    async def refuses(action: Start) -> str:
        return next(answers, "") or await start(action)

    rig.actuator.start = refuses  # type: ignore[method-assign]
    await scaler.look()
    assert rig.actuator.started == ["prefill-0"]
    await scaler.look()
    assert rig.actuator.started == ["prefill-0", "decode-0"]


async def test_an_instance_that_fails_during_the_bring_up_is_not_started_again_by_it() -> None:
    """The machine starts failed instances again, with its own pauses; meanwhile another start is refused."""
    rig = Rig()
    scaler = rig.scaler(Scripted(lambda _: {}), at_start={"prefill": 1, "decode": 1})
    await scaler.lease.turn()
    start, first = rig.actuator.start, InstanceId("prefill-0")

    async def refuses(action: Start) -> str:
        return "a file is missing" if action.pool == "decode" else await start(action)

    rig.actuator.start = refuses  # type: ignore[method-assign]
    for _ in range(4):
        await scaler.look()
        rig.actuator.there[first] = Existing(instance=first, pool="prefill", life=InstanceLife.FAILED)
    assert rig.actuator.started == ["prefill-0"]


async def test_a_pause_holds_a_fleet_that_exists_and_says_so_once() -> None:
    rig = Rig()
    await rig.actuator.start(Start(instance=InstanceId("prefill-0"), pool="prefill"))
    said: list[str] = []
    scaler = rig.scaler(Scripted(lambda _: {}), at_start={"prefill": 1, "decode": 2}, say=said.append)
    await scaler.lease.turn()
    await scaler.pause(paused=True, who="me")
    for _ in range(2):
        await scaler.look()
    assert rig.actuator.started == ["prefill-0"]
    (line,) = said
    assert "decode" in line
    assert "baton scale --resume" in line
    await scaler.pause(paused=False, who="me")
    await scaler.look()
    assert rig.actuator.started == ["prefill-0", "decode-0", "decode-1"]


async def test_a_fleet_that_begins_is_not_held_by_an_earlier_runs_pause() -> None:
    rig = Rig()
    scaler = rig.scaler(Scripted(lambda _: {}), at_start={"decode": 2})
    await scaler.lease.turn()
    await scaler.pause(paused=True, who="me")
    await scaler.look()
    assert rig.actuator.started == ["decode-0", "decode-1"]


@pytest.mark.parametrize("life", [InstanceLife.FAILED, InstanceLife.LEAVING])
async def test_instances_that_do_not_stay_keep_their_names_and_no_pool_from_being_brought_up(
    life: InstanceLife,
) -> None:
    rig = Rig()
    left = InstanceId("decode-0")
    rig.actuator.there[left] = Existing(instance=left, pool="decode", life=life)
    scaler = rig.scaler(Scripted(lambda _: {}), at_start={"decode": 2})
    await scaler.lease.turn()
    await scaler.look()
    assert rig.actuator.started == ["decode-1", "decode-2"]


# --- what is seen -----------------------------------------------------------------------------------------------------


async def test_a_registry_that_is_lost_makes_everything_unknown_not_zero() -> None:
    rig = Rig()
    machine = Scripted(lambda _: {"decode": 1})
    scaler = rig.scaler(machine)
    await scaler.lease.turn()
    await rig.registry.beat(router(1, (FlowCounts(model="m", arrivals=7),)))
    await scaler.look()
    assert machine.looks[-1].routers[0].classes[""].arrivals == 7
    rig.registry.down = True
    await scaler.look()
    assert machine.looks[-1].instances is None
    assert machine.looks[-1].routers == ()


async def test_a_registry_that_takes_no_heartbeats_loses_no_instance() -> None:
    """Redis answers readers while it is a replica, or its disk is full: every heartbeat in it expires."""
    rig = Rig()
    machine = Scripted(lambda _: {})
    scaler = rig.scaler(machine)
    await rig.actuator.start(Start(instance=InstanceId("decode-0"), pool="decode"))
    await rig.registry.beat(instance("decode-0", Role.DECODE, MemberState.READY))
    rig.registry.full = True
    for _ in range(20):
        await scaler.lease.turn()
        await scaler.look()
        rig.clock.now += 1.0
    assert await rig.registry.read() == () and not scaler.lease.held
    rig.registry.full = False
    await scaler.lease.turn()
    await scaler.look()
    (seen,) = machine.looks[-1].instances or ()
    assert (seen.phase, machine.looks[-1].leads) == ("ready", True), "its agent has not announced it again yet"


async def test_a_router_without_counters_counts_as_silent() -> None:
    rig = Rig()
    machine = Scripted(lambda _: {})
    scaler = rig.scaler(machine)
    await rig.registry.beat(router(1, None))
    await scaler.look()
    (seen,) = machine.looks[-1].routers
    assert machine.looks[-1].at_s - seen.at_s > 20, "`goodput.counters` holds then"


async def test_a_routers_goodbye_is_told_once_with_its_last_counts() -> None:
    rig = Rig()
    machine = Scripted(lambda _: {})
    scaler = rig.scaler(machine)
    await rig.registry.beat(router(1, (FlowCounts(model="m", arrivals=7),)))
    await scaler.look()
    await rig.registry.beat(router(2, (FlowCounts(model="m", arrivals=9),), waiting=3))
    await rig.registry.leave("router-1", "r", MemberKind.ROUTER)
    await scaler.look()
    (last,) = machine.looks[-1].routers
    assert (last.left, last.classes[""].arrivals, last.waiting, last.address) == (True, 9, 0, "http://h:1")
    await scaler.look()
    assert machine.looks[-1].routers == ()


async def test_when_a_router_began_is_known_from_its_heartbeats() -> None:
    """A router announces itself every second, from its start on."""
    rig = Rig()
    machine = Scripted(lambda _: {})
    scaler = rig.scaler(machine)
    await rig.registry.beat(router(600, (FlowCounts(model="m", arrivals=7),)))
    await scaler.look()
    (seen,) = machine.looks[-1].routers
    assert (seen.at_s, seen.began_s) == (rig.clock.now, rig.clock.now - 600.0)


async def test_instances_are_joined_with_their_agents_heartbeats() -> None:
    rig = Rig()
    machine = Scripted(lambda _: {})
    scaler = rig.scaler(machine)
    for name in ("prefill-0", "decode-0", "decode-1"):
        await rig.actuator.start(Start(instance=InstanceId(name), pool=name.partition("-")[0]))
    await rig.registry.beat(instance("decode-0", Role.DECODE, MemberState.STARTING))
    await rig.registry.beat(instance("decode-1", Role.PREFILL, MemberState.READY))
    await scaler.look()
    rig.clock.now += 1
    await rig.registry.beat(instance("decode-0", Role.DECODE, MemberState.READY, 2))
    await scaler.look()
    assert machine.looks[-1].instances is not None
    seen = {each.id: each for each in machine.looks[-1].instances}
    assert seen[InstanceId("prefill-0")].phase == "starting", "nothing is heard of it yet"
    assert seen[InstanceId("decode-0")].ready_s == rig.clock.now
    assert seen[InstanceId("decode-1")].ready_s is None, "it was ready before anybody looked"
    assert seen[InstanceId("decode-1")].role is Role.PREFILL
    assert seen[InstanceId("decode-1")].flips


# --- the log ----------------------------------------------------------------------------------------------------------


async def test_the_log_gives_the_machine_the_same_events_again(tmp_path: Path) -> None:
    rig = Rig()
    log = tmp_path / "scaling.jsonl"
    machine = Scripted(lambda _: {"prefill": 1, "decode": 2})
    scaler = rig.scaler(machine, Journal(log, {"engine": "mock"}))
    await scaler.lease.turn()
    await rig.registry.beat(
        router(1, (FlowCounts(model="m", arrivals=3, prompts={5: 3}, prompt_tokens=30),), waiting=2)
    )
    await scaler.look()
    await scaler.pause(paused=True, who="me")
    await scaler.resize("", Role.DECODE, 4, "me")
    with log.open("ab") as file:
        file.write(b'{"cut off')
    read = [*lines(log)]
    assert read[0].began == {"engine": "mock"}
    events = [decode(line.raw).event for line in read[1:]]
    assert events == machine.events
    assert isinstance(events[0], Observed)
    kind, told = read[1].effects[0]
    assert (kind, told["decision"]["what"]) == ("Told", What.UP)


def test_a_log_of_an_earlier_version_is_read() -> None:
    """In that version observations had `free_gpus`, and routers had neither `address` nor `left`."""
    counts = {"router": "r", "life": "r", "at_s": 1.0, "classes": {}, "waiting": 0, "oldest_wait_s": 0.0}
    seen = {"at_s": 1.0, "routers": [counts], "instances": [], "leads": True, "free_gpus": {"L4": 2}}
    line = {"at": 1.0, "model": "", "form": 1, "now": 1.0, "event": "Observed", "value": {"seen": seen}, "effects": []}
    event = decode(json.dumps(line).encode()).event
    assert isinstance(event, Observed)
    assert (event.seen.routers[0].left, event.seen.routers[0].address) == (False, "")


def test_a_log_that_is_full_is_kept_once_and_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goodput.actuate.journal.BYTES_MAX", 2000)
    log = Journal(tmp_path / "log.jsonl", {})
    for number in range(100):
        log.add("m", float(number), Pause(paused=True), ())
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "log.jsonl.1"}
    assert all(path.stat().st_size < 3000 for path in tmp_path.iterdir())
    assert decode([*lines(log.path)][-1].raw).now == 99.0


async def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    rig = Rig()
    (tmp_path / "file").write_text("")
    scaler = rig.scaler(Scripted(lambda _: {"decode": 1}), Journal(tmp_path / "file" / "log.jsonl", {}))
    await scaler.lease.turn()
    await scaler.look()
    assert rig.actuator.started == ["decode-0"]


class FullDisk:
    """The disk of one journal: while the disk is full, a write leaves its first bytes and raises."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.log = Journal(folder / "log.jsonl", {"engine": "mock", "gpu": None})
        really = Path.open

        def opened(path: Path, mode: str = "r", **more: Any) -> Any:
            if self.full and "a" in mode:
                with really(path, mode) as file:
                    file.write(b'{"at":1,"model":"cut')
                raise OSError(28, "No space left on device")
            return really(path, mode, **more)

        monkeypatch.setattr(Path, "open", opened)

    def add(self, now: float, *, full: bool) -> None:
        self.full = full
        self.log.add("m", now, Pause(paused=True), ())

    def lives(self) -> list[list[float]]:
        """Event times of each controller life that can be replayed."""
        self.full = False
        return [[decode(each.raw).now for each in logged] for _, _, logged in _lives(self.log.path)]


def test_a_log_whose_first_lines_are_lost_begins_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events after the lost lines belong neither to the life before, nor to a life that can be replayed."""
    disk = FullDisk(tmp_path, monkeypatch)
    for now in (1.0, 2.0):
        disk.add(now, full=False)
    disk.log = Journal(disk.log.path, {"engine": "mock", "gpu": None})
    for now, full in ((3.0, True), (4.0, True), (5.0, False), (6.0, False)):
        disk.add(now, full=full)
    disk.log = Journal(disk.log.path, {"engine": "mock", "gpu": None})
    disk.add(7.0, full=False)
    assert disk.lives() == [[1.0, 2.0], [7.0]]
    read = [*lines(disk.log.path)]
    assert [each.lost for each in read if each.lost] == [2]
    assert [decode(each.raw).now for each in read if each.model] == [1.0, 2.0, 5.0, 6.0, 7.0]
    assert sum(each.began is not None for each in read) == 3


def test_a_life_with_a_gap_can_be_replayed_up_to_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(tmp_path, monkeypatch)
    for now, full in ((1.0, False), (2.0, True), (3.0, False), (4.0, True), (5.0, False)):
        disk.add(now, full=full)
    assert disk.lives() == [[1.0]]
