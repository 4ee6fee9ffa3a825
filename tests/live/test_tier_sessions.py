"""Conversations that need three times the KV caches of two engines, with tiers and without, and with a router that does
not know of the tiers.
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
      both: {{start: 2, engine_args: {{num-gpu-blocks-override: {BLOCKS}ARGS}}}}
"""
TIERS = "kv: {host_gib: 0.25}\n"
UNTOLD = ", kv-events-config: '{\"enable_kv_cache_events\": false}'"
"""With events of the user's own the agent hears of no block: routers take the KV cache's size for all that is kept."""
WAYS = {"tiers, known to the router": ("", TIERS), "tiers, not known": (UNTOLD, TIERS), "no tiers": ("", "")}


def heard_with(folder: Path, args: str, tiers: str) -> Heard:
    folder.mkdir()
    with Cluster.of(folder, FILE.replace("ARGS", args) + tiers) as cluster:
        heard = converse(cluster.endpoint, TALKS, at_once=2, seed=7)
        within(30, cluster.idle)
    return heard


def test_conversations_find_their_beginnings_in_tiers(tmp_path: Path) -> None:
    """A router that knows the tiers sends a next turn where its beginning is, and so less is computed again."""
    told = {}
    for number, (name, (args, tiers)) in enumerate(WAYS.items()):
        told[name] = heard = heard_with(tmp_path / f"{number}", args, tiers)
        first_ms = sorted(1000 * each for each in heard.first_s)
        print(
            f"{name}: first token {mean(first_ms):.0f} ms ({first_ms[0]:.0f} to {first_ms[-1]:.0f}), "
            f"{heard.computed} of {heard.prompts} prompt tokens computed"
        )
    known, unknown, none = told.values()
    assert known.said == unknown.said == none.said
    assert known.computed < 0.7 * unknown.computed
    assert unknown.computed < none.computed
