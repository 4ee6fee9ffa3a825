"""The agent's own HTTP, as operators and Kubernetes probes use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from cluster.instance import Role
from engine.agent.http import agent_app, listen


class Told:
    """Remembers what it was asked."""

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
    runner, url = await listen(agent_app(told), "127.0.0.1", 0)
    async with aiohttp.ClientSession(url) as session:
        yield told, session
    await runner.cleanup()


Agent = tuple[Told, aiohttp.ClientSession]


async def test_looking(agent: Agent) -> None:
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
