"""With Baton's connector a router hands over only between engines that have met, at first and after a restart."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator

import aiohttp
import pytest
from support.cluster import Cluster, descendants, within

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(600)]

BACK_S = 180.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    words = ("--transfer", "baton", "--prefill", "1", "--decode", "1")
    running = Cluster.start(tmp_path_factory.mktemp("state"), *words)
    try:
        running.wait_ready()
        assert running.all_ready()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(90)


def counted(cluster: Cluster, event: str) -> int:
    """How often D's connector has counted this event, from its agent's metrics, which are at most a second old."""
    with urllib.request.urlopen(cluster.agents["decode-0"] + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(rf'baton_agent_connector_events_total\{{[^}}]*event="{event}"\}} (\d+)', text)
    return int(found[1]) if found else 0


async def asked(cluster: Cluster, number: int) -> None:
    prompt = [(7 * number + at) % 200 + 10 for at in range(200)]
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
        session.post(f"{cluster.endpoint}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert json.loads(await answer.text())["usage"]["completion_tokens"] == 8


async def test_the_very_first_requests_are_handed_over(cluster: Cluster) -> None:
    await asyncio.gather(*(asked(cluster, number) for number in range(4)))
    within(10.0, lambda: counted(cluster, "confirmed") >= 4)
    assert counted(cluster, "not pulled") == 0


def proven(cluster: Cluster) -> float:
    """Proofs that pairs have passed. For a proof the router compares a hand-over of a fresh prompt with D's own answer
    (`router.fleet.pair_proofs`).
    """
    return cluster.router_metric('baton_pair_proofs_total{result="passed"}', 0.0)


def test_the_pair_is_proven(cluster: Cluster) -> None:
    within(30.0, lambda: proven(cluster) == 1)
    assert cluster.router_metric('baton_pair_proofs_total{result="failed"}', 0.0) == 0
    within(10.0, lambda: counted(cluster, "confirmed") == 5)


async def test_while_p_starts_anew_all_are_served_and_a_d_that_has_not_met_p_pulls_nothing(cluster: Cluster) -> None:
    agent = cluster.status()["prefill-0"]["pid"]
    before, handed = counted(cluster, "confirmed"), cluster.router_metric('baton_handoffs_total{result="ok"}')
    os.kill(next(iter(descendants(agent))), signal.SIGKILL)
    number = 100
    async with asyncio.timeout(BACK_S):
        while cluster.router_metric('baton_handoffs_total{result="ok"}') < handed + 3:
            await asked(cluster, number)
            number += 1
    within(10.0, lambda: counted(cluster, "confirmed") >= before + 3)
    assert counted(cluster, "not pulled") == 0, "no hand-over to a D that had not met P yet"
    within(60.0, lambda: proven(cluster) == 2)
