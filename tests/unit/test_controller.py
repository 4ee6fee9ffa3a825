"""The controller on a pretended fleet: what it does, what it leaves alone, and that it says why."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support.pretend_fleet import PROMISE, Drive, PretendFleet, drive, pools, ways

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.budget import Budget
from goodput.control_rules import ControlRules
from goodput.controller import CHECK_S, Controller
from goodput.counters import Between
from goodput.decision import Answered, Check, Checked, Observed, Pause, Resize, What
from goodput.decisionlog import BadLine, replay
from goodput.forecasters import SEASONAL
from goodput.needs import Needs
from goodput.observation import ClassCounts, InstanceSeen, Observation, Phase
from goodput.pools import Kinds
from goodput.sketch import sketch_of

P, D = Role.PREFILL, Role.DECODE


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def starts(actions: list[tuple[float, do.Action]]) -> list[do.Start]:
    return [each for _, each in actions if isinstance(each, do.Start)]


def test_a_step_is_absorbed_and_given_back() -> None:
    at = drive()
    at.run(lambda _: 1.0, 300, rng())
    small = at.fleet.of_role(P), at.fleet.of_role(D)
    at.run(lambda _: 3.0, 300, rng(2))
    large = at.fleet.of_role(P), at.fleet.of_role(D)
    assert large[0] > small[0] and large[1] > small[1]
    at.run(lambda _: 1.0, 900, rng(3))
    assert at.fleet.of_role(P) < large[0] and at.fleet.of_role(D) < large[1]
    assert all(each.because for each in at.decisions)


def settled(seed: int, rate: float, hours: float) -> list[str]:
    """Directions of changes after the first 15 minutes, in which estimates of the load are off by a few percent."""
    at = drive(3, 4)
    chance = rng(seed)
    at.run(lambda _: rate, 900, chance)
    at.fleet.actions.clear()
    at.run(lambda _: rate, hours * 3600, chance)
    return ways(at.fleet.actions)


def test_steady_load_changes_no_direction() -> None:
    assert len(settled(1, 2.0, 0.75)) <= 1
    assert len(settled(2, 1.1, 0.75)) <= 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.timeout(3600)
def test_steady_load_for_a_day_changes_no_direction(seed: int) -> None:
    assert len(settled(seed, 1.0 + 0.2 * seed, 24)) <= 1


def test_few_requests_decide_nothing() -> None:
    at = drive(4, 4)
    at.fleet.arrive(20)
    for _ in range(100):
        at.now += 5.0
        at.look()
    assert not at.fleet.actions
    assert "of 30 arrivals" in at.decisions[-1].because


def test_unknown_is_not_zero() -> None:
    at = drive(3, 4)
    at.run(lambda _: 2.0, 120, rng())
    before = len(at.fleet.actions)
    at.fleet.hears = False
    at.run(lambda _: 0.0, 600, rng())
    assert len(at.fleet.actions) == before
    assert at.decisions[-1].what is What.HOLD
    assert "unknown: metrics" in at.decisions[-1].conditions
    at.fleet.hears = True
    at.run(lambda _: 2.0, 300, rng(2))
    assert at.fleet.of_role(P) >= 3


def test_a_router_that_starts_anew_is_no_drop_of_the_load() -> None:
    at = drive(3, 4)
    at.run(lambda _: 2.0, 300, rng())
    at.fleet.life = "2"
    fresh = PretendFleet()
    at.fleet.prompts, at.fleet.answers = fresh.prompts, fresh.answers
    at.fleet.arrivals = at.fleet.ended = at.fleet.met = 0
    before = at.decisions[-1].rate
    at.run(lambda _: 2.0, 60, rng(2))
    assert at.decisions[-1].rate == pytest.approx(before, rel=0.3)


def test_one_late_request_adds_nothing_and_many_do() -> None:
    at = drive(3, 4)
    at.run(lambda _: 2.0, 300, rng(), met=1.0)
    before = len(starts(at.fleet.actions))
    at.fleet.met -= 1
    at.run(lambda _: 2.0, 120, rng(2), met=1.0)
    assert len(starts(at.fleet.actions)) == before
    at.run(lambda _: 2.0, 700, rng(3), met=0.6)
    assert len(starts(at.fleet.actions)) > before


def test_the_budget_holds_and_says_so() -> None:
    at = drive(budget=Budget(gpus={"A100": 14}))
    at.run(lambda _: 6.0, 600, rng())
    assert at.fleet.most_gpus <= 14
    assert any("left in the budget" in each for each in at.decisions[-1].conditions)


def test_where_no_gpu_is_free_the_instance_is_cancelled_and_another_type_tried() -> None:
    kinds = pools()
    other = replace(kinds[0], name="prefill-other", footprint=replace(kinds[0].footprint, gpu="H100"))
    at = drive(1, 2, kinds=[*kinds, other], gpus=6)
    at.fleet.instances = dict(at.fleet.instances)
    at.run(lambda _: 2.0, 240, rng())
    tried = [each.pool for each in starts(at.fleet.actions)]
    assert "prefill" in tried and "prefill-other" in tried
    assert any(isinstance(each, do.Drain) and "waited" in each.because for _, each in at.fleet.actions)
    assert any("no GPU" in each for each in at.decisions[-1].conditions)


def test_lengths_that_drift_flip_instances() -> None:
    at = drive(3, 4, startup_s=300.0)
    at.run(lambda _: 2.0, 300, rng())
    at.fleet.prompt, at.fleet.answer = 14_000, 300
    at.run(lambda _: 2.0, 600, rng(2))
    flips = [each for _, each in at.fleet.actions if isinstance(each, do.Flip)]
    assert flips and all(each.role is P for each in flips)
    assert at.fleet.of_role(D) >= 1


def test_instances_for_long_prompts_end_when_prompts_become_short() -> None:
    """The rate stays as it is: only the lengths say that the load has changed."""
    at = drive(6, 4)
    at.fleet.prompt = 14_000
    chance = rng()
    at.run(lambda _: 2.0, 1500, chance)
    before = at.fleet.of_role(P)
    at.fleet.prompt = 4000
    at.run(lambda _: 2.0, 1500, chance)
    assert at.fleet.of_role(P) <= before - 2


def test_prompts_that_wait_are_looked_at_every_second() -> None:
    at = drive(2, 2)
    at.run(lambda _: 1.0, 100, rng())
    assert at.controller.next_wakeup() == at.now + at.controller.rules.every_s
    at.fleet.waiting = 9
    at.now += 5
    at.look()
    assert at.controller.next_wakeup() == at.now + at.controller.rules.hurry_s
    at.fleet.hears = False
    at.now += 60
    at.look()
    assert at.controller.next_wakeup() == at.now + at.controller.rules.every_s


def test_a_check_is_asked_before_an_instance_leaves_and_may_say_no() -> None:
    at = drive(6, 6, rules=ControlRules(checks=True))
    at.keeps = True
    asked: list[Check] = []

    def answer(effect: Check) -> Checked:
        asked.append(effect)
        return Checked(effect.number, len(asked) > 2, "the test")

    at.check = answer
    at.run(lambda _: 1.0, 900, rng())
    assert len(asked) > 2
    assert sum(sum(roles.values()) for roles in asked[0].fleet.values()) == 11
    assert asked[0].rate > 0.9
    drains = [each for _, each in at.fleet.actions if isinstance(each, do.Drain)]
    assert len(drains) == len(asked) - 2
    assert any("a simulation of recent requests without" in each.because for each in at.decisions)
    assert not list(replay(at.lines, Controller(pools(), {"": PROMISE}, ControlRules(checks=True))))


@pytest.mark.parametrize("flips", [True, False])
def test_an_order_shrinks_a_role_whatever_a_simulation_says(flips: bool) -> None:
    """Before, the simulation refused each end for ever, although a manual size wins."""
    at = drive(6, 6, rules=ControlRules(checks=True), kinds=pools(flips=flips))
    at.check = lambda asked: Checked(asked.number, False, "the test")
    at.run(lambda _: 2.0, 60, rng())
    at.feed(Resize(D, 4, "ada"))
    at.run(lambda _: 2.0, 300, rng(2))
    assert at.fleet.of_role(D) == 4
    drains = [each for _, each in at.fleet.actions if isinstance(each, do.Drain)]
    assert len(drains) == 2 and all("ada wants 4" in each.because for each in drains)


def asking() -> tuple[Drive, list[Check], np.random.Generator]:
    """A controller that has asked for a simulation, and waits for its verdict."""
    at = drive(6, 6, rules=ControlRules(checks=True))
    asked: list[Check] = []
    at.check = asked.append
    chance = rng()
    while not asked:
        at.run(lambda _: 1.0, 5, chance)
    return at, asked, chance


def test_one_simulation_at_a_time_and_a_late_result_changes_nothing() -> None:
    at, asked, chance = asking()
    at.run(lambda _: 1.0, CHECK_S - 5, chance)
    assert len(asked) == 1
    assert "waits for the simulation" in at.decisions[-1].because
    at.run(lambda _: 1.0, 10, chance)
    assert len(asked) == 2, "the first is taken to be lost"
    at.feed(Checked(1, True, "late"))
    assert not at.fleet.actions
    at.run(lambda _: 9.0, 20, chance)
    before = len(at.fleet.actions)
    at.feed(Checked(2, True, "of a load that is no more"))
    assert not [each for _, each in at.fleet.actions[before:] if isinstance(each, do.Drain)]


def test_a_manual_size_wins_until_it_is_taken_back() -> None:
    at = drive(3, 4)
    at.run(lambda _: 2.0, 300, rng())
    at.feed(Resize(P, 6, "ada"))
    at.run(lambda _: 2.0, 600, rng(2))
    assert at.fleet.of_role(P) == 6
    assert any("ada" in each.because for _, each in at.fleet.actions)
    at.feed(Resize(P, None))
    at.run(lambda _: 2.0, 900, rng(3))
    assert at.fleet.of_role(P) < 6


def test_what_an_operator_drains_is_not_started_again() -> None:
    at = drive(3, 6)
    at.run(lambda _: 2.0, 60, rng())
    drained = InstanceId("decode-first-5")
    at.fleet.instances[drained] = replace(at.fleet.instances[drained], leaving=True, phase=Phase.DRAINING)
    before = at.fleet.of_role(D)
    at.run(lambda _: 4.0, 300, rng(2))
    assert at.fleet.of_role(D) == before
    assert not [each for each in starts(at.fleet.actions) if each.pool == "decode"]
    assert "who drained decode-first-5" in at.decisions[-1].needs[D].because


def leave(at: Drive, name: InstanceId, phase: Phase = Phase.DRAINING) -> None:
    """Let an instance drain without the controller, or take it back to another phase; then look."""
    leaving = phase is Phase.DRAINING
    at.fleet.instances[name] = replace(at.fleet.instances[name], leaving=leaving, phase=phase)
    at.fleet.drained.discard(name)
    at.now += 5.0
    at.look()


@pytest.mark.parametrize("then", [Phase.FAILED, Phase.READY])
def test_an_instance_that_dies_or_resumes_is_no_operators_drain(then: Phase) -> None:
    """On Ray the last heartbeat of an instance that dies may say that it drains. Before, its role was kept at one less
    for half an hour; so it was after `POST /resume`.
    """
    at = drive(2, 3)
    at.look()
    name = InstanceId("decode-first-1")
    leave(at, name)
    assert at.controller.manual.orders(at.now)[D][0] == 2
    leave(at, name, then)
    assert at.controller.manual.orders(at.now) == {}


def test_the_only_instance_of_a_role_that_dies_is_replaced() -> None:
    at = drive(2, 1)
    at.look()
    name = InstanceId("decode-first-0")
    leave(at, name)
    leave(at, name, Phase.FAILED)
    assert at.controller.manual.orders(at.now) == {}
    for _ in range(3):
        at.now += 5.0
        at.look()
    assert [each.pool for each in starts(at.fleet.actions)] == ["decode"]


def test_a_drain_that_leaves_none_of_a_role_does_not_suppress_the_pools_min() -> None:
    at = drive(2, 1)
    at.look()
    leave(at, InstanceId("decode-first-0"))
    assert at.controller.manual.orders(at.now) == {}
    assert [each.pool for each in starts(at.fleet.actions)] == ["decode"]


def test_a_death_leaves_the_notice_of_another_drain() -> None:
    at = drive(2, 4)
    at.look()
    died, drained = InstanceId("decode-first-1"), InstanceId("decode-first-2")
    leave(at, died)
    at.fleet.drained.discard(died)
    leave(at, drained)
    assert at.controller.manual.orders(at.now)[D] == (2, f"an operator (who drained {drained})")
    at.fleet.drained.discard(drained)
    leave(at, died, Phase.FAILED)
    assert at.controller.manual.orders(at.now)[D] == (3, f"an operator (who drained {drained})")


def test_what_the_operator_of_kubernetes_replaces_is_sized_on() -> None:
    at = drive(3, 6, rules=ControlRules(manual_s=0.0))
    at.run(lambda _: 2.0, 60, rng())
    evicted, other = InstanceId("decode-first-5"), InstanceId("decode-first-6")
    at.fleet.instances[other] = replace(at.fleet.instances[evicted], id=other)
    at.fleet.instances[evicted] = replace(at.fleet.instances[evicted], leaving=True, phase=Phase.DRAINING)
    at.run(lambda _: 4.0, 300, rng(2))
    assert at.controller.manual.orders(at.now) == {}
    assert [each for each in starts(at.fleet.actions) if each.pool == "decode"]


def test_an_instance_whose_start_was_answered_too_late_is_no_operators() -> None:
    """Such a start counts as refused, and the instance may exist all the same: it does not fix the role's size."""
    at = drive()
    at.run(lambda _: 1.0, 300, rng())
    give, before = at.fleet.give, len(at.fleet.instances)

    def late(action: do.Action, now: float) -> str:
        return give(action, now) or ("no answer within 2.5 s" if isinstance(action, do.Start) else "")

    at.fleet.give = late  # type: ignore[method-assign]
    at.run(lambda _: 3.0, 60, rng(2))
    assert len(at.fleet.instances) > before
    assert any("no answer" in each.because for each in at.decisions)
    assert at.controller.manual.orders(at.now) == {}
    at.fleet.give = give  # type: ignore[method-assign]
    at.run(lambda _: 1.0, 900, rng(3))
    assert any(isinstance(action, do.Drain) for _, action in at.fleet.actions)


