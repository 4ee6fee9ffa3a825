"""Several routers of one registry: each of them answers for all, also while the registry is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web
from support.fake_engine import FakeEngine
from support.hands_over import hands_over
from support.served import served

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.keys import digest
from cluster.registry.membership import Heartbeat, MemberKind, MemberState
from cluster.registry.memory import MemoryRegistry
from cluster.spec import Tenant
from kvtransfer.signed import BY, LIFE_S, READER, SIGNATURE, TO, Ask, signed_headers
from kvtransfer.ticket import SKEW_S, SigningKey
from router.admin.peers import FROM, PeerAnswer, RouterPeers
from router.api.config import RouterConfig
from router.fleet.quarantine import WORDS_MAX

PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 5}
FLEET_KEY = SigningKey("k1", b"s" * 32)


class Own(MemoryRegistry):
    """One process' connection to a registry that all share: `close` does not close the registry."""

    def __init__(self, shared: MemoryRegistry) -> None:
        super().__init__(time.monotonic)
        self.__dict__ = shared.__dict__

    async def close(self) -> None:
        return


@dataclass
class Replicas:
    """Routers, a prefill and a decode engine, and an agent that records the orders it gets."""

    stack: AsyncExitStack
    client: aiohttp.ClientSession
    registry: MemoryRegistry = field(default_factory=lambda: MemoryRegistry(time.monotonic))
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    admins: list[str] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)
    told: list[tuple[str, Any]] = field(default_factory=list)
    seq: int = 0

    async def engine(self, name: str, role: Role, agent_url: str | None = None) -> None:
        if name not in self.engines:
            engine = await self.stack.enter_async_context(FakeEngine(name))
            engine.peers, self.engines[name] = self.engines, engine
        self.seq += 1
        beat = Heartbeat(
            id=InstanceId(name), agent="agent-" + name.replace("@", "-"), epoch=1, seq=self.seq, role=role,
            state=MemberState.READY, credits=8, url=self.engines[name].url, models=({"id": "fake"},),
            agent_url=agent_url,
        )  # fmt: skip
        await self.registry.beat(beat)

    async def agent(self) -> str:
        async def hear(http: web.Request) -> web.Response:
            self.told.append((http.path, await http.json()))
            return web.json_response({"state": "draining"}, status=202)

        app = web.Application()
        app.router.add_post("/{what}", hear)
        runner = web.AppRunner(app)
        await runner.setup()
        self.stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def router(self, **settings: Any) -> str:
        """Start a router, and return its admin URL."""
        config = RouterConfig(port=0, admin_port=0, drain_s=1.0, has_registry=True, **hands_over(settings))
        endpoint, admin = await self.stack.enter_async_context(served(config, Own(self.registry)))
        self.endpoints.append(endpoint)
        self.admins.append(admin)
        return admin

    async def see_each_other(self) -> None:
        async with asyncio.timeout(5):
            for admin in self.admins:
                while len((await self.get(admin, "/ui/data"))[1].get("routers", ())) < len(self.admins):
                    await asyncio.sleep(0.02)
                while not (await self.get(admin, "/ready"))[1]["ready"]:
                    await asyncio.sleep(0.02)

    async def get(self, admin: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self.client.get(admin + path, **more) as answer:
            as_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if as_json else answer.text())

    async def states(self, admin: str) -> dict[str, str]:
        return {each["id"]: each["state"] for each in (await self.get(admin, "/ready"))[1]["instances"]}

    async def change(self, method: str, admin: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self.client.request(method, admin + path, **more) as answer:
            return answer.status, await answer.json()

    async def complete(self, endpoint: str, name: str, **headers: str) -> int:
        sent = {"X-Request-Id": name, **headers}
        async with self.client.post(f"{endpoint}/v1/completions", json=PROMPT, headers=sent) as answer:
            await answer.read()
            return answer.status


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        found = Replicas(stack, client)
        agent = await found.agent()
        await found.engine("p", Role.PREFILL, agent)
        await found.engine("d", Role.DECODE)
        yield found


async def two(replicas: Replicas, **settings: Any) -> tuple[str, str]:
    first, second = await replicas.router(**settings), await replicas.router(**settings)
    await replicas.see_each_other()
    return first, second


async def test_any_router_explains_any_request(replicas: Replicas) -> None:
    first, second = await two(replicas)
    assert await replicas.complete(replicas.endpoints[0], "one") == 200
    assert await replicas.complete(replicas.endpoints[1], "two") == 200
    for name, at in (("one", first), ("two", second)):
        own = (await replicas.get(at, f"/explain/{name}"))[1]
        other = (await replicas.get(first if at is second else second, f"/explain/{name}"))[1]
        assert own["turns"] == other["turns"]
        assert own["router"] == other["router"]
    listed = [(await replicas.get(admin, "/explain?n=10"))[1]["requests"] for admin in (first, second)]
    assert [{each["client_id"] for each in one} for one in listed] == [{"one", "two"}] * 2
    assert len((await replicas.get(first, "/explain?n=1"))[1]["requests"]) == 1
    status, said = await replicas.get(first, "/explain/nobodys")
    assert (status, "No request `nobodys`" in said["error"]["message"]) == (404, True)


async def test_requests_with_one_client_id_at_several_routers_are_found_newest_first(replicas: Replicas) -> None:
    first, second = await two(replicas)
    for number in (0, 1, 1, 0):
        await asyncio.sleep(0.05)  # routers report ages, each on its own clock: make the ages differ
        assert await replicas.complete(replicas.endpoints[number], "same") == 200
    told = [(await replicas.get(admin, "/explain/same"))[1] for admin in (first, second)]
    assert [each["named_alike"] for each in told] == [4, 4]
    assert told[0]["id"] == told[1]["id"]
    assert told[0]["router"] == told[1]["router"]
    newest = (await replicas.get(first, "/explain?n=1"))[1]["requests"]
    assert newest[0]["id"] == told[0]["id"]
    assert (await replicas.get(second, f"/explain/{told[0]['id']}"))[1]["id"] == told[0]["id"]


async def test_the_page_and_all_metrics_add_up(replicas: Replicas) -> None:
    first, second = await two(replicas)
    for number in range(5):
        assert await replicas.complete(replicas.endpoints[number % 2], f"r{number}") == 200
    for admin in (first, second):
        told = (await replicas.get(admin, "/ui/data"))[1]
        assert told["windows"]["now"]["served"] == 5
        assert sum(pair["handed_over"] for pair in told["pairs"]) == 5
        assert {each["client_id"] for each in told["requests"]} == {f"r{number}" for number in range(5)}
        assert [each["state"] for each in told["routers"]] == ["this one", "answers"]
        assert told["bottleneck"]["where"] == "nowhere"
        both = (await replicas.get(admin, "/metrics?all=1"))[1]
        assert 'baton_requests_total{outcome="served",path="/v1/completions",way="handoff"} 5.0' in both
        assert 'baton_handoffs_total{result="ok"} 5.0' in both
        assert "baton_routers_silent 0.0" in both
        own = (await replicas.get(admin, "/metrics"))[1]
        assert 'way="handoff"} 5.0' not in own


async def test_the_quarantine_of_a_rank_is_told_to_other_routers(replicas: Replicas) -> None:
    first, second = await two(replicas)
    await replicas.engine("e@1", Role.DECODE)
    async with asyncio.timeout(5):
        while "e@1" not in await replicas.states(first):
            await asyncio.sleep(0.02)
    status, said = await replicas.change("POST", first, "/quarantine/e@1", json={"because": "a test"})
    assert (status, set(said["routers"].values())) == (200, {"told"})
    assert (await replicas.get(second, "/quarantine"))[1] == {"quarantined": {"e@1": "a test"}}


async def test_quarantine_holds_at_every_router_and_at_later_ones(replicas: Replicas) -> None:
    first, second = await two(replicas)
    await replicas.engine("d2", Role.DECODE)
    status, said = await replicas.change("POST", first, "/quarantine/d", json={"because": "answers wrong"})
    assert status == 200
    assert set(said["routers"].values()) == {"told"}
    assert len(said["routers"]) == 2
    assert (await replicas.get(second, "/quarantine"))[1] == {"quarantined": {"d": "answers wrong"}}
    third = await replicas.router()
    await replicas.see_each_other()
    for admin in (first, second, third):
        async with asyncio.timeout(5):  # a new router learns it from the others' next announcement
            while (await replicas.states(admin))["d"] != "quarantined":
                await asyncio.sleep(0.02)
    for number, endpoint in enumerate(replicas.endpoints):
        assert await replicas.complete(endpoint, f"q{number}") == 200
    assert not replicas.engines["d"].generated
    status, said = await replicas.change("DELETE", third, "/quarantine/d")
    assert (status, said["quarantined"]) == (200, False)
    async with asyncio.timeout(3):
        while (await replicas.get(first, "/quarantine"))[1]["quarantined"]:
            await asyncio.sleep(0.02)
    assert (await replicas.change("POST", first, "/quarantine/nobody"))[0] == 404


async def test_an_instance_that_other_routers_words_displace_is_logged_and_counted_once(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    """Several routers can set more instances aside together than any of them announces. One that has not heard so goes
    on announcing what was displaced.
    """
    admin = await replicas.router()
    await replicas.see_each_other()
    status, said = await replicas.change("POST", admin, "/quarantine/d", json={"because": "slow"})
    assert status == 200
    (name,) = said["routers"]
    crowd = {f"x{number}": (9, True, "", "router-else") for number in range(WORDS_MAX)}
    stale = {"d": (1, True, "slow", name)}
    for seq in range(1, 4):
        for router, words in (("else", crowd), ("stale", stale)):
            await replicas.registry.beat(
                Heartbeat(
                    id=InstanceId(f"router-{router}"), agent=router, seq=seq, kind=MemberKind.ROUTER,
                    state=MemberState.READY, url="http://127.0.0.1:9", quarantined=words,
                )
            )  # fmt: skip
        await replicas.engine(f"e{seq}", Role.DECODE)  # seen by a reading that has the announcements, too
        async with asyncio.timeout(5):
            while (await replicas.states(admin)).get(f"e{seq}") != "up":
                await asyncio.sleep(0.02)
        assert (await replicas.states(admin))["d"] == "up"
    assert "d" not in (await replicas.get(admin, "/quarantine"))[1]["quarantined"]
    assert "baton_quarantine_displaced_total 1.0" in (await replicas.get(admin, "/metrics"))[1]
    (line,) = [each.getMessage() for each in caplog.records if "is not set aside any more" in each.getMessage()]
    assert line.startswith("d is not set aside any more") and "slow" in line and "DELETE /quarantine/ID" in line


async def test_drain_goes_to_the_agent(replicas: Replicas) -> None:
    admin = await replicas.router()
    status, said = await replicas.change("POST", admin, "/drain/p", json={"deadline_s": 5})
    assert (status, said) == (202, {"state": "draining"})
    assert (await replicas.change("POST", admin, "/resume/p"))[0] == 202
    assert replicas.told == [("/drain", {"deadline_s": 5}), ("/resume", {})]
    status, said = await replicas.change("POST", admin, "/drain/d")
    assert (status, "no agent" in said["error"]["message"]) == (409, True)
    assert (await replicas.change("POST", admin, "/drain/nobody"))[0] == 404


async def test_without_its_registry_a_router_goes_on_and_tells_so_and_catches_up(replicas: Replicas) -> None:
    first, second = await two(replicas)
    replicas.registry.down = True
    async with asyncio.timeout(5):
        while (await _stale_s(replicas, first)) < 0.05:
            await asyncio.sleep(0.02)
    assert await replicas.complete(replicas.endpoints[1], "meanwhile") == 200
    assert (await replicas.get(first, "/explain/meanwhile"))[0] == 200, "the router remembers its peers"
    status, said = await replicas.change("POST", first, "/quarantine/p")
    assert (status, set(said["routers"].values())) == (200, {"told"})
    assert "p" in (await replicas.get(second, "/quarantine"))[1]["quarantined"]
    assert (await replicas.get(first, "/ready"))[1]["registry"] == "away"
    replicas.registry.down = False
    await replicas.engine("d3", Role.DECODE)
    async with asyncio.timeout(5):
        while (await _stale_s(replicas, first)) > 0:
            await asyncio.sleep(0.02)
        while len((await replicas.get(first, "/ready"))[1]["instances"]) < 3:
            await asyncio.sleep(0.02)


async def _stale_s(replicas: Replicas, admin: str) -> float:
    lines = (await replicas.get(admin, "/metrics"))[1].splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("baton_registry_stale_seconds "))


async def test_a_router_that_does_not_answer_is_named(replicas: Replicas) -> None:
    admin = await replicas.router()
    silent = Heartbeat(
        id=InstanceId("router-gone"), agent="gone", kind=MemberKind.ROUTER, state=MemberState.READY, url="http://127.0.0.1:9",
        agent_url="http://127.0.0.1:9",
    )  # fmt: skip
    another = Heartbeat(
        id=InstanceId("router-else"), agent="else", kind=MemberKind.ROUTER, state=MemberState.READY, url="http://127.0.0.1:9",
        agent_url=admin,
    )  # fmt: skip
    await replicas.registry.beat(silent)
    await replicas.registry.beat(another)
    async with asyncio.timeout(5):
        while len(said := (await replicas.get(admin, "/ui/data"))[1]["routers"]) < 3:
            await asyncio.sleep(0.02)
    because = {each["router"]: each.get("detail", "") for each in said}
    assert "cannot be reached" in because["router-gone"]
    assert "another one answers" in because["router-else"], "the false router's address is this router's own"
    assert "baton_routers_silent 2.0" in (await replicas.get(admin, "/metrics?all=1"))[1]
    message = (await replicas.get(admin, "/explain/nobodys"))[1]["error"]["message"]
    assert "Not asked: router-" in message


async def test_pages_of_other_sites_change_nothing(replicas: Replicas) -> None:
    admin = await replicas.router()
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        status, said = await replicas.change("POST", admin, "/quarantine/p", headers=headers)
        assert (status, said["error"]["type"]) == (403, "PermissionDeniedError")
    rebound = {"Host": "evil.example:8001", "Origin": "http://evil.example:8001"}
    assert (await replicas.change("POST", admin, "/quarantine/p", headers=rebound))[0] == 403
    assert (await replicas.get(admin, "/ui/data", headers=rebound))[0] == 403, "DNS rebinding"
    assert (await replicas.get(admin, "/ui/data", headers={"Host": "localhost:8001"}))[0] == 200
    assert (await replicas.change("POST", admin, "/quarantine/p", headers={"Origin": admin}))[0] == 200


async def test_a_tenant_sees_its_own_at_any_router_and_changes_nothing(replicas: Replicas) -> None:
    tenants = {"acme": Tenant(key_file="a"), "beta": Tenant(key_file="b")}
    keys = {"acme": lambda: (digest("key-a"),), "beta": lambda: (digest("key-b"),)}
    first, second = await replicas.router(tenants=tenants, tenant_keys=keys), ""
    second = await replicas.router(tenants=tenants, tenant_keys=keys)
    await replicas.see_each_other()
    as_acme, as_beta = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}
    assert await replicas.complete(replicas.endpoints[0], "acmes", **as_acme) == 200
    for admin in (first, second):
        assert (await replicas.get(admin, "/explain/acmes", headers=as_acme))[0] == 200
        assert (await replicas.get(admin, "/explain/acmes", headers=as_beta))[0] == 404
        assert (await replicas.get(admin, "/ui/data", headers=as_beta))[1]["requests"] == []
        assert len((await replicas.get(admin, "/ui/data", headers=as_acme))[1]["requests"]) == 1
        assert (await replicas.get(admin, "/explain/acmes"))[0] == 200, "an operator on this machine"
        assert (await replicas.change("POST", admin, "/quarantine/p", headers=as_acme))[0] == 403
        assert (await replicas.get(admin, "/ui/data", headers={"Authorization": "Bearer no"}))[0] == 401


