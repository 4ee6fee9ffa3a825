"""The router on a registry: instances come, drain, start again and leave while the router serves."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.cast import Breakable, Cast
from support.fake_engine import FakeEngine
from support.fleet import Fleet, eventually

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.keys import digest
from cluster.registry.membership import MemberKind, MemberState
from cluster.registry.memory import MemoryRegistry
from cluster.spec import Tenant
from router.api.app import serve
from router.api.config import RouterConfig
from router.api.paths import owner_tag, response_id
from router.fleet import prover

PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 5}


async def told(fleet: Fleet, line: str) -> None:
    """Wait until the router's metrics have this line."""
    async with asyncio.timeout(10):
        while line not in (await fleet.get("/metrics"))[1]:
            await asyncio.sleep(0.01)


@pytest.fixture
async def cast() -> AsyncIterator[Cast]:
    async with AsyncExitStack() as stack:
        yield Cast(Breakable(clock=time.monotonic), stack)


async def test_instances_come_while_the_router_serves(cast: Cast) -> None:
    fleet = await cast.serve()
    status, answer = await fleet.post("/v1/completions", json=PROMPT)
    assert status == 503
    assert "no ready instance" in answer["error"]["message"]
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE)
    await cast.router_sees(p="up", d="up")
    assert (await fleet.post("/v1/completions", json=PROMPT))[1]["from"] == "d"
    assert len(cast.engines["p"].generated) == 1