def test_what_another_leader_starts_and_drains_is_no_operators() -> None:
    """A standby sees the leader's changes. When it takes over, it decides about sizes at once."""
    at = drive()
    at.run(lambda _: 1.0, 300, rng())
    assert at.make is not None
    standby = at.make()

    def both(rate: float, looks: int) -> None:
        for _ in range(looks):
            at.run(lambda _: rate, 5.0, rng(int(at.now)))
            instances = tuple(at.fleet.instances.values())
            seen = Observation(at_s=at.now, routers=at.fleet.heard(at.now), instances=instances, leads=False)
            standby.handle(Observed(seen), at.now)

    both(1.0, 5)
    both(3.0, 40)
    both(1.0, 120)
    assert {type(action) for _, action in at.fleet.actions} >= {do.Start, do.Drain}
    at.fleet.give(do.Start(instance=InstanceId("the-leaders-last"), pool="decode"), at.now)
    at.controller = standby
    at.run(lambda _: 1.0, 10)
    assert standby.manual.orders(at.now) == {}
    at.fleet.give(do.Start(instance=InstanceId("by-hand"), pool="decode"), at.now)
    at.run(lambda _: 1.0, 10)
    assert "by-hand" in standby.manual.orders(at.now)[D][1]


def test_paused_dry_or_without_the_lock_it_only_says_what_it_would_do() -> None:
    for rules, paused, leads, word in (
        (ControlRules(), True, True, "paused by eve"),
        (ControlRules(dry=True), False, True, "dry run"),
        (ControlRules(), False, False, "another controller"),
    ):
        at = drive(rules=rules)
        at.leads = leads
        if paused:
            at.feed(Pause(True, "eve"))
        at.run(lambda _: 3.0, 300, rng())
        assert not at.fleet.actions
        told = [each for each in at.decisions if each.actions]
        assert told and word in told[-1].because and "would up" in told[-1].because


