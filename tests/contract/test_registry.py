"""Every registry does the same: the one in memory, the stand-in that speaks Redis' protocol, a real redis-server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio.connection
from support.redis_server import RedisServer, start, wait_for_line

from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.registry import launch
from cluster.registry.membership import TTL_S, ChangeKind, Heartbeat, MemberKind, Membership, MemberState
from cluster.registry.memory import MemoryRegistry
from cluster.registry.proofs import proven
from cluster.registry.redis import NUDGES_AT_ONCE, RedisRegistry
from cluster.registry.redis_link import parse_place
from cluster.registry.registry import Author, Beaten, Claimed, NameRefused, Registry, RegistryDown, read_members
from cluster.registry.standin import Server
from kvtransfer.keys import InstanceKeys, instance_key
from kvtransfer.proving import FleetProofs, InstanceProofs
from kvtransfer.ticket import SigningKey

SHORT_TTL_S = 0.3
SOON_S = 20.0
"""The longest wait for an event, in seconds; on an idle machine each comes within a second."""


def beat(agent: str, *, seq: int = 0, name: str = "prefill-0", **more: Any) -> Heartbeat:
    fields: dict[str, Any] = {"url": "http://10.0.0.1:8100", "where": f"host-{agent}:7", "state": MemberState.READY}
    return Heartbeat(id=name, agent=agent, seq=seq, **{**fields, **more})


class World:
    """One registry, and as many clients of it as a test wants. `ttl_s` may be set before the first one is opened."""

    def __init__(self) -> None:
        self.ttl_s = TTL_S

    def open(self) -> Registry:
        """One more client."""
        raise NotImplementedError

    async def pass_time(self) -> None:
        """Let a moment pass, so that other tasks run."""
        await asyncio.sleep(0.01)

    def down(self) -> None:
        """Make it unreachable."""
        raise NotImplementedError

    def up_again(self) -> None:
        """Bring it back, without its data."""
        raise NotImplementedError


class MemoryWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.registry: MemoryRegistry | None = None

    def open(self) -> MemoryRegistry:
        self.registry = self.registry or MemoryRegistry(lambda: self.now, self.ttl_s)
        return self.registry

    async def pass_time(self) -> None:
        self.now += 0.01
        await asyncio.sleep(0)

    def down(self) -> None:
        self.open().down = True

    def up_again(self) -> None:
        self.open().down = False
        self.open().forget()


class RedisWorld(World):
    def __init__(self, server: RedisServer, stack: AsyncExitStack, cluster: str) -> None:
        super().__init__()
        self.server, self.cluster = server, cluster
        self._stack = stack

    def open(self, url: str | None = None, **more: Any) -> RedisRegistry:
        settings = {"cluster": self.cluster, "password_file": self.server.command.password_file, "ttl_s": self.ttl_s}
        settings["timeout_s"] = SOON_S / 2  # long, because a busy machine is not the subject
        registry = RedisRegistry.open(url or self.server.url, **{**settings, **more})
        self._stack.push_async_callback(registry.close)
        return registry

    def down(self) -> None:
        self.server.kill()

    def up_again(self) -> None:
        self.server.start()


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Callable[[str], RedisServer]]:
    """`servers("stand-in")` and `servers("redis-server")`: running, started once and again after a test killed it."""
    started: dict[str, RedisServer] = {}

    def get(kind: str) -> RedisServer:
        if kind == "redis-server" and shutil.which(kind) is None:
            pytest.skip(f"registry tests on a real Redis ({launch.INSTALL})")
        if kind not in started:
            started[kind] = RedisServer(tmp_path_factory.mktemp(kind), standin=kind == "stand-in")
        if not started[kind].running:
            started[kind].start()
        return started[kind]

    yield get
    for server in started.values():
        server.kill()


async def make_world(request, servers) -> AsyncIterator[Any]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    cluster = "".join(char if char.isalnum() else "-" for char in request.node.name)
    async with AsyncExitStack() as stack:
        yield RedisWorld(servers(request.param), stack, cluster[-60:].strip("-"))


world = pytest.fixture(params=["memory", "stand-in", "redis-server"], name="world")(make_world)
redis_world = pytest.fixture(params=["stand-in", "redis-server"], name="redis_world")(make_world)
real_redis = pytest.fixture(params=["redis-server"], name="real_redis")(make_world)


async def expect_soon(attempt: Callable[[], Awaitable[bool]], world: World) -> None:
    """Try until it succeeds; time passes in between."""
    async with asyncio.timeout(SOON_S):
        while not await attempt():
            await world.pass_time()


async def listening(reader: Registry) -> None:
    """Make the reader listen for changes, and take all changes that were before."""
    while await reader.wait_changed(0.05):
        pass


# --- what agents rely on ---------------------------------------------------------------------------------------------


async def test_what_is_written_is_read(world) -> None:
    agent, reader = world.open(), world.open()
    first = beat("alfa", models=({"id": "tiny"},), shape={"tp": 2}, credits=4, sent_at=12.5)
    assert await agent.claim(first) == Claimed()
    assert await reader.read() == (first,)
    later = replace(first, seq=1, state=MemberState.DRAINING)
    assert await agent.beat(later) == Beaten()
    assert await reader.read() == (later,)


async def test_routers_are_a_kind_of_their_own(world) -> None:
    registry = world.open()
    router = beat("alfa", name="router-1", kind=MemberKind.ROUTER)
    assert await registry.beat(router) == Beaten()  # a beat takes a free name, too
    assert await registry.read() == ()
    assert await registry.read(MemberKind.ROUTER) == (router,)


async def test_two_agents_with_one_name(world) -> None:
    one, other, reader = world.open(), world.open(), world.open()
    await one.claim(beat("alfa", epoch=3))
    for refused in (await other.claim(beat("bravo", epoch=4)), await other.beat(beat("bravo", epoch=4, seq=1))):
        assert isinstance(refused, NameRefused)
        assert "agent alfa at host-alfa:7 (ready, epoch 3)" in refused.because
        assert "agent bravo at host-bravo:7" in refused.because
    assert await one.beat(beat("alfa", epoch=3, seq=1)) == Beaten()
    assert await reader.read() == (beat("alfa", epoch=3, seq=1),)


async def test_values_posted_for_others_are_read_by_name(world) -> None:
    one, reader = world.open(), world.open()
    first, second = Author("prefill-0", "alfa", 3), Author("prefill-0", "alfa", 4)
    await one.post(first, {"decode-0": b"\x00sealed\r\n\xff", "decode-1": b"other"})
    await one.post(second, {"decode-0": b"newer"})
    assert await reader.posted([second, first], "decode-0") == (b"newer", b"\x00sealed\r\n\xff")
    await one.post(first, {"decode-1": b"x" * 200_000})
    assert await reader.posted([first], "decode-0") == (None,), "what was posted before is replaced as a whole"
    assert await reader.posted([first], "decode-1") == (b"x" * 200_000,)
    assert await one.keep(first)
    await one.unpost(first)
    assert await reader.posted([first, second], "decode-1") == (None, None)
    assert not await one.keep(first) and await reader.posted([], "decode-0") == ()
    await one.post(second, {})
    assert await reader.posted([second], "decode-0") == (None,)
    with pytest.raises(ValueError):
        await one.post(first, {str(number): b"" for number in range(5000)})


async def test_posted_values_expire_with_their_author(world) -> None:
    world.ttl_s = SHORT_TTL_S
    one, reader = world.open(), world.open()
    author = Author("prefill-0", "alfa", 3)
    await one.post(author, {"decode-0": b"sealed"})

    async def gone() -> bool:
        return await reader.posted([author], "decode-0") == (None,)

    await expect_soon(gone, world)
    assert not await one.keep(author)


async def test_a_note_comes_to_every_router_that_takes_notes(world) -> None:
    one, *others = world.open(), world.open(), world.open()
    await one.send_note(b"before anyone takes notes")
    taking = [asyncio.ensure_future(other.next_note(SOON_S)) for other in others]
    note = b"\x00\r\n\xff" * 40_000

    async def arrived() -> bool:
        await one.send_note(note)
        await asyncio.sleep(0.05)
        return all(each.done() for each in taking)

    await expect_soon(arrived, world)
    assert [each.result() for each in taking] == [note, note]
    while await others[0].next_note(0.2) is not None:  # take the notes that are left over
        pass
    await one.send_note(b"next")
    assert await others[0].next_note(SOON_S) == b"next"
    assert await others[0].next_note(0.01) is None


async def test_notes_go_on_after_an_outage(world) -> None:
    one, other = world.open(), world.open()
    assert await other.next_note(0.01) is None
    world.down()
    with pytest.raises(RegistryDown):
        await one.send_note(b"lost")

    async def fails() -> bool:
        try:
            await other.next_note(0.05)
        except RegistryDown:
            return True
        return False

    await expect_soon(fails, world)
    world.up_again()

    async def heard() -> bool:
        with contextlib.suppress(RegistryDown):
            await one.send_note(b"again")
            return await other.next_note(0.1) == b"again"
        return False

    await expect_soon(heard, world)


async def test_of_many_newcomers_at_once_one_gets_the_name(world) -> None:
    agents = {f"agent{number}": world.open() for number in range(12)}
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(registry.claim(beat(agent))) for agent, registry in agents.items()]
    answers = [task.result() for task in tasks]
    assert answers.count(Claimed()) == 1
    (seen,) = await world.open().read()
    assert seen.agent == list(agents)[answers.index(Claimed())]


async def test_a_silent_owner_loses_the_name_and_is_told(world) -> None:
    world.ttl_s = SHORT_TTL_S
    paused, newcomer, reader = world.open(), world.open(), world.open()
    await paused.claim(beat("alfa", epoch=3))

    async def takes_over() -> bool:
        return await newcomer.claim(beat("bravo", epoch=4)) == Claimed()

    async def told() -> bool:
        await newcomer.beat(beat("bravo", epoch=4, seq=1))
        answer = await paused.beat(beat("alfa", epoch=3, seq=1))
        return isinstance(answer, NameRefused) and "agent bravo" in answer.because

    await expect_soon(takes_over, world)
    await expect_soon(told, world)
    assert all(seen.agent == "bravo" for seen in await reader.read())


async def test_a_refused_agent_keeps_no_dead_owner_alive(world) -> None:
    """A refused agent's heartbeats do not extend the lock of a dead owner, so that the name becomes free."""
    world.ttl_s = SHORT_TTL_S
    owner, other = world.open(), world.open()

    async def owned() -> bool:
        return await owner.claim(beat("alfa")) == Claimed() and isinstance(
            await other.claim(beat("bravo")), NameRefused
        )

    async def freed() -> bool:
        return await other.beat(beat("bravo", seq=1)) == Beaten()

    await expect_soon(owned, world)
    await expect_soon(freed, world)


