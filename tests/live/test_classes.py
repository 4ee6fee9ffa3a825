"""Classes, tenants and keys in front of real engines: access, order, refusals, and each tenant's own cached prefixes.

The engines are the session's. The routers in front of them are others; their cluster file has `slo` and `tenants`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.cluster import Cluster
from support.other_router import OtherRouter, other_router

from cluster.keys import key_line

FILE = """\
models:
  - name: baton-tiny
    pools: {prefill: {start: 1}, decode: {start: 1}, both: {start: 1}}
slo:
  easy: {ttft_ms: 60000, tt2t_ms: 60000, tpot_ms: 5000, e2e_ms: 120000, attainment: 0.9}
  soon: {ttft_ms: 20000}
  never: {ttft_ms: 1, when_missed: shed}
  brisk: {ttft_ms: 1000, when_missed: shed}
  falls: {ttft_ms: 1, when_missed: degrade, degrade_to: easy}
tenants:
  acme: {share: 3, classes: [soon, easy, never, brisk, falls], default_class: easy}
  bolt: {classes: [easy]}
  open-1: {cache_scope: shared}
  open-2: {cache_scope: shared}
"""
TENANTS = ("acme", "bolt", "open-1", "open-2")
LEARNT = 24
"""Prompts that are timed first: admission trusts its estimates for an engine after 20; the rest are a margin."""

PATH = "/v1/completions"
PATIENT = 20
"""Requests that wait: each takes the engine 0.1 s, and all of them come within a few hundredths of a second."""

BLOCKS = 640
"""Tokens in five blocks of 128 (vLLM's on CPU), of the 800 in ten times `STORY`: the model reads bytes."""
STORY = "Once upon a time a small robot found a bright red lantern near the river. "


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cluster file, and a key of each tenant beside it: `KEY-OF-NAME`."""
    folder = tmp_path_factory.mktemp("promises")
    (folder / "keys").mkdir()
    for name in TENANTS:
        (folder / "keys" / name).write_text(key_line(f"sk-{name}"))
    (folder / "baton.yaml").write_text(FILE)
    return folder / "baton.yaml"


@pytest.fixture(scope="module")
def router(cluster: Cluster, file: Path) -> Iterator[OtherRouter]:
    """A router in front of all engines."""
    with other_router(cluster, "--config", str(file)) as running:
        yield running


@pytest.fixture(scope="module")
def narrow(cluster: Cluster, file: Path) -> Iterator[OtherRouter]:
    """A router in front of one engine: requests with one salt share its prefix cache, and requests may have to wait."""
    with other_router(cluster, "--config", str(file), engines=("both-0",)) as running:
        yield running


def bearer(tenant: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}", **more}


def body(number: int, repeat: int = 3, **more: Any) -> dict[str, Any]:
    """A request with a prompt that no request had before."""
    return {
        "prompt": f"[{number} {uuid.uuid4().hex}] {STORY * repeat}",
        "max_tokens": 6,
        "temperature": 0,
        "stream": True,
        **more,
    }


def test_a_request_needs_a_key_and_a_class_of_its_tenant(router: OtherRouter) -> None:
    for headers in ({}, {"Authorization": "Bearer sk-nobody"}):
        status, told, answered = router.ask(PATH, body(0), **headers)
        assert (status, told["error"]["type"], answered["WWW-Authenticate"]) == (401, "AuthenticationError", "Bearer")
    status, told, _ = router.ask(PATH, body(0), **bearer("bolt", x_slo_class="soon"))
    assert (status, told["error"]["type"]) == (403, "PermissionDeniedError")
    assert "`easy`" in told["error"]["message"]
    assert router.ask(PATH, body(0), **bearer("bolt", x_slo_class="no such"))[0] == 400
    status, text, _ = router.ask(PATH, body(0), **bearer("bolt"))
    assert (status, text[-14:]) == (200, "data: [DONE]\n\n")


def test_a_request_in_time_has_met_its_class_as_was_estimated(router: OtherRouter) -> None:
    asked = body(1, stream_options={"include_usage": True})
    assert router.ask(PATH, asked, **bearer("acme", x_request_id="in-time"))[0] == 200
    story = router.explain("in-time")
    slo = story["slo"]
    assert (story["tenant"], story["slo_class"], slo["result"], slo["late"]) == ("acme", "easy", "met", False)
    assert 0 < slo["foretold"]["ttft_ms"] < 60_000
    assert 0 < slo["seen"]["ttft_ms"] < 60_000
    assert slo["tokens"] == 6


def test_a_request_that_cannot_be_in_time_is_refused_or_degraded_as_its_class_says(narrow: OtherRouter) -> None:
    """A target of 1 ms cannot be met here. The router knows that only after it has timed prompts of the engine."""
    assert narrow.ask(PATH, body(99), **bearer("acme", x_slo_class="never"))[0] == 200, "the router cannot know yet"
    for at in range(LEARNT):
        whole = body(100 + at, stream=at % 2 == 0)  # answers in one piece are timed, too
        assert narrow.ask(PATH, whole, **bearer("acme"))[0] == 200
    before = narrow.metrics()
    status, told, headers = narrow.ask(PATH, body(200), **bearer("acme", x_slo_class="never", x_request_id="shed"))
    assert status == 429, told
    assert told["error"]["type"] == "RateLimitError"
    assert int(headers["Retry-After"]) >= 1
    story = narrow.explain("shed")
    assert (story["state"], story["slo"]["result"], story["slo"]["late"]) == ("shed", "shed", True)
    assert not any(turn["turn"] == "leg" for turn in story["turns"]), "no leg was sent to an engine"
    assert narrow.ask(PATH, body(201), **bearer("acme", x_slo_class="falls", x_request_id="falls"))[0] == 200
    slo = narrow.explain("falls")["slo"]
    assert (slo["degraded"], slo["late"], slo["result"]) == (True, False, "missed")
    after = narrow.metrics()

    def counted(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert counted('baton_slo_requests_total{result="shed",slo_class="never",tenant="acme"}') == 1
    assert counted('baton_slo_degraded_total{slo_class="falls",tenant="acme"}') == 1
    assert after['baton_slo_attainment{slo_class="easy"}'] == 1.0


async def test_under_overload_some_requests_are_in_time_and_others_get_429(narrow: OtherRouter) -> None:
    """Two dozen or more requests at once, 0.1 s each, all due within 1 s: the router refuses some with 429."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(number: int) -> tuple[int, str]:
            headers = {"Authorization": "Bearer sk-acme", "x-slo-class": "brisk"}
            asked = {"model": narrow.model, **body(number, 12, max_tokens=2)}
            async with session.post(narrow.endpoint + PATH, json=asked, headers=headers) as answer:
                await answer.read()
                return answer.status, answer.headers.get("Retry-After", "")

        answers: list[tuple[int, str]] = []
        for many in (PATIENT + 4, 2 * PATIENT, 4 * PATIENT):
            answers += await asyncio.gather(*(ask(500 + len(answers) + at) for at in range(many)))
            if any(status == 429 for status, _ in answers):
                break  # else the engine was quick enough for all of them: send more
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 429}
    assert all(status == 200 or int(after) >= 1 for status, after in answers)
    found = narrow.metrics()
    results = {
        name: found.get(f'baton_slo_requests_total{{result="{name}",slo_class="brisk",tenant="acme"}}', 0.0)
        for name in ("met", "missed", "shed")
    }
    print(results)
    assert results["shed"] == statuses.count(429)
    assert results["met"] >= 1, "only one, because other programs use these cores, too"


