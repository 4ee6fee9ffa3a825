"""Only another engine's host memory has the prefix of a next turn: the router chooses that engine as the source.

All first turns are computed by one prefill engine, which then drains. The other one has nothing. The decode engine's KV
cache has room for two of the conversations, and its host memory for all.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median

import pytest
from support import cluster as clusters
from support.cluster import Cluster, within
from support.pairs_front import Front, pairs_only
from support.talks import Turn, ask, first_turns

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]

FILE = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 2, engine_args: {num-gpu-blocks-override: 24}}
      decode: {start: 1, engine_args: {num-gpu-blocks-override: 24}}
transfer: {connector: baton, peers: true}
kv: {host_gib: 0.25}
"""
TALKS = 6
FROM_HOST = "vllm:prompt_tokens_cached_by_source_total{"


def from_host(cluster: Cluster, instance: str) -> float:
    """Prompt tokens that this engine has found in host memory."""
    lines = cluster.metrics(instance).splitlines()
    return sum(
        float(each.rsplit(" ", 1)[1]) for each in lines if each.startswith(FROM_HOST) and 'source="host"' in each
    )


def drain(cluster: Cluster, front: Front, out: str, back: str) -> None:
    """Take one prefill engine out and the other one in, and wait until the router knows both."""
    agents = {name: each["agent"] for name, each in cluster.status().items()}
    for name, path in ((back, "resume"), (out, "drain")):
        body = json.dumps({"deadline_s": 60} if path == "drain" else {}).encode()
        request = urllib.request.Request(f"{agents[name]}/{path}", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=30).close()

    def known() -> bool:
        try:
            listed = front.told("/ready")["instances"]
        except urllib.error.HTTPError:  # 503: no prefill instance, as the router knows of one of the two already
            return False
        states = {each["id"]: each["state"] for each in listed}
        return (states[out], states[back]) == ("draining", "up")

    within(30, known)


def choice(front: Front, name: str) -> str:
    """Why the router has chosen the places of this request."""
    turns = front.told(f"/explain/{name}")["turns"]
    return str(next(each["because"] for each in turns if each["turn"] == "choice"))


def test_the_router_chooses_a_tier_as_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next turns are placed with what the decode engine has, and their answers are those of prompts that no cache has.

    At least half of them: a source has to save three tenths of the time, and a source leg that was late just now, as
    several are on cores that all engines share, is in the next one's price.
    """
    monkeypatch.setattr(clusters, "START_S", 600.0)
    with Cluster.of(tmp_path, FILE) as cluster, pairs_only(cluster, 2) as front:
        drain(cluster, front, out="prefill-1", back="prefill-0")
        talks = first_turns(TALKS)
        for each in talks:
            each.append({"role": "assistant", "content": ask(front.endpoint, each).text})
            each.append({"role": "user", "content": "And on the day after that?"})
        within(30, cluster.idle)
        drain(cluster, front, out="prefill-0", back="prefill-1")
        before, told, why = from_host(cluster, "decode-0"), [], []
        for number, each in enumerate(talks):
            told.append(ask(front.endpoint, each, name=f"talk-{number}"))
            why.append(choice(front, f"talk-{number}"))
        loaded = from_host(cluster, "decode-0") - before
        held = front.metric('baton_prefix_sources_total{outcome="held"}')
        cold = [ask(front.endpoint, each, cache_salt="alone") for each in talks]
        print_told(told, cold, loaded, held, why)
        assert [each.text for each in told] == [each.text for each in cold]
        sourced = [each for each in why if "more from decode-0" in each]
        assert len(sourced) >= TALKS / 2, why
        assert held == len(sourced)
        assert loaded >= 1000 * (len(sourced) - 2), "the decode engine's cache may still have two of them"
        within(30, cluster.idle)


def print_told(told: list[Turn], cold: list[Turn], loaded: float, held: float, why: list[str]) -> None:
    """For docs/peers.md."""
    first_ms, cold_ms = (1000 * median(turn.first_s for turn in turns) for turns in (told, cold))
    print(
        f"first token {first_ms:.0f} ms, cold {cold_ms:.0f} ms; {held:.0f} holds, {loaded:.0f} tokens from host memory"
    )
    print("\n".join(why))