async def test_a_goodbye_is_read_and_frees_the_name(world) -> None:
    agent, reader, membership = world.open(), world.open(), Membership()
    await agent.claim(beat("alfa", seq=4))
    membership.fold(await reader.read(), 0.0)
    assert await agent.leave("prefill-0", "alfa")
    (change,) = membership.fold(await reader.read(), 1.0)
    assert change.because == "prefill-0 left: agent alfa at host-alfa:7 said goodbye"
    late = await agent.beat(beat("alfa", seq=9))
    assert isinstance(late, NameRefused) and "said goodbye" in late.because
    assert await world.open().claim(beat("bravo", epoch=2)) == Claimed()
    (change,) = membership.fold(await reader.read(), 2.0)
    assert "takes the name over" in change.because


async def test_a_goodbye_under_anothers_name_does_nothing(world) -> None:
    owner, other, reader = world.open(), world.open(), world.open()
    await owner.claim(beat("alfa"))
    assert not await other.leave("prefill-0", "bravo")
    assert not await other.leave("nobody-0", "bravo")
    assert isinstance(await world.open().claim(beat("charlie")), NameRefused)
    assert await owner.beat(beat("alfa", seq=1)) == Beaten()
    assert await reader.read() == (beat("alfa", seq=1),)


async def test_epochs_are_given_out_once(world) -> None:
    clients = [world.open() for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.next_epoch("prefill-0")) for client in clients]
    drawn = [task.result() for task in tasks]
    assert len(set(drawn)) == len(drawn)
    assert await clients[0].next_epoch("prefill-0", above=10**12) == 10**12 + 1
    assert await clients[1].next_epoch("prefill-0") == 10**12 + 2


