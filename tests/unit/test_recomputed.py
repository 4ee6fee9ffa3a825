"""Handed-over prompt tokens that were computed again: engines' reports become counters that never decrease."""

from __future__ import annotations

from dataclasses import replace

from cluster.ids import InstanceId
from cluster.instance import SETTLED_LOOKS as LOOKS
from cluster.instance import Instance, Load, Role
from decode.rules import DecodeRules
from engine.agent.machine import AgentMachine
from engine.agent.rank import Rank
from router.fleet.view import FleetView
from router.telemetry.metrics import RouterMetrics
from router.telemetry.recomputed import LATELY, Recomputed

D = InstanceId("d")


def fleet(epoch: int = 1) -> FleetView:
    view = FleetView()
    view.add(Instance(id=D, role=Role.DECODE, url="http://d", epoch=epoch))
    return view


def words(counts: Recomputed, view: FleetView, *tokens: int, pulled: int = 1000, times: int = 1) -> None:
    for each in tokens:
        for _ in range(times):
            view.get(D).load = Load(recomputed_tokens=each, external_kv_tokens=pulled, prompt_tokens=9000)
            counts.look(view.all())


def told(counts: Recomputed) -> tuple[int, int] | None:
    found = counts.of(D)
    return None if found is None else (found.recomputed, found.pulled)


def test_an_instance_with_too_few_reports_has_no_counts() -> None:
    counts, view = Recomputed(), fleet()
    counts.look(view.all())
    assert told(counts) is None, "its engine has reported nothing"
    words(counts, view, *[7] * (LOOKS - 1))
    assert told(counts) is None
    words(counts, view, 7)
    assert told(counts) == (7, 1000), "a router that starts later counts from where the engine is"


def test_pulls_that_are_under_way_are_not_counted() -> None:
    counts, view = Recomputed(), fleet()
    words(counts, view, 0, times=LOOKS)
    words(counts, view, *[300, 0, 900, 0, 300] * 4)
    assert told(counts) == (0, 1000)
    words(counts, view, *[281, 281 + 300, 281, 281 + 900, 281])
    assert told(counts) == (281, 1000)


def test_counted_tokens_are_not_taken_back() -> None:
    counts, view = Recomputed(), fleet()
    words(counts, view, 500, times=LOOKS)
    words(counts, view, 0, times=LOOKS)
    assert told(counts) == (500, 1000)


def test_the_counts_of_a_restarted_engine_are_added_to_those_before() -> None:
    counts, view = Recomputed(), fleet()
    words(counts, view, 500, times=LOOKS)
    view.get(D).instance = replace(view.get(D).instance, epoch=2)
    words(counts, view, 30, pulled=20, times=LOOKS - 1)
    assert told(counts) == (500, 1000)
    words(counts, view, 30, pulled=20)
    assert told(counts) == (530, 1020)
    # Without a new epoch, a lower count of pulled tokens shows that the engine was started again.
    words(counts, view, 4, pulled=5, times=LOOKS)
    assert told(counts) == (534, 1025)


def test_an_instance_that_left_has_no_counts_and_recent_tokens_are_counted_apart() -> None:
    counts, view = Recomputed(), fleet()
    words(counts, view, 5, times=LOOKS)
    found = counts.of(D)
    assert found is not None and found.lately == 0
    words(counts, view, 45, times=LOOKS)
    assert found.lately == 40
    words(counts, view, 45, times=LATELY)
    assert (found.lately, found.recomputed) == (0, 45)
    view.all().remove(D)
    counts.look(view.all())
    assert counts.of(D) is None


def test_the_counters_are_exported_to_prometheus() -> None:
    meters, view = RouterMetrics(), fleet()
    words(meters.recomputed, view, 281, times=LOOKS)
    lines = meters.text(view, 0).decode().splitlines()
    assert 'baton_handoff_recomputed_tokens_total{instance="d"} 281.0' in lines
    assert 'baton_handoff_pulled_tokens_total{instance="d"} 1000.0' in lines


def test_an_agents_counter_never_goes_back_within_a_life_of_its_engine() -> None:
    """Pulls that are under way come and go in vLLM's counts. Prometheus takes each step back for a restart, and counts
    all tokens once more.
    """
    rank = Rank(AgentMachine(name=D, rules=DecodeRules(), role=Role.DECODE), tiered=False)
    told = []
    for tokens in [0, 300, 0, 900, 0, 281, 581, 281, 281, 1181, 281, 0]:
        rank.read(Load(recomputed_tokens=tokens))
        told.append(rank.samples()["baton_agent_recomputed_tokens_total"])
    assert told == sorted(told) and told[-2:] == [281, 281]
    rank.restart()
    assert rank.samples()["baton_agent_recomputed_tokens_total"] == 0
