"""What a router expects to be in the real engines' prefix caches is there: conversations with tools, several at a time.

The engines are the session's; the router in front of them is another one, which foresees.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from support.cluster import Cluster

TURNS, TALKS = 5, 4
SYSTEM_BYTES = 1100
"""The tiny model reads bytes, 2,048 in all: one chunk of text lies within each conversation's unchanging beginning."""

TOOLS = [{"type": "function", "function": {"name": "lantern", "parameters": {"type": "object", "properties": {}}}}]
SENTENCE = "On day {} the fox carried the baton to the mill and the owl carried it back. "


@contextmanager
def foreseeing(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Another router in front of the same engines, with the fleet's keys for tickets."""
    record = next((cluster.state / "baton" / "clusters").glob("*.json"))
    keys = json.loads(record.read_text())["ticket_keys_file"]
    words = [sys.executable, "-m", "baton", "router", "--json", "--port", "0", "--admin-port", "0", "--pins"]
    words += ["--policy", "workload", *(["--ticket-keys-file", keys] if keys else [])]
    for name, url in cluster.urls.items():
        words += [f"--{name.rpartition('-')[0]}-url", f"{name}={url}"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        _wait_ready(told["admin"])
        yield told
    finally:
        process.terminate()
        assert process.wait(30) == 0


def _wait_ready(admin: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(f"{admin}/ready", timeout=5) as answer:
                seen = json.loads(answer.read())["instances"]
        except urllib.error.HTTPError:
            seen = []
        if seen and all(each["state"] == "up" for each in seen):
            return
        assert time.monotonic() < deadline, "the router sees every engine within 20 s"
        time.sleep(0.1)


def _ask(endpoint: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"{endpoint}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: str = json.loads(answer.read())["choices"][0]["message"]["content"] or ""
    return content


def _talk(endpoint: str, model: str, number: int) -> None:
    system = "".join(SENTENCE.format(1000 * number + day) for day in range(20))[:SYSTEM_BYTES]
    messages = [{"role": "system", "content": system}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"What happened on day {1000 * number + turn}, and why?"})
        body = {
            "model": model,
            "messages": messages,
            "tools": TOOLS,
            "tool_choice": "none",
            "max_tokens": 20,
            "temperature": 0,
        }
        messages.append({"role": "assistant", "content": _ask(endpoint, body)})


def _tokens(admin: str, name: str) -> float:
    with urllib.request.urlopen(f"{admin}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return float(
        next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"baton_prefix_{name}_tokens_total "))
    )


@pytest.mark.long
def test_what_is_expected_to_be_cached_is(cluster: Cluster) -> None:
    with foreseeing(cluster) as router, ThreadPoolExecutor(2) as clients:
        list(clients.map(lambda number: _talk(router["endpoint"], cluster.model, number), range(TALKS)))
        expected, found, cached = (_tokens(router["admin"], name) for name in ("expected", "found", "cached"))
    told = f"expected {expected:.0f}, found {found:.0f}, cached {cached:.0f}"
    assert expected >= (TURNS - 2) * TALKS * 500, told  # bytes per token are learned first
    assert found >= 0.95 * expected, told
