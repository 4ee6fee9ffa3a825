"""A router's announcements: they fit with their proofs, and no fault ends them. And what it hears of others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.credits import TenantDemand
from cluster.ids import InstanceId
from cluster.registry.membership import HEARTBEAT_BYTES_MAX, Heartbeat, MemberKind, MemberState, decode, encode
from cluster.registry.memory import MemoryRegistry
from cluster.registry.proofs import PROOF_BYTES_MAX, parted, proven
from cluster.registry.registry import Beaten, NameRefused, RegistryDown
from kvtransfer.keys import KEYS_MAX
from kvtransfer.proving import FleetProofs
from kvtransfer.ticket import SigningKey
from router.core.values import Reported
from router.fleet import discovery
from router.fleet.discovery import Discovery
from router.http import tasks

URL = "http://127.0.0.1:1"
LONGEST = FleetProofs(lambda: tuple(SigningKey(f"{'k' * 15}{n}", bytes([n]) * 32) for n in range(KEYS_MAX)), time.time)


class OwnWord:
    """A router's word whose legs take this many bytes."""

    shares: Mapping[str, float] = {}

    def __init__(self, legs_bytes: int) -> None:
        self.legs_bytes = legs_bytes

    def legs(self, goes_by: Mapping[InstanceId, tuple[int, int]], turn: int) -> dict[str, tuple[int, int, int]]:
        count, rest = divmod(self.legs_bytes, 100)  # a leg takes 11 bytes besides its name
        names = [f"{number:089}" for number in range(count)] + (["y" * (rest - 11)] if rest > 11 else [])
        return dict.fromkeys(names, (0, 0, 0))

    def demand(self) -> tuple[TenantDemand, ...]:
        return ()

    def counters(self, now: float) -> dict[str, Any]:
        return {}


def router(own: OwnWord | None = None, registry: MemoryRegistry | None = None) -> tuple[Discovery, MemoryRegistry]:
    registry = registry or MemoryRegistry(time.monotonic, proofs=LONGEST)
    watch = Discovery(registry, lambda *_: None)
    watch.own = own
    return watch, registry


@pytest.mark.parametrize(("size", "fits"), [(64_400, True), (64_600, False), (65_000, False), (65_500, False)])
async def test_an_announcement_leaves_room_for_its_proof(size: int, fits: bool) -> None:
    """Without room for everything a router announces less."""
    watch, registry = router()
    watch.own = OwnWord(size - len(encode(watch.announcement(URL, URL))))
    beat = watch.announcement(URL, URL)
    assert bool(beat.legs) is fits
    assert len(encode(replace(beat, legs=watch.own.legs({}, 0)))) == pytest.approx(size, abs=20)
    assert await registry.beat(beat) == Beaten()
    assert [each.id for each in await registry.read(MemberKind.ROUTER)] == [watch.name]


async def test_the_longest_proof_is_readable_and_fits_the_room_that_is_kept_for_it() -> None:
    beat = router()[0].announcement(URL, URL)
    payload = proven(beat, "default", LONGEST)
    body, proof = parted(payload)
    assert body == encode(beat) and len(proof.split()) == KEYS_MAX
    assert len(payload) - len(body) <= PROOF_BYTES_MAX < HEARTBEAT_BYTES_MAX // 16
    assert decode(payload)[1] == ""


class FailingRegistry(MemoryRegistry):
    """A registry whose first heartbeats fail by errors of no kind that a registry has."""

    failures = 3

    async def beat(self, beat: Heartbeat) -> Beaten | NameRefused:
        if self.failures:
            self.failures -= 1
            raise ValueError("a heartbeat that no reader takes")
        return await super().beat(beat)


async def test_a_router_announces_itself_again_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the others would take this router for gone."""
    monkeypatch.setattr(tasks, "PAUSES_S", (0.001, 0.002))
    watch, registry = router(registry=FailingRegistry(time.monotonic))
    with caplog.at_level(logging.ERROR, "baton.router"):
        announcing = tasks.Tasks().keep(partial(watch.announce_forever, URL, URL), "announce")
        async with asyncio.timeout(10):
            while not await registry.read(MemberKind.ROUTER):
                assert not announcing.done()
                await asyncio.sleep(0.001)
    announcing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await announcing
    assert ["announce" in each.getMessage() and bool(each.exc_info) for each in caplog.records] == [True] * 3


class Clock:
    """The clock of a registry and of the programs that use it. Stands in for the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