async def test_instances_kept_for_a_tenant_serve_no_other_tenant(cast: Cast) -> None:
    """Other tenants do not see the models of these instances either. The tenant's own requests may go to shared
    instances, too.
    """
    await cast.join("d", Role.DECODE)
    keys = {"ann": "sk-baton-ann", "eve": "sk-baton-eve"}
    fleet = await cast.serve(
        aliases={"theirs": "anns-own"},
        tenants={name: Tenant() for name in keys},
        tenant_keys={name: lambda key=key: (digest(key),) for name, key in keys.items()},
    )
    adapter = {"id": "anns-own", "parent": "fake"}
    await cast.join("own", Role.DECODE, tenants=("ann",), models=({"id": "fake"}, adapter))
    await cast.router_sees(d="up", own="up")
    cast.engines["own"].adapters = ["anns-own"]

    async def asks(tenant: str, path: str, **body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {keys[tenant]}"}
        how = fleet.client.post if body else fleet.client.get
        async with how(fleet.endpoint + path, headers=headers, **({"json": body} if body else {})) as answer:
            return answer.status, await answer.json()

    came = {tenant: [(await asks(tenant, "/v1/completions", **PROMPT))[1]["from"] for _ in range(6)] for tenant in keys}
    assert set(came["eve"]) == {"d"} and set(came["ann"]) == {"d", "own"}
    for path in ("/v1/completions", "/v1/embeddings"):
        body = {"prompt": "hello", "input": "hello", "model": "anns-own"}
        status, answer = await asks("eve", path, **body)
        assert status == 404 and "anns-own" in answer["error"]["message"].partition("Served here")[0], path
        assert "anns-own" not in answer["error"]["message"].partition("Served here")[2]
        assert (await asks("ann", path, **body))[0] != 404, path
    listed = {tenant: {card["id"] for card in (await asks(tenant, "/v1/models"))[1]["data"]} for tenant in keys}
    assert listed == {"ann": {"fake", "anns-own", "theirs"}, "eve": {"fake"}}
    assert [(await asks(tenant, "/v1/models/anns-own"))[0] for tenant in keys] == [200, 404]
    for path in ("/v1/completions", "/v1/embeddings"):
        body = {"prompt": "hello", "input": "hello", "model": "theirs"}
        status, answer = await asks("eve", path, **body)
        assert (status, answer["error"]["message"].count("`theirs`"), "anns-own" in str(answer)) == (404, 1, False), (
            path
        )
        assert (await asks("ann", path, **body))[0] != 404, path
    # Operators see all instances, and each tenant sees those that serve it; a client without a key sees none.
    assert (await fleet.get("/ready"))[1] == {
        "ready": False, "registry": "heard", "missing": ["prefill"], "instances": []
    }  # fmt: skip
    for tenant, sees in (("ann", {"d", "own"}), ("eve", {"d"})):
        headers = {"Authorization": f"Bearer {keys[tenant]}"}
        for path in ("/ready", "/ui/data"):
            async with fleet.client.get(fleet.admin + path, headers=headers) as answer:
                listed = (await answer.json())["instances"]
                assert {each["id"] for each in listed} == sees, (tenant, path)
                assert not any(each.get("tenants") for each in listed)


async def test_a_model_that_is_kept_for_others_is_answered_like_an_unknown_one(cast: Cast) -> None:
    """So are the model's adapters: on every path and in every list, in the same words. No client can load an adapter
    through a router.
    """
    keys = {"ann": "sk-baton-ann", "eve": "sk-baton-eve"}
    await cast.join("all", Role.BOTH, models=({"id": "fake"},))
    kept = ({"id": "secret"}, {"id": "tuned", "parent": "secret"})
    await cast.join("own", Role.BOTH, tenants=("ann",), models=kept)
    cast.engines["own"].model, cast.engines["own"].adapters = "secret", ["tuned"]
    fleet = await cast.serve(
        tenants={name: Tenant() for name in keys},
        tenant_keys={name: lambda key=key: (digest(key),) for name, key in keys.items()},
    )
    await eventually_up(fleet, "all", "own")

    async def asks(tenant: str, method: str, path: str, **more: Any) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {keys[tenant]}"}
        async with fleet.client.request(method, fleet.endpoint + path, headers=headers, **more) as answer:
            return answer.status, await answer.text()

    paths = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/responses")
    for name in ("secret", "tuned"):
        for path in paths:
            more = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x", "input": "x"}
            found = [await asks("eve", "POST", path, json={"model": each, **more}) for each in (name, "nobody")]
            assert found[0][0] == found[1][0] == 404, (path, found)
            assert found[0][1].replace(name, "nobody") == found[1][1], path
            assert (await asks("ann", "POST", path, json={"model": name, **more}))[0] == 200, path
        form = aiohttp.FormData({"model": name})
        form.add_field("file", b"x", filename="x.wav")
        assert (await asks("eve", "POST", "/v1/audio/transcriptions", data=form))[0] == 404
        assert (await asks("eve", "GET", f"/v1/models/{name}"))[0] == 404
        assert (await asks("ann", "GET", f"/v1/models/{name}"))[0] == 200
    listed = {each: (await asks(each, "GET", "/v1/models"))[1] for each in keys}
    assert '"tuned"' in listed["ann"] and '"secret"' in listed["ann"]
    assert not any(name in listed["eve"] for name in ("secret", "tuned", "own"))
    assert len(cast.engines["own"].bodies) == 2 * len(paths), "ann's alone"
    before = {name: len(engine.bodies) for name, engine in cast.engines.items()}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/%6coad_lora_adapter"):
        for tenant in keys:
            status, _ = await asks(tenant, "POST", path, json={"lora_name": "x", "lora_path": "/x"})
            assert status in {403, 404}, path
    assert {name: len(engine.bodies) for name, engine in cast.engines.items()} == before


async def eventually_up(fleet: Fleet, *names: str) -> None:
    """Wait until exactly these instances are up, as an operator on this machine sees them."""
    async with asyncio.timeout(5):
        while True:
            async with fleet.client.get(fleet.admin + "/ready") as answer:
                told = {each["id"]: each["state"] for each in (await answer.json())["instances"]}
            if told == dict.fromkeys(names, "up"):
                return
            await asyncio.sleep(0.01)


async def test_where_all_instances_are_kept_other_tenants_are_told_that_the_model_is_unknown(cast: Cast) -> None:
    """The answer is 404, not one that asks the client to try again."""
    keys = {"ann": "sk-baton-ann", "eve": "sk-baton-eve"}
    fleet = await cast.serve(
        tenants={name: Tenant() for name in keys},
        tenant_keys={name: lambda key=key: (digest(key),) for name, key in keys.items()},
    )
    await cast.join("own", Role.DECODE, tenants=("ann",), models=({"id": "fake"},))
    await cast.router_sees(own="up")
    identifier = response_id("c" * 32, owner_tag(hashlib.sha256(b"eve\0own").hexdigest()))
    for tenant, known in (("ann", True), ("eve", False)):
        headers = {"Authorization": f"Bearer {keys[tenant]}"}
        for path in ("/v1/completions", "/v1/embeddings"):
            async with fleet.client.post(
                fleet.endpoint + path, headers=headers, json=PROMPT | {"model": "fake"}
            ) as answer:
                assert (answer.status == 404) is not known, path
        async with fleet.client.get(f"{fleet.endpoint}/v1/responses/{identifier}", headers=headers) as answer:
            assert answer.status == 404
    assert len(cast.engines["own"].generated) == 1


async def test_a_model_whose_last_instance_is_away_is_a_503_and_not_a_404(cast: Cast) -> None:
    """A client reads 404 as a wrong name, and gives up."""
    fleet = await cast.serve(aliases={"alias": "own"})
    await cast.join("a", Role.BOTH)
    await cast.join("b", Role.BOTH, models=({"id": "own"},))
    cast.engines["b"].model = "own"
    await cast.router_sees(a="up", b="up")

    async def asks(method: str, path: str, **more: Any) -> tuple[int, str | None]:
        async with fleet.client.request(method, fleet.endpoint + path, **more) as answer:
            return answer.status, answer.headers.get("Retry-After")

    async def answers(name: str) -> set[tuple[int, str | None]]:
        body = {"model": name, "prompt": "x", "input": "x"}
        form = aiohttp.FormData({"model": name})
        form.add_field("file", b"x", filename="x.wav")
        return {
            *[await asks("POST", path, json=body) for path in ("/v1/completions", "/v1/embeddings", "/tokenize")],
            await asks("POST", "/v1/audio/transcriptions", data=form),
            await asks("GET", f"/v1/models/{name}"),
        }

    await cast.join("b", Role.BOTH, models=({"id": "own"},), state=MemberState.DRAINING)
    await cast.router_sees(a="up", b="draining")
    assert [await answers(name) for name in ("own", "alias")] == [{(503, "1")}] * 2
    await cast.join("b", Role.BOTH, models=(), state=MemberState.STARTING, epoch=2)
    await cast.router_sees(a="up", b="starting")
    assert [await answers(name) for name in ("own", "alias")] == [{(503, "1")}] * 2
    await cast.registry.leave(InstanceId("b"), "agent-b", MemberKind.INSTANCE)
    await cast.router_sees(a="up")
    assert [await answers(name) for name in ("own", "alias")] == [{(503, "1")}] * 2
    assert await answers("typo") == {(404, None)}


@pytest.mark.parametrize("comes_back", [False, True])
async def test_an_instance_that_leaves_while_it_is_asked_for_a_response_is_not_sent_one(
    cast: Cast, comes_back: bool
) -> None:
    """`comes_back`: the instance comes back under the same name, at another address."""
    asked, go_on = asyncio.Event(), asyncio.Event()
    reached: list[str] = []

    async def knows_it(engine: FakeEngine, request: web.Request, raw: bytes) -> web.Response:
        reached.append(request.path)
        asked.set()
        await go_on.wait()
        return web.json_response({"id": "resp_others"})

    await cast.join("d", Role.BOTH)
    cast.engines["d"].behave_elsewhere = knows_it
    fleet = await cast.serve()
    await cast.router_sees(d="up")
    asking = asyncio.create_task(fleet.get("/v1/responses/resp_others"))
    await asked.wait()
    if comes_back:
        del cast.engines["d"]
        await cast.join("d", Role.BOTH, epoch=2)
        async with asyncio.timeout(5):
            while (await fleet.get("/ready"))[1]["instances"][0]["epoch"] != 2:
                await asyncio.sleep(0.01)
    else:
        await cast.registry.leave("d", "agent-d")
        await cast.router_sees()
    go_on.set()
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, 503), answer
    assert "d has just left" in answer["error"]["message"]
    assert len(reached) == 1


