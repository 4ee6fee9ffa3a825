"""Routers with the fleet's ticket keys accept only members that prove themselves, and send no key to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.fake_engine import FakeEngine
from support.served import answering, served

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.keys import digest
from cluster.registry.membership import Heartbeat, MemberKind, MemberState, encode
from cluster.registry.memory import MemoryRegistry
from cluster.registry.proofs import proven
from cluster.registry.registry import DEFAULT_CLUSTER
from cluster.spec import Tenant
from kvtransfer.keys import InstanceKeys, instance_key
from kvtransfer.proving import AGE_S, FleetProofs, InstanceProofs
from kvtransfer.signed import READER
from kvtransfer.ticket import SigningKey
from router.admin.peers import FROM
from router.api.config import RouterConfig

FLEET = SigningKey("k1", b"f" * 32)
CLIENT = {"Authorization": "Bearer sk-clients-own"}
PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 2}


def agent_of(name: str, *keys: SigningKey) -> InstanceProofs:
    """The proofs that the agent of an instance can make."""
    mine = tuple(instance_key(key, InstanceId(name)) for key in keys or (FLEET,))
    return InstanceProofs(lambda: InstanceKeys(InstanceId(name), mine), time.time)


@dataclass
class Stage:
    registry: MemoryRegistry
    stack: AsyncExitStack
    client: aiohttp.ClientSession
    endpoint: str = ""
    admin: str = ""
    seq: int = 0

    async def engine(self, name: str) -> FakeEngine:
        return await self.stack.enter_async_context(FakeEngine(name))

    def beat(self, name: str, engine: FakeEngine, **more: Any) -> Heartbeat:
        self.seq += 1
        fields: dict[str, Any] = {
            "agent": f"agent-{name}", "epoch": 1, "seq": self.seq, "role": Role.BOTH, "state": MemberState.READY,
            "credits": 8, "url": engine.url, "models": ({"id": "fake"},), "sent_at": time.time(),
        }  # fmt: skip
        return Heartbeat(id=InstanceId(name), **{**fields, **more})

    def says(self, beat: Heartbeat, proofs: Any) -> bytes:
        payload = proven(beat, DEFAULT_CLUSTER, proofs)
        self.registry.plant(payload)
        return payload

    async def serve(self, **settings: Any) -> None:
        config = RouterConfig(port=0, admin_port=0, drain_s=0.1, has_registry=True, **settings)
        self.endpoint, self.admin = await self.stack.enter_async_context(served(config, self.registry))

    async def get(self, path: str, **more: Any) -> Any:
        async with self.client.get(self.admin + path, **more) as answer:
            return await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def sees(self, *names: str) -> None:
        """Wait until these instances, and no others, are up for the router."""
        async with asyncio.timeout(10):
            while {each["id"] for each in (await self.get("/ready"))["instances"] if each["state"] == "up"} != {*names}:
                await asyncio.sleep(0.01)

    async def hears(self, *names: str) -> None:
        """Wait until the router ignores these members, and no others, as unproven."""
        async with asyncio.timeout(10):
            while {*(await self.get("/ready")).get("unproven", ())} != {*names}:
                await asyncio.sleep(0.01)

    async def complete(self, **headers: str) -> int:
        async with self.client.post(f"{self.endpoint}/v1/completions", json=PROMPT, headers=headers) as answer:
            return answer.status


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        proofs = FleetProofs(lambda: (FLEET,), time.time)
        yield Stage(MemoryRegistry(time.monotonic, proofs=proofs), stack, client)


def open_registry(stage: Stage, proofs: FleetProofs | None) -> None:
    """Replace the fixture's registry by one with these proofs."""
    stage.registry = MemoryRegistry(time.monotonic, proofs=proofs)


async def test_a_false_instance_gets_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    good, false = await stage.engine("good"), await stage.engine("false")
    await stage.serve(ticket_keys=lambda: (FLEET,))
    stage.says(stage.beat("good", good), agent_of("good"))
    wrong = {
        "unsigned": None,
        "strangers": agent_of("strangers", SigningKey("k1", b"x" * 32)),
        "other-key": agent_of("other-key", SigningKey("k9", b"f" * 32)),
    }
    for name, proofs in wrong.items():
        stage.says(stage.beat(name, false), proofs)
    mine = proven(stage.beat("good", good), DEFAULT_CLUSTER, agent_of("good"))
    stage.registry.plant(mine.replace(b'"id":"good"', b'"id":"moved"'))  # a genuine proof under another name
    await stage.sees("good")
    await stage.hears("moved", *wrong)
    for _ in range(4):
        assert await stage.complete(**CLIENT) == 200
    assert len(good.generated) == 4 and not false.bodies
    assert {each["Authorization"] for each in good.headers if "Authorization" in each} == {CLIENT["Authorization"]}
    because = (await stage.get("/ui/data"))["unproven"]
    assert "carries no proof" in because["unsigned"]
    assert "is wrong" in because["strangers"] and "is wrong" in because["moved"]
    assert "not valid here" in because["other-key"]
    assert "baton_registry_unproven 4.0" in await stage.get("/metrics")
    lines = [line for line in caplog.messages if "does not prove itself" in line]
    assert len(lines) == 4 and len(set(lines)) == 4, "each is logged once"


