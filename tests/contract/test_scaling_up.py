"""`baton up` of a file with room to grow: from two engines to six and back, as real processes under load."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.cluster import Cluster, within
from support.streams import Streams

FILE = """\
models:
  - name: meta-llama/Llama-3.1-8B
    pools:
      prefill: {min: 1, max: 3, gpu: H100-SXM}
      decode: {min: 1, max: 3, gpu: H100-SXM}
"""


def _sizes(cluster: Cluster) -> dict[str, str]:
    told = cluster.baton("status", "--json")
    return {each["instance"]: each["state"] for each in json.loads(told.stdout)["instances"]}


def _idle(urls: list[str]) -> bool:
    """Whether these mocks run nothing and hold nothing."""
    for url in urls:
        with urllib.request.urlopen(f"{url}/mock/state", timeout=10) as answer:
            state = json.loads(answer.read())
        if state["load"]["running"] or state["requests"] or state["holds"]:
            return False
    return True


@pytest.mark.long  # tests/live/test_ray.py does the same with real nodes
@pytest.mark.timed
async def test_from_two_engines_to_six_and_back_without_a_failed_request(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(FILE)
    cluster = Cluster.start(tmp_path, str(path), "--engine", "mock", program=("-m", "support.scripted_up"))
    try:
        await asyncio.to_thread(cluster.wait_ready)
        first = dict(cluster.urls)
        load = Streams(cluster.endpoint, cluster.model, tokens=100, every_s=0.2)
        running = asyncio.ensure_future(load.run())
        names: set[str] = set()

        def seen(count: int) -> bool:
            sizes = _sizes(cluster)
            names.update(sizes)
            return len(sizes) == count and set(sizes.values()) == {"ready"}

        await asyncio.to_thread(within, 60, lambda: seen(6), lambda: _sizes(cluster))
        await asyncio.to_thread(within, 60, lambda: seen(2), lambda: _sizes(cluster))
        load.over.set()
        await running
        assert load.faults == []
        assert load.served == load.sent > 20
        assert names == {f"{role}-{number}" for role in ("prefill", "decode") for number in range(3)}
        await asyncio.to_thread(within, 35, lambda: _idle(list(first.values())))
        said = cluster.baton("scale", "--json")
        decided = [each["what"] for each in json.loads(said.stdout)["decisions"] if each["what"] != "hold"]
        assert decided[0] == "up"
        assert decided[-1] == "down"
    finally:
        cluster.stop()


SLOW = """\
models:
  - name: meta-llama/Llama-3.1-8B
    pools:
      prefill: {min: 1, max: 3, gpu: L4}
      decode: {min: 1, max: 3, gpu: L4}
hardware:
  L4: {count: 6}
slo:
  chat: {ttft_ms: 6000, tpot_ms: 150, attainment: 0.9}
"""


def _load(cluster: Cluster, rate: float, seconds: int, tokens: str) -> dict[str, int]:
    """`baton load`, as a user runs it."""
    inputs, outputs = tokens.split("/")
    words = ["load", cluster.endpoint, "--rate", f"{rate}", "--duration-s", f"{seconds}", "--input-tokens", inputs]
    words += ["--output-tokens", outputs, "--header", "x-slo-class:chat", "--timeout-s", "200", "--json"]
    told = subprocess.run(
        [sys.executable, "-m", "baton", *words], capture_output=True, text=True, timeout=500, check=False
    )
    found: dict[str, int] = json.loads(told.stdout)
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_controller_itself_goes_from_two_to_six_and_back_under_load(tmp_path: Path) -> None:
    """The controller decides without a script: a load needs six instances of such GPUs, then another needs two."""
    path = tmp_path / "baton.yaml"
    path.write_text(SLOW)
    cluster = Cluster.start(tmp_path, str(path), "--engine", "mock")
    try:
        await asyncio.to_thread(cluster.wait_ready)
        heavy = asyncio.ensure_future(asyncio.to_thread(_load, cluster, 2.4, 100, "4000/120"))
        await asyncio.to_thread(within, 150, lambda: len(_sizes(cluster)) == 6, lambda: _sizes(cluster))
        light = asyncio.ensure_future(asyncio.to_thread(_load, cluster, 0.4, 300, "300/20"))
        await asyncio.to_thread(within, 400, lambda: len(_sizes(cluster)) == 2, lambda: _sizes(cluster))
        for told in (await heavy, await light):
            assert told["failed"] == 0
            assert told["completed"] == told["sent"] > 50
        left = [each["engine"] for each in json.loads(cluster.baton("status", "--json").stdout)["instances"]]
        await asyncio.to_thread(within, 35, lambda: _idle(left), lambda: left)
        assert cluster.baton("explain", "--scaling").stdout.count("because") >= 2
        again = cluster.baton("plan", str(path), "--replay-decisions", "default")
        assert again.returncode == 0, again.stdout[-2000:]
    finally:
        cluster.stop()
