"""Conversations that need three times the KV caches of two engines: with tiers and a router that knows of them, with
tiers and a router that does not, with tiers and a router that goes by load alone, and without tiers.
"""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from support.cluster import PROGRAM, Cluster, within
from support.talks import Heard, converse

from bench.tiers_tables import KNOWN, NONE, UNKNOWN

BLOCKS: Final = 24
"""Blocks of 128 tokens in an engine's KV cache: two conversations."""
TALKS: Final = 12
"""Conversations of some 1,500 tokens: three times what both caches hold."""
FILE: Final = f"""
models:
  - name: baton-tiny
    pools:
      both: {{start: 2, engine_args: {{num-gpu-blocks-override: {BLOCKS}}}}}
"""
TIERS: Final = "kv: {host_gib: 0.25}\n"
BY_LOAD: Final = "router: {policy: least_load}\n"
UNTOLD: Final = ("-m", "support.tiers_unknown")
PLACED_BY_LOAD: Final = "tiers, placed by load"
SETUPS: Final = {
    KNOWN: (TIERS, PROGRAM),
    UNKNOWN: (TIERS, UNTOLD),
    PLACED_BY_LOAD: (TIERS + BY_LOAD, PROGRAM),
    NONE: ("", PROGRAM),
}
"""What each adds to the cluster file, and the program that runs `baton`."""


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


def heard_with(folder: Path, setup: str, seed: int = 7) -> tuple[Heard, Told]:
    """What clients hear with one of `SETUPS`, and what agents have told routers by then. `seed`: of the order of the
    conversations in each turn.
    """
    more, program = SETUPS[setup]
    folder.mkdir()
    with Cluster.of(folder, FILE + more, program=program) as cluster:
        heard = converse(cluster.endpoint, TALKS, at_once=2, seed=seed)
        within(30, cluster.idle)
        return heard, told_by_agents(cluster)