async def test_changes_wake_readers_and_load_does_not(world) -> None:
    agent, reader = world.open(), world.open()
    await agent.claim(beat("alfa"))
    await listening(reader)
    await agent.beat(beat("alfa", seq=1, credits=7))
    assert not await reader.wait_changed(0.1)
    await agent.beat(beat("alfa", seq=2, state=MemberState.DRAINING))
    async with asyncio.timeout(SOON_S):
        assert await reader.wait_changed(2 * SOON_S)
        await agent.leave("prefill-0", "alfa")
        assert await reader.wait_changed(2 * SOON_S)


async def test_a_registry_that_is_killed_and_comes_back(world) -> None:
    """A reader keeps what it knows, agents fill the new, empty registry, and the reader catches up."""
    agent, lost, reader, membership = world.open(), world.open(), world.open(), Membership()
    epoch = await agent.next_epoch("prefill-0")
    await agent.claim(beat("alfa", epoch=epoch))
    await lost.claim(beat("bravo", name="decode-0"))
    membership.fold(await reader.read(), 0.0)
    await listening(reader)
    world.down()
    for call in (reader.read(), agent.beat(beat("alfa", epoch=epoch, seq=1)), agent.next_epoch("prefill-0", epoch)):
        with pytest.raises(RegistryDown):
            await call
    assert not await reader.wait_changed(0.01)
    membership.deaf()
    assert len(membership.snapshot()) == 2
    world.up_again()
    assert membership.fold(await reader.read(), 200.0) == ()
    assert await agent.next_epoch("prefill-0", epoch) > epoch
    assert await agent.beat(beat("alfa", epoch=epoch, seq=2)) == Beaten()
    assert membership.fold(await reader.read(), 201.0) == ()
    assert membership.snapshot().members[1].beat.seq == 2
    (change,) = membership.fold(await reader.read(), 206.5)
    assert change.because.startswith("decode-0 expired")
    await listening(reader)
    await agent.beat(beat("alfa", epoch=epoch, seq=3, state=MemberState.DRAINING))
    assert await reader.wait_changed(SOON_S)


@pytest.mark.parametrize("fault", ["down", "full", "cancelled"])
async def test_a_reading_that_says_nothing_of_a_silence_ends_no_member(fault: str, monkeypatch) -> None:
    """Of all kinds that are read together, though the reading of the second one fails."""
    registry = MemoryRegistry(lambda: 0.0)
    memberships = {kind: Membership() for kind in (MemberKind.INSTANCE, MemberKind.ROUTER)}
    for kind, membership in memberships.items():
        membership.fold([beat("alfa", kind=kind)], 0.0)
    registry.down, registry.full = fault == "down", fault == "full"
    with contextlib.suppress(RegistryDown):
        await registry.beat(beat("bravo", name="decode-0"))
    with monkeypatch.context() as patched:
        if fault == "cancelled":
            read = registry.read

            async def cut_off(kind: MemberKind) -> tuple[Heartbeat, ...]:
                if kind is MemberKind.ROUTER:
                    raise asyncio.CancelledError
                return await read(kind)

            patched.setattr(registry, "read", cut_off)
        with contextlib.nullcontext() if fault == "full" else pytest.raises((RegistryDown, asyncio.CancelledError)):
            await read_members(registry, memberships)
    for membership in memberships.values():
        assert membership.fold((), 100.0) == membership.fold((), 105.9) == ()
        assert [change.what for change in membership.fold((), 106.0)] == [ChangeKind.EXPIRED]


# --- Redis only ------------------------------------------------------------------------------------------------------