async def test_from_another_machine_an_operators_key_is_needed(replicas: Replicas) -> None:
    """For the router, a client with another address of this machine (127.0.0.2) is another machine."""
    tenants, keys = {"acme": Tenant(key_file="a")}, {"acme": lambda: (digest("key-a"),)}
    settings = {"tenants": tenants, "tenant_keys": keys, "admin_keys": lambda: (digest("key-o"),)}
    first, second = await two(replicas, ticket_keys=lambda: (FLEET_KEY,), **settings)
    operator, tenant = {"Authorization": "Bearer key-o"}, {"Authorization": "Bearer key-a"}
    elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=elsewhere) as client:
        away = Replicas(replicas.stack, client, admins=[first])
        for path in ("/ui/data", "/metrics", "/metrics?all=1", "/explain", "/quarantine"):
            assert (await away.get(first, path))[0] == 401, path
            assert (await away.get(first, path, headers=operator))[0] == 200, path
        assert (await away.get(first, "/metrics", headers=tenant))[0] == 403
        assert (await away.get(first, "/ui/data", headers=tenant))[0] == 200
        assert (await away.get(first, "/ui"))[0] == 200, "the page itself tells nothing"
        name = (await away.get(first, "/ui/data", headers=operator))[1]["router"]
        ask = Ask(method="GET", path="/metrics", by="x", to=name, reader="acme")
        vouched = signed_headers(ask, FLEET_KEY, now=time.time(), nonce=bytes(16))
        assert (await away.get(first, "/metrics", headers=vouched))[0] == 403, "it is signed for a tenant"
        assert (await away.change("POST", first, "/quarantine/p"))[0] == 401
        status, said = await away.change("POST", first, "/quarantine/p", headers=operator)
        assert (status, set(said["routers"].values())) == (200, {"told"})
    assert "p" in (await replicas.get(second, "/quarantine"))[1]["quarantined"]


