"""Two engines that run both legs, each with tiers: the router sends a prompt back to the engine that has it in a
tier, or makes that engine the source of a pull. No prompt is computed again.

The KV cache of each engine has room for two of the conversations, so that most next turns find their beginnings in a
tier alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import cluster as clusters
from support.cluster import Cluster, within
from support.pairs_front import Front, as_it_starts
from support.talks import ask, first_turns

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]

FILE = """
models:
  - name: baton-tiny
    pools:
      both: {start: 2, engine_args: {num-gpu-blocks-override: 24}}
kv: KV
"""
TALKS = 8
TIERS = {
    "host": "{host_gib: 0.25}",
    "disk": "{host_gib: 0.012, disk_gib: 0.5, disk_folder: FOLDER}",  # host memory has room for four conversations
}
FROM_TIERS = "vllm:prompt_tokens_cached_by_source_total{"


def from_tiers(cluster: Cluster, instance: str) -> float:
    """Prompt tokens that this engine has found in its tiers."""
    lines = [each for each in cluster.metrics(instance).splitlines() if each.startswith(FROM_TIERS)]
    return sum(float(each.rsplit(" ", 1)[1]) for each in lines if 'source="device"' not in each)


def told(front: Front, name: str) -> tuple[str, str]:
    """The instance that computed this request's prompt, and why it was chosen."""
    (choice,) = [each for each in front.told(f"/explain/{name}")["turns"] if each["turn"] == "choice"]
    return str(choice["prefill"] or choice["decode"]), str(choice["because"])


@pytest.mark.parametrize("tier", TIERS)
def test_a_prompt_goes_back_to_the_engine_whose_tier_has_it(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "START_S", 600.0)
    (tmp_path / "tier").mkdir()
    file = FILE.replace("KV", TIERS[tier]).replace("FOLDER", str(tmp_path / "tier"))
    with Cluster.of(tmp_path, file) as cluster, as_it_starts(cluster, 2) as front:
        talks = first_turns(TALKS)
        first = []
        for number, each in enumerate(talks):
            each.append({"role": "assistant", "content": ask(front.endpoint, each, name=f"first-{number}").text})
            each.append({"role": "user", "content": "And on the day after that?"})
            first.append(told(front, f"first-{number}")[0])
        within(30, cluster.idle)
        before = {name: from_tiers(cluster, name) for name in cluster.urls}
        turns = [ask(front.endpoint, each, name=f"next-{number}") for number, each in enumerate(talks)]
        places = [told(front, f"next-{number}") for number in range(TALKS)]
        loaded = {name: from_tiers(cluster, name) - before[name] for name in cluster.urls}
        print(tier, first, *places, loaded, sep="\n")
        assert len(set(first)) == 2, "both engines have conversations"
        for former, (place, why) in zip(first, places, strict=True):
            assert place == former or f"more from {former}" in why, why
        assert all(turn.usage["prompt_tokens_details"]["cached_tokens"] >= 1000 for turn in turns)
        assert sum(loaded.values()) >= 1000 * (TALKS - 4), "each KV cache may still have two of them"
        cold = [ask(front.endpoint, each, cache_salt="alone") for each in talks]
        assert [each.text for each in turns] == [each.text for each in cold]
        within(30, cluster.idle)
