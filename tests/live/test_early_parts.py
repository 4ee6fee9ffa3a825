"""Parts in two real engines, without router or agents: D reads a prompt's blocks while P computes the rest.

Answers are one engine's. If P or D dies in the middle, nothing hangs and nothing is held.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import device
from support.cluster import within
from support.engine_pair import Open, ask
from support.random_models import write_model
from support.two_engines import TwoEngines, real_engines

from bench.pair import Engines
from cluster import wire
from cluster.ids import InstanceId, TransferId
from cluster.instance import Role
from engine.vllm.command import GPU_READS
from engine.vllm.tiers import Tiers
from kvtransfer.door import ask as knock
from kvtransfer.door import introduce_each_other

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(600)]

PATH = "/v1/completions"
P = InstanceId("p")
LONG = 1900
FLAGS = ("--max-num-batched-tokens", "256", "--no-enable-prefix-caching")
"""P computes a long prompt in eight steps. (Without a prefix cache, an answer of one engine is computed anew.)"""


@pytest.fixture(scope="module", autouse=True)
def slow_link() -> Iterator[None]:
    """On GPUs reads go over TCP. Straight ones bring these prompts so soon that D rightly reads no parts."""
    with pytest.MonkeyPatch.context() as patch:
        if device.gpus():
            patch.setenv(GPU_READS, "off")
        yield


class Fleet(TwoEngines):
    """The two engines, and their legs."""

    seed = 31
    counts = (*TwoEngines.counts, "early")

    def __init__(self, engines: Engines) -> None:
        super().__init__(engines)
        self.pool = ThreadPoolExecutor(16)

    def early(self, name: TransferId, prompt: list[int]) -> Future[tuple[int, dict[str, Any]]]:
        body = {**self.body(prompt), **wire.early_fields(name, P, pins=True)}
        return self.pool.submit(ask, self.d, PATH, body)

    def prefilling(self, name: TransferId, prompt: list[int]) -> Future[tuple[int, dict[str, Any]]]:
        return self.pool.submit(ask, self.p, PATH, wire.prefill_body(self.body(prompt), transfer=name, token_ids=True))

    def hand_over(self, prompt: list[int]) -> list[int]:
        """An early leg and its prompt. Returns the leg's tokens."""
        name = self.name()
        early = self.early(name, prompt)
        within(10, lambda: self.state("d")["early"] >= 1)
        assert self.prefilling(name, prompt).result(60)[0] == 200
        status, answer = early.result(60)
        assert status == 200, answer
        return list(answer["choices"][0]["token_ids"])

    def count(self, name: str, engine: str = "d") -> int:
        return int(self.state(engine)["counts"].get(name, 0))

    def open(self, prompt: list[int]) -> tuple[Open, TransferId, Future[tuple[int, dict[str, Any]]]]:
        """An early leg of which D reads, while P computes. Returns the leg, its name, and P's answer to come."""
        name, before = self.name(), self.count("parts read early")
        leg = Open(self.d, PATH, {**self.body(prompt), **wire.early_fields(name, P, pins=True)})
        within(10, lambda: self.state("d")["early"] == 1)
        prefilling = self.prefilling(name, prompt)
        within(10, lambda: self.count("parts read early") > before)
        assert not prefilling.done(), "P computes the rest"
        return leg, name, prefilling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("wide cache", tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Fleet]:
    with real_engines(tmp_path_factory.mktemp("e"), model=model, flags=FLAGS) as running:
        made = Fleet(running)
        made.met()
        prompt = made.prompt(LONG)
        assert made.hand_over(prompt) == made.alone(prompt)
        assert made.count("parts read early") == 0, "the rate of the link is not known yet"
        yield made


@pytest.fixture
def fleet(started: Fleet) -> Iterator[Fleet]:
    yield started
    started.both_live()


@pytest.mark.parametrize("length", [200, 256, 1800, 1792, LONG])
def test_tokens_equal_one_engines(fleet: Fleet, length: int) -> None:
    prompt = fleet.prompt(length)
    told, read, good = fleet.count("parts told", "p"), fleet.count("parts read early"), fleet.count("confirmed")
    assert fleet.hand_over(prompt) == fleet.alone(prompt)
    assert fleet.count("confirmed") == good + 1
    assert (fleet.count("parts told", "p") > told) == (length > 256), "a prompt of one step has no parts"
    assert (fleet.count("parts read early") > read) == (length > 1000)


def test_six_at_once(fleet: Fleet) -> None:
    many = [fleet.prompt(1200) for _ in range(6)]
    good = fleet.count("confirmed")
    told = list(fleet.pool.map(fleet.hand_over, many))
    assert told == [fleet.alone(prompt) for prompt in many]
    assert fleet.count("confirmed") == good + 6