def test_killed_between_two_actions_nothing_is_started_twice() -> None:
    whole = drive(1, 1)
    whole.run(lambda _: 2.0, 200)
    count = len(whole.fleet.actions)
    assert count > 3
    for killed in range(count):
        at = drive(1, 1)
        at.kill_after = killed
        at.run(lambda _: 2.0, 200)
        assert at.kill_after is None
        assert (at.fleet.of_role(P), at.fleet.of_role(D)) == (whole.fleet.of_role(P), whole.fleet.of_role(D))
        names = [each.instance for each in starts(at.fleet.actions)]
        assert len(names) == len(set(names)) == len(starts(whole.fleet.actions))


def test_starts_that_fail_are_tried_again_within_the_budget() -> None:
    at = drive(1, 1, starts_fail=True, budget=Budget(gpus={"A100": 12}))
    at.run(lambda _: 2.0, 600, rng())
    assert at.fleet.most_gpus <= 12
    at.fleet.starts_fail = False
    at.run(lambda _: 2.0, 300, rng(2))
    assert at.fleet.of_role(P) > 1


def test_where_starts_fail_another_pool_is_tried() -> None:
    """Before, `decode` was asked every five seconds, for ever, and the role stayed short."""
    kinds = pools(flips=False)
    at = drive(6, 1, kinds=[*kinds, replace(kinds[1], name="decode-other")], failing=frozenset({"decode"}))
    at.fleet.instances = {name: replace(each, flips=False) for name, each in at.fleet.instances.items()}
    at.run(lambda _: 1.0, 600, rng())
    tried = Counter(each.pool for each in starts(at.fleet.actions))
    assert 1 <= tried["decode"] <= 3
    assert tried["decode-other"] >= 1
    serving = [each for each in at.fleet.instances.values() if each.role is D and each.phase is Phase.READY]
    assert len(serving) >= at.decisions[-1].needs[D].ahead
    told = [each for decision in at.decisions for each in decision.conditions]
    assert any("starts fail: decode is not asked again" in each and "exit status 1" in each for each in told)
    assert not [each for each in told if "no GPU" in each]


