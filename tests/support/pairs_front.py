"""Routers of a test's own in front of real engines: one that hands over wherever a pair can serve, and one by URLs."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support.cluster import Cluster, with_support, within

ROUTER = ("router", "--json", "--port", "0", "--admin-port", "0")


@dataclass
class Front:
    """The test's own router."""

    endpoint: str
    admin: str

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))

    def told(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.admin + path, timeout=30) as answer:
            return dict(json.loads(answer.read()))

    def proven(self, pairs: int) -> bool:
        return self.metric('baton_pair_proofs_total{result="passed"}') >= pairs


@contextmanager
def pairs_only(cluster: Cluster, pairs: int) -> Iterator[Front]:
    """The router, once it has proven so many pairs."""
    argv = [sys.executable, "-m", "support.pairs_only", *ROUTER, "--policy", "workload", *_registered(cluster)]
    with _started(argv) as front:
        within(120, lambda: front.proven(pairs))
        yield front


@contextmanager
def as_it_starts(cluster: Cluster, pairs: int) -> Iterator[Front]:
    """`baton router` with the cluster's registry and keys alone, once it knows of so many proven pairs."""
    with _started([sys.executable, "-m", "baton", *ROUTER, *_registered(cluster)]) as front:
        within(120, lambda: front.proven(pairs))
        yield front


def _registered(cluster: Cluster) -> list[str]:
    """Flags with the cluster's registry, and the files with its secrets."""
    record = json.loads(next((cluster.state / "baton" / "clusters").glob("*.json")).read_text())
    words = ["--registry", record["registry"], "--registry-password-file", record["registry_password_file"]]
    return [*words, "--ticket-keys-file", record["ticket_keys_file"]]


@contextmanager
def by_url(*words: str, pairs: int) -> Iterator[Front]:
    """`baton router` with these words, once it has proven so many pairs."""
    with _started([sys.executable, "-m", "baton", *ROUTER, *words]) as front:
        within(120, lambda: front.proven(pairs))
        yield front


@contextmanager
def _started(argv: list[str]) -> Iterator[Front]:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=with_support())
    assert process.stdout is not None
    with process.stdout as said:
        try:
            told = json.loads(said.readline())
            yield Front(told["endpoint"], told["admin"])
        finally:
            process.terminate()
            process.wait(30)
