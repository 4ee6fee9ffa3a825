"""Early legs or pulls, chosen by a router by what both have cost (`router/predict/early_cost.py`), on two real engines.

How long both take is for `make bench-handoff ARGS="--part router"`. Here both ways are tried, whatever the verdict is,
and no answer differs from one engine's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from support import cluster as clusters
from support import device
from support.cluster import Cluster, within
from support.pairs_front import pairs_only

from bench.connectors_fleet import EIGHT
from bench.connectors_router import counts, extra_ms
from bench.handoff_client import events, prompt
from bench.router_front import Front
from router.predict.early_cost import ENOUGH, RUN, SOON

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1500)]

FIRST_VERDICT = (ENOUGH * (SOON + 1) + 1) * RUN
"""The requests until the first verdict, one at a time."""
IN_LOOP = 4
"""Requests of each of the eight clients, before it is looked whether both ways were tried."""
TOKENS = 300


@dataclass
class Asked:
    """A router, and all that it was asked."""

    cluster: Cluster
    front: Front
    chance: random.Random = field(default_factory=lambda: random.Random(31))
    answers: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def stream(self) -> None:
        body = {"model": self.cluster.model, "prompt": prompt(TOKENS, self.chance), "max_tokens": 6, "temperature": 0,
                "ignore_eos": True, "stream": True}  # fmt: skip
        self.answers.append((body, events(self.front.endpoint, body)[1]))

    def loop(self) -> None:
        """Eight clients at once, each with one request after another."""
        with ThreadPoolExecutor(EIGHT) as pool:
            for done in [pool.submit(self.stream) for _ in range(EIGHT * IN_LOOP)]:
                done.result()

    def all_read_as_from_one_engine(self) -> None:
        url = self.cluster.urls["prefill-0"]
        assert [text for _, text in self.answers] == [events(url, body)[1] for body, _ in self.answers]


@pytest.fixture
def asked(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(clusters, "START_S", 600.0)
    file = "".join(line for line in device.example().splitlines(keepends=True) if "both:" not in line)
    with Cluster.of(tmp_path_factory.mktemp("state"), file) as cluster, pairs_only(cluster, 1) as front:
        yield Asked(cluster, front)


def test_both_ways_are_tried_and_answers_are_one_engines(asked: Asked) -> None:
    """One request at a time until there is a verdict, then eight: P has a queue then, which is compared apart."""
    while "not queued" not in extra_ms(asked.front):
        asked.stream()
        assert len(asked.answers) < 3 * FIRST_VERDICT, counts(asked.front)
    told = counts(asked.front)
    assert len(asked.answers) >= FIRST_VERDICT
    assert told["compared"] >= ENOUGH * RUN and told["early"] >= ENOUGH * SOON * RUN - RUN, told
    while counts(asked.front)["compared"] < told["compared"] + RUN:
        asked.loop()
        assert len(asked.answers) < 8 * FIRST_VERDICT, counts(asked.front)
    assert asked.front.metric("baton_broken_seams_total") == 0
    print(f"{len(asked.answers)} streams: {counts(asked.front)}, early legs take longer by ms: {extra_ms(asked.front)}")
    asked.all_read_as_from_one_engine()
    within(30, asked.cluster.idle)