async def test_a_peers_answer_of_many_pieces_is_read_to_its_end() -> None:
    """An answer longer than the limit is not read beyond it."""

    async def pieces(http: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={FROM: "other"})
        await answer.prepare(http)
        for _ in range(int(http.query["n"])):
            await answer.write(b"x" * 65536)
        return answer

    app = web.Application()
    app.router.add_get("/", pieces)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    beat = Heartbeat(id=InstanceId("other"), agent="o", kind=MemberKind.ROUTER, url=url, agent_url=url)
    peers = RouterPeers("one", lambda: (beat,), None)
    found = (await peers.ask("/?n=20", None))["other"]
    assert isinstance(found, PeerAnswer)
    assert len(found.body) == 20 * 65536
    said = (await peers.ask("/?n=200", None))["other"]
    assert isinstance(said, str)
    assert "longer than" in said
    await peers.close()
    await runner.cleanup()


@pytest.mark.parametrize("name", ["a:b:c", "a%3Ab", "a/b?c=d", "a b", "ä", "%2F..%2F", "a+b", "a;b,c=@!$&'()*~"])
async def test_the_path_that_is_sent_is_the_path_that_is_signed(name: str) -> None:
    """The receiver checks the bytes of the path that came, however the client library writes the path."""
    vouched: list[bool] = []
    receiver = RouterPeers("asked", tuple, lambda: (FLEET_KEY,))

    async def answer(http: web.Request) -> web.Response:
        vouched.append(receiver.vouched(http.method, http.path_qs, http.headers, await http.read()))
        assert http.match_info["name"] == name
        return web.json_response({}, headers={FROM: "asked"})

    app = web.Application()
    app.router.add_get("/explain/{name:.+}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    beat = Heartbeat(
        id=InstanceId("asked"), agent="a", kind=MemberKind.ROUTER, state=MemberState.READY, url=url, agent_url=url
    )
    asker = RouterPeers("asker", lambda: (beat,), lambda: (FLEET_KEY,))
    try:
        told = await asker.ask(f"/explain/{quote(name, safe='')}", None)
        assert told == {"asked": PeerAnswer(200, b"{}")}
        assert vouched == [True]
    finally:
        await asker.close()
        await runner.cleanup()