async def test_a_copy_of_an_old_heartbeat_brings_no_instance_back(stage: Stage) -> None:
    good, gone = await stage.engine("good"), await stage.engine("gone")
    await stage.serve(ticket_keys=lambda: (FLEET,))
    stage.says(stage.beat("good", good), agent_of("good"))
    for name, age_s in (("old", AGE_S + 5), ("future", -AGE_S - 5)):
        stage.says(stage.beat(name, gone, sent_at=time.time() - age_s), agent_of(name))
    await stage.sees("good")
    await stage.hears("old", "future")
    because = (await stage.get("/ready"))["unproven"]
    assert "35 s old" in because["old"] and "from 3" in because["future"]


async def test_a_repeated_heartbeat_is_not_new(stage: Stage) -> None:
    """A young copy keeps a dead instance only for the rest of its ttl, however often the copy is put in again."""
    stage.registry.ttl_s = 0.4
    good, dead = await stage.engine("good"), await stage.engine("dead")
    await stage.serve(ticket_keys=lambda: (FLEET,))
    copy = stage.says(stage.beat("dead", dead), agent_of("dead"))
    stage.says(stage.beat("good", good), agent_of("good"))
    async with asyncio.timeout(10):
        while {each["id"] for each in (await stage.get("/ready"))["instances"] if each["state"] == "up"} != {"good"}:
            stage.registry.plant(copy)
            stage.says(stage.beat("good", good), agent_of("good"))
            await asyncio.sleep(0.02)
    assert not (await stage.get("/ready")).get("unproven"), "the copy is genuine, but not new"


async def test_a_false_goodbye_takes_no_instance_out(stage: Stage) -> None:
    good = await stage.engine("good")
    await stage.serve(ticket_keys=lambda: (FLEET,))
    beat = stage.beat("good", good)
    stage.says(beat, agent_of("good"))
    await stage.sees("good")
    stage.registry.plant(encode(replace(beat, state=MemberState.GONE, seq=beat.seq + 1)))
    await stage.hears("good")
    stage.says(stage.beat("good", good), agent_of("good"))
    await stage.sees("good")
    assert await stage.complete() == 200


@pytest.mark.parametrize("step", ["both", "agents first", "routers first", "old is gone"])
async def test_keys_are_replaced_in_any_order(stage: Stage, step: str) -> None:
    new = SigningKey("k2", b"n" * 32)
    routers, agents = {
        "both": ((FLEET, new), (FLEET, new)), "agents first": ((FLEET,), (FLEET, new)),
        "routers first": ((new, FLEET), (FLEET,)), "old is gone": ((new,), (FLEET, new)),
    }[step]  # fmt: skip
    open_registry(stage, FleetProofs(lambda: routers, time.time))
    good = await stage.engine("good")
    await stage.serve(ticket_keys=lambda: routers)
    stage.says(stage.beat("good", good), agent_of("good", *agents))
    await stage.sees("good")
    assert not (await stage.get("/ready")).get("unproven")


async def test_while_a_fleet_is_upgraded_members_without_a_proof_may_be_accepted(stage: Stage) -> None:
    """Members with a wrong proof are never accepted."""
    open_registry(stage, FleetProofs(lambda: (FLEET,), time.time, accepts_unproven=True))
    old, false = await stage.engine("old"), await stage.engine("false")
    await stage.serve(ticket_keys=lambda: (FLEET,))
    stage.says(stage.beat("old", old), None)
    stage.says(stage.beat("false", false), agent_of("false", SigningKey("k1", b"x" * 32)))
    await stage.sees("old")
    await stage.hears("old", "false")
    assert await stage.complete(**CLIENT) == 200 and not false.generated
    assert not any("Authorization" in each for each in old.headers), "the engine may be a stranger's"


