"""`baton status`, with agents that answer only signed requests, and with registry entries that prove nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from support.fake_engine import FakeEngine

from baton.commands.status import Asker, _ask_all, _print
from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberKind, MemberState, encode
from cluster.registry.memory import MemoryRegistry
from engine.agent.http import Gate, agent_app, listen
from kvtransfer.keys import instance_key
from kvtransfer.proving import FleetProofs
from kvtransfer.ticket import SigningKey

FLEET = SigningKey("k1", b"f" * 32)
STRANGERS = SigningKey("k1", b"x" * 32)
NAME = InstanceId("decode-0")


class Tells:
    def state(self) -> dict[str, Any]:
        return {
            "instance": NAME, "role": "decode", "state": "ready", "detail": "", "engine": "http://127.0.0.1:9",
            "credits": 7, "epoch": 1, "load": {"running": 1, "waiting": 0, "kv_usage": 0.5},
        }  # fmt: skip

    def is_ready(self) -> bool:
        return True

    def metrics(self) -> str:
        return ""

    def ask_drain(self, deadline_s: float) -> None:
        raise AssertionError

    def ask_resume(self) -> None:
        raise AssertionError

    def ask_role(self, role: Role) -> str | None:
        raise AssertionError


@dataclass
class Fleet:
    registry: MemoryRegistry
    engine: FakeEngine
    stack: AsyncExitStack

    async def told(self, key: SigningKey | None) -> dict[str, Any]:
        return await _ask_all(self.registry, "redis://x", Asker(None if key is None else lambda: (key,)))

    async def server(self, app: web.Application) -> str:
        runner, url = await listen(app, "127.0.0.1", 0)
        self.stack.push_async_callback(runner.cleanup)
        return url

    async def joins(self, agent_url: str, **more: Any) -> None:
        fields: dict[str, Any] = {"state": MemberState.READY, "where": "elsewhere:1", "sent_at": time.time(), **more}
        await self.registry.beat(Heartbeat(id=NAME, agent="a", url=self.engine.url, agent_url=agent_url, **fields))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        registry = MemoryRegistry(time.monotonic, proofs=FleetProofs(lambda: (FLEET,), time.time))
        yield Fleet(registry, await stack.enter_async_context(FakeEngine("decode-0")), stack)


async def test_status_signs_its_questions(fleet: Fleet) -> None:
    gate = Gate(NAME, ticket_keys=lambda: (instance_key(FLEET, NAME),))
    await fleet.joins(await fleet.server(agent_app(Tells(), Tells(), gate)))
    (told,) = (await fleet.told(FLEET))["instances"]
    assert (told["state"], told["credits"]) == ("ready", 7)
    (told,) = (await fleet.told(STRANGERS))["instances"]
    assert (told["state"], told["credits"]) == ("ready", 0), "the state is the heartbeat's, and the engine answers"
    assert "only requests that the fleet's --ticket-keys-file signed" in told["detail"]


async def test_an_agent_of_another_machines_loopback_is_not_taken_for_lost(fleet: Fleet) -> None:
    await fleet.joins("http://127.0.0.1:9")
    (told,) = (await fleet.told(FLEET))["instances"]
    assert (told["state"], "on its own machine only" in told["detail"]) == ("ready", True)
    other = agent_app(Tells(), Tells(), Gate("another"))
    await fleet.joins(await fleet.server(other), seq=1)
    (told,) = (await fleet.told(FLEET))["instances"]
    assert (told["state"], "on its own machine only" in told["detail"]) == ("ready", True)
    await fleet.engine.stop()
    assert (await fleet.told(FLEET))["instances"][0]["state"] == "unwell"


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b"", b'{"instance": "decode-0"}', b"[" * 5000])
async def test_a_server_that_is_no_agent_and_no_router_counts_as_lost(fleet: Fleet, body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    url = await fleet.server(app)
    await fleet.joins(url, where=f"{socket.gethostname()}:1")
    router = Heartbeat(
        id=InstanceId("router-1"), agent="r", kind=MemberKind.ROUTER, state=MemberState.READY, url=url, agent_url=url,
        sent_at=time.time(),
    )  # fmt: skip
    await fleet.registry.beat(router)
    told = await fleet.told(FLEET)
    assert told["instances"][0]["state"] == "lost"
    assert told["routers"][0]["state"] == "lost"


async def test_a_member_that_does_not_prove_itself_is_named_and_not_asked(fleet: Fleet) -> None:
    fleet.registry.plant(encode(Heartbeat(id=NAME, agent="a", url="http://127.0.0.1:9", sent_at=time.time())))
    told = await fleet.told(FLEET)
    assert told["instances"] == []
    assert "carries no proof" in told["ignored"][NAME]


async def test_a_password_in_the_registrys_address_is_not_shown() -> None:
    registry = MemoryRegistry(time.monotonic)
    told = await _ask_all(registry, "redis://reader:secret@127.0.0.1:6379", Asker(None))
    assert told["registry"]["url"] == "redis://reader@127.0.0.1:6379"


def test_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    instance = {
        "instance": NAME, "role": "decode", "state": "failed", "detail": "OSError: [/models/x] is not [auto, half]",
        "credits": 0, "epoch": 1, "engine": "http://[fd00::12]:8100", "load": None,
    }  # fmt: skip
    _print({"routers": [], "instances": [instance], "registry": {"url": "redis://[::1]:6379"}})
    shown = capsys.readouterr().out
    assert "[fd00::12]:8100" in shown
    assert "OSError: [/models/x] is not [auto, half]" in shown