def asked_at(at: Drive) -> list[float]:
    return sorted({at_s for at_s, each in at.fleet.actions if isinstance(each, do.Start) and each.pool == "decode"})


def test_the_pause_between_starts_that_fail_doubles_until_one_succeeds() -> None:
    kinds = pools(flips=False, min=2)
    at = drive(2, 1, kinds=kinds, failing=frozenset({"decode"}))
    for _ in range(300):
        at.now += 5.0
        at.look()
    pauses = [after - before for before, after in pairwise(asked_at(at))]
    rules = at.controller.rules
    assert pauses == sorted(pauses) and pauses[0] <= rules.unseen_s + 15
    assert pauses[-1] == pytest.approx(rules.blocked_s, abs=15)
    at.fleet.failing = frozenset()
    for _ in range(100):
        at.now += 5.0
        at.look()
    assert at.fleet.of_role(D) == 2
    at.fleet.failing, before = frozenset({"decode"}), at.now
    del at.fleet.instances[InstanceId("decode-first-0")]
    for _ in range(20):
        at.now += 5.0
        at.look()
    again = [each for each in asked_at(at) if each > before]
    assert again[1] - again[0] <= rules.unseen_s + 15


def test_an_instance_that_served_and_failed_is_replaced_at_once() -> None:
    at = drive(2, 2, kinds=pools(flips=False, min=2))
    at.look()
    name = InstanceId("decode-first-0")
    at.fleet.instances[name] = replace(at.fleet.instances[name], phase=Phase.FAILED)
    for _ in range(4):
        at.now += 5.0
        at.look()
    assert [each.pool for each in starts(at.fleet.actions)] == ["decode"]
    assert not at.decisions[-1].conditions


