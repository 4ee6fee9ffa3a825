"""Conversations with engines of data parallel ranks, and with as many engines without ranks."""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.cluster import Cluster

from engine.vllm.metrics import parse_loads

TOKENS: Final = 12
"""Tokens of each answer."""
BOTH: Final = """
models:
  - name: baton-tiny
    pools:
      both: {start: STARTS, shape: {dp: DP}}
transfer: {connector: auto}
"""
PLACES: Final = {"ranks": (1, 2), "instances": (2, 1)}
"""Engines, and ranks of each: two places for prefixes either way."""
TALKS, TURNS = 8, 5


@dataclass
class Found:
    """What clients are told of all prompt tokens, and how many each engine or rank got."""

    prompt: int
    cached: int
    by_place: list[int]

    @property
    def rate(self) -> float:
        """The share of all prompt tokens that was in a cache."""
        return self.cached / self.prompt


def ask(url: str, prompt: str, **headers: str) -> dict[str, Any]:
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    if headers:
        body["cache_salt"] = "alone"
    told = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), told)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.loads(answer.read()))


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def prompts(count: int, seed: int = 3) -> list[str]:
    chance = random.Random(seed)
    words = "fox hill river sun tree stone child bird rain moon".split()
    return [" ".join(chance.choice(words) for _ in range(chance.randrange(30, 130))) for _ in range(count)]


def found_with(folder: Path, places: str, seed: int = 21) -> Found:
    """Prefixes found in conversations that take turns, on one of `PLACES`. An engine that pulls a beginning from
    another one counts it as cached. `seed`: of the conversations.
    """
    folder.mkdir()
    starts, ranks = PLACES[places]
    with Cluster.of(folder, BOTH.replace("STARTS", str(starts)).replace("DP", str(ranks))) as cluster:
        _talk(cluster, prompts(4, seed=20), turns=3)  # the router learns how fast these engines are
        prompt, cached = _talk(cluster, prompts(TALKS, seed=seed), turns=TURNS)
        used = [each.prompt_tokens for name in cluster.urls for each in parse_loads(cluster.metrics(name), ranks)]
    return Found(prompt, cached, used)


def _talk(cluster: Cluster, starts: list[str], turns: int) -> tuple[int, int]:
    """All prompt tokens, and those of them that were in a cache."""
    talks = [(each * 12)[:1150] for each in starts]  # a chunk of the prefix-cache index has some 1,000 bytes
    prompt = cached = 0
    for turn in range(turns):
        with ThreadPoolExecutor(1 if turn else len(talks)) as pool:  # the first turns at once, so that they go to both
            answers = list(pool.map(lambda said: ask(cluster.endpoint, said), talks))
        for number, (said, answer) in enumerate(zip(talks, answers, strict=True)):
            usage = answer["usage"]
            prompt += usage["prompt_tokens"]
            cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            talks[number] = (
                said + text(answer) + f" and on day {turn} of talk {number} the fox went up the hill again. "
            )
    return prompt, cached