class Wire:
    """What clients sent: one entry for each round trip."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[bytes] = []
        self.something = asyncio.Event()
        connection = redis.asyncio.connection.AbstractConnection
        send = connection.send_packed_command

        async def counted(this: Any, command: Any, *args: Any, **more: Any) -> None:
            await send(this, command, *args, **more)
            self.sent.append(command if isinstance(command, bytes) else b"".join(command))
            self.something.set()

        monkeypatch.setattr(connection, "send_packed_command", counted)


async def test_500_members_cost_one_pipeline_a_heartbeat_and_two_a_reading(redis_world, monkeypatch) -> None:
    agents, reader = redis_world.open(), redis_world.open()
    models = ({"id": "tiny", "max_model_len": 2048, "root": "x" * 500},)
    beats = [beat(f"agent{number}", name=f"prefill-{number:03}", models=models) for number in range(500)]
    for each in beats:
        await agents.claim(each)
    wire = Wire(monkeypatch)
    for each in beats:
        assert await agents.beat(replace(each, seq=1)) == Beaten()
    assert len(wire.sent) == 500
    await reader.next_epoch("x")  # the first call connects
    wire.sent.clear()
    assert [seen.id for seen in await reader.read()] == [each.id for each in beats]
    assert len(wire.sent) == 2
    assert not any(word in sent.upper() for sent in wire.sent for word in (b"KEYS\r", b"SCAN\r"))


async def test_silent_members_leave_nothing_behind(redis_world) -> None:
    redis_world.ttl_s = SHORT_TTL_S
    agent, reader = redis_world.open(), redis_world.open()
    await agent.claim(beat("alfa"))
    await agent.next_epoch("prefill-0")
    members = f"baton:{redis_world.cluster}:instance:members"
    keys = await agent._redis.keys(f"baton:{redis_world.cluster}:*")
    assert members.encode() in keys
    for key in keys:
        assert await agent._redis.ttl(key) != -1, f"{key} never expires"

    async def gone() -> bool:
        return await reader.read() == () and not await agent._redis.exists(members)

    await expect_soon(gone, redis_world)


async def test_clusters_do_not_see_each_other(redis_world) -> None:
    await redis_world.open().claim(beat("alfa"))
    other = redis_world.open(cluster="another")
    assert await other.read() == ()
    assert await other.claim(beat("bravo")) == Claimed()
    await other.leave("prefill-0", "bravo")


async def test_junk_in_redis_is_left_out_and_told_once(redis_world, caplog) -> None:
    agent, reader = redis_world.open(), redis_world.open()
    await agent.claim(beat("alfa"))
    await agent.claim(beat("bravo", name="decode-0"))
    prefix = f"baton:{redis_world.cluster}:instance:"
    await agent._redis.set(f"{prefix}beat:prefill-0:alfa", b'{"id": "\x1b"}')
    await agent._redis.sadd(f"{prefix}members", b"\xff", b"no-agent", b"a b c")
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        assert [seen.id for seen in await reader.read()] == ["decode-0"]
    assert len(caplog.messages) == 1
    assert "prefill-0" in caplog.messages[0] and "\x1b" not in caplog.messages[0]
    await agent._redis.set(f"baton:{redis_world.cluster}:epoch:prefill-0", "many")
    assert await agent.next_epoch("prefill-0") > 0


async def test_a_heartbeat_under_anothers_name_is_left_out(redis_world) -> None:
    agent, reader = redis_world.open(), redis_world.open()
    await agent.claim(beat("alfa"))
    await agent.claim(beat("alfa", name="decode-0"))
    keys = f"baton:{redis_world.cluster}:instance:beat:"
    await agent._redis.set(f"{keys}prefill-0:alfa", await agent._redis.get(f"{keys}decode-0:alfa"))
    assert [seen.id for seen in await reader.read()] == ["decode-0"]


async def test_an_owner_that_lost_its_name_without_noticing(redis_world) -> None:
    """The former owner's next heartbeat extends the new owner's lock once. It takes its own keys back, and extends the
    lock no second time.
    """
    paused, reader = redis_world.open(), redis_world.open()
    await paused.claim(beat("alfa"))
    prefix = f"baton:{redis_world.cluster}:instance:"
    lock, long_ms = f"{prefix}lock:prefill-0", 10**9
    payload = (await paused._redis.get(f"{prefix}beat:prefill-0:alfa")).replace(b"alfa", b"bravo")
    await paused._redis.set(f"{prefix}beat:prefill-0:bravo", payload)  # a lock alone would prove nothing
    for extended in (True, False, False):
        await paused._redis.set(lock, "bravo", px=long_ms)
        assert isinstance(await paused.beat(beat("alfa", seq=1)), NameRefused)
        assert (await paused._redis.pttl(lock) < long_ms / 2) == extended
        assert not await paused._redis.exists(f"{prefix}beat:prefill-0:alfa")
        assert await paused._redis.smembers(f"{prefix}members") == set()
    await paused._redis.delete(lock)
    assert await paused.beat(beat("alfa", seq=2)) == Beaten()
    await paused._redis.set(f"{prefix}beat:prefill-0:bravo", payload)  # bravo is in the middle of such a pipeline
    await paused._redis.sadd(f"{prefix}members", "prefill-0 bravo")
    assert [seen.agent for seen in await reader.read()] == ["alfa"]


FLEET = SigningKey("k1", b"f" * 32)
MINE = InstanceKeys(InstanceId("prefill-0"), (instance_key(FLEET, InstanceId("prefill-0")),))


def agents(world: RedisWorld, keys: InstanceKeys | None = MINE) -> RedisRegistry:
    """An agent's client, with its ticket keys or without."""
    return world.open(proofs=None if keys is None else InstanceProofs(lambda: keys, lambda: 1000.0))


@pytest.mark.parametrize("keys", [MINE, None], ids=["keys", "no keys"])
async def test_a_lock_without_a_living_owner_stops_no_agent(redis_world, keys, caplog) -> None:
    """Any holder of the password can write such a lock; the agent takes it back, and logs a line."""
    agent = agents(redis_world, keys)
    lock = f"baton:{redis_world.cluster}:instance:lock:prefill-0"
    await agent.claim(beat("alfa", sent_at=1000.0))
    for seq, owner in enumerate((b"nobody", b"nobody", b"\xff\x1b[2J", b"x" * 5000), 1):
        await agent._redis.set(lock, owner)
        assert await agent.beat(beat("alfa", seq=seq, sent_at=1000.0)) == Beaten()
        assert await agent._redis.get(lock) == b"alfa"
        assert await agent._redis.pttl(lock) > 0, "the lock expires"
    assert not any("\x1b" in line for line in caplog.messages)
    assert sum("shows no heartbeat that counts" in line for line in caplog.messages) >= 3


