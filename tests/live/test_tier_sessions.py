"""Conversations that need three times the KV caches of two engines: with tiers and a router that knows of them, with
tiers and a router that does not, with tiers and a router that goes by load alone, and without tiers.
"""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest
from support.cluster import PROGRAM, Cluster, within
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
UNTOLD = ("-m", "support.tiers_unknown")
SETUPS = {
    "tiers, known to the router": (TIERS, PROGRAM),
    "tiers, unknown to the router": (TIERS, UNTOLD),
    "tiers, placed by load": (TIERS + BY_LOAD, PROGRAM),
    "no tiers": ("", PROGRAM),
}


@dataclass
class Told:
    """Tokens, of all agents together."""

    evicted: float = 0.0
    kept: float = 0.0
    """Tokens in tiers."""


def told_by_agents(cluster: Cluster) -> Told:
    told = Told()
    for each in cluster.status().values():
        with urllib.request.urlopen(f"{each['agent']}/metrics", timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("baton_agent_kv_evicted_tokens_total{"):
                    told.evicted += float(line.rsplit(" ", 1)[1])
                elif line.startswith("baton_agent_kv_kept_tokens{"):
                    told.kept += float(line.rsplit(" ", 1)[1])
    return told


def heard_with(folder: Path, more: str, program: tuple[str, ...]) -> tuple[Heard, Told]:
    """What clients hear, and what agents have told routers by then."""
    folder.mkdir()
    with Cluster.of(folder, FILE + more, program=program) as cluster:
        heard = converse(cluster.endpoint, TALKS, at_once=2, seed=7)
        within(30, cluster.idle)
        return heard, told_by_agents(cluster)


def test_conversations_find_their_beginnings_in_tiers(tmp_path: Path) -> None:
    """With tiers less than half as many prompt tokens are computed again as without, whether the router knows of the
    tiers or goes by load alone; with an index that knows no tiers more is computed. Answers are
    the same. Times are printed only: one run of each decides nothing.

    Not checked: other loads, other models, tiers on disk.
    """
    found = {}
    for number, (name, setup) in enumerate(SETUPS.items()):
        heard, told = heard_with(tmp_path / f"{number}", *setup)
        found[name] = heard, told
        first_ms = sorted(1000 * each for each in heard.first_s)
        print(
            f"{name}: first token {mean(first_ms):.0f} ms ({first_ms[0]:.0f} to {first_ms[-1]:.0f}), "
            f"{heard.computed} of {heard.prompts} prompt tokens computed; agents: {told}"
        )
    (known, telling), (unknown, silent), (by_load, _), (none, _) = found.values()
    assert known.said == unknown.said == by_load.said == none.said
    assert max(known.computed, by_load.computed) < 0.5 * none.computed
    assert known.computed < unknown.computed
    assert telling.kept and not silent.kept and silent.evicted > telling.evicted
