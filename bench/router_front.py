"""Routers of a benchmark's own, or of a test's, in front of real engines that run already."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROUTER: Final = ("router", "--json", "--port", "0", "--admin-port", "0")
PAIRS_ROUTER: Final = (sys.executable, "-m", "bench.pairs_router")
"""The program of a router that hands over wherever a pair can serve."""


@dataclass
class Front:
    """One such router."""

    endpoint: str
    admin: str

    def metrics(self) -> str:
        """Its page of metrics."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=30) as answer:  # noqa: S310 - a router of ours
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """A metric by its name with labels; 0 where the router has none such yet."""
        lines = self.metrics().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))

    def told(self, path: str) -> dict[str, Any]:
        """The JSON of a path of the admin side."""
        with urllib.request.urlopen(self.admin + path, timeout=30) as answer:  # noqa: S310 - a router of ours
            return dict(json.loads(answer.read()))

    def proven(self, pairs: int) -> bool:
        """Whether it has proven so many pairs."""
        return self.metric('baton_pair_proofs_total{result="passed"}') >= pairs


def registered(state: Path) -> list[str]:
    """Flags with the registry of the cluster that `baton up` has started with this XDG_STATE_HOME, and the files with
    its secrets.
    """
    record = json.loads(next((state / "baton" / "clusters").glob("*.json")).read_text())
    words = ["--registry", record["registry"], "--registry-password-file", record["registry_password_file"]]
    return [*words, "--ticket-keys-file", record["ticket_keys_file"]]


@contextmanager
def started(words: Sequence[str], env: Mapping[str, str]) -> Iterator[Front]:
    """A router by these words; stopped at the end."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=env)
    assert process.stdout is not None
    with process.stdout as said:
        try:
            told = json.loads(said.readline())
            yield Front(told["endpoint"], told["admin"])
        finally:
            process.terminate()
            process.wait(30)