async def test_a_newcomer_waits_a_ttl_for_a_lock_without_a_living_owner(redis_world) -> None:
    redis_world.ttl_s = SHORT_TTL_S
    agent = agents(redis_world)
    await agent._redis.set(f"baton:{redis_world.cluster}:instance:lock:prefill-0", "nobody")  # and it never expires
    assert isinstance(await agent.claim(beat("alfa", sent_at=1000.0)), NameRefused), "its owner may be about to write"

    async def claimed() -> bool:
        return await agent.claim(beat("alfa", sent_at=1000.0)) == Claimed()

    await expect_soon(claimed, redis_world)


async def test_a_list_of_members_that_is_no_set_is_made_anew(redis_world) -> None:
    """One SET of one program stops neither readers nor agents for longer than one reading."""
    agent, reader = agents(redis_world), redis_world.open()
    await agent.claim(beat("alfa", sent_at=1000.0))
    await agent._redis.set(f"baton:{redis_world.cluster}:instance:members", "x")
    with pytest.raises(RegistryDown):
        await reader.read()
    assert await reader.read() == ()
    assert await agent.beat(beat("alfa", seq=1, sent_at=1000.0)) == Beaten()
    assert [each.agent for each in await reader.read()] == ["alfa"]


async def test_a_flood_of_changes_leaves_other_tasks_their_turns(redis_world, monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py returns at once while more messages are there."""
    sender, reader = redis_world.open(), redis_world.open()
    await reader.wait_changed(0.01)
    async with sender._redis.pipeline(transaction=False) as pipe:
        for _ in range(400):
            pipe.publish(f"baton:{redis_world.cluster}:instance:changed", "x")
        await pipe.execute()
    in_a_row, most, nudge = 0, 0, reader._nudge

    async def counted(timeout_s: float) -> bool:
        nonlocal in_a_row, most
        in_a_row += 1
        most = max(most, in_a_row)
        return await nudge(timeout_s)

    async def others() -> None:
        nonlocal in_a_row
        while True:
            in_a_row = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(reader, "_nudge", counted)
    turns = asyncio.ensure_future(others())
    try:
        for _ in range(3):
            assert await reader.wait_changed(1) or most
    finally:
        turns.cancel()
    assert 1 < most <= 2 * NUDGES_AT_ONCE


async def test_with_keys_an_agent_yields_to_a_proven_later_epoch_only(redis_world) -> None:
    """An agent does not yield to a heartbeat that proves nothing, is too old, or is not of a later epoch."""
    agent, other = agents(redis_world), agents(redis_world)
    prefix = f"baton:{redis_world.cluster}:instance:"
    await agent.claim(beat("alfa", epoch=5, sent_at=1000.0))
    strangers = InstanceProofs(lambda: InstanceKeys(MINE.instance, (SigningKey("k1", b"x" * 32),)), lambda: 1000.0)
    proofs, cluster = InstanceProofs(lambda: MINE, lambda: 1000.0), redis_world.cluster

    async def put(payload: bytes) -> None:
        await agent._redis.set(f"{prefix}lock:prefill-0", "bravo")
        await agent._redis.set(f"{prefix}beat:prefill-0:bravo", payload)

    later = beat("bravo", epoch=6, sent_at=1000.0)
    good = proven(later, cluster, proofs)
    worthless = (
        proven(later, cluster, None), proven(later, cluster, strangers), proven(later, "another", proofs),
        proven(replace(later, sent_at=900.0), cluster, proofs), proven(replace(later, epoch=5), cluster, proofs),
        good.replace(b'"epoch":6', b'"epoch":7'), b"junk",
    )  # fmt: skip
    for seq, payload in enumerate(worthless, 1):
        await put(payload)
        assert await agent.beat(beat("alfa", epoch=5, seq=seq, sent_at=1000.0)) == Beaten(), payload
        assert await agent._redis.get(f"{prefix}lock:prefill-0") == b"alfa"
    await put(good)
    answer = await agent.beat(beat("alfa", epoch=5, seq=9, sent_at=1000.0))
    assert isinstance(answer, NameRefused) and "agent bravo" in answer.because
    await agent._redis.delete(f"{prefix}lock:prefill-0")
    assert await other.claim(beat("charlie", epoch=8, sent_at=1000.0)) == Claimed()


async def test_with_keys_a_later_epoch_of_its_own_takes_no_name_back(redis_world) -> None:
    """A program that was cut off draws an epoch above that of the next owner, whose name it is now."""
    cut_off, owner = agents(redis_world), agents(redis_world)
    await cut_off.claim(beat("alfa", epoch=5, sent_at=1000.0))
    await cut_off._redis.delete(f"baton:{redis_world.cluster}:instance:lock:prefill-0")  # its ttl is over
    assert await owner.claim(beat("bravo", epoch=6, sent_at=1000.0)) == Claimed()
    assert isinstance(await cut_off.beat(beat("alfa", epoch=7, sent_at=1000.0)), NameRefused)
    assert await owner.beat(beat("bravo", epoch=6, seq=1, sent_at=1000.0)) == Beaten()


async def test_readers_with_the_fleets_keys_go_by_proofs_and_not_by_locks(redis_world) -> None:
    agent, strict = agents(redis_world), FleetProofs(lambda: (FLEET,), lambda: 1000.0)
    reader, careless = redis_world.open(proofs=strict), redis_world.open()
    prefix = f"baton:{redis_world.cluster}:instance:"
    mine = beat("alfa", sent_at=1000.0)
    await agent.claim(mine)
    await agent._redis.set(f"{prefix}lock:prefill-0", "nobody")
    await agent._redis.set(f"{prefix}beat:prefill-0:nobody", proven(beat("nobody", epoch=99), "x", None))
    await agent._redis.sadd(f"{prefix}members", "prefill-0 nobody")
    assert await reader.read() == (mine,)
    assert "carries no proof" in reader.unproven(MemberKind.INSTANCE)["prefill-0"]
    assert [each.agent for each in await careless.read()] == ["nobody"], "without keys it is believed"
    await agent._redis.delete(f"{prefix}beat:prefill-0:nobody")
    assert await reader.read() == (mine,) and not reader.unproven(MemberKind.INSTANCE)


async def test_a_goodbye_is_proven_and_copies_nothing_from_the_registry(redis_world) -> None:
    """A holder of the password must not get its own words signed as an agent's goodbye."""
    agent, reader = agents(redis_world), redis_world.open(proofs=FleetProofs(lambda: (FLEET,), lambda: 1000.0))
    mine = beat("alfa", sent_at=1000.0)
    await agent.claim(mine)
    key = f"baton:{redis_world.cluster}:instance:beat:prefill-0:alfa"
    await agent._redis.set(key, proven(replace(mine, seq=2**53 - 1, detail="false"), "x", None))
    assert await agent.leave("prefill-0", "alfa")
    (last,) = await reader.read()
    assert (last.state, last.seq, last.detail) == (MemberState.GONE, 1, "")


async def test_an_epoch_too_high_to_be_followed_is_ignored(redis_world) -> None:
    agent = redis_world.open()
    key = f"baton:{redis_world.cluster}:epoch:prefill-0"
    for planted in (str(2**53), str(2**63), "9" * 5000):
        await agent._redis.set(key, planted)
        assert await agent.next_epoch("prefill-0", above=7) < 2**48


async def test_a_restart_between_two_heartbeats_is_not_noticed(redis_world) -> None:
    agent, reader, starting, leaving = (redis_world.open() for _ in range(4))
    await agent.claim(beat("alfa"))
    await leaving.claim(beat("bravo", name="decode-0"))
    epoch = await starting.next_epoch("prefill-1")
    await reader.read()
    redis_world.down()
    redis_world.up_again()
    assert await agent.beat(beat("alfa", seq=1)) == Beaten()
    assert await reader.read() == (beat("alfa", seq=1),)
    assert await starting.next_epoch("prefill-1", above=epoch) > epoch
    assert not await leaving.leave("decode-0", "bravo")


async def test_a_registry_that_hangs_is_down_in_time(redis_world) -> None:
    registry = redis_world.open(timeout_s=0.3)

    async def works() -> bool:
        try:
            return await registry.beat(beat("alfa")) == Beaten()
        except RegistryDown:
            return False

    await expect_soon(works, redis_world)
    redis_world.server.pause()
    try:
        begun = time.monotonic()
        with pytest.raises(RegistryDown, match=r"did not answer within 0\.3 s"):
            await registry.beat(beat("alfa", seq=1))
        assert time.monotonic() - begun < SOON_S / 4
    finally:
        redis_world.server.resume()
    await expect_soon(works, redis_world)


async def test_a_call_cut_short_leaves_no_answer_for_the_next(redis_world, monkeypatch) -> None:
    registry = redis_world.open()
    await registry.claim(beat("alfa"))
    wire = Wire(monkeypatch)
    redis_world.server.pause()
    try:
        cut = asyncio.create_task(registry.read())
        async with asyncio.timeout(SOON_S):
            await wire.something.wait()
        cut.cancel()
        await asyncio.wait([cut])
        assert cut.cancelled()
    finally:
        redis_world.server.resume()
    assert await registry.next_epoch("prefill-0", above=10**12) == 10**12 + 1
    assert await registry.read() == (beat("alfa"),)


@pytest.mark.parametrize("call", ["read", "post", "keep", "next_epoch", "wait_changed", "next_note"])
async def test_a_cancellation_is_never_lost(redis_world, call) -> None:
    """Cancelled at each of the first turns of the loop, a call ends. Seen in CI: an agent that had left did not end, as
    its work read on after it was cancelled twice.
    """
    registry = redis_world.open()
    author = Author("prefill-0", "alfa", 1)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "read": registry.read,
        "post": lambda: registry.post(author, {"decode-0": b"sealed"}),
        "keep": lambda: registry.keep(author),
        "next_epoch": lambda: registry.next_epoch("prefill-0"),
        "wait_changed": lambda: registry.wait_changed(0.001),
        "next_note": lambda: registry.next_note(0.001),
    }
    await registry.claim(beat("alfa"))
    lost = []
    for turns in range(60):

        async def again_and_again() -> None:
            while True:
                await calls[call]()

        task = asyncio.create_task(again_and_again())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        _, running = await asyncio.wait([task], timeout=0.2)
        if running:
            lost.append(turns)
            while not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=0.2)
    assert not lost, "turns of the loop before the cancellation"