async def test_a_request_that_is_due_earlier_goes_first(narrow: OtherRouter) -> None:
    """Long prompts of a patient class fill the queue. Two of a class that is due earlier come last, and overtake."""
    for patient in (PATIENT, 2 * PATIENT, 4 * PATIENT):
        inside, ended = await overtaken(narrow, patient)
        if inside >= 8:  # else the engine was quicker than the clients: send more
            break
    assert inside >= 8, "too few requests waited"
    behind = len(ended) - 1 - max(at for at, slo_class in enumerate(ended) if slo_class == "soon")
    assert behind >= inside - 5, f"{inside} requests were in the queue: {ended}"


async def overtaken(router: OtherRouter, patient: int) -> tuple[int, list[str]]:
    """Send `patient` requests, then two that are due earlier. Return how many waited when the two came, and the classes
    of all requests in the order in which they ended.
    """
    ended: list[str] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(slo_class: str, number: int) -> None:
            asked = {"model": router.model, **body(number, 12, max_tokens=2)}
            headers = {"Authorization": "Bearer sk-acme", "x-slo-class": slo_class}
            async with session.post(router.endpoint + PATH, json=asked, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            ended.append(slo_class)

        async def gauge(name: str) -> int:
            async with session.get(f"{router.admin}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            return int(float(next(line.split()[1] for line in lines if line.startswith(f"{name} "))))

        asking = [asyncio.create_task(ask("easy", 300 + at)) for at in range(patient)]
        async with asyncio.timeout(20):
            while await gauge("baton_open_requests") + len(ended) < patient:
                await asyncio.sleep(0)
        inside = await gauge("baton_waiting_requests")
        asking += [asyncio.create_task(ask("soon", 400 + at)) for at in range(2)]
        await asyncio.gather(*asking)
    return inside, ended


def test_only_tenants_that_share_use_each_others_cached_prefixes(narrow: OtherRouter) -> None:
    def cached(tenant: str, prompt: str) -> int:
        asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
        status, answer, _ = narrow.ask(PATH, asked, **bearer(tenant))
        assert status == 200, answer
        return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))

    own, shared = (f"[{uuid.uuid4().hex} {name}] {STORY * 10}" for name in ("own", "shared"))
    assert cached("acme", own) == 0
    assert cached("acme", own) >= BLOCKS
    assert cached("bolt", own) == 0, "another tenant does not use acme's blocks"
    assert cached("open-1", own) == 0, "a tenant that shares its cache does not use them either"
    assert cached("open-1", shared) == 0
    assert cached("open-2", shared) >= BLOCKS
    assert cached("acme", shared) == 0, "a tenant that does not share uses no shared blocks"
