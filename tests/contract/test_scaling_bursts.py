"""Eight mocks that may flip, the product's own controller: a burst of long prompts; a load that goes on and off."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.cluster import Cluster, within

pytestmark = [pytest.mark.timed, pytest.mark.long, pytest.mark.timeout(900)]

FILE = """\
models:
  - name: meta-llama/Llama-3.1-8B
    pools:
      prefill: {min: 2, max: 8, gpu: L4, flips: true}
      decode: {min: 6, max: 8, gpu: L4, flips: true}
hardware:
  L4: {count: 8}
slo:
  chat: {ttft_ms: 4000, tpot_ms: 150, attainment: 0.9}
"""
"""No instance can be started and none may leave: only roles can change."""
FLIPPED_S = 10.0


class Clients:
    """Streams of single requests, each with when it was sent and when its first token came."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._session = session
        self.first_s: dict[str, float] = {}
        self.texts: dict[str, str] = {}
        self.faults: list[str] = []

    async def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        body = {"model": self._cluster.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        headers = {"x-slo-class": "chat", "x-request-id": name}
        text = b""
        async with self._session.post(f"{self._cluster.endpoint}/v1/completions", json=body, headers=headers) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self.first_s.setdefault(name, time.monotonic())
                text += line
        self.texts[name] = text.decode()
        if answer.status != 200 or not text.rstrip().endswith(b"[DONE]") or b'"error"' in text:
            self.faults.append(f"{name}: {answer.status} {text[-200:]!r}")

    def prefilled_on(self, name: str) -> str | None:
        """The instance that computed a prompt, where it was handed over from there."""
        with urllib.request.urlopen(f"{self._cluster.admin}/explain/{name}", timeout=30) as answer:
            turns: list[dict[str, Any]] = json.loads(answer.read())["turns"]
        return next((each["instance"] for each in turns if each["turn"] == "leg" and each["leg"] == "prefill"), None)


@asynccontextmanager
async def clients(tmp_path: Path) -> AsyncIterator[Clients]:
    path = tmp_path / "baton.yaml"
    path.write_text(FILE)
    cluster = Cluster.start(tmp_path / "state", str(path), "--engine", "mock")
    try:
        await asyncio.to_thread(cluster.wait_ready)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
            yield Clients(cluster, session)
        agents = cluster.urls
        await asyncio.to_thread(within, 35, lambda: not any(_holds(url) for url in agents.values()))
    finally:
        cluster.stop()


def _holds(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/mock/state", timeout=10) as answer:
        state = json.loads(answer.read())
    return bool(state["load"]["running"] or state["requests"] or state["holds"])


def flips_of(cluster: Cluster) -> list[tuple[float, str]]:
    """When (Unix seconds), and which instance."""
    told = json.loads(cluster.baton("scale", "--json").stdout)
    return [
        (each["at"], action["instance"])
        for each in told["decisions"]
        if each["what"] == "flip"
        for action in each["actions"]
    ]


def short(number: int) -> list[int]:
    return [5 + number % 90] * 300


def long(number: int) -> list[int]:
    return [5 + at % (90 + number) for at in range(5000)]


async def test_a_burst_of_long_prompts_gets_a_first_token_of_a_flipped_instance_in_ten_seconds(tmp_path: Path) -> None:
    async with clients(tmp_path) as at, asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(at.ask(f"quiet-{number}", short(number), 40))
            await asyncio.sleep(0.5)
        assert flips_of(at._cluster) == []
        burst_s, burst_unix = time.monotonic(), time.time()
        names = [f"burst-{number}" for number in range(120)]
        asked = [group.create_task(at.ask(name, long(number), 20)) for number, name in enumerate(names)]
        await asyncio.wait(asked)
        assert at.faults == []
        flipped = {name for _, name in flips_of(at._cluster)}
        assert flipped, at._cluster.baton("scale", "--json").stdout[-3000:]
        theirs = [name for name in names if at.prefilled_on(name) in flipped]
        assert theirs, "a flipped instance computed prompts"
        first_s = min(at.first_s[name] for name in theirs) - burst_s
        assert first_s < FLIPPED_S, (
            first_s,
            [each - burst_unix for each, _ in flips_of(at._cluster)],
            sorted((round(at.first_s[n] - burst_s, 1), at.prefilled_on(n)) for n in theirs)[:6],
            sorted(round(at.first_s[n] - burst_s, 1) for n in names),
        )
