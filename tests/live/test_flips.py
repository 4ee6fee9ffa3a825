"""Instances take another role while they serve: a P and a D change places and back, and no answer differs."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, within

FILE = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 1, flips: true}
      decode: {start: 1, flips: true}
transfer: {connector: CONNECTOR}
router: {policy: least_load}
"""

CHANGES = (("decode-0", "both"), ("prefill-0", "decode"), ("decode-0", "prefill"))
"""Role changes, in an order that always leaves an instance for each leg."""
BACK = (("prefill-0", "both"), ("decode-0", "decode"), ("prefill-0", "prefill"))
EACH = 40


@pytest.fixture(params=["baton", "nixl"])
def flipping(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Two engines that were started for both kinds of leg."""
    with Cluster.of(tmp_path, FILE.replace("CONNECTOR", request.param)) as cluster:
        yield cluster


def _post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, json.loads(answer.read())


def _ask(url: str, prompt: list[int]) -> str:
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    return str(_post(f"{url}/v1/completions", body)[1]["choices"][0]["text"])


def _done(answers: list[Future[str]], count: int) -> bool:
    return sum(each.done() for each in answers) >= count


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_pair_changes_places_and_back_and_nothing_is_lost(flipping: Cluster) -> None:
    """It takes a minute and a half for each connector, most of it the start of two engines."""
    agents = {name: told["agent"] for name, told in flipping.status().items()}
    chance = random.Random(3)
    prompts = [[chance.randrange(3, 250) for _ in range(chance.randrange(2, 900))] for _ in range(3 * EACH)]
    with ThreadPoolExecutor(4) as clients:
        answers: list[Future[str]] = []
        for changes in (CHANGES, BACK, ()):
            answers += [clients.submit(_ask, flipping.endpoint, each) for each in prompts[len(answers) :][:EACH]]
            for name, role in changes:
                within(60, partial(_done, answers, len(answers) - EACH + EACH // 4))
                assert _post(f"{agents[name]}/role", {"role": role})[1]["role"] == role
        told = [each.result() for each in answers]
    pulled = {name: flipping.metrics(name) for name in flipping.urls}
    alone = [_ask(flipping.urls["prefill-0"], each) for each in prompts]
    assert told == alone, [at for at, pair in enumerate(zip(told, alone, strict=True)) if pair[0] != pair[1]]
    for name, metrics in pulled.items():
        source = next(line for line in metrics.splitlines() if 'source="external_kv_transfer"' in line)
        assert float(source.rsplit(" ", 1)[1]) > 0, f"{name} has been a D"
    within(15, flipping.idle)
