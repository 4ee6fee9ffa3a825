"""Conversations over a working set larger than a prefill engine's cache, with prompts' beginnings from the peer and
without: `baton up` on real engines. The decode engine has all of them, and is kept busy with other answers.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.cluster import Cluster, within

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]

FILE = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 1, engine_args: {num-gpu-blocks-override: 24}}
      decode: {start: 1}
transfer: {connector: baton, peers: PEERS}
"""
TALKS, TURNS, BUSY = 5, 4, 4
SENTENCE = "On day {} the fox carried the baton to the mill and the owl carried it back. "


@dataclass
class Seen:
    """Of one cluster: what its clients saw."""

    first_s: list[float] = field(default_factory=list)
    """Of turns after the first."""
    computed: int = 0
    """Prompt tokens of such turns that no cache had."""
    said: list[str] = field(default_factory=list)
    held: float = 0.0
    tokens: float = 0.0


def _stream(cluster: Cluster, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    raw = json.dumps({"model": "baton-tiny", "temperature": 0, "stream": True, **body}).encode()
    request = urllib.request.Request(
        f"{cluster.endpoint}/v1/chat/completions", raw, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


@contextmanager
def busy(cluster: Cluster) -> Iterator[None]:
    """Answers that decode all the while."""
    over = threading.Event()

    def decode(number: int) -> None:
        while not over.is_set():
            body = {"messages": [{"role": "user", "content": f"{number}: go on"}], "max_tokens": 300}
            for _ in _stream(cluster, {**body, "ignore_eos": True}):
                if over.is_set():
                    break

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(BUSY)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in threads:
            each.join()


def converse(cluster: Cluster) -> Seen:
    """Turn by turn, one conversation after the other."""
    seen, talks = Seen(), [
        [{"role": "system", "content": "".join(SENTENCE.format(100 * talk + day) for day in range(16))}]
        for talk in range(TALKS)
    ]  # fmt: skip
    for turn in range(TURNS):
        for number, messages in enumerate(talks):
            messages.append({"role": "user", "content": f"What happened on day {100 * number + turn}?"})
            body = {"messages": messages, "max_tokens": 12, "stream_options": {"include_usage": True}}
            began, first, text, usage = time.monotonic(), 0.0, "", {}
            for event in _stream(cluster, body):
                for choice in event["choices"]:
                    said = choice["delta"].get("content") or ""
                    first = first or (time.monotonic() if said else 0.0)
                    text += said
                usage = event.get("usage") or usage
            messages.append({"role": "assistant", "content": text})
            seen.said.append(text)
            if turn:
                seen.first_s.append(first - began)
                cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
                seen.computed += usage["prompt_tokens"] - cached
    return seen


def seen_with(folder: Path, peers: str) -> Seen:
    folder.mkdir()
    with Cluster.of(folder, FILE.replace("PEERS", peers)) as cluster:
        within(60, cluster.proven)
        with busy(cluster):
            seen = converse(cluster)
        seen.held = cluster.router_metric('baton_prefix_sources_total{outcome="held"}', 0.0)
        seen.tokens = cluster.router_metric("baton_prefix_source_tokens_total", 0.0)
        within(30, cluster.idle)
    return seen


def test_conversations_with_and_without_peers(tmp_path: Path) -> None:
    """What is said is the same; with peers less is computed again."""
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