async def test_nothing_is_sent_to_a_draining_instance(cast: Cast) -> None:
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE)
    await cast.join("d2", Role.DECODE)
    fleet = await cast.serve()
    await cast.join("d", Role.DECODE, state=MemberState.DRAINING)
    await cast.router_sees(p="up", d="draining", d2="up")
    for _ in range(4):
        assert (await fleet.post("/v1/completions", json=PROMPT))[1]["from"] == "d2"
    await cast.join("p", Role.PREFILL, state=MemberState.DRAINING)
    await cast.router_sees(p="draining", d="draining", d2="up")
    assert (await fleet.post("/v1/completions", json=PROMPT))[0] == 200
    assert len(cast.engines["p"].generated) == 4, "the fifth request was served aggregated on d2"


async def test_decode_that_drains_during_prefill_is_replaced(cast: Cast) -> None:
    """The hold is on P, not on D: another D pulls the same blocks."""
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE)
    fleet = await cast.serve()
    await cast.router_sees(p="up", d="up")
    cast.engines["p"].hold_leg = asyncio.Event()
    asking = asyncio.ensure_future(fleet.post("/v1/completions", json=PROMPT))
    await eventually(lambda: bool(cast.engines["p"].generated), "the prefill leg is running")
    await cast.join("d2", Role.DECODE)
    await cast.join("d", Role.DECODE, state=MemberState.DRAINING)
    await cast.router_sees(p="up", d="draining", d2="up")
    cast.engines["p"].hold_leg.set()
    status, answer = await asking
    assert (status, answer["from"]) == (200, "d2")
    assert len(cast.engines["p"].generated) == 1, "prefilled once"
    assert fleet.held == 0