async def test_a_registry_that_answers_and_takes_no_heartbeats_loses_no_instance(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis answers readers while it is a replica, or its disk is full: every heartbeat in it expires."""
    clock = Clock()
    monkeypatch.setattr(discovery, "time", clock)
    caplog.set_level(logging.INFO, "baton.router")
    registry = MemoryRegistry(clock.monotonic)
    fleets: list[tuple[Reported, ...]] = []
    watch = Discovery(registry, lambda fleet, _: fleets.append(fleet))

    async def pass_s(seconds: int, **agents: MemberState) -> None:
        for _ in range(seconds):
            clock.now += 1.0
            for name, state in agents.items():
                beat = Heartbeat(id=InstanceId(name), agent=name, url=URL, state=state, seq=int(clock.now))
                with contextlib.suppress(RegistryDown):
                    await registry.beat(beat)
            await watch.announce(URL, URL)
            await watch.read()

    await pass_s(2, d=MemberState.READY, e=MemberState.READY)
    registry.full = True
    await pass_s(60, d=MemberState.READY)
    assert await registry.read() == ()
    assert [each.instance.id for each in fleets[-1]] == ["d", "e"]
    assert watch.stale_s(clock.now) == 59.0
    registry.full = False
    await pass_s(2, d=MemberState.DRAINING)
    assert [(each.instance.id, each.state) for each in fleets[-1]] == [("d", "draining"), ("e", "ready")]
    assert watch.stale_s(clock.now) == 0.0
    await pass_s(6, d=MemberState.DRAINING)
    assert [each.instance.id for each in fleets[-1]] == ["d"], "e has been silent for a whole ttl since"
    assert [line.split("; ")[-1] for line in caplog.messages] == [
        "the registry is heard",
        "it is read, but takes no heartbeats: serving on with what is known",
        "the registry takes heartbeats again",
        "it was ready in epoch 1",
    ]


async def test_a_machine_that_stood_still_loses_no_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause the registry on the same machine has forgotten its agents, until they announce themselves again."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(discovery, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    registry, fleets = MemoryRegistry(lambda: clock.now), []
    watch = Discovery(registry, lambda reported, _: fleets.append([each.instance.id for each in reported]))
    beat = Heartbeat(id=InstanceId("d"), agent="alfa", kind=MemberKind.INSTANCE, url=URL)
    await registry.beat(beat)
    await watch.read()
    clock.now += 90.0
    await watch.read()
    clock.now += registry.ttl_s / 2
    await registry.beat(replace(beat, seq=1))
    await watch.read()
    for _ in range(4):
        clock.now += registry.ttl_s / 2
        await watch.read()
    assert fleets == [["d"]] * 4 + [[]] * 3, "it is gone once it is silent while the router listens"


async def test_a_flood_of_changes_makes_no_flood_of_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any program that reaches the registry can tell of changes without end; a reading costs milliseconds."""
    slept: list[float] = []

    class Nudged(MemoryRegistry):
        async def wait_changed(self, timeout_s: float) -> bool:
            if len(slept) == 3:
                raise asyncio.CancelledError
            return True

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    clock = SimpleNamespace(monotonic=lambda: 100.0, time=time.time)
    monkeypatch.setattr(discovery, "time", clock)
    monkeypatch.setattr(discovery.asyncio, "sleep", sleep)
    watch = Discovery(Nudged(time.monotonic), lambda *_: None)
    with pytest.raises(asyncio.CancelledError):
        await watch.read_forever()
    assert slept == [discovery.READS_WITHIN_S] * 3


async def test_routers_number_themselves_in_the_order_of_their_names() -> None:
    registry = MemoryRegistry(time.monotonic)
    watches = [router(registry=registry)[0] for _ in range(3)]
    for watch in watches:
        await registry.beat(watch.announcement(URL, URL))
        await watch.read()
    for watch in watches:
        await watch.read()
    assert [each.number for each in sorted(watches, key=lambda watch: watch.name)] == [0, 1, 2]
