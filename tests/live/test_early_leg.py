"""Early legs in two real engines, without router or agents: D has its leg before P has computed the prompt.

Answers are exact, and no leg hangs if P or D dies or if the legs come in another order.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
from support import device
from support.cluster import Cluster, within
from support.engine_pair import Open, ask, load
from support.two_engines import TwoEngines, real_engines

from bench.pair import Engines
from cluster import wire
from cluster.ids import InstanceId, TransferId
from kvtransfer.door import ask as knock
from kvtransfer.door import introduce_each_other

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(600)]

PATH = "/v1/completions"
P = InstanceId("p")
LONG = 1900
"""Tokens of a prompt that P computes for 0.1 s and more."""


class Fleet(TwoEngines):
    """The two engines, and their legs."""

    seed = 29
    counts = (*TwoEngines.counts, "early")

    def __init__(self, engines: Engines) -> None:
        super().__init__(engines)
        self.pool = ThreadPoolExecutor(16)

    def prefill(self, name: TransferId, prompt: list[int]) -> dict[str, Any]:
        status, answer = ask(self.p, PATH, wire.prefill_body(self.body(prompt), transfer=name, token_ids=True))
        assert status == 200, answer
        return answer

    def early(
        self, name: TransferId, prompt: list[int], *, pins: bool = True, by: str = P
    ) -> Future[tuple[int, dict[str, Any]]]:
        body = {**self.body(prompt), **wire.early_fields(name, InstanceId(by), pins=pins)}
        return self.pool.submit(ask, self.d, PATH, body)

    def count(self, name: str) -> int:
        return int(self.state("d")["counts"].get(name, 0))

    def waits(self, many: int = 1) -> None:
        within(10, lambda: self.state("d")["early"] == many)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with real_engines(tmp_path_factory.mktemp("e")) as running:
        made = Fleet(running)
        made.met()
        yield made


@pytest.fixture
def fleet(started: Fleet) -> Iterator[Fleet]:
    yield started
    started.both_live()


def tokens_of(early: Future[tuple[int, dict[str, Any]]]) -> list[int]:
    status, answer = early.result(30)
    assert status == 200, answer
    return list(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize("length", [2, 127, 128, 129, 1000, LONG])
def test_tokens_equal_one_engines_and_are_pulled(fleet: Fleet, length: int) -> None:
    prompt, name = fleet.prompt(length), fleet.name()
    before = load(fleet.d).external_kv_tokens
    early = fleet.early(name, prompt)
    fleet.waits()
    answer = fleet.prefill(name, prompt)
    told = tokens_of(early)
    assert told[0] == answer["choices"][0]["token_ids"][0]
    assert told == fleet.alone(prompt)
    within(5, lambda: load(fleet.d).external_kv_tokens - before == length)


def test_an_early_leg_may_come_after_p_has_answered(fleet: Fleet) -> None:
    prompt, name = fleet.prompt(400), fleet.name()
    fleet.prefill(name, prompt)
    assert tokens_of(fleet.early(name, prompt)) == fleet.alone(prompt)


def test_twelve_at_once_in_any_order(fleet: Fleet) -> None:
    before = fleet.count("confirmed")
    many = [(fleet.name(), fleet.prompt(300)) for _ in range(12)]
    early = {name: fleet.early(name, prompt) for name, prompt in many[::2]}
    prefilled = [fleet.pool.submit(fleet.prefill, name, prompt) for name, prompt in reversed(many)]
    early |= {name: fleet.early(name, prompt) for name, prompt in many[1::2]}
    told = {name: tokens_of(early[name]) for name, _ in many}
    for each in prefilled:
        each.result(30)
    assert all(told[name] == fleet.alone(prompt) for name, prompt in many)
    assert fleet.count("confirmed") - before == 12


def test_the_answer_of_an_early_leg_tells_what_p_had_cached(fleet: Fleet) -> None:
    prompt = fleet.prompt(600)
    first, name = fleet.name(), fleet.name()
    fleet.prefill(first, prompt[:400])
    early = fleet.early(name, prompt)
    fleet.waits()
    p_said = fleet.prefill(name, prompt)
    _, answer = early.result(30)
    assert answer["usage"]["prompt_tokens"] == 600
    told = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    assert told == (p_said["kv_transfer_params"] or {}).get("remote_prefill_cached_tokens", 0)
    assert told >= 384, "P has whole blocks of the first 400 tokens"
    assert knock(fleet.engines.door("p"), {"ask": "release", "transfer_id": str(first)}) == {"ok": True}


def test_a_client_that_leaves_d_early_frees_all(fleet: Fleet) -> None:
    prompt, name = fleet.prompt(LONG), fleet.name()
    body = {**fleet.body(prompt), **wire.early_fields(name, P, pins=True)}
    left = Open(fleet.d, PATH, body)
    fleet.waits()
    left.leave()
    fleet.waits(0)
    fleet.prefill(name, prompt)
    assert knock(fleet.engines.door("p"), {"ask": "release", "transfer_id": str(name)}) == {"ok": True}


def test_a_leg_of_an_unknown_producer_is_computed_here(fleet: Fleet) -> None:
    prompt = fleet.prompt(200)
    assert tokens_of(fleet.early(fleet.name(), prompt, by="nobody")) == fleet.alone(prompt)


def test_a_hold_for_a_leg_that_is_computed_here_ends_at_once(fleet: Fleet) -> None:
    """D loses P, computes the prompt itself, and meets P again: it tells P that it does not want the hold, long before
    the hold's lease ends.
    """
    prompt, name = fleet.prompt(100), fleet.name()
    long = {**fleet.body(prompt, LONG), **wire.early_fields(name, P, pins=True)}
    declined = fleet.count("early holds declined")
    answer = fleet.pool.submit(ask, fleet.d, PATH, long)
    fleet.waits()
    knock(fleet.engines.door("d"), {"ask": "forget", "engine_id": fleet.state("p")["engine_id"]})
    fleet.waits(0)
    introduce_each_other(*((each, fleet.engines.door(each)) for each in "pd"))
    fleet.prefill(name, prompt)
    within(10, lambda: fleet.count("early holds declined") == declined + 1 and fleet.state("p")["holds"] == 0)
    status, told = answer.result(60)
    assert status == 200 and told["choices"][0]["token_ids"][:6] == fleet.alone(prompt)


def test_other_requests_are_served_while_an_early_leg_waits(fleet: Fleet) -> None:
    prompt, name = fleet.prompt(LONG), fleet.name()
    early = fleet.early(name, prompt)
    fleet.waits()
    status, _ = ask(fleet.d, PATH, fleet.body(fleet.prompt(50)))
    assert status == 200 and not early.done()
    fleet.prefill(name, prompt)
    assert tokens_of(early) == fleet.alone(prompt)


def test_no_leg_hangs_when_d_or_p_is_killed(tmp_path: Any) -> None:
    """D dies: P's hold is released by its name, and another D takes an early leg from the same P. P dies: the test ends
    the waiting leg, as a router does, and D serves on.
    """
    with real_engines(tmp_path, another="e") as running:
        fleet = Fleet(running)
        within(20, lambda: all(len(fleet.state(name)["peers"]) >= 1 for name in "pde"))
        prompt, name = fleet.prompt(LONG), fleet.name()
        left = Open(fleet.d, PATH, {**fleet.body(prompt), **wire.early_fields(name, P, pins=True)})
        fleet.waits()
        prefilling = fleet.pool.submit(ask, fleet.p, PATH, wire.prefill_body(fleet.body(prompt), transfer=name))
        time.sleep(0.03)
        os.killpg(running.running["d"].process.pid, signal.SIGKILL)
        assert prefilling.result(30)[0] == 200
        left.leave()
        knock(fleet.engines.door("p"), {"ask": "release", "transfer_id": str(name)})
        within(10, lambda: fleet.state("p")["holds"] == 0)

        fleet.d = running.url("e")
        prompt, name = fleet.prompt(300), fleet.name()
        early = fleet.early(name, prompt)
        within(10, lambda: fleet.state("e")["early"] == 1)
        fleet.prefill(name, prompt)
        assert tokens_of(early) == fleet.alone(prompt)

        prompt, name = fleet.prompt(LONG), fleet.name()
        left = Open(fleet.d, PATH, {**fleet.body(prompt), **wire.early_fields(name, P, pins=True)})
        within(10, lambda: fleet.state("e")["early"] == 1)
        if device.gpus():  # a GPU computes this prompt before P is killed
            os.killpg(running.running["p"].process.pid, signal.SIGSTOP)
        prefilling = fleet.pool.submit(ask, fleet.p, PATH, wire.prefill_body(fleet.body(prompt), transfer=name))
        time.sleep(0.03)
        os.killpg(running.running["p"].process.pid, signal.SIGKILL)
        assert prefilling.exception(30) is not None
        left.leave()
        within(10, lambda: fleet.state("e")["early"] == 0 and fleet.state("e")["pulls"] == 0)
        status, answer = ask(fleet.d, PATH, fleet.body(prompt))
        assert status == 200, answer


async def test_a_router_sends_early_legs_without_a_setting(tmp_path: Any) -> None:
    """In a cluster with Baton's connector and no other setting, streams are handed over by early legs. Their texts are
    one engine's.
    """
    file = tmp_path / "baton.yaml"
    file.write_text(f"{device.example()}transfer: {{connector: baton}}\nrouter: {{policy: least_load}}\n")
    running = Cluster.start(tmp_path, str(file))
    try:
        running.wait_ready()
        within(60, running.proven)
        chance = random.Random(5)
        prompts = [[chance.randrange(97, 123) for _ in range(400)] for _ in range(6)]
        body = {"model": running.model, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:

            async def streamed(prompt: list[int]) -> str:
                told = {**body, "prompt": prompt, "stream": True}
                async with session.post(f"{running.endpoint}/v1/completions", json=told) as answer:
                    assert answer.status == 200
                    lines = [line async for line in answer.content if line.startswith(b"data: {")]
                return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

            told = [await streamed(prompt) for prompt in prompts]
            alone = []
            for prompt in prompts:
                url = next(iter(running.urls.values()))
                async with session.post(f"{url}/v1/completions", json={**body, "prompt": prompt}) as answer:
                    alone.append((await answer.json())["choices"][0]["text"])
        assert told == alone
        used = running.router_metric('baton_early_legs_total{result="used"}', 0.0)
        first = running.router_metric('baton_early_legs_total{result="answered first"}', 0.0)
        assert used + first >= 3, "at least three streams had an early leg that was used"
        assert running.router_metric("baton_seeds_total", 0.0) + first >= 5
        assert running.router_metric("baton_broken_seams_total", 0.0) == 0
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(90)