def test_a_client_that_leaves_frees_all(fleet: Fleet) -> None:
    left, name, prefilling = fleet.open(fleet.prompt(LONG))
    left.leave()
    within(10, lambda: fleet.state("d")["early"] == 0)
    assert prefilling.result(60)[0] == 200
    assert knock(fleet.engines.door("p"), {"ask": "release", "transfer_id": str(name)}) == {"ok": True}
    within(10, fleet.nothing_is_held)
    assert fleet.count("early reads abandoned") >= 1
    prompt = fleet.prompt(LONG)
    assert fleet.hand_over(prompt) == fleet.alone(prompt)


def test_a_producer_that_d_loses_is_not_waited_for(fleet: Fleet) -> None:
    """D's agent says that P has gone: D gives the blocks back once their reads have ended, and computes the prompt."""
    prompt, name = fleet.prompt(LONG), fleet.name()
    before = fleet.count("parts read early")
    early = fleet.early(name, prompt)
    within(10, lambda: fleet.state("d")["early"] == 1)
    prefilling = fleet.prefilling(name, prompt)
    within(10, lambda: fleet.count("parts read early") > before)
    knock(fleet.engines.door("d"), {"ask": "forget", "engine_id": fleet.state("p")["engine_id"]})
    status, answer = early.result(60)
    assert status == 200 and answer["choices"][0]["token_ids"] == fleet.alone(prompt)
    assert prefilling.result(60)[0] == 200
    knock(fleet.engines.door("p"), {"ask": "release", "transfer_id": str(name)})
    within(10, fleet.nothing_is_held)
    introduce_each_other(*((each, fleet.engines.door(each)) for each in "pd"))
    within(20, lambda: bool(fleet.state("d")["peers"]))


def test_beside_a_tier(tmp_path: Path, model: Path) -> None:
    """Host memory below small KV caches: D's copies into its tier and early reads go for the same blocks, and some
    prompts come back from P's or D's tier instead.
    """
    tiers = Tiers(host_bytes=1 << 30, disk_bytes=0, folder="")
    flags = (*device.flags(), "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "40")
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    more = {"tiers": tiers, "max_model_len": 2048}
    with Engines(tmp_path, str(model), roles, flags=flags, more=more, gpus=device.gpus()) as running:
        fleet = Fleet(running)
        fleet.met()
        prompts = [fleet.prompt(LONG) for _ in range(5)]
        alone = [fleet.hand_over(prompt) for prompt in prompts]
        for _ in range(2):
            assert [fleet.hand_over(prompt) for prompt in prompts] == alone
        more_of_them = [fleet.prompt(1200) for _ in range(6)]
        told = list(fleet.pool.map(fleet.hand_over, more_of_them))
        assert told == [fleet.alone(prompt) for prompt in more_of_them]
        assert alone == [fleet.alone(prompt) for prompt in prompts]
        print({name: fleet.count(name) for name in ("parts read early", "confirmed", "early reads in vain")})
        assert fleet.count("parts read early") > 0
        fleet.both_live()


def test_nothing_hangs_when_d_or_p_is_killed(tmp_path: Path, model: Path) -> None:
    with real_engines(tmp_path, another="e", model=model, flags=FLAGS) as running:
        fleet = Fleet(running)
        within(20, lambda: all(len(fleet.state(name)["peers"]) >= 1 for name in "pde"))
        fleet.hand_over(fleet.prompt(LONG))
        left, name, prefilling = fleet.open(fleet.prompt(LONG))
        os.killpg(running.running["d"].process.pid, signal.SIGKILL)
        assert prefilling.result(60)[0] == 200, "P serves on"
        left.leave()
        knock(fleet.engines.door("p"), {"ask": "release", "transfer_id": str(name)})
        within(10, lambda: fleet.state("p")["holds"] == 0)

        fleet.d = running.url("e")
        state = fleet.state
        fleet.state = lambda name: state("e" if name == "d" else name)  # type: ignore[method-assign]
        fleet.hand_over(fleet.prompt(LONG))
        left, name, prefilling = fleet.open(prompt := fleet.prompt(LONG))
        os.killpg(running.running["p"].process.pid, signal.SIGKILL)
        assert prefilling.exception(30) is not None
        left.leave()
        within(20, lambda: fleet.state("e")["early"] == 0 and fleet.state("e")["pulls"] == 0)
        began = time.monotonic()
        status, answer = ask(fleet.d, PATH, fleet.body(prompt))
        assert status == 200 and time.monotonic() - began < 60, answer