@pytest.mark.parametrize("call", ["next_epoch", "leave"])
async def test_a_server_that_is_silent_after_a_watch_is_down_in_time(call) -> None:
    """redis-py takes a WATCH back before it gives a call up, and asks the server for that: this ends in time, too."""
    silent = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    length = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(length + 2))[:-2])
                if not silent.is_set():
                    writer.write(b"+OK\r\n")
                if words[0] == b"WATCH":
                    silent.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        registry = RedisRegistry.open(f"redis://127.0.0.1:{port}", timeout_s=0.3)
        calls = {
            "next_epoch": lambda: registry.next_epoch("prefill-0"),
            "leave": lambda: registry.leave("router-1", "alfa", MemberKind.ROUTER),
        }
        async with asyncio.timeout(SOON_S):
            with pytest.raises(RegistryDown, match=r"did not answer within 0\.3 s"):
                await calls[call]()
            await registry.close()
    assert silent.is_set()


async def test_a_subscription_whose_server_hangs_is_given_up(redis_world) -> None:
    """The connection is broken, and the server takes a new one without answering: no reader waits for ever."""
    registry = redis_world.open(timeout_s=0.3)
    await listening(registry)
    redis_world.server.kill()
    redis_world.server.start()
    redis_world.server.pause()
    try:
        async with asyncio.timeout(SOON_S):
            changed = [await registry.wait_changed(0.05) for _ in range(3)]
        assert not any(changed)
    finally:
        redis_world.server.resume()