async def test_a_decode_instance_that_starts_anew_during_the_prefill_leg_pulls_nothing(cast: Cast) -> None:
    """No leg runs there that could be lost, and it is ready again, with other weights, before P has answered."""
    await cast.join("p", Role.PREFILL, weights="w1")
    await cast.join("d", Role.DECODE, weights="w1")
    fleet = await cast.serve()
    await cast.router_sees(p="up", d="up")
    cast.engines["p"].hold_leg = asyncio.Event()
    asking = asyncio.ensure_future(fleet.post("/v1/completions", json=PROMPT))
    await eventually(lambda: bool(cast.engines["p"].generated), "the prefill leg is running")
    await cast.join("d", Role.DECODE, weights="w2", epoch=2)
    await cast.join("d2", Role.DECODE, weights="w1")
    await cast.router_sees(p="up", d="up", d2="up")
    cast.engines["p"].hold_leg.set()
    status, answer = await asking
    assert (status, answer["from"]) == (200, "d2")
    assert (len(cast.engines["p"].generated), len(cast.engines["d"].generated)) == (1, 0), "d2 pulls the same hold"
    assert fleet.held == 0


async def test_prefill_that_starts_anew_during_its_leg_is_replaced(cast: Cast) -> None:
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE)
    fleet = await cast.serve()
    await cast.router_sees(p="up", d="up")
    cast.engines["p"].hold_leg = asyncio.Event()
    asking = asyncio.ensure_future(fleet.post("/v1/completions", json=PROMPT))
    await eventually(lambda: bool(cast.engines["p"].generated), "the prefill leg is running")
    await cast.join("p2", Role.PREFILL)
    await cast.router_sees(p="up", d="up", p2="up")
    await cast.join("p", Role.PREFILL, state=MemberState.STARTING, epoch=2)
    status, answer = await asking
    assert (status, answer["from"]) == (200, "d")
    assert len(cast.engines["p2"].generated) == 1


async def test_nothing_is_handed_over_to_a_d_that_shuns_the_p(cast: Cast) -> None:
    """A bad pair is quarantined without losing either instance."""
    fleet = await cast.serve()
    await cast.join("p0", Role.PREFILL)
    await cast.join("p1", Role.PREFILL)
    await cast.join("d", Role.DECODE, shuns=("p0",))
    await cast.router_sees(p0="up", p1="up", d="up")
    for _ in range(4):
        assert (await fleet.post("/v1/completions", json=PROMPT))[1]["from"] == "d"
    assert (len(cast.engines["p0"].generated), len(cast.engines["p1"].generated)) == (0, 4)
    assert 'baton_pair_apart{decode="d",prefill="p0"} 1.0' in (await fleet.get("/metrics"))[1]
    async with fleet.client.get(fleet.admin + "/ui/data") as answer:
        pairs = (await answer.json())["pairs"]
    assert [(pair["prefill"], pair["apart"]) for pair in pairs] == [("p0", True), ("p1", False)]
    await cast.join("d", Role.DECODE)

    async with asyncio.timeout(5):
        while not cast.engines["p0"].generated:  # until the pair's pause is over
            await fleet.post("/v1/completions", json=PROMPT)
    assert "baton_pair_apart{" not in (await fleet.get("/metrics"))[1]


