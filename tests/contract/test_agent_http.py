"""The agent's HTTP API, as operators and Kubernetes probes use it."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from support.idle_connections import oldest_make_room

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.keys import digest
from engine.agent import http
from engine.agent.http import Gate, agent_app, listen
from kvtransfer.keys import instance_key
from kvtransfer.signed import NONCE_BYTES, READER, SIGNATURE, TO, Ask, Judge, signed_headers
from kvtransfer.ticket import SigningKey


class Told:
    """Replaces an agent: keeps what the HTTP API asks of it."""

    def __init__(self) -> None:
        self.ready = True
        self.asked: list[object] = []

    def state(self) -> dict[str, Any]:
        return {"state": "ready" if self.ready else "starting"}

    def is_ready(self) -> bool:
        return self.ready

    def metrics(self) -> str:
        return "baton_agent_ready 1\n"

    def ask_drain(self, deadline_s: float) -> None:
        self.asked.append(deadline_s)

    def ask_resume(self) -> None:
        self.asked.append("resume")

    def ask_role(self, role: Role) -> str | None:
        self.asked.append(role)
        return "Its role is fixed." if role is Role.BOTH else None


@pytest.fixture
async def agent() -> AsyncIterator[tuple[Told, aiohttp.ClientSession]]:
    told = Told()
    runner, url = await listen(agent_app(told, told, Gate("decode-0")), "127.0.0.1", 0)
    async with aiohttp.ClientSession(url) as session:
        yield told, session
    await runner.cleanup()


Agent = tuple[Told, aiohttp.ClientSession]


async def test_connections_that_ask_nothing_keep_nobody_out(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took a file descriptor, for ever: at the process's limit no probe, router or operator got in."""
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 4)
    _, session = agent
    at = session._base_url
    assert at is not None
    assert at.host is not None and at.port is not None

    async def healthy() -> int:
        async with session.get("/health") as answer:
            return answer.status

    assert await oldest_make_room(at.host, at.port, 4, healthy) == 16


async def test_pages_to_read(agent: Agent) -> None:
    told, session = agent
    for path, status in (("/health", 200), ("/ready", 200), ("/state", 200), ("/metrics", 200), ("/drain", 405)):
        async with session.get(path) as answer:
            assert answer.status == status, path
    told.ready = False
    async with session.get("/ready") as answer:
        assert (answer.status, await answer.json()) == (503, {"state": "starting"})


@pytest.mark.parametrize(("body", "deadline_s"), [(b"", 60.0), (b"{}", 60.0), (b'{"deadline_s": 5}', 5.0)])
async def test_drain_and_resume(agent: Agent, body: bytes, deadline_s: float) -> None:
    told, session = agent
    async with session.post("/drain", data=body) as answer:
        assert answer.status == 202
    async with session.post("/resume") as answer:
        assert answer.status == 202
    assert told.asked == [deadline_s, "resume"]


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"{", "not JSON"), (b"[]", "must be a JSON object"), (b"[" * 4000, "nested too deep"),
     (b'{"deadline_s": ' + b"[" * 4000, "nested too deep"), (b'{"deadline_s": "\xff"}', "not JSON"),
     (b'{"deadline": 5}', "no field `deadline` here. It may have `deadline_s`"), (b'{"deadline_s": "soon"}', "soon"),
     (b'{"deadline_s": -1}', "-1"), (b'{"deadline_s": true}', "True")],
)  # fmt: skip
async def test_bad_drains(agent: Agent, body: bytes, words: str) -> None:
    told, session = agent
    async with session.post("/drain", data=body) as answer:
        assert answer.status == 400
        assert words in (await answer.json())["error"]["message"]
    assert told.asked == []


async def test_another_role(agent: Agent) -> None:
    told, session = agent
    async with session.post("/role", json={"role": "decode"}) as answer:
        assert answer.status == 202
    async with session.post("/role", json={"role": "both"}) as answer:
        assert answer.status == 409
        assert (await answer.json())["error"]["message"] == "Its role is fixed."
    assert told.asked == [Role.DECODE, Role.BOTH]


@pytest.mark.parametrize("body", [b"", b"{", b'{"role": "router"}', b'{"role": 3}', b'{"role": ["decode"]}'])
async def test_bad_roles(agent: Agent, body: bytes) -> None:
    told, session = agent
    async with session.post("/role", data=body) as answer:
        assert answer.status == 400
        assert "role" in (await answer.json())["error"]["message"]
    assert told.asked == []


# --- callers ----------------------------------------------------------------------------------------------------------

FLEET = SigningKey("k1", b"f" * 32)
MINE = instance_key(FLEET, InstanceId("decode-0"))
OPERATOR = {"Authorization": "Bearer sk-operator"}
ASKS = (("GET", "/state"), ("GET", "/metrics"), ("POST", "/drain"), ("POST", "/resume"), ("POST", "/role"))
NONCES = itertools.count()


@pytest.fixture(params=[True, False], ids=["keys", "no keys"])
async def agent_with(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Told, str, bool]]:
    told = Told()
    keys = {"ticket_keys": lambda: (MINE,), "admin_keys": lambda: (digest("sk-operator"),)} if request.param else {}
    runner, url = await listen(agent_app(told, told, Gate("decode-0", **keys)), "127.0.0.1", 0)
    yield told, url, request.param
    await runner.cleanup()