def test_gpus_that_others_take_block_nothing() -> None:
    at = drive(2, 2, gpus=20)
    at.run(lambda _: 1.0, 120, rng())
    at.fleet.taken = 12
    at.run(lambda _: 4.0, 300, rng(2))
    assert any("no GPU" in each for each in at.decisions[-1].conditions)
    at.fleet.taken = 0
    at.run(lambda _: 4.0, 450, rng(3))
    assert at.fleet.of_role(D) >= 4


def test_every_decision_is_made_again_from_the_log() -> None:
    at = drive()
    at.keeps = True
    at.run(lambda now: 1.0 if now < 600 else 3.0, 1200, rng())
    assert any(each.actions for each in at.decisions)
    assert not list(replay(at.lines, Controller(pools(), {"": PROMISE})))
    other = Controller(pools(), {"": replace(PROMISE, ttft_ms=2000.0)})
    assert list(replay(at.lines, other))
    with pytest.raises(BadLine, match="line 1"):
        list(replay([b"{}"], other))


def test_a_failed_instance_is_stopped() -> None:
    at = drive(2, 2)
    at.run(lambda _: 1.0, 300, rng())
    name = InstanceId("prefill-first-0")
    at.fleet.instances[name] = InstanceSeen(id=name, pool="prefill", role=P, phase=Phase.FAILED, flips=True)
    at.run(lambda _: 1.0, 60, rng(2))
    assert name not in at.fleet.instances