async def test_pairs_are_proven_and_a_pair_that_answers_otherwise_hands_nothing_over(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A P with other weights under the same name: every hand-over works, and the text is wrong."""
    monkeypatch.setattr(prover, "EVERY_S", 0.01)
    await cast.join("p0", Role.PREFILL)
    await cast.join("p1", Role.PREFILL)
    await cast.join("d", Role.DECODE)

    async def says(_: web.Request, body: dict[str, Any]) -> web.Response:
        pulled = (body.get("kv_transfer_params") or {}).get("remote_engine_id")
        cast.engines["d"]._free(body.get("kv_transfer_params") or {})
        text = "another" if pulled == "p1" and wrong else "the same"
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "length"}
        if body.get("logprobs"):
            choice["logprobs"] = {"tokens": [text], "top_logprobs": [{text: -0.1}]}
        fields = body.get("kv_transfer_params") or {}
        told = fields.get("remote_prefill_cached_tokens", 96 if pulled else 0)  # as vLLM 0.32: P's number goes first
        usage = {"prompt_tokens_details": {"cached_tokens": told}}
        return web.json_response({"choices": [choice], "usage": usage})

    wrong = True
    cast.engines["d"].behave = says
    fleet = await cast.serve(proves=True)
    await cast.router_sees(p0="up", p1="up", d="up")

    await told(fleet, 'baton_pair_apart{decode="d",prefill="p1"} 1.0')
    await told(fleet, 'baton_pair_proofs_total{result="passed"} 1.0')
    assert 'baton_pair_apart{decode="d",prefill="p0"}' not in (await fleet.get("/metrics"))[1]
    async with fleet.client.get(fleet.admin + "/ui/data") as answer:
        (first, *_) = (await answer.json())["pairs"]
    assert first["prefill"] == "p1" and "answers otherwise" in first["last_failure"]
    cast.engines["p0"].bodies.clear()
    cast.engines["p1"].bodies.clear()
    for _ in range(4):
        assert (await fleet.post("/v1/completions", json=PROMPT))[0] == 200
    assert (len(cast.engines["p0"].generated), len(cast.engines["p1"].generated)) == (4, 0)
    prompts = [body for body in cast.engines["d"].generated if "cache_salt" in body]
    assert len({body["cache_salt"] for body in prompts}) == len(prompts), "no cache has a proof's prompt"
    assert not cast.engines["p0"].holds and not cast.engines["p1"].holds
    wrong = False
    await cast.join("p1", Role.PREFILL, epoch=2)  # p1 comes back with the right weights
    await told(fleet, 'baton_pair_proofs_total{result="passed"} 2.0')
    assert "baton_pair_apart{" not in (await fleet.get("/metrics"))[1]


async def test_an_instance_that_joins_does_not_wait_for_a_proof_of_others(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full fleet a proof takes seconds, but an instance that has just flipped is needed at once."""
    monkeypatch.setattr(prover, "EVERY_S", 0.01)
    joined, due = set[str](), asyncio.Event()

    async def made(proof: prover._Proof) -> tuple[str, str]:
        if not proof._joining:
            due.set()
            await asyncio.Event().wait()  # for ever
        joined.update(proof._pair.names)
        return "", ""

    monkeypatch.setattr(prover._Proof, "made", made)
    for name in ("p0", "p1", "p2"):
        await cast.join(name, Role.PREFILL)
    for name in ("d0", "d1"):
        await cast.join(name, Role.DECODE)
    await cast.serve(proves=True)
    async with asyncio.timeout(10):
        await due.wait()
    await cast.join("p3", Role.PREFILL)
    await eventually(lambda: "p3" in joined, "p3 is proven while the other proof runs")
    assert "p3" in joined


@pytest.mark.parametrize("told_at_once", [0, 64], ids=["large fleet", "small fleet"])
async def test_an_engine_that_answers_no_proof_does_not_keep_others_waiting(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, told_at_once: int
) -> None:
    """It answers /health, and never a completion."""
    for name, value in (("EVERY_S", 0.01), ("TOLD_EVERY_S", 0.05), ("AT_ONCE", 2), ("TOLD_AT_ONCE", told_at_once)):
        monkeypatch.setattr(prover, name, value)
    silent = set[str]()

    async def made(proof: prover._Proof) -> tuple[str, str]:
        if "d0" in proof._pair.names:
            silent.update(proof._pair.names)
            await asyncio.Event().wait()  # for ever
        return "", ""

    monkeypatch.setattr(prover._Proof, "made", made)
    for number in range(4):
        await cast.join(f"p{number}", Role.PREFILL)
        await cast.join(f"d{number}", Role.DECODE)
    fleet = await cast.serve(proves=True)

    async def unproven() -> set[str]:
        async with fleet.client.get(fleet.admin + "/ui/data") as answer:
            instances = (await answer.json())["instances"]
        return {each["id"] for each in instances if not (each["gives"] or each["takes"])}

    async with asyncio.timeout(10):
        while not silent or await unproven() != silent:
            await asyncio.sleep(0.01)
    assert len(silent) == 2, "it is tried with one partner at a time"


async def test_a_proof_without_a_pull_fails_and_leaves_no_hold(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover, "EVERY_S", 0.01)
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE)

    async def computes_all(_: web.Request, body: dict[str, Any]) -> web.Response | None:
        if body["model"] != "fake":
            return None  # a leg that releases a hold
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        return web.json_response({"choices": [{"index": 0, "text": "the same"}], "usage": usage})

    cast.engines["d"].behave = computes_all
    fleet = await cast.serve(proves=True)
    await told(fleet, 'baton_pair_proofs_total{result="failed"} 1.0')
    assert cast.engines["p"].generated and not cast.engines["p"].holds