def signed(method: str, path: str, body: bytes = b"", key: SigningKey = MINE, to: str = "decode-0") -> dict[str, str]:
    ask = Ask(method=method, path=path, body=body, by="router-1", to=to)
    return signed_headers(ask, key, now=time.time(), nonce=next(NONCES).to_bytes(16))


async def ask(url: str, method: str, path: str, elsewhere: bool = True, **more: Any) -> int:
    """Status of a request. The agent takes 127.0.0.2, the address for `elsewhere`, for another machine."""
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2" if elsewhere else "127.0.0.1", 0))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, url + path, **more) as answer,
    ):
        return answer.status


async def test_strangers_from_elsewhere_get_nothing_but_readiness(agent_with: tuple[Told, str, bool]) -> None:
    told, url, _ = agent_with
    wrong = ({}, {"Authorization": "Bearer guess"}, {SIGNATURE: "1.k1.1.2.3"})
    for method, path in ASKS:
        for headers in wrong:
            assert await ask(url, method, path, headers=headers) == 401, (method, path, headers)
    assert told.asked == []
    assert await ask(url, "GET", "/health") == 200
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector) as session, session.get(f"{url}/ready") as answer:
        assert (answer.status, await answer.json()) == (200, {"ready": True})


async def test_signed_requests_and_operators_keys_are_taken_from_anywhere(agent_with: tuple[Told, str, bool]) -> None:
    told, url, has_keys = agent_with
    for method, path in ASKS[:4]:
        for headers in (signed(method, path), OPERATOR):
            found = await ask(url, method, path, headers=headers)
            assert found == ((200 if method == "GET" else 202) if has_keys else 401), (method, path)
    assert told.asked == ([60.0, 60.0, "resume", "resume"] if has_keys else [])


@pytest.mark.parametrize("agent_with", [True], indirect=True, ids=["keys"])
async def test_a_signature_is_good_once_for_one_agent_and_one_request(agent_with: tuple[Told, str, bool]) -> None:
    told, url, _ = agent_with
    body = b'{"deadline_s": 5}'
    good = signed("POST", "/drain", body)
    assert await ask(url, "POST", "/drain", headers=good, data=body) == 202
    fresh = lambda **more: signed("POST", "/drain", **{"body": body, **more})  # noqa: E731
    refused = (
        (good, body, "used before"),
        (fresh(), b'{"deadline_s": 0}', "another body"),
        (signed("POST", "/resume", body), body, "another path"),
        (signed("GET", "/drain", body), body, "another method"),
        (fresh(key=FLEET), body, "the fleet's key is no instance's"),
        (fresh(key=instance_key(FLEET, InstanceId("decode-1"))), body, "another instance's key"),
        (fresh() | {READER: "acme"}, body, "on another's behalf"),
    )
    for headers, sent, why in refused:
        assert await ask(url, "POST", "/drain", headers=headers, data=sent) == 401, why
        assert await ask(url, "POST", "/drain", elsewhere=False, headers=headers, data=sent) == 401, why
    assert told.asked == [5.0]


async def test_a_request_for_another_agent_is_refused(agent_with: tuple[Told, str, bool]) -> None:
    """On every machine an agent on loopback announces the same address, so a caller may reach the wrong agent."""
    told, url, _ = agent_with
    for headers in ({TO: "decode-1"}, signed("POST", "/drain", to="decode-1")):
        assert await ask(url, "POST", "/drain", elsewhere=False, headers=headers) == 421
    assert told.asked == []


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://[bad"}, {"Origin": "http://127.0.0.1:1"},
     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Host": "evil.example:8200"},
     {"Host": "127.0.0.1.evil.example"}, {"Host": ""}],
    ids=str,
)  # fmt: skip
async def test_pages_of_other_sites_are_refused_on_this_machine_too(
    agent_with: tuple[Told, str, bool], headers: dict[str, str]
) -> None:
    told, url, _ = agent_with
    for method, path in ASKS:
        assert await ask(url, method, path, elsewhere=False, headers=headers) in {400, 403}, (method, path)
    assert told.asked == []


async def test_this_machines_own_names_and_pages_are_taken(agent: Agent) -> None:
    _, session = agent
    assert session._base_url is not None  # the port it listens on
    here = f"127.0.0.1:{session._base_url.port}"
    for headers in ({"Host": "localhost:8200"}, {"Host": "[::1]:8200"}, {"Origin": f"http://{here}", "Host": here}):
        async with session.post("/resume", headers=headers) as answer:
            assert answer.status == 202, headers


def test_a_clock_that_is_set_back_an_hour_refuses_no_new_signature() -> None:
    key, ask, now = SigningKey("k1", bytes(32)), Ask(method="GET", path="/state", by="r", to="d"), 1_900_000_000.0
    judge = Judge("d", now + 3600)  # it was started while its machine's clock was an hour fast
    for number in range(2):
        said = signed_headers(ask, key, now=now, nonce=number.to_bytes(NONCE_BYTES))[SIGNATURE]
        assert judge.fault(said, ask, [key], now) == ""
        assert judge.fault(said, ask, [key], now) == "the signature was used before"