async def test_without_ticket_keys_no_key_goes_to_engines(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    open_registry(stage, None)
    anybodys = await stage.engine("anybodys")
    await stage.serve(engine_key="sk-engines-own")
    stage.says(stage.beat("anybodys", anybodys), None)
    await stage.sees("anybodys")
    assert await stage.complete(**CLIENT) == 200
    async with stage.client.post(f"{stage.endpoint}/v1/embeddings", json={"input": "x"}, headers=CLIENT) as answer:
        await answer.read()
    async with stage.client.get(f"{stage.endpoint}/v1/responses/resp_others", headers=CLIENT) as answer:
        await answer.read()
    asked = [path for path, _ in anybodys.bodies if path.startswith("/v1/responses/")]
    assert len(asked) == 2, "a first request asks whether the engine has that response, a second fetches it"
    assert anybodys.headers and not any("Authorization" in each for each in anybodys.headers)
    assert any("holders of the registry's password" in line for line in caplog.messages)


# --- routers ----------------------------------------------------------------------------------------------------------


async def false_router(stage: Stage, name: str, body: bytes) -> tuple[str, list[dict[str, str]]]:
    """Start a server that answers everything with `body` in the name of a router. Return its URL, and the headers that
    it got.
    """
    heard: list[dict[str, str]] = []

    async def answer(http: web.Request) -> web.Response:
        heard.append(dict(http.headers))
        echo = {READER: http.headers[READER]} if READER in http.headers else {}
        return web.Response(body=body, content_type="application/json", headers={FROM: name, **echo})

    return await stage.stack.enter_async_context(answering(answer)), heard


def announced(name: str, url: str) -> Heartbeat:
    return Heartbeat(
        id=InstanceId(name),
        agent="f",
        kind=MemberKind.ROUTER,
        state=MemberState.READY,
        url=url,
        agent_url=url,
        sent_at=time.time(),
    )


ASKS = ("/ui/data", "/metrics?all=1", "/explain", "/explain/nobodys")


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_false_router_gets_no_key(stage: Stage, keyed: bool) -> None:
    if not keyed:
        open_registry(stage, None)
    tenants = {"tenants": {"acme": Tenant()}, "tenant_keys": {"acme": lambda: (digest("sk-acme"),)}}
    await stage.serve(
        ticket_keys=(lambda: (FLEET,)) if keyed else None, admin_keys=lambda: (digest("sk-operator"),), **tenants
    )
    url, heard = await false_router(stage, "router-false", b"{}")
    stage.registry.plant(encode(announced("router-false", url)))
    if keyed:
        await stage.hears("router-false")
    else:
        async with asyncio.timeout(10):
            while len((await stage.get("/ui/data"))["routers"]) < 2:
                await asyncio.sleep(0.01)
    for key in ("sk-operator", "sk-acme"):
        for path in ASKS:
            await stage.get(path, headers={"Authorization": f"Bearer {key}"})
    assert bool(heard) is not keyed
    assert not any("sk-" in value for headers in heard for value in headers.values())
    assert {headers.get(READER) for headers in heard} <= {None, "acme"}


async def test_a_router_that_does_not_know_tenants_questions_is_not_believed(stage: Stage) -> None:
    """A router of an older release would answer a tenant's question as an operator's."""
    open_registry(stage, None)
    await stage.serve(tenants={"acme": Tenant()}, tenant_keys={"acme": lambda: (digest("sk-acme"),)})

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"id": "x", "text": "another tenant's"}, headers={FROM: "router-old"})

    url = await stage.stack.enter_async_context(answering(answer))
    stage.registry.plant(encode(announced("router-old", url)))
    async with asyncio.timeout(10):
        while "text" not in await stage.get("/explain/x"):  # an operator gets the answer of every router
            await asyncio.sleep(0.01)
    told = await stage.get("/explain/x", headers={"Authorization": "Bearer sk-acme"})
    assert "does not say on whose behalf" in told["error"]["message"]


ODD = (
    b"{}", b"[]", b"null", b"", b"\xff", b'{"requests": [{}]}', b'{"requests": 3}', b'{"requests": [{"ago_s": "x"}]}',
    b'{"router": "r", "line": -1}', b"[" * 5000, b'{"lately": {"now": {"values": {"ttft": {"99999": 1}}}}}',
)  # fmt: skip


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
async def test_a_wrong_answer_of_a_router_is_named_and_the_page_is_there(stage: Stage, body: bytes) -> None:
    open_registry(stage, None)
    await stage.serve()
    url, _ = await false_router(stage, "router-odd", body)
    stage.registry.plant(encode(announced("router-odd", url)))
    async with asyncio.timeout(10):
        while len((told := await stage.get("/ui/data")).get("routers", [0, 0])) < 2:
            await asyncio.sleep(0.01)
    assert [each["state"] for each in told["routers"]] == ["this one", "silent"]
    assert "not as this router knows it" in told["routers"][1]["detail"]
    listed = await stage.get("/explain")
    assert listed["requests"] == [] and "router-odd" in listed["silent"]
    assert "baton_open_requests" in await stage.get("/metrics?all=1")
    async with stage.client.post(f"{stage.admin}/quarantine/nobody") as answer:
        assert answer.status == 404