def test_a_signature_holds_for_one_question_once() -> None:
    now = [1000.0]

    def asked(name: str = "asked", keys: tuple[SigningKey, ...] | None = (FLEET_KEY,)) -> RouterPeers:
        return RouterPeers(name, tuple, None if keys is None else lambda: keys, lambda: now[0])

    def signed(**more: str) -> dict[str, str]:
        ask = Ask(method="POST", path="/quarantine/p", body=b"{}", by="asker", to="asked", **more)
        return signed_headers(ask, FLEET_KEY, now=1000.0, nonce=bytes(16)) | {FROM: "asker"}

    good = signed()
    receiver = asked()
    assert receiver.vouched("POST", "/quarantine/p", good, b"{}")
    assert not receiver.vouched("POST", "/quarantine/p", good, b"{}"), "it was used before"
    others = (
        ("DELETE", "/quarantine/p", good, b"{}"),
        ("POST", "/quarantine/q", good, b"{}"),
        ("POST", "/quarantine/p", good, b"{ }"),
        ("POST", "/quarantine/p", {**good, BY: "another"}, b"{}"),
        ("POST", "/quarantine/p", {**good, TO: "other"}, b"{}"),
        ("POST", "/quarantine/p", {**good, READER: "acme"}, b"{}"),
        ("POST", "/quarantine/p", {**good, BY: "\ud800"}, b"{}"),
    )
    for method, path, headers, body in others:
        assert not asked().vouched(method, path, headers, body), (method, path, headers)
    assert not asked("other").vouched("POST", "/quarantine/p", good, b"{}"), "it is for another router"
    text = good[SIGNATURE]
    for odd in ("", ".", "1.k1", text[:-1], text[:-1] + "é", text.upper(), f"1.k1.{10**30}.{'0' * 32}.{'0' * 64}"):
        assert not asked().vouched("POST", "/quarantine/p", {**good, SIGNATURE: odd}, b"{}"), odd
    as_tenant = signed(reader="acme")
    assert asked().vouched("POST", "/quarantine/p", as_tenant, b"{}")
    without = {name: value for name, value in as_tenant.items() if name != READER}
    assert not asked().vouched("POST", "/quarantine/p", without, b"{}"), "a tenant's question is no operator's"
    assert not asked(keys=None).vouched("POST", "/quarantine/p", good, b"{}")
    now[0] = 1000.0 + LIFE_S + SKEW_S + 1
    assert not asked().vouched("POST", "/quarantine/p", good, b"{}"), "it is too old"
    assert not receiver.vouched("POST", "/quarantine/p", good, b"{}")
    now[0] = 900.0
    assert not asked().vouched("POST", "/quarantine/p", good, b"{}"), "it is from the future"
    now[0] = 1010.0
    assert not asked().vouched("POST", "/quarantine/p", good, b"{}"), "older than a process that has just begun"