def pending(at: Drive, name: str = "prefill-p") -> InstanceId:
    """Add an instance that has waited for a GPU for long."""
    found = InstanceId(name)
    at.fleet.instances[found] = InstanceSeen(
        id=found, pool="prefill", role=P, phase=Phase.PENDING, flips=True, asked_s=at.now - 1000.0
    )
    at.fleet.gpus = 0
    return found


@pytest.mark.parametrize(("waited_s", "given_up"), [(100.0, False), (1000.0, True)])
def test_an_instance_waits_for_a_node_that_the_cluster_adds(waited_s: float, given_up: bool) -> None:
    """Its role has no other pool. Before, it was cancelled after 90 s, and the node came up empty."""
    at = drive(1, 4)
    name = pending(at)
    at.fleet.instances[name] = replace(at.fleet.instances[name], asked_s=at.now - waited_s)
    at.run(lambda _: 1.0, 60, rng())
    assert any(each.instance == name for _, each in at.fleet.actions) is given_up


def test_an_instance_whose_end_is_refused_stops_no_other_change() -> None:
    """On Kubernetes a pool shrinks neither while a revision rolls out nor where a BatonPool decides."""
    at = drive(1, 2)
    name = pending(at)
    at.fleet.refuses = lambda action: "a revision rolls out" if action.instance == name else ""
    at.feed(Resize(D, 1, "ada"))
    for _ in range(200):
        at.now += 5.0
        at.look()
    assert at.fleet.of_role(D) == 1
    asked = [at_s for at_s, each in at.fleet.actions if each.instance == name]
    assert len(asked) > 1
    assert min(after - before for before, after in pairwise(asked)) >= at.controller.rules.blocked_s


def test_an_end_that_is_refused_is_asked_again_after_minutes() -> None:
    """A controller without `--on` can end nothing. Before, it asked every 15 s."""
    at = drive(5, 1, kinds=pools(flips=False))
    at.fleet.refuses = lambda action: "nothing here can end instances" if isinstance(action, do.Drain) else ""
    at.feed(Resize(P, 2, "ada"))
    for _ in range(250):
        at.now += 5.0
        at.look()
    names = {each.instance for _, each in at.fleet.actions if isinstance(each, do.Drain)}
    assert len(names) == 5
    for name in names:
        asked = [at_s for at_s, each in at.fleet.actions if each.instance == name]
        assert min(after - before for before, after in pairwise(asked)) >= at.controller.rules.blocked_s


def test_an_instance_that_a_pool_needs_for_its_min_is_not_ended_while_it_waits() -> None:
    at = drive(1, 1, kinds=pools(min=2))
    name = pending(at)
    at.look()
    at.now += 5.0
    at.look()
    assert not [each for _, each in at.fleet.actions if each.instance == name]
    assert any("no GPU" in each for each in at.decisions[-1].conditions)


def test_an_instance_that_gets_no_gpu_is_no_capacity() -> None:
    """Its pool keeps it for its `min`. Before, another pool's serving instance was drained in its stead."""
    kinds = pools(flips=False)
    other = replace(kinds[0], name="prefill-other", footprint=replace(kinds[0].footprint, gpu="H100"))
    at = drive(1, 4, kinds=[kinds[0], other, kinds[1]])
    (serves,) = (name for name, each in at.fleet.instances.items() if each.role is P)
    at.fleet.instances[serves] = replace(at.fleet.instances[serves], pool="prefill-other")
    name = pending(at)
    at.fleet.gpus = None
    full = at.fleet._full
    at.fleet._full = lambda each: each.pool == "prefill" or full(each)  # type: ignore[method-assign]
    at.run(lambda _: 2.0, 900, rng())
    assert not [each for _, each in at.fleet.actions if each.instance == name]
    serving = [each for each in at.fleet.instances.values() if each.role is P and each.phase is Phase.READY]
    needed = at.decisions[-1].needs[P].ahead
    assert len(serving) >= needed > 1


def endless(at: Drive, name: str = "prefill-s") -> InstanceId:
    """Add an instance that starts for ever: its image cannot be pulled."""
    found = InstanceId(name)
    at.fleet.instances[found] = InstanceSeen(
        id=found, pool="prefill", role=P, phase=Phase.STARTING, flips=True, asked_s=at.now - 3600.0, because="no image"
    )
    at.fleet.stuck = frozenset({"prefill"})
    return found


