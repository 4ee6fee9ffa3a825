"""A real engine with a small cache evicts prompts: its agent reports how many tokens, from vLLM's own KV events."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """A cluster whose P has room for one long prompt."""
    with Cluster.of(tmp_path, FILE.replace("CONNECTOR", request.param)) as cluster:
        yield cluster


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[Cluster]:
    """The same with tiers: host memory for about seven prompts, and files for all."""
    text = FILE.replace("CONNECTOR", "auto") + f"kv: {{host_gib: 0.02, disk_gib: 1, disk_folder: {tmp_path}/kv}}\n"
    with Cluster.of(tmp_path, text) as cluster:
        within(60, cluster.proven)  # until then D serves requests aggregated, and P gets no prompt
        yield cluster
    assert not list(Path("/dev/shm").glob("vllm_offload_*")) and not list((tmp_path / "kv").iterdir())


def _evicted(cluster: Cluster, name_of: str = "evicted_tokens_total{") -> dict[str, float]:
    """Evicted tokens by instance (or another `baton_agent_kv_` metric)."""
    found = {}
    for name, of in cluster.status().items():
        with urllib.request.urlopen(f"{of['agent']}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        told = [line for line in lines if line.startswith(f"baton_agent_kv_{name_of}")]
        found[name] = sum(float(line.rsplit(" ", 1)[1]) for line in told)
    return found


def _ask(cluster: Cluster, number: int) -> dict[str, Any]:
    """The answer to prompt `number`, which has some 1,500 tokens."""
    body = {"model": "baton-tiny", "prompt": f"{number} " + "a fox ran over the hill. " * 60, "max_tokens": 4}
    request = urllib.request.Request(
        f"{cluster.endpoint}/v1/completions",
        json.dumps({**body, "temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
        return dict(json.loads(answer.read()))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_prompt_in_a_tier_does_not_count_as_evicted_and_comes_back(tiered: Cluster) -> None:
    said = [_ask(tiered, number)["choices"][0]["text"] for number in range(12)]
    within(10, lambda: _evicted(tiered, "kept_tokens{")["prefill-0"] >= 8 * 1400)
    again = [_ask(tiered, number) for number in range(12)]
    assert [each["choices"][0]["text"] for each in again] == said
    found = [each["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1400 for each in again]
    assert all(found), "P had them on disk"
    # Not 0: vLLM stores no block while all of host memory is written to files, and learns of the end only in steps.
    assert _evicted(tiered)["prefill-0"] <= 4 * 1400, "without tiers 8 prompts and more are evicted"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_agent_counts_what_its_engine_evicts(small: Cluster) -> None:
    assert _evicted(small)["decode-0"] == 0
    for number in range(12):
        _ask(small, number)
    within(10, lambda: _evicted(small)["prefill-0"] >= 8 * 1400)
    counted = _evicted(small)
    assert counted["prefill-0"] <= 12 * 1600, "no more than was sent"
    assert counted["decode-0"] == 0, "its cache holds all of them"