@pytest.mark.parametrize("given", ["nothing", "file", "url"])
async def test_a_wrong_password_is_told_without_it(redis_world, tmp_path, given, caplog) -> None:
    wrong = "correct horse: battery/staple"
    (tmp_path / "password").write_text(wrong)
    url, file = redis_world.server.url, None
    if given == "url":
        url = url.replace("//", "//:correct%20horse%3A%20battery%2Fstaple@")
    elif given == "file":
        file = tmp_path / "password"
    registry = redis_world.open(url, password_file=file)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(RegistryDown) as caught:
        await registry.read()
    assert "password" in str(caught.value)
    assert ("--registry-password-file" in str(caught.value)) == (given == "nothing")
    told = "".join(traceback.format_exception(caught.value)) + repr(registry) + repr(registry._link.place) + caplog.text
    assert "horse" not in told and redis_world.server.password not in told


async def test_a_server_that_quotes_the_password_is_not_quoted() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"-ERR no such password: battery staple\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        registry = RedisRegistry.open(f"redis://:battery%20staple@127.0.0.1:{other.sockets[0].getsockname()[1]}")
        with pytest.raises(RegistryDown, match=r"no such password: \*\*\*"):
            await registry.read()
        await registry.close()


async def test_the_password_may_stand_in_the_url(redis_world) -> None:
    url = redis_world.server.url.replace("//", f"//default:{redis_world.server.password}@")
    registry = redis_world.open(url, password_file=None)
    assert await registry.claim(beat("alfa")) == Claimed()
    assert redis_world.server.password not in repr(registry)


async def test_a_server_that_does_not_speak_redis_is_reported(tmp_path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        registry = RedisRegistry.open(f"redis://127.0.0.1:{port}")
        with pytest.raises(RegistryDown, match=f"127.0.0.1:{port}"):
            await registry.read()
        await registry.close()


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """A key, and a self-signed certificate for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("the registry over TLS (apt install openssl)")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=registry"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*words, *names], check=True, capture_output=True)
    return key, cert


@asynccontextmanager
async def in_front_of(url: str, tls: ssl.SSLContext | None = None, delay_s: float = 0.0) -> AsyncIterator[str]:
    """The address of a proxy in front of a server, like a load balancer or stunnel; it delays answers by `delay_s`."""
    behind = parse_place(url)
    open_now: set[asyncio.Task[Any]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(delay_s)
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(asyncio.current_task())
        to = await asyncio.open_connection(behind.host, behind.port)
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as group:
                group.create_task(pass_on(reader, to[1], 0.0))
                group.create_task(pass_on(to[0], writer, delay_s))
        for end in (writer, to[1]):
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()

    async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in open_now:
            task.cancel()
        if open_now:
            await asyncio.wait(open_now)


async def test_the_time_limit_holds_for_all_round_trips_of_a_call_together(redis_world) -> None:
    async with in_front_of(redis_world.server.url, delay_s=0.25) as address:
        registry = redis_world.open(f"redis://{address}", timeout_s=0.6)
        with pytest.raises(RegistryDown, match=r"did not answer within 0\.6 s"):
            await registry.claim(beat("alfa"))  # log in, ask for the name, write: at least three round trips
        await registry.close()


async def test_tls_with_the_right_and_the_wrong_authority(redis_world, certificate) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate[1], certificate[0])
    async with in_front_of(redis_world.server.url, context) as address:
        url = f"rediss://{address}"
        trusting = redis_world.open(url, ca_file=certificate[1])
        assert await trusting.claim(beat("alfa")) == Claimed()
        assert await trusting.read() == (beat("alfa"),)
        strict = redis_world.open(url)
        with pytest.raises(RegistryDown, match="certificate"):
            await strict.read()
        await trusting.close()


async def test_a_redis_that_refuses_writes_answers_readers(real_redis) -> None:
    agent, reader = real_redis.open(), real_redis.open()
    await agent.claim(beat("alfa"))
    await reader._redis.config_set("min-replicas-to-write", 1)
    try:
        for call in (agent.beat(beat("alfa", seq=1)), agent.next_epoch("prefill-0")):
            with pytest.raises(RegistryDown, match="replicas"):
                await call
            assert await agent.read() == (beat("alfa"),) and not agent.takes_writes
    finally:
        await reader._redis.config_set("min-replicas-to-write", 0)
    assert await agent.beat(beat("alfa", seq=1)) == Beaten()
    assert agent.takes_writes and reader.takes_writes


@pytest.mark.parametrize("refusal", ["READONLY a read only replica", "NOREPLICAS not enough replicas to write"])
async def test_a_connection_to_a_former_primary_is_not_used_again(refusal: str) -> None:
    """After a failover the registry's name leads to another server, and connections to the former one stay open."""
    answers = iter([f"-{refusal}\r\n".encode(), b":1\r\n"])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = next(answers)
        with contextlib.closing(writer):
            while head := await reader.readline():
                for _ in range(2 * int(head[1:])):
                    await reader.readline()
                writer.write(answer)

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        agent = RedisRegistry.open(f"redis://{host}:{port}", timeout_s=SOON_S)
        author = Author("prefill-0", "alfa", 1)
        with pytest.raises(RegistryDown, match="replica"):
            await agent.keep(author)
        assert await agent.keep(author)
        await agent.close()


# --- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://head:6379", "redis://HOST:PORT"),
        ("redis://", "redis://HOST:PORT"),
        ("redis://:secret@head:many", "not a URL"),
        ("redis://:secret@head:70000", "not a URL"),
        ("redis://:secret@head/first", "not a URL"),
        ("redis://:secret@head/-1", "redis://HOST:PORT"),
        ("redis://:secret@head?db=1", "redis://HOST:PORT"),
        ("head:6379", "redis://HOST:PORT"),
    ],
)
def test_urls_that_cannot_be_used(url, says) -> None:
    with pytest.raises(UsageError) as caught:
        RedisRegistry.open(url)
    assert says in str(caught.value)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_files_that_cannot_be_used(tmp_path) -> None:
    (tmp_path / "empty").write_text("\n")
    for more, says in (
        ({"password_file": tmp_path / "none"}, "no such file"),
        ({"password_file": tmp_path / "empty"}, "empty"),
        ({"ca_file": tmp_path / "empty"}, "rediss://"),
        ({"cluster": "a:b"}, "--cluster"),
    ):
        with pytest.raises(UsageError, match=says):
            RedisRegistry.open("redis://head", **more)
    with pytest.raises(UsageError, match="no such file"):
        RedisRegistry.open("rediss://head", ca_file=tmp_path / "none")
    with pytest.raises(UsageError, match="one of them"):
        RedisRegistry.open("redis://:x@head", password_file=tmp_path / "none")


