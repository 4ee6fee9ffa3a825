"""Requests that are passed through whole, on a full fleet: they wait for a place, as generation requests do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from support.cast import Breakable, Cast
from support.fake_engine import FakeEngine
from support.fleet import Fleet, eventually

from cluster.instance import Instance, Role
from router.api.passthrough import Passthrough
from router.http.upstream import EngineLost
from router.scheduler.dispatch import Dispatch

MESSAGES = "/v1/messages"
ASK = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


class Gate:
    """The engine `d` with one place, whose answers outside completions and chats wait for `open`."""

    def __init__(self, engine: FakeEngine) -> None:
        self.open = asyncio.Event()
        self.running = self.most = 0
        engine.behave_elsewhere = self._behave

    async def _behave(self, _: FakeEngine, __: web.Request, raw: bytes) -> web.Response:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.open.wait()
        self.running -= 1
        return web.Response(body=raw, content_type="application/json")


@pytest.fixture
async def cast() -> AsyncIterator[Cast]:
    async with AsyncExitStack() as stack:
        yield Cast(Breakable(clock=time.monotonic), stack)


async def full(cast: Cast, **settings: object) -> tuple[Fleet, Gate, asyncio.Future[tuple[int, object]]]:
    """A fleet whose only place is taken, and the request that has it."""
    await cast.join("d", Role.DECODE, places=1)
    fleet, gate = await cast.serve(**settings), Gate(cast.engines["d"])
    await cast.router_sees(d="up")
    first = asyncio.ensure_future(fleet.post(MESSAGES, json=ASK))
    await eventually(lambda: gate.running == 1, "the place is taken")
    return fleet, gate, first


@pytest.mark.parametrize("policy", ["least_load", "workload"])
async def test_they_wait_for_a_place(cast: Cast, policy: str) -> None:
    fleet, gate, first = await full(cast, policy=policy)
    paths = [MESSAGES, "/v1/responses", "/v1/embeddings", "/tokenize", MESSAGES]
    others = [asyncio.ensure_future(fleet.post(path, json=ASK)) for path in paths]
    others.append(asyncio.ensure_future(fleet.post("/v1/chat/completions", json=ASK)))
    refused, _ = await asyncio.wait(others, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
    assert not refused
    gate.open.set()
    assert [status for status, _ in await asyncio.gather(first, *others)] == [200] * 7
    assert gate.most == 1, "never more at once than the instance allowed"


async def test_their_wait_ends_with_the_deadline(cast: Cast) -> None:
    fleet, gate, first = await full(cast, first_token_s=0.2)
    status, answer = await fleet.post(MESSAGES, json=ASK)
    assert (status, answer["error"]["type"]) == (504, "DeadlineExceededError")
    gate.open.set()
    assert (await first)[0] == 200


async def test_all_tries_of_one_have_one_deadline(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = []

    async def lost(_: Passthrough, __: web.Request, ___: str, ____: bytes, deadline: float) -> tuple[Instance, bytes]:
        deadlines.append(deadline)
        raise EngineLost("d: cannot be reached", reached=False)

    fleet = await cast.serve(first_token_s=0.2)
    monkeypatch.setattr(Passthrough, "place", lost)
    began = asyncio.get_running_loop().time()
    assert (await fleet.post(MESSAGES, json=ASK))[0] == 502
    assert len(deadlines) == 3
    assert len(set(deadlines)) == 1 and deadlines[0] >= began + 0.2


@pytest.mark.interpreted
async def test_they_and_chats_get_places_in_turn(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Dispatch] = []
    fleet_changed, frozen = Dispatch.fleet_changed, False

    def changed(dispatch: Dispatch) -> None:
        made.append(dispatch)
        if not frozen:  # it wakes all requests, and would hide which ones the ends of answers wake
            fleet_changed(dispatch)

    monkeypatch.setattr(Dispatch, "fleet_changed", changed)
    fleet, gate, first = await full(cast)
    frozen, dispatch = True, made[0]
    others = [asyncio.ensure_future(fleet.post("/v1/chat/completions", json=ASK)) for _ in range(6)]
    others += [asyncio.ensure_future(fleet.post(MESSAGES, json=ASK)) for _ in range(3)]
    await eventually(lambda: len(dispatch.scheduler.line) == 6 and bool(dispatch.outside), "they wait")
    gate.open.set()
    assert [status for status, _ in await asyncio.gather(first, *others)] == [200] * 10
    paths = [path for path, _ in cast.engines["d"].bodies if path == MESSAGES or "chat" in path]
    kinds = "".join("m" if path == MESSAGES else "c" for path in paths)
    assert kinds == "mcmcmcmccc"


async def test_a_client_that_leaves_while_it_waits_takes_no_place(cast: Cast) -> None:
    fleet, gate, first = await full(cast)
    leaving = asyncio.ensure_future(fleet.post(MESSAGES, json=ASK))
    await asyncio.wait({leaving}, timeout=0.05)
    leaving.cancel()
    await asyncio.wait({leaving})
    gate.open.set()
    assert (await first)[0] == 200
    assert (await fleet.post(MESSAGES, json=ASK))[0] == 200


async def test_without_a_ready_instance_they_are_refused_at_once(cast: Cast) -> None:
    fleet = await cast.serve()
    status, answer = await fleet.post(MESSAGES, json={})
    assert status == 503
    assert "no ready instance" in answer["error"]["message"]
