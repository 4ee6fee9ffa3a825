"""Requests that are counted in batches give the same statistics as requests that are counted one by one."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.core.slo import seen_in
from router.telemetry.finished import SHAPES_MAX, TOGETHER, FinishedRequests
from router.telemetry.histograms import Times
from router.telemetry.rolling import KINDS, SLOT_S, RollingStatistics
from router.telemetry.timing import EngineTimes, RequestTimeline, Stage

BOUNDS = (0.005, 0.05, 0.5)


def through(chance: Random, *, stream: bool = True) -> RequestTimeline:
    """The timeline of a random request, to its end."""
    now = 100 * chance.random()
    line = RequestTimeline(now, stream=stream)

    def enter(stage: str) -> float:
        nonlocal now
        now += chance.choice([0.0, chance.random() / 10])
        line.enter(stage, now)
        return now

    handed_over, seeded = chance.random() < 0.8, chance.random() < 0.5
    if chance.random() < 0.3:
        enter(Stage.CREDIT)
        enter(Stage.ROUTER)
    for _ in range(chance.choice([0, 0, 0, 1, 2])):
        line.again(enter(Stage.PREFILL_LEG))
    if handed_over:
        enter(Stage.PREFILL_LEG)
        enter(Stage.ROUTER)
        if chance.random() < 0.2:
            line.report(Stage.PREFILL_LEG, EngineTimes(0.01, 0.02))
    if handed_over and seeded and stream:
        line.seeded = True
        line.relabel(Stage.RELAY)
        line.first(now, Stage.ROUTER)
    enter(Stage.DECODE_LEG if handed_over else Stage.AGGREGATED_LEG)
    enter(Stage.STEP if line.seeded else Stage.RELAY)
    if stream and not line.seeded and chance.random() < 0.9:
        line.first(now, Stage.STEP)
    if stream and chance.random() < 0.8:
        line.second(now + 0.01)
    line.end(now + 0.02 + chance.random())
    return line


def samples(registry: CollectorRegistry) -> Iterator[tuple[Any, float]]:
    for family in registry.collect():
        for each in family.samples:
            if not each.name.endswith("_created"):
                yield (each.name, *sorted(each.labels.items())), each.value


@pytest.mark.parametrize("count", [1, TOGETHER + 7])
def test_a_batch_counts_as_its_requests_one_by_one(count: int) -> None:
    chance = Random(count)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times, single, lately, lone = Times(ours, BOUNDS), Times(theirs, BOUNDS), RollingStatistics(), RollingStatistics()
    finished = FinishedRequests(times, lately)
    for _ in range(count):
        stream = chance.random() < 0.9
        line, tokens = through(chance, stream=stream), chance.choice([None, 1, 2, 50])
        finished.add(1000.0, line, tokens)
        timing = line.read(1000.0)
        single.observe(timing)
        tpot_ms = seen_in(line.totals(1000.0), tokens, streamed=stream).tpot_ms
        sums = [[] if each is None else [each.total_s] for each in (timing.ttft, timing.tt2t)]
        lone.served(1000.0, *sums, [] if tpot_ms is None else [tpot_ms / 1000])
    assert dict(samples(ours)) == pytest.approx(dict(samples(theirs)), rel=1e-9, abs=1e-12)
    told, wanted = lately.told(1000.0), lone.told(1000.0)
    assert told["now"] == wanted["now"]
    assert told["history"][-1] == pytest.approx(wanted["history"][-1])
    assert times.parts_of_ttft() == pytest.approx(single.parts_of_ttft())


def test_each_request_is_counted_in_its_own_slot() -> None:
    lately = RollingStatistics()
    finished = FinishedRequests(Times(CollectorRegistry(), BOUNDS), lately)
    for at in range(4):
        finished.add(at * SLOT_S, through(Random(at)), None)
    assert [slot["ended"] for slot in lately.told(3 * SLOT_S)["history"][-4:]] == [1, 1, 1, 1]


def test_a_request_that_asked_for_a_place_in_vain_thousands_of_times_is_read_once() -> None:
    line = RequestTimeline(0.0, stream=True)
    for at in range(4000):
        line.enter((Stage.CREDIT, Stage.ROUTER)[at % 2], float(at))
    line.end(4000.0)
    assert line.shape() is None
    assert line.read(4000.0).total_s == 4000.0


def test_rows_of_stages_are_not_remembered_for_ever() -> None:
    lately = RollingStatistics()
    finished = FinishedRequests(Times(CollectorRegistry(), BOUNDS), lately)
    for stages in range(SHAPES_MAX + 2):
        line = RequestTimeline(0.0, stream=True)
        for at in range(stages):
            line.enter(Stage.CREDIT, float(at))
        line.end(float(stages))
        finished.add(0.0, line, None)
    told = lately.told(0.0)
    assert told["now"]["outcomes"] == {"served": SHAPES_MAX + 2}
    assert len(finished._shapes) <= SHAPES_MAX
    assert all(told["now"]["values"][kind] == {} for kind in KINDS)