def test_places_read_well() -> None:
    place = parse_place("rediss://joe:s%40fe@[::1]:7000/3")
    assert str(place) == "rediss://[::1]:7000/3"
    assert (place.username, place.password, place.tls) == ("joe", "s@fe", True)
    assert str(parse_place("redis://head")) == "redis://head:6379"
    assert place.redact("AUTH s@fe or s%40fe") == "AUTH *** or ***"


# --- the server on this machine --------------------------------------------------------------------------------------


def test_the_command_keeps_its_password_in_private_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(launch.shutil, "which", {"redis-server": "/opt/bin/redis-server"}.get)
    real = launch.registry_command(tmp_path, port=7777)
    password = real.password_file.read_text().strip()
    assert real.argv == ("/opt/bin/redis-server", str(tmp_path / "registry.conf"))
    assert (real.server, real.url) == ("/opt/bin/redis-server", "redis://127.0.0.1:7777")
    conf = (tmp_path / "registry.conf").read_text().splitlines()
    for line in (f"requirepass {password}", "bind 127.0.0.1", "port 7777", 'save ""'):
        assert line in conf
    for name in ("registry.conf", "registry.password"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    monkeypatch.setattr(launch.shutil, "which", lambda _: None)
    standin = launch.registry_command(tmp_path)
    again = standin.password_file.read_text().strip()
    assert again != password
    assert not any(secret in word for word in standin.argv for secret in (password, again))
    assert "stand-in" in standin.server and launch.INSTALL in standin.server
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"apt install redis-server, or pip install 'baton-serve\[local\]'"):
        launch.registry_command(tmp_path)


def test_the_stand_ins_database_is_there_before_any_client() -> None:
    """fakeredis makes it for the first client, without a lock. One of two that came together was alone in another."""
    server = Server(("127.0.0.1", 0), "")
    try:
        assert 0 in server.fake_server.dbs
    finally:
        server.server_close()


def standin_words(*more: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "cluster.registry.standin", *more)


def test_long_answers_reach_a_slow_client_whole(servers) -> None:
    server, value, times = servers("stand-in"), b"x" * 10**6, 16
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", parse_place(server.url).port))
        words = [
            [b"AUTH", server.password.encode()],
            [b"SET", b"long", value, b"EX", b"60"],
            *[[b"GET", b"long"]] * times,
        ]
        for command in words:
            bulks = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in command)
            slow.sendall(b"*%d\r\n%s" % (len(command), bulks))
        slow.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: slow.recv(65536), b""))
    assert received.startswith(b"+OK\r\n+OK\r\n")
    assert received.count(b"x") == times * len(value)


@pytest.mark.parametrize("end", ["SIGTERM", "lifeline"])
def test_the_stand_in_ends_when_told(end) -> None:
    process = start(standin_words("--lifeline"), stdin=subprocess.PIPE)
    line = wait_for_line(process, "ready")
    assert line is not None
    ready = json.loads(line)
    assert ready["event"] == "ready" and ready["host"] == "127.0.0.1" and ready["port"] > 0
    if end == "SIGTERM":
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=SOON_S) == 0
    process.communicate(timeout=SOON_S)
    assert process.returncode == 0


def test_the_stand_in_reports_a_busy_port() -> None:
    first = start(standin_words("--lifeline"), stdin=subprocess.PIPE)
    port = str(json.loads(wait_for_line(first, "ready") or "{}")["port"])
    second = start(standin_words("--port", port))
    output, _ = second.communicate(timeout=SOON_S)
    assert second.returncode == 2
    assert f"--port {port}" in output.decode() and len(output.splitlines()) == 1
    first.communicate(timeout=SOON_S)