def test_an_instance_that_never_becomes_ready_is_no_capacity() -> None:
    """Its pool keeps it for its `min`. Before, the role stayed one short for ever."""
    kinds = pools(flips=False)
    other = replace(kinds[0], name="prefill-other", footprint=replace(kinds[0].footprint, gpu="H100"))
    at = drive(1, 4, kinds=[replace(kinds[0], max=1), other, kinds[1]])
    (serves,) = (name for name, each in at.fleet.instances.items() if each.role is P)
    at.fleet.instances = {name: replace(each, flips=False) for name, each in at.fleet.instances.items()}
    at.fleet.instances[serves] = replace(at.fleet.instances[serves], pool="prefill-other")
    name = endless(at)
    at.run(lambda _: 2.0, 900, rng())
    assert not [each for _, each in at.fleet.actions if each.instance == name]
    serving = [each for each in at.fleet.instances.values() if each.role is P and each.phase is Phase.READY]
    needed = at.decisions[-1].needs[P].ahead
    assert len(serving) == at.decisions[-1].needs[P].have >= needed > 1
    assert any("starts fail: prefill is not asked again" in each for each in at.decisions[-1].conditions)


def test_an_instance_that_never_becomes_ready_ends_above_the_pools_min() -> None:
    at = drive(1, 1)
    name = endless(at)
    ready_s = at.controller.startups.horizon_s("prefill")
    while at.now < 3 * ready_s:
        at.now += 5.0
        at.look()
    ((at_s, drain),) = [(at_s, each) for at_s, each in at.fleet.actions if each.instance == name]
    assert isinstance(drain, do.Drain) and at_s > ready_s
    assert drain.because == f"{name} is not ready {3600 + at_s:.0f} s after its start began (no image)"
    assert any(drain.because in each for decision in at.decisions for each in decision.conditions)


@pytest.mark.parametrize("known", [True, False])
def test_an_instance_that_restarts_in_place_has_a_start_of_time(known: bool) -> None:
    """It was asked for long ago. A controller that began while it restarts has not seen it ready."""
    at = drive(2, 2)
    at.now = 90_000.0
    name = InstanceId("prefill-first-0")
    if known:
        at.look()
        at.now += 5.0
    at.fleet.stuck = frozenset({"prefill"})
    was = at.fleet.instances[name]
    at.fleet.instances[name] = replace(was, phase=Phase.STARTING, asked_s=0.0)
    for _ in range(10):
        at.look()
        at.now += 5.0
    at.fleet.instances[name] = was
    at.look()
    assert not at.fleet.actions
    assert not at.decisions[-1].conditions


def test_an_action_without_an_answer_may_be_under_way() -> None:
    """Before, a drain that was carried out all the same counted as a person's, and froze the role for 30 minutes."""
    at = drive(6, 6)
    at.answered = lambda action, refusal: Answered(
        action, "no answer within 2.5 s" if isinstance(action, do.Drain) else refusal, unsure=True
    )
    at.run(lambda _: 1.0, 900, rng())
    assert [each for _, each in at.fleet.actions if isinstance(each, do.Drain)]
    assert at.controller.manual.orders(at.now) == {}


@pytest.mark.parametrize("event", [Pause(True, "eve"), Resize(D, 6, "eve"), Resize(P, 6, "eve")])
def test_what_an_operator_says_during_a_simulation_comes_first(event: Pause | Resize) -> None:
    at, _, _ = asking()
    at.feed(event)
    at.feed(Checked(1, True, "it would do"))
    assert not at.fleet.actions


@pytest.mark.parametrize("lost", ["metrics", "lock"])
def test_a_verdict_is_void_if_the_controller_would_not_act_now(lost: str) -> None:
    at, _, _ = asking()
    if lost == "lock":
        at.leads = False
    else:
        at.fleet.hears = False
    for _ in range(5):
        at.now += 5.0
        at.look()
    at.feed(Checked(1, True, "it would do"))
    assert not at.fleet.actions


def test_a_start_without_an_answer_is_tried_again_soon() -> None:
    """An agent that does not answer holds the operator's lock for longer than an action may take."""
    at = drive(1, 1, kinds=pools(min=2))
    unsure = {"prefill": True, "decode": False}
    at.fleet.refuses = lambda action: "no answer" if isinstance(action, do.Start) else ""
    at.answered = lambda action, refusal: Answered(action, refusal, unsure=unsure[getattr(action, "pool", "decode")])
    for _ in range(70):
        at.now += 5.0
        at.look()
    tried = Counter(each.pool for each in starts(at.fleet.actions))
    assert tried["prefill"] > 5
    assert tried["decode"] == 2


