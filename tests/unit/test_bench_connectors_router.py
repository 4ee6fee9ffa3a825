"""What `make bench-handoff ARGS="--part router"` makes of what it saw."""

from __future__ import annotations

from typing import Any

import pytest

from bench import connectors_router as bench
from bench.pairs_router import OneWay
from bench.router_front import Front
from cluster.ids import InstanceId

PAGE = """
baton_early_legs_total{result="used"} 30.0
baton_early_legs_total{result="answered first"} 2.0
baton_early_legs_total{result="lost"} 1.0
baton_early_legs_forgone_total{why="dearer"} 5.0
baton_early_legs_forgone_total{why="compared"} 8.0
baton_early_leg_extra_seconds{near="true",prefill="p",queued="false"} 0.0125
baton_early_leg_extra_seconds{near="true",prefill="p",queued="true"} -0.004
"""


def figures(choice: float) -> dict[str, Any]:
    """Eight turns in which a pull takes a tenth longer than an early leg, and the choice so many times as long."""
    turns = [100.0 + number for number in range(8)]
    taken = {"early": turns, "pull": [1.1 * each for each in turns], "choice": [choice * each for each in turns]}
    legs = {"early": 60, "compared": 4, "dearer": 0}
    learning = {"sent": 40, "legs": {"early": 32, "compared": 8, "dearer": 0}, "extra_ms": {}}
    return {"learning": learning, "first": taken, "second": taken, "legs": legs, "extra_ms": {"queued": -9.5}}


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Front:
    monkeypatch.setattr(Front, "metrics", lambda _: PAGE)
    return Front("", "")


def test_what_a_router_counts(front: Front) -> None:
    assert bench.counts(front) == {"early": 32, "compared": 8, "dearer": 5}
    assert bench.extra_ms(front) == {"not queued": 12.5, "queued": -4.0}


def test_a_choice_is_compared_with_the_better_way_turn_by_turn() -> None:
    mine = figures(1.01)
    assert bench.better(mine, "second") == "early"
    told = bench.over(mine, "second", "choice", "early")
    assert told is not None and told["median"] == pytest.approx(1.01) and told["repeats"] == 8
    assert told["low"] == pytest.approx(1.01) and told["high"] == pytest.approx(1.01)


def test_the_better_way_is_so_in_most_turns() -> None:
    """A few turns in which all was slow do not decide."""
    mine = figures(1.0)
    mine["second"] = {"early": [100.0, 100.0, 900.0, 950.0, 980.0], "pull": [90.0, 90.0, 500.0, 990.0, 990.0]}
    assert bench.better(mine, "second") == "pull"


def test_tables_have_a_row_for_each_way_and_token() -> None:
    times, legs = bench.tables({"alone": figures(1.01), "loop": figures(1.02)})
    assert [row[:2] for row in times.rows] == [
        ["one at a time", "first"],
        ["one at a time", "second"],
        ["eight in a loop", "first"],
        ["eight in a loop", "second"],
    ]
    assert times.rows[0][2:] == ["104", "114", "105", "0.91 (0.91 to 0.91)", "1.01 (1.01 to 1.01) early"]
    assert legs.rows[0] == ["one at a time", "learning", "32", "8", "0", ""]
    assert legs.rows[1] == ["one at a time", "turns", "60", "4", "0", "queued: -9.5"]
    assert all(len(row) == len(table.columns) for table in (times, legs) for row in table.rows)


class Sent(bench.Clients):
    """Clients of a router that has a verdict about the place after `until` requests."""

    def __init__(self, until: int) -> None:
        self.until, self.sent = until, 0

    def stream(self, url: str, tokens: int = 0, output: int = 0) -> bench.Heard:
        self.sent += 1
        return bench.Heard(1.0, 2.0, "")


@pytest.mark.parametrize(("until", "sent"), [(24, 24), (1000, 40), (0, 0)])
def test_a_router_learns_until_its_first_verdict(monkeypatch: pytest.MonkeyPatch, until: int, sent: int) -> None:
    clients = Sent(until)
    monkeypatch.setattr(Front, "metrics", lambda _: PAGE if clients.sent >= until else "")
    assert bench.learn(clients, Front("", ""), "alone", 40)["sent"] == sent == clients.sent


def test_a_turn_of_the_loop_has_eight_clients(front: Front) -> None:
    clients = Sent(0)
    assert len(clients.turn(front, "loop")) == 24 and len(clients.turn(front, "alone")) == 6


@pytest.mark.parametrize("way", ["early", "pull"])
def test_a_forced_router_sends_all_legs_one_way(way: str) -> None:
    costs = OneWay(way)
    told = [costs.choose(InstanceId("p"), 0.0, near=True, queued=False, counts=True) for _ in range(100)]
    assert {(each.early, each.because, each.trial) for each in told} == {(way == "early", "", None)}
