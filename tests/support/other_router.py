"""Another router in front of a cluster's engines, with a policy, classes or tenants that the cluster's router lacks."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support.cluster import Cluster, within

SEEN_S = 20.0
"""Seconds within which a router on busy cores has seen every engine."""


@dataclass(frozen=True)
class OtherRouter:
    """A running router, reached over HTTP."""

    endpoint: str
    admin: str
    model: str

    def ask(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Send a request. Returns status, answer and headers. In names of `headers`, `_` stands for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        raw = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(
            self.endpoint + path, raw, {"Content-Type": "application/json", **named}
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
                whole = "json" in answer.headers["Content-Type"]
                return answer.status, json.loads(text) if whole else text, dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read()), dict(error.headers)

    def metrics(self) -> dict[str, float]:
        """The router's metrics, by name with labels."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def explain(self, request_id: str) -> dict[str, Any]:
        """The explanation of a request (`/explain/{id}`), once the request is over."""
        found: list[dict[str, Any]] = []

        def over() -> bool:
            with urllib.request.urlopen(f"{self.admin}/explain/{request_id}", timeout=30) as answer:
                found.append(json.loads(answer.read()))
            return bool(found[-1]["state"] != "open")

        within(5.0, over)
        return found[-1]

    def sees_all(self) -> bool:
        """Whether the router sees every engine up."""
        try:
            with urllib.request.urlopen(f"{self.admin}/ready", timeout=5) as answer:
                seen = json.loads(answer.read())["instances"]
        except urllib.error.HTTPError as error:
            error.close()
            return False
        return bool(seen) and all(each["state"] == "up" for each in seen)


@contextmanager
def other_router(cluster: Cluster, *words: str, engines: tuple[str, ...] = ()) -> Iterator[OtherRouter]:
    """Start `baton router` with these flags and the fleet's ticket keys, for these engines (none named: all)."""
    record = next((cluster.state / "baton" / "clusters").glob("*.json"))
    keys = json.loads(record.read_text())["ticket_keys_file"]
    argv = [sys.executable, "-m", "baton", "router", "--json", "--port", "0", "--admin-port", "0", "--pins"]
    argv += ["--policy", "least_load", *words]
    argv += ["--ticket-keys-file", keys] if keys else []
    for name in engines or cluster.urls:
        argv += [f"--{name.rpartition('-')[0]}-url", f"{name}={cluster.urls[name]}"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        try:
            told = json.loads(said.readline())
            router = OtherRouter(told["endpoint"], told["admin"], cluster.model)
            within(SEEN_S, router.sees_all)
            yield router
        finally:
            process.terminate()
            code = process.wait(30)
    assert code == 0
