"""A router with keys in front of guarded engines: its legs, pins and releases pass; other transfer fields do not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web
from support.fake_engine import FIRST_TOKEN, FakeEngine
from support.fleet import Fleet, eventually
from support.served import served
from support.tickets import FLEET, HOLD, OLD, PULL, STRANGERS, signed, smuggled

from cluster import wire
from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from engine.mock.transfer import read_reference, wants_hold
from kvtransfer.guard import Guard
from kvtransfer.keys import FILE_VARIABLE, instance_text
from kvtransfer.ticket import SigningKey
from router.api.config import RouterConfig

PROMPT = {"model": "fake", "prompt": "Hello", "max_tokens": 8}


class Guarded:
    """A server of its own that puts a guard (ASGI) in front of a fake engine."""

    def __init__(self, engine: FakeEngine, file: Path, keys: tuple[SigningKey, ...]) -> None:
        self.engine = engine
        file.write_text(instance_text(keys, InstanceId(engine.name)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FILE_VARIABLE, str(file))
            self.guard = Guard(self._pass_on)  # type: ignore[arg-type]
        self.refused = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession()
        app = web.Application(client_max_size=1 << 27)
        app.router.add_route("*", "/{rest:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        await self._runner.cleanup()

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        news = [{"type": "http.request", "body": await http.read(), "more_body": False}]

        async def receive() -> Any:
            return news.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.refused += message["status"] == 403
                response.set_status(message["status"])
                for name, value in message["headers"]:
                    response.headers[name.decode()] = value.decode()
                await response.prepare(http)
            else:
                await response.write(message["body"])

        headers = [(name.lower().encode(), value.encode()) for name, value in http.headers.items()]
        scope = {"type": "http", "method": http.method, "path": http.path, "headers": headers}
        await self.guard(scope, receive, send)
        await response.write_eof()
        return response

    async def _pass_on(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"] if name != b"host"}
        url = self.engine.url + scope["path"]
        async with self._client.request(scope["method"], url, data=body or None, headers=headers) as answer:
            kept = [(b"content-type", answer.headers.get("Content-Type", "text/plain").encode())]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})


Start = Callable[..., Awaitable[tuple[Fleet, dict[str, Guarded]]]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """`await start(keys, theirs, decode=1)`: a router with `keys`, in front of one P and `decode` Ds. Each engine is
    behind a guard with the keys `theirs`.
    """
    async with AsyncExitStack() as stack:

        async def starter(
            keys: tuple[SigningKey, ...] | None = (FLEET,),
            theirs: tuple[SigningKey, ...] = (FLEET,),
            *,
            prefill: int = 1,
            decode: int = 1,
            pins: bool = False,
        ) -> tuple[Fleet, dict[str, Guarded]]:
            engines: dict[str, FakeEngine] = {}
            guards: dict[str, Guarded] = {}
            instances = []
            for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
                for number in range(count):
                    name = f"{role.value}-{number}"
                    engine = engines[name] = await stack.enter_async_context(FakeEngine(name))
                    engine.peers = engines
                    guards[name] = await stack.enter_async_context(Guarded(engine, tmp_path / name, theirs))
                    instances.append(Instance(id=InstanceId(name), role=role, url=guards[name].url, pins=pins))
            config = RouterConfig(
                instances=tuple(instances),
                port=0,
                admin_port=0,
                drain_s=1.0,
                policy="least_load",
                ticket_keys=None if keys is None else lambda: keys,
            )
            endpoint, admin = await _serving(stack, config)
            client = await stack.enter_async_context(aiohttp.ClientSession())
            fleet = Fleet(endpoint, admin, engines, client)
            async with asyncio.timeout(5):
                while (await fleet.get("/ready"))[1]["instances"][-1]["state"] != "up":
                    await asyncio.sleep(0.01)
            return fleet, guards

        yield starter


async def _serving(stack: AsyncExitStack, config: RouterConfig) -> tuple[str, str]:
    return await stack.enter_async_context(served(config))


def refusals(guards: dict[str, Guarded]) -> int:
    return sum(guard.refused for guard in guards.values())


async def test_both_legs_pass(start: Start) -> None:
    fleet, guards = await start()
    for stream in (False, True):
        status, _ = await fleet.post("/v1/completions", json={**PROMPT, "stream": stream})
        assert status == 200
    legs = [each.generated for each in fleet.engines.values()]
    assert [len(each) for each in legs] == [2, 2], "every request had both legs"
    assert all(leg["kv_transfer_params"][wire.TICKET] for each in legs for leg in each)
    assert refusals(guards) == 0
    assert fleet.held == 0


async def test_a_pinned_token_passes_under_the_same_ticket(start: Start) -> None:
    fleet, guards = await start(pins=True)
    status, _ = await fleet.post("/v1/completions", json={**PROMPT, "stream": True, "temperature": 0})
    assert status == 200
    (leg,) = fleet.engines["decode-0"].generated
    assert leg["kv_transfer_params"][wire.FIRST_TOKEN] == FIRST_TOKEN
    assert refusals(guards) == 0


async def test_releases_pass(start: Start) -> None:
    """A release is sent twice for a pair that has not met, each time with a ticket of its own."""
    fleet, guards = await start()
    fleet.engines["prefill-0"].finish_reason = "stop"  # the first token was the last: nothing to hand over
    status, _ = await fleet.post("/v1/completions", json={**PROMPT, "temperature": 0})
    assert status == 200
    releases = fleet.engines["decode-0"].bodies
    await eventually(lambda: fleet.held == 0 and len(releases) == 2, "released")
    assert {body["model"] for _, body in releases} == {wire.RELEASE_MODEL}
    assert refusals(guards) == 0


async def test_another_instance_gets_a_ticket_of_its_own(start: Start) -> None:
    fleet, guards = await start(decode=2)

    async def fail(*_: Any) -> web.StreamResponse:
        return web.json_response({}, status=500)

    fleet.engines["decode-0"].behave = fleet.engines["decode-1"].behave = fail
    status, _ = await fleet.post("/v1/completions", json=PROMPT)
    assert status == 200, "P serves the request aggregated when every D fails"
    assert refusals(guards) == 0


def test_a_mock_reads_a_ticketed_leg_as_any_other() -> None:
    ticketed = signed(PULL, "decode-0", at=0.0)
    assert read_reference(ticketed) == read_reference(PULL) is not None
    assert wants_hold(signed(HOLD, "prefill-0", at=0.0))


async def test_without_keys_nothing_is_added(start: Start) -> None:
    fleet, _ = await start(keys=None)
    await fleet.post("/v1/completions", json=PROMPT)
    assert wire.TICKET not in json.dumps([engine.bodies for engine in fleet.engines.values()])


@pytest.mark.parametrize("keys", [None, (STRANGERS,), (OLD,)], ids=["none", "a stranger's", "one they do not know"])
async def test_a_router_with_other_keys_serves_aggregated_and_holds_nothing(
    start: Start, keys: tuple[SigningKey, ...] | None
) -> None:
    """The fault is the fleet's, so the client gets an answer and not the guard's 403."""
    fleet, guards = await start(keys)
    status, answer = await fleet.post("/v1/completions", json=PROMPT)
    assert (status, answer["from"]) == (200, "decode-0")
    assert refusals(guards) >= 1
    assert fleet.held == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_with_many_prefill_instances_too_a_router_whose_tickets_are_refused_serves_whole(
    start: Start, stream: bool
) -> None:
    """Each try at another P was refused as well, until none was left: each request that is handed over failed."""
    fleet, guards = await start((STRANGERS,), prefill=4)
    for _ in range(3):
        status, answer = await fleet.post("/v1/completions", json={**PROMPT, "stream": stream})
        assert status == 200
        assert stream or answer["from"]
    assert refusals(guards) >= 3 * 2, "two engines were asked for each request"
    assert fleet.held == 0


async def test_the_new_key_may_be_known_before_it_signs_and_the_old_one_after(start: Start) -> None:
    fleet, guards = await start((OLD,), (FLEET, OLD))
    assert (await fleet.post("/v1/completions", json=PROMPT))[0] == 200
    assert refusals(guards) == 0


@pytest.mark.parametrize("target", ["prefill-0", "decode-0"])
async def test_nothing_smuggled_reaches_an_engine_directly(start: Start, target: str) -> None:
    fleet, guards = await start()
    engine = fleet.engines[target]
    for path in ("/v1/completions", "/v1/responses", "/inference/v1/generate"):
        for fields in (HOLD, PULL, signed(PULL, target, at=time.time(), key=STRANGERS)):
            for raw in smuggled(fields, PROMPT).values():
                headers = {"Content-Type": "application/json"}
                async with fleet.client.post(guards[target].url + path, data=raw, headers=headers) as answer:
                    assert answer.status == 403
                    assert (await answer.json())["error"]["type"] == wire.TICKET_REFUSED
    assert not engine.bodies
    async with fleet.client.post(guards[target].url + "/v1/completions", json=PROMPT) as answer:
        assert answer.status == 200, "a request without transfer fields is served"


async def test_a_copy_of_a_leg_is_refused(start: Start) -> None:
    """Guards refuse the copy at the same instance, which has seen the ticket, at another, and with a changed field."""
    fleet, guards = await start(decode=2)
    await fleet.post("/v1/completions", json=PROMPT)
    legs = [(engine.name, leg) for engine in fleet.engines.values() for leg in engine.generated]
    assert len(legs) == 2
    before = len([body for engine in fleet.engines.values() for body in engine.bodies])
    for _, leg in legs:
        for guard in guards.values():
            for changed in ({}, {"remote_host": "10.0.0.1"}):
                body = {**leg, "kv_transfer_params": {**leg["kv_transfer_params"], **changed}}
                async with fleet.client.post(guard.url + "/v1/completions", json=body) as answer:
                    assert answer.status == 403
    assert len([body for engine in fleet.engines.values() for body in engine.bodies]) == before
