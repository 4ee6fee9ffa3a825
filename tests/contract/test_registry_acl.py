"""Redis' access control lists for a fleet: the file in deploy/ allows what the code needs, and no more."""

from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import NoPermissionError
from support.redis_server import start, wait_for_line

from cluster.ids import InstanceId
from cluster.registry import launch
from cluster.registry.layout import CONTROLLER, USERS, Keys, users
from cluster.registry.membership import Heartbeat, MemberKind, MemberState
from cluster.registry.redis import RedisRegistry
from cluster.registry.registry import Author, Beaten, Claimed, RegistryDown

FILE = Path(__file__).resolve().parents[2] / "deploy" / "redis" / "users.acl"
REMAKE = (
    'python -c "from cluster.registry.layout import users; '
    "open('deploy/redis/users.acl', 'w').write(users('default'))\""
)


def test_the_file_allows_what_the_code_needs() -> None:
    assert FILE.read_text() == users("default"), f"make it again: {REMAKE}"


@dataclass
class Server:
    port: int

    def open(self, user: str) -> RedisRegistry:
        named = f"{user}:{user}-PASSWORD@" if user else ""
        return RedisRegistry.open(f"redis://{named}127.0.0.1:{self.port}", timeout_s=10.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip(f"Redis' access control lists on a real Redis ({launch.INSTALL})")
    folder = tmp_path_factory.mktemp("acl")
    one = users("default", "decode-0").splitlines()[2].replace("baton-agent", "agent-of-decode-0")
    (folder / "users.acl").write_text(FILE.read_text() + one + "\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    lines = ["bind 127.0.0.1", f"port {port}", f"dir {folder}", f"aclfile {folder}/users.acl", 'save ""']
    (folder / "redis.conf").write_text("\n".join(lines))
    process = start((binary, str(folder / "redis.conf")))
    assert wait_for_line(process, "Ready to accept connections")
    yield Server(port)
    process.kill()
    process.communicate(timeout=10)


Open = Callable[[str], RedisRegistry]


@pytest.fixture
async def as_user(server: Server) -> AsyncIterator[Open]:
    """`as_user(NAME)` opens a client, which is closed after the test."""
    async with AsyncExitStack() as closing:

        def opened(user: str) -> RedisRegistry:
            registry = server.open(user)
            closing.push_async_callback(registry.close)
            return registry

        yield opened


def beat(name: str, kind: MemberKind = MemberKind.INSTANCE, **more: Any) -> Heartbeat:
    fields: dict[str, Any] = {"agent": "a", "url": "http://127.0.0.1:9", "state": MemberState.READY}
    return Heartbeat(id=InstanceId(name), kind=kind, **{**fields, **more})


@pytest.mark.parametrize("user", ["baton-agent", "agent-of-decode-0"])
async def test_an_agent_can_do_what_agents_do(as_user: Open, user: str) -> None:
    agent, name = as_user(user), "decode-0"
    epoch = await agent.next_epoch(name)
    mine = beat(name, epoch=epoch)
    assert await agent.claim(mine) == Claimed()
    assert await agent.beat(beat(name, epoch=epoch, seq=1, state=MemberState.DRAINING)) == Beaten()
    author = Author(name, "a", epoch)
    await agent.post(author, {"prefill-0": b"sealed"})
    assert await agent.posted([author, Author("prefill-0", "b", 1)], "prefill-0") == (b"sealed", None)
    assert await agent.keep(author)
    await agent.unpost(author)
    await agent._redis.execute_command("PING")
    assert [each.id for each in await agent.read()] == [name]
    await agent.read(MemberKind.ROUTER)
    assert not await agent.wait_changed(0.01)
    assert await agent.leave(name, "a")


async def test_a_router_can_do_what_routers_do(as_user: Open) -> None:
    router, agent = as_user("baton-router"), as_user("baton-agent")
    assert await agent.claim(beat("prefill-0", agent="p")) == Claimed()
    assert await router.beat(beat("router-1", MemberKind.ROUTER)) == Beaten()
    assert not await router.wait_changed(0.01)
    assert await router.beat(beat("router-1", MemberKind.ROUTER, seq=1)) == Beaten()
    for _ in range(2):
        assert "prefill-0" in [each.id for each in await router.read()]
    assert [each.id for each in await agent.read(MemberKind.ROUTER)] == ["router-1"]
    await agent._redis.sadd(Keys("default").members(MemberKind.INSTANCE), "silent s")
    for _ in range(3):  # silent members are seen, then removed
        await router.read()
    reader = as_user("baton-reader")
    assert [each.id for each in await reader.read(MemberKind.ROUTER)] == ["router-1"]
    assert "prefill-0" in [each.id for each in await reader.read()]
    assert await router.next_note(0.01) is None
    await router.send_note(b"load")
    assert await router.next_note(5.0) == b"load"
    assert await router.leave("router-1", "a", MemberKind.ROUTER)


@pytest.mark.parametrize("user", ["baton-router", "baton-reader"])
async def test_a_controllers_silent_entry_stops_no_reading(as_user: Open, user: str) -> None:
    """A controller that is started again leaves its former entry behind. Routers remove it; `baton-reader` may not."""
    controller, reading = as_user("baton-controller"), as_user(user)
    key = Keys("default").members(MemberKind.CONTROLLER)
    await controller._redis.sadd(key, "controller silent")
    assert await controller.claim(beat(CONTROLLER, MemberKind.CONTROLLER, agent="c")) == Claimed()
    for _ in range(3):
        assert [each.id for each in await reading.read(MemberKind.CONTROLLER)] == [CONTROLLER]
    left = b"controller silent" in await controller._redis.smembers(key)
    assert left is (user == "baton-reader")
    assert await controller.leave(CONTROLLER, "c", MemberKind.CONTROLLER)


async def test_a_lock_without_an_owner_is_taken_back_by_the_names_agent(as_user: Open) -> None:
    agent = as_user("agent-of-decode-0")
    assert await agent.claim(beat("decode-0", agent="z")) == Claimed()
    await agent._redis.set(Keys("default").lock(MemberKind.INSTANCE, "decode-0"), "nobody")
    assert await agent.beat(beat("decode-0", agent="z", seq=1)) == Beaten()
    assert await agent.leave("decode-0", "z")


async def test_no_user_can_do_more(as_user: Open) -> None:
    keys = Keys("default")
    other, router = keys.beat(MemberKind.INSTANCE, "prefill-9", "x"), keys.beat(MemberKind.ROUTER, "router-9", "x")
    refused: dict[str, list[tuple[str, ...]]] = {
        "agent-of-decode-0": [
            ("SET", other, "x"), ("SET", keys.lock(MemberKind.INSTANCE, "prefill-9"), "x"), ("SET", router, "x"),
            ("HSET", keys.posted("prefill-9", "x", 1), "f", "x"), ("SET", keys.epoch("prefill-9"), "1"),
        ],
        "baton-agent": [
            ("SET", router, "x"), ("SET", keys.lock(MemberKind.ROUTER, "router-9"), "x"), ("PUBLISH", keys.notes, "x"),
        ],
        "baton-router": [
            ("SET", other, "x"), ("SET", keys.epoch("prefill-9"), "1"), ("HSET", keys.posted("p", "x", 1), "f", "x"),
            ("HMGET", keys.posted("p", "x", 1), "f"), ("PUBLISH", "other", "x"),
        ],
        "baton-controller": [("SET", other, "x"), ("SET", router, "x"), ("SET", keys.epoch("prefill-9"), "1")],
        "baton-reader": [
            ("SET", other, "x"), ("SREM", keys.members(MemberKind.INSTANCE), "x"),
            ("PUBLISH", keys.changed(MemberKind.ROUTER), "x"),
        ],
    }  # fmt: skip
    all_users = [("KEYS", "*"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("EVAL", "return 1", "0"), ("SET", "x", "y"),
                 ("ACL", "LIST"), ("SHUTDOWN",), ("GET", "baton:another:epoch:x")]  # fmt: skip
    for user, words in refused.items():
        registry = as_user(user)
        for command in (*words, *all_users):
            with pytest.raises(NoPermissionError):
                await registry._redis.execute_command(*command)
    with pytest.raises(RegistryDown):
        await as_user("").read()
    assert {*USERS} <= set(refused)
