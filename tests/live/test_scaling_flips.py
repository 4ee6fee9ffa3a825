"""The product's controller flips a real engine: a burst of long prompts, and nobody notices but by being served."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.cluster import Cluster, within

pytestmark = [pytest.mark.live, pytest.mark.timed, pytest.mark.long, pytest.mark.timeout(900)]

FILE = """\
models:
  - name: baton-tiny
    pools:
      prefill: {min: 1, max: 3, flips: true}
      decode: {min: 2, max: 3, flips: true}
router: {policy: least_load}
slo:
  chat: {ttft_ms: 2000, tpot_ms: 500, attainment: 0.9}
"""
"""Two that may flip: the last of a role never does."""
FLIPPED_S = 10.0


class Clients:
    """Answers by name, with when each one's first token came."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._session = session
        self.first_s: dict[str, float] = {}
        self.texts: dict[str, str] = {}
        self.faults: list[str] = []

    async def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        headers = {"x-slo-class": "chat", "x-request-id": name}
        url, text, whole = f"{self._cluster.endpoint}/v1/completions", "", False
        async with self._session.post(url, json=body, headers=headers) as answer:
            async for raw in answer.content:
                line = raw.decode().strip()
                whole = whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    self.first_s.setdefault(name, time.monotonic())
                    text += str(json.loads(line[6:])["choices"][0]["text"])
        self.texts[name] = text
        if answer.status != 200 or not whole:
            self.faults.append(f"{name}: {answer.status} {text[-200:]!r}")


def prefilled_on(cluster: Cluster, name: str) -> str | None:
    with urllib.request.urlopen(f"{cluster.admin}/explain/{name}", timeout=30) as answer:
        turns: list[dict[str, Any]] = json.loads(answer.read())["turns"]
    return next((each["instance"] for each in turns if each["turn"] == "leg" and each["leg"] == "prefill"), None)


def flipped(cluster: Cluster) -> set[str]:
    told = json.loads(cluster.baton("scale", "--json").stdout)
    return {
        action["instance"]
        for each in told["decisions"]
        if each["what"] == "flip"
        for action in each["actions"]
        if action["role"] == "prefill"
    }


async def test_a_burst_is_answered_by_a_flipped_engine_and_tokens_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(FILE)
    cluster = Cluster.start(tmp_path / "state", str(path), program=("-m", "support.flipping_up"))
    chance = random.Random(5)
    prompts = {f"burst-{at}": [chance.randrange(3, 250) for _ in range(900)] for at in range(150)}
    try:
        await asyncio.to_thread(cluster.wait_ready)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session, asyncio.TaskGroup() as group:
            at = Clients(cluster, session)
            for number in range(50):
                group.create_task(at.ask(f"quiet-{number}", [5 + number] * 20, 8))
                await asyncio.sleep(0.4)
            burst_s = time.monotonic()
            await asyncio.wait([group.create_task(at.ask(name, prompt, 8)) for name, prompt in prompts.items()])
        assert at.faults == []
        ours = flipped(cluster)
        theirs = [name for name in prompts if prefilled_on(cluster, name) in ours]
        assert theirs, (ours, cluster.baton("scale").stdout)
        assert min(at.first_s[name] for name in theirs) - burst_s < FLIPPED_S
        async with aiohttp.ClientSession() as session:
            for name in theirs[:20]:
                body = {"model": "baton-tiny", "prompt": prompts[name], "max_tokens": 8, "temperature": 0}
                async with session.post(f"{cluster.urls['prefill-0']}/v1/completions", json=body) as answer:
                    alone = (await answer.json())["choices"][0]["text"]
                assert at.texts[name] == alone
        await asyncio.to_thread(within, 35, cluster.idle)
    finally:
        cluster.stop()