async def test_a_proof_ends_where_an_operator_sets_an_instance_aside(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarantined instance gets no new legs, not even those of a proof that is under way."""
    monkeypatch.setattr(prover, "EVERY_S", 0.01)
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE)
    computed = asyncio.Event()

    async def slow(_: web.Request, body: dict[str, Any]) -> None:
        await computed.wait()

    cast.engines["p"].behave = slow
    fleet = await cast.serve(proves=True)
    await eventually(lambda: bool(cast.engines["p"].bodies), "its prefill leg runs")
    before = len(cast.engines["d"].generated)  # it was asked about itself
    async with fleet.client.post(fleet.admin + "/quarantine/d", json={"because": "answers wrong"}) as answer:
        assert answer.status == 200
    computed.set()
    await told(fleet, 'baton_pair_proofs_total{result="none"} 1.0')
    assert len(cast.engines["d"].generated) == before
    await eventually(lambda: not cast.engines["p"].holds, "P's hold is released")


async def test_leaving_instances_are_forgotten(cast: Cast) -> None:
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE)
    fleet = await cast.serve()
    await cast.router_sees(p="up", d="up")
    await cast.registry.leave("p", "agent-p")
    await cast.router_sees(d="up")
    assert (await fleet.get("/ready"))[0] == 503
    assert (await fleet.post("/v1/completions", json=PROMPT))[1]["from"] == "d"


async def test_on_a_full_fleet_requests_wait_in_the_queue(cast: Cast) -> None:
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE, places=2)
    fleet = await cast.serve(first_token_s=5.0)
    await cast.router_sees(p="up", d="up")
    gate = asyncio.Event()
    running = 0
    most = 0

    async def slow(_: web.Request, body: dict[str, Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    cast.engines["d"].behave = slow
    asking = [asyncio.ensure_future(fleet.post("/v1/completions", json=PROMPT)) for _ in range(6)]
    await eventually(lambda: running == 2, "two requests run")
    gate.set()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 6
    assert most == 2, "never more at once than the instance allowed"


async def test_waiting_in_the_queue_ends_with_the_deadline(cast: Cast) -> None:
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE, places=1)
    fleet = await cast.serve(first_token_s=0.4)
    await cast.router_sees(p="up", d="up")
    forever = asyncio.Event()

    async def hang(_: web.Request, body: dict[str, Any]) -> None:
        await forever.wait()

    cast.engines["d"].behave = hang
    first = asyncio.ensure_future(fleet.post("/v1/completions", json=PROMPT))
    await eventually(lambda: bool(cast.engines["d"].generated), "the only place is taken")
    status, answer = await fleet.post("/v1/completions", json=PROMPT)
    assert (status, answer["error"]["code"]) == (504, 504)
    forever.set()
    assert (await first)[0] == 200


class Stubborn(MemoryRegistry):
    """A registry that swallows cancellations. Once a reader went on after two of them, in a router that outlived its
    parent.
    """

    async def wait_changed(self, timeout_s: float) -> bool:
        try:
            return await super().wait_changed(timeout_s)
        except asyncio.CancelledError:
            return False


async def test_a_router_ends_although_its_registry_swallows_cancellations() -> None:
    stop = asyncio.Event()
    config = RouterConfig(port=0, admin_port=0, drain_s=0.1, has_registry=True)
    ready = asyncio.Event()
    serving = asyncio.ensure_future(serve(config, lambda *_: ready.set(), stop, Stubborn(clock=time.monotonic)))
    await ready.wait()
    stop.set()
    await serving
    readers = {task for task in asyncio.all_tasks() if "registry" in task.get_name()}
    _, reading = await asyncio.wait(readers, timeout=3) if readers else ((), ())
    assert not reading, "no task reads the registry any more"


async def test_registry_away_and_back(cast: Cast) -> None:
    """Without its registry the router serves on with what it knows, reports that, and catches up later."""
    await cast.join("p", Role.PREFILL)
    await cast.join("d", Role.DECODE)
    fleet = await cast.serve()
    await cast.router_sees(p="up", d="up")
    cast.registry.deaf = True
    async with asyncio.timeout(5):
        while (await fleet.get("/ready"))[1]["registry"] != "away":
            await asyncio.sleep(0.01)
    assert (await fleet.post("/v1/completions", json=PROMPT))[1]["from"] == "d"
    await cast.join("d2", Role.DECODE)
    await cast.join("d", Role.DECODE, state=MemberState.DRAINING)
    cast.registry.deaf = False
    await cast.router_sees(p="up", d="draining", d2="up")
    assert (await fleet.post("/v1/completions", json=PROMPT))[1]["from"] == "d2"


async def test_a_router_that_begins_without_its_registry_says_so_once(
    cast: Cast, caplog: pytest.LogCaptureFixture
) -> None:
    cast.registry.deaf = True
    caplog.set_level(logging.INFO, "baton.router")
    fleet = await cast.serve()
    async with asyncio.timeout(5):
        while cast.registry.failed < 3:
            await asyncio.sleep(0.01)
    assert (await fleet.get("/ready"))[1]["registry"] == "away"
    assert caplog.text.count("no instance is known before it answers") == 1
    cast.registry.deaf = False
    await cast.join("b", Role.BOTH)
    await cast.router_sees(b="up")
    assert caplog.text.count("cannot be reached") == 1


async def test_a_proof_takes_a_place_and_a_request_that_finds_none_waits_for_it(cast: Cast) -> None:
    """Instances have one place each, and their first proof takes it: requests wait, and none is refused."""
    await cast.join("p", Role.PREFILL, places=1)
    await cast.join("d", Role.DECODE, places=1)
    go_on = asyncio.Event()

    async def slow(_: web.Request, body: dict[str, Any]) -> None:
        if "cache_salt" in body and not {"logprobs", "prompt_logprobs"} & body.keys():  # a proof's, after D's alone
            await go_on.wait()

    for engine in cast.engines.values():
        engine.behave = slow
    fleet = await cast.serve(proves=True)
    await eventually(lambda: bool(cast.engines["p"].bodies), "its prefill leg runs")
    cast.engines["d"].bodies.clear()
    asking = [asyncio.create_task(fleet.post("/v1/completions", json=PROMPT)) for _ in range(3)]
    await eventually(lambda: len(cast.engines["d"].generated) > 0, "the first request is served meanwhile")
    go_on.set()
    assert [(await each)[0] for each in asking] == [200] * 3
