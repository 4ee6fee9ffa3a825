"""A request's id is the router's own. The client's id comes back to the client, and finds only its own requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import pytest
from aiohttp import web
from support.fleet import Fleet, Starter, eventually
from yarl import URL

from cluster import wire
from cluster.keys import digest
from cluster.spec import Tenant

PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 5}
COMPLETIONS = "/v1/completions"
OURS = re.compile(r"[0-9a-f]{32}")
TENANTS: dict[str, Any] = {
    "tenants": {"acme": Tenant(), "other": Tenant()},
    "tenant_keys": {name: lambda name=name: (digest(f"sk-{name}"),) for name in ("acme", "other")},
}


def key(tenant: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}", **{name.replace("_", "-"): value for name, value in more.items()}}


async def asked(fleet: Fleet, headers: Mapping[str, str], path: str = COMPLETIONS, **more: Any) -> Mapping[str, str]:
    async with fleet.client.post(fleet.endpoint + path, json={**PROMPT, **more}, headers=headers) as answer:
        await answer.read()
        assert answer.status == 200, await answer.text()
        return answer.headers


async def explained(fleet: Fleet, name: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    async with fleet.client.get(f"{fleet.admin}/explain/{name}", headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/embeddings"])
async def test_the_clients_id_comes_back_and_never_reaches_an_engine(
    start: Starter, path: str, *, stream: bool
) -> None:
    fleet = await start()
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
    told = await asked(fleet, {"X-Request-Id": "mine"}, path, stream=stream, request_id="mine-too", **body)
    assert told["X-Request-Id"] == "mine"
    ours = told["X-Baton-Request-Id"]
    assert OURS.fullmatch(ours)
    assert {name for engine in fleet.engines.values() for name in engine.named} == {ours}
    bodies = [str(body) for engine in fleet.engines.values() for _, body in engine.bodies]
    assert bodies
    assert not any("mine" in each for each in bodies)


async def test_a_client_without_an_id_gets_the_routers_in_both_headers(start: Starter) -> None:
    fleet = await start()
    for path in (COMPLETIONS, "/v1/embeddings"):
        told = await asked(fleet, {}, path)
        assert told["X-Request-Id"] == told["X-Baton-Request-Id"]


REFUSED = {
    "without a key": (401, {}, b"{}"),
    "no JSON": (400, key("acme"), b"{"),
    "a wrong field": (400, key("acme"), b'{"model": 5, "prompt": ""}'),
    "heavy": (400, key("acme"), b"[" + b" " * (1 << 20)),
    "too large": (413, key("acme"), b" " * ((2 << 20) + 1)),
    "too many": (429, key("other"), b'{"model": "fake"}'),
}


@pytest.mark.parametrize(("status", "headers", "body"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/%63ompletions", "/v1/embeddings"])
async def test_refusals_carry_both_ids(
    start: Starter, path: str, status: int, headers: dict[str, str], body: bytes
) -> None:
    tenants = {"acme": Tenant(), "other": Tenant(open_max=0)}
    fleet = await start(tenants=tenants, tenant_keys=TENANTS["tenant_keys"], body_bytes_max=2 << 20)
    url = URL(fleet.endpoint + path, encoded=True)
    for named in ("mine", "", "not of its form"):
        asking = {"Content-Type": "application/json", **headers, **({"X-Request-Id": named} if named else {})}
        async with fleet.client.post(url, headers=asking, data=BytesIO(body)) as answer:
            assert answer.status == status, await answer.text()
            told = answer.headers
        assert OURS.fullmatch(told["X-Baton-Request-Id"])
        assert told["X-Request-Id"] == ("mine" if named == "mine" else told["X-Baton-Request-Id"])


async def test_an_engines_failure_has_the_name_that_the_engine_was_given(start: Starter) -> None:
    async def broken(_: object, request: web.Request, __: bytes) -> Any:
        assert request.transport is not None
        request.transport.abort()

    fleet = await start(prefill=0, decode=0, both=1)
    engine = fleet.engines["both-0"]
    engine.behave_elsewhere = broken
    async with fleet.client.post(fleet.endpoint + "/v1/embeddings", json=PROMPT) as answer:
        assert answer.status == 502
        assert answer.headers["X-Baton-Request-Id"] == engine.named[-1]


async def test_two_requests_of_one_client_id_at_once_are_two_requests(start: Starter) -> None:
    fleet = await start()
    prefill = fleet.engines["prefill-0"]
    prefill.hold_leg = asyncio.Event()
    both = [asyncio.ensure_future(asked(fleet, {"X-Request-Id": "same"})) for _ in range(2)]
    await eventually(lambda: len(prefill.generated) == 2, "both are there")
    prefill.hold_leg.set()
    told = [await each for each in both]
    names = {each["X-Baton-Request-Id"] for each in told}
    assert len(names) == 2
    transfers = {body["kv_transfer_params"][wire.TRANSFER].split("/")[0] for body in prefill.generated}
    assert transfers == names
    assert fleet.held == 0
    status, story = await explained(fleet, "same")
    assert (status, story["client_id"], story["named_alike"]) == (200, "same", 2)
    assert story["id"] in names
    for name in names:
        assert (await explained(fleet, name))[1]["id"] == name


async def test_a_client_that_leaves_ends_no_other_request_of_its_id(start: Starter) -> None:
    fleet = await start()
    prefill = fleet.engines["prefill-0"]
    prefill.hold_leg = asyncio.Event()
    stays = asyncio.ensure_future(asked(fleet, {"X-Request-Id": "same"}))
    await eventually(lambda: len(prefill.generated) == 1, "it is there")
    leaves = asyncio.ensure_future(asked(fleet, {"X-Request-Id": "same"}))
    await eventually(lambda: len(prefill.generated) == 2, "the other, too")
    leaves.cancel()
    await eventually(lambda: len(prefill.aborted) == 1, "one is aborted")
    first, second = prefill.named[:2]
    assert prefill.aborted == [f"cmpl-{second}-0"] and first != second
    prefill.hold_leg.set()
    assert (await stays)["X-Baton-Request-Id"] == first


async def test_a_client_id_is_found_by_its_own_tenant_only(start: Starter) -> None:
    fleet = await start(**TENANTS)
    mine = (await asked(fleet, key("acme", X_Request_Id="same")))["X-Baton-Request-Id"]
    theirs = (await asked(fleet, key("other", X_Request_Id="same")))["X-Baton-Request-Id"]
    for tenant, name in (("acme", mine), ("other", theirs)):
        status, story = await explained(fleet, "same", key(tenant))
        assert (status, story["id"], story["tenant"], story["named_alike"]) == (200, name, tenant, 1)
        assert (await explained(fleet, name, key(tenant)))[1]["id"] == name
    assert (await explained(fleet, mine, key("other")))[0] == 404
    status, story = await explained(fleet, "same")
    assert (status, story["id"], story["named_alike"]) == (200, theirs, 2), "an operator sees the newest of all"


async def test_a_client_id_equal_to_a_routers_id_hides_no_request(start: Starter) -> None:
    fleet = await start(**TENANTS)
    mine = (await asked(fleet, key("acme")))["X-Baton-Request-Id"]
    thief = (await asked(fleet, key("other", X_Request_Id=mine)))["X-Baton-Request-Id"]
    assert thief != mine
    for headers in (key("acme"), None):
        assert (await explained(fleet, mine, headers))[1]["id"] == mine
    assert (await explained(fleet, mine, key("other")))[1]["id"] == thief


async def test_both_ids_are_in_the_list_and_in_the_timing(start: Starter) -> None:
    fleet = await start()
    told = await asked(fleet, {"X-Request-Id": "mine", "x-baton-timing": "1"})
    await asked(fleet, {})
    async with fleet.client.get(f"{fleet.admin}/explain") as response:
        unnamed, named = (await response.json())["requests"]
    assert (named["id"], named["client_id"]) == (told["X-Baton-Request-Id"], "mine")
    assert "client_id" not in unnamed
    assert f'"id":"{named["id"]}"' in told["x-baton-timing"]
