"""Conversations that need more than a prefill engine's cache, with and without prompts' beginnings from the peer.

`baton up` runs real engines; the router hands over wherever it can (`support.pairs_only`). The decode engine's cache
has all of the conversations.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.cluster import Cluster, with_support, within
from support.talks import Heard, converse

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]

FILE = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 1, engine_args: {num-gpu-blocks-override: 24}}
      decode: {start: 1}
transfer: {connector: baton, peers: PEERS}
"""
TALKS = 5


@dataclass
class Seen(Heard):
    """What the clients of one cluster saw, and what its router counted."""

    held: float = 0.0
    tokens: float = 0.0


@dataclass
class Front:
    """The test's own router in front of a cluster's engines."""

    endpoint: str
    admin: str

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))

    def told(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.admin + path, timeout=30) as answer:
            return dict(json.loads(answer.read()))

    def proven(self) -> bool:
        return self.metric('baton_pair_proofs_total{result="passed"}') >= 1


@contextmanager
def pairs_only(cluster: Cluster) -> Iterator[Front]:
    record = json.loads(next((cluster.state / "baton" / "clusters").glob("*.json")).read_text())
    argv = [sys.executable, "-m", "support.pairs_only", "router", "--json", "--port", "0", "--admin-port", "0"]
    argv += ["--policy", "workload", "--ticket-keys-file", record["ticket_keys_file"]]
    argv += ["--registry", record["registry"], "--registry-password-file", record["registry_password_file"]]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=with_support())
    assert process.stdout is not None
    with process.stdout as said:
        try:
            told = json.loads(said.readline())
            front = Front(told["endpoint"], told["admin"])
            within(60, front.proven)
            yield front
        finally:
            process.terminate()
            process.wait(30)


def seen_with(folder: Path, peers: str) -> Seen:
    folder.mkdir()
    with Cluster.of(folder, FILE.replace("PEERS", peers)) as cluster:
        with pairs_only(cluster) as front:
            seen = Seen(**vars(converse(front.endpoint, TALKS)))
            seen.held = front.metric('baton_prefix_sources_total{outcome="held"}')
            seen.tokens = front.metric("baton_prefix_source_tokens_total")
        within(30, cluster.idle)
    return seen


def test_conversations_with_and_without_peers(tmp_path: Path) -> None:
    """The answers are the same with and without peers; with peers fewer tokens are computed."""
    told = {peers: seen_with(tmp_path / peers, peers) for peers in ("true", "false")}
    for peers, seen in told.items():
        first_ms = sorted(1000 * each for each in seen.first_s)
        print(
            f"peers {peers}: first token {median(first_ms):.0f} ms ({first_ms[0]:.0f} to {first_ms[-1]:.0f}), "
            f"{seen.computed} tokens computed, {seen.held:.0f} holds of {seen.tokens:.0f} tokens"
        )
    assert told["true"].said == told["false"].said
    assert told["false"].held == 0
    assert told["true"].held > 0
    assert told["true"].computed < told["false"].computed
