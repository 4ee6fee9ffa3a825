"""Conversations that need more than a prefill engine's cache, with and without prompts' beginnings from the peer.

`baton up` runs real engines; the router hands over wherever it can (`bench.pairs_router`). The decode engine's cache
has all of the conversations. With one and with two data parallel ranks in each engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from support import cluster as clusters
from support.cluster import Cluster, within
from support.pairs_front import pairs_only
from support.talks import Heard, converse

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]

FILE = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 1, shape: {dp: RANKS}, engine_args: {num-gpu-blocks-override: 24}}
      decode: {start: 1, shape: {dp: RANKS}}
transfer: {connector: baton, peers: PEERS}
"""
TALKS = {1: 5, 2: 9}
"""Conversations by the number of ranks. Each rank's cache in the prefill engine has room for two."""


@dataclass
class Seen(Heard):
    """What the clients of one cluster saw, and what its router counted."""

    held: float = 0.0
    tokens: float = 0.0


def seen_with(folder: Path, peers: str, ranks: int) -> Seen:
    folder.mkdir()
    with Cluster.of(folder, FILE.replace("PEERS", peers).replace("RANKS", str(ranks))) as cluster:
        with pairs_only(cluster, ranks * ranks) as front:
            seen = Seen(**vars(converse(front.endpoint, TALKS[ranks])))
            seen.held = front.metric('baton_prefix_sources_total{outcome="held"}')
            seen.tokens = front.metric("baton_prefix_source_tokens_total")
        within(30, cluster.idle)
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_conversations_with_and_without_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The answers are the same with and without peers; with peers fewer tokens are computed."""
    monkeypatch.setattr(clusters, "START_S", 600.0)  # with ranks four engine cores start on two processor cores
    told = {peers: seen_with(tmp_path / peers, peers, ranks) for peers in ("true", "false")}
    for peers, seen in told.items():
        first_ms = sorted(1000 * each for each in seen.first_s)
        print(
            f"ranks {ranks}, peers {peers}: first token {median(first_ms):.0f} ms "
            f"({first_ms[0]:.0f} to {first_ms[-1]:.0f}), "
            f"{seen.computed} tokens computed, {seen.held:.0f} holds of {seen.tokens:.0f} tokens"
        )
    assert told["true"].said == told["false"].said
    assert told["false"].held == 0
    assert told["true"].held > 0
    assert told["true"].computed < told["false"].computed
