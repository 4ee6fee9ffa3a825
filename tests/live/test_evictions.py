"""A real engine whose cache is small throws prompts out: its agent says how much, by vLLM's own KV events."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, within

FILE = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 1, engine_args: {num-gpu-blocks-override: 24}}
      decode: {start: 1}
transfer: {connector: CONNECTOR}
router: {policy: least_load}
"""


@pytest.fixture(params=["baton", "nixl"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A P with room for one long prompt."""
    with Cluster.of(tmp_path, FILE.replace("CONNECTOR", request.param)) as cluster:
        yield cluster


def _evicted(cluster: Cluster) -> dict[str, float]:
    """Tokens, by instance."""
    found = {}
    for name, told in cluster.status().items():
        with urllib.request.urlopen(f"{told['agent']}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        (line,) = [line for line in lines if line.startswith("baton_agent_kv_evicted_tokens_total{")]
        found[name] = float(line.rsplit(" ", 1)[1])
    return found


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_agent_counts_what_its_engine_throws_out(small: Cluster) -> None:
    assert _evicted(small)["decode-0"] == 0
    for number in range(12):
        body = {"model": "baton-tiny", "prompt": f"{number} " + "a fox ran over the hill. " * 60, "max_tokens": 4}
        request = urllib.request.Request(
            f"{small.endpoint}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
    within(10, lambda: _evicted(small)["prefill-0"] >= 8 * 1400)
    counted = _evicted(small)
    assert counted["prefill-0"] <= 12 * 1600, "no more than came"
    assert counted["decode-0"] == 0, "its cache holds all of them"