def test_a_pool_below_its_min_is_filled_without_any_traffic() -> None:
    at = drive(1, 2, kinds=pools(min=2))
    for _ in range(30):
        at.now += 5.0
        at.look()
    assert (at.fleet.of_role(P), at.fleet.of_role(D)) == (2, 2)
    (start,) = starts(at.fleet.actions)
    assert start.because == "prefill: 1 there or coming, its fewest are 2"


def test_an_order_is_carried_out_without_any_traffic() -> None:
    at = drive(1, 3)
    at.feed(Resize(P, 3, "ada"))
    at.feed(Resize(D, 1, "ada"))
    for _ in range(200):
        at.now += 5.0
        at.look()
    assert (at.fleet.of_role(P), at.fleet.of_role(D)) == (3, 1)
    assert "ada wants" in at.fleet.actions[0][1].because


def test_instances_are_kept_for_the_season_one_and_a_half_start_up_times_ahead() -> None:
    """Two periods of a load without noise. In the third rise, the rate one start-up time ahead is 68 % of the rate one
    and a half start-up times ahead.
    """
    needs, period_s, start_s = Needs(Kinds.of(pools()), {"": PROMISE}, ControlRules()), 2400.0, 240.0
    rate = lambda at_s: 20.0 - 16.0 * math.cos(2 * math.pi * at_s / period_s)  # noqa: E731
    kept, now = [], 0.0
    while now < 2.3 * period_s:
        now += 5.0
        prompts, answers = sketch_of([8000] * 100), sketch_of([1000] * 100)
        counts = ClassCounts(arrivals=round(5 * rate(now)), prompts=prompts, answers=answers, computed_tokens=800_000)
        needs.add(Between(seconds=5.0, classes={"": counts}, waiting=0, oldest_wait_s=0.0), now)
        outlook = needs.look(now, start_s, {P: 4.0, D: 4.0})
        if outlook is not None and now > 2.1 * period_s and outlook.ahead.who == SEASONAL:
            kept.append(outlook.keep_rate / rate(now + 1.5 * start_s))
    assert kept
    assert min(kept) > 0.8


def test_a_manual_size_below_the_min_is_kept() -> None:
    at = drive(2, 3, kinds=pools(min=3))
    at.feed(Resize(P, 2, "ada"))
    for _ in range(60):
        at.now += 5.0
        at.look()
    assert (at.fleet.of_role(P), at.fleet.of_role(D)) == (2, 3)


def test_the_first_request_begins_an_empty_fleet() -> None:
    """Before, nothing began it: a size is computed from 20 complete answers, and no instance gave one."""
    at = drive(0, 0, kinds=pools(min=0))
    at.look()
    at.now += 5.0
    at.look()
    assert not at.fleet.actions, "nobody asks"
    at.fleet.arrivals += 1
    at.fleet.prompts.add(8000)
    for _ in range(3):
        at.now += 5.0
        at.look()
    assert [each.pool for each in starts(at.fleet.actions)] == ["prefill", "decode"]
    assert "requests come" in starts(at.fleet.actions)[0].because


def test_requests_begin_no_role_that_an_operator_keeps_empty() -> None:
    at = drive(0, 0, kinds=pools(min=0))
    at.feed(Resize(P, 0, "ana"))
    at.look()
    at.fleet.arrivals += 1
    at.fleet.prompts.add(8000)
    for _ in range(3):
        at.now += 5.0
        at.look()
    assert [each.pool for each in starts(at.fleet.actions)] == ["decode"]


def test_gpus_of_other_models_count_against_the_budget() -> None:
    at = drive(budget=Budget(gpus={"A100": 14}))
    at.fleet.elsewhere = {"A100": 4}
    at.run(lambda _: 6.0, 600, rng())
    assert at.fleet.most_gpus == 10
    assert any("0 of 14 left in the budget" in each for each in at.decisions[-1].conditions)


def test_a_refused_start_is_called_that() -> None:
    """Before, the condition of each refusal began with `no GPU`."""
    at = drive(1, 1)
    at.fleet.refuses = lambda each: "quota exceeded" if isinstance(each, do.Start) else ""
    at.run(lambda _: 6.0, 120, rng())
    assert any(each.startswith("refused: ") and "quota" in each for each in at.decisions[-1].conditions)
