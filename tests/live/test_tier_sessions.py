"""Conversations that need three times the KV caches of two engines: with tiers and a router that knows of them, with
tiers and a router that goes by load alone, and without tiers.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from support.cluster import Cluster, within
from support.talks import Heard, converse

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]

BLOCKS = 24
"""Blocks of 128 tokens in an engine's KV cache: two conversations."""
TALKS = 12
"""Conversations of some 1,500 tokens: three times what both caches hold."""
FILE = f"""
models:
  - name: baton-tiny
    pools:
      both: {{start: 2, engine_args: {{num-gpu-blocks-override: {BLOCKS}}}}}
"""
TIERS = "kv: {host_gib: 0.25}\n"
BY_LOAD = "router: {policy: least_load}\n"
SETUPS = {"tiers, known to the router": TIERS, "tiers, placed by load": TIERS + BY_LOAD, "no tiers": ""}


def heard_with(folder: Path, more: str) -> Heard:
    folder.mkdir()
    with Cluster.of(folder, FILE + more) as cluster:
        heard = converse(cluster.endpoint, TALKS, at_once=2, seed=7)
        within(30, cluster.idle)
    return heard


def test_conversations_find_their_beginnings_in_tiers(tmp_path: Path) -> None:
    """With tiers less than half as many prompt tokens are computed again as without, whether the router knows of the
    tiers or goes by load alone. Answers are the same. Times are printed only: one run of each decides nothing.
    """
    told = {}
    for number, (name, more) in enumerate(SETUPS.items()):
        told[name] = heard = heard_with(tmp_path / f"{number}", more)
        first_ms = sorted(1000 * each for each in heard.first_s)
        print(
            f"{name}: first token {mean(first_ms):.0f} ms ({first_ms[0]:.0f} to {first_ms[-1]:.0f}), "
            f"{heard.computed} of {heard.prompts} prompt tokens computed"
        )
    known, by_load, none = told.values()
    assert known.said == by_load.said == none.said
    assert max(known.computed, by_load.computed) < 0.5 * none.computed
