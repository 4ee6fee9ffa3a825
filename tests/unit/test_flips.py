"""Flips and starts together: an instance is started where no flip helps, and none where a flip does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from support.pretend_fleet import PROMISE, pools

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.changes import Changes, ChosenChange
from goodput.control_rules import ControlRules
from goodput.decision import Answered, Need
from goodput.forecast import Forecast
from goodput.needs import Outlook
from goodput.observation import InstanceSeen, Phase
from goodput.overdue import Overdue
from goodput.pools import Kinds
from goodput.sizing import LoadToServe
from goodput.standing import StandingInstances
from goodput.startups import StartUps

P, D = Role.PREFILL, Role.DECODE
OUTLOOK = Outlook(
    rate=1.0,
    ahead=Forecast(mean=1.0, upper=1.0, horizon_s=60.0, who="the test"),
    keep_rate=1.0,
    now={},
    lasting={},
    then={},
    keep={},
    load=LoadToServe(rate=1.0, lengths={}, promises={"": PROMISE}),
)


def seen(role: Role, count: int, phase: Phase = Phase.READY) -> list[InstanceSeen]:
    names = (InstanceId(f"{role.value}-{phase.value}-{number}") for number in range(count))
    return [InstanceSeen(id=name, pool=role.value, role=role, phase=phase, flips=True) for name in names]


@dataclass
class Short:
    """Two prefill instances of the four that are needed, and decode instances of which two would do."""

    decodes: list[InstanceSeen] = field(default_factory=lambda: seen(D, 4))
    rules: ControlRules = field(default_factory=ControlRules)

    def __post_init__(self) -> None:
        kinds = Kinds.of(pools())
        self.standing = StandingInstances(kinds.pools, self.rules.unseen_s)
        overdue = Overdue(StartUps(kinds.pools), self.rules.start_max_s)
        self.changes = Changes(kinds, self.standing, self.rules, overdue)

    def choose(self, now: float) -> ChosenChange:
        """The change at this time. Its effects are not observed: the next look finds the same fleet."""
        self.standing.see([*seen(P, 2), *self.decodes], now)
        ready = float(sum(each.phase is Phase.READY for each in self.decodes))
        needs = {
            P: Need(now=4, ahead=4, keep=4, have=2.0, ready=2.0),
            D: Need(now=2, ahead=2, keep=2, have=float(len(self.decodes)), ready=ready),
        }
        found = self.changes.choose(needs, OUTLOOK, now, 60.0, {})
        for action in found.actions:
            self.changes.gave(action, now)
        return found

    def flipped(self, now: float) -> InstanceId:
        """The instance that flips now."""
        (flip,) = self.choose(now).actions
        assert isinstance(flip, do.Flip)
        return flip.instance

    def started(self, now: float) -> int:
        """The number of prefill instances that start now; nothing else happens."""
        found = self.choose(now).actions
        assert all(isinstance(each, do.Start) and each.pool == "prefill" for each in found)
        return len(found)


def test_where_the_hours_flips_are_used_up_instances_start() -> None:
    at = Short(rules=ControlRules(flips_hour=0.0))
    at.flipped(0.0)
    at.flipped(100.0)
    assert at.started(200.0) == 2


def test_the_flips_that_are_left_of_an_hour_save_as_many_starts() -> None:
    at = Short(rules=ControlRules(flips_hour=0.0))
    at.flipped(0.0)
    at.flipped(3500.0)
    at.flipped(3700.0)
    assert at.started(3702.0) == 2


def test_the_pause_between_two_flips_starts_nothing() -> None:
    at = Short()
    at.flipped(0.0)
    assert at.choose(2.0).actions == ()
    at.flipped(6.0)


@pytest.mark.parametrize(("phase", "count"), [(Phase.STARTING, 0), (Phase.PENDING, 2)])
def test_an_instance_that_starts_saves_a_start_and_one_that_waits_for_a_gpu_does_not(phase: Phase, count: int) -> None:
    """The first flips once it is ready, before another one could serve. The second may never be."""
    at = Short([*seen(D, 2), *seen(D, 2, phase)])
    assert at.started(0.0) == count


def test_an_instance_that_has_just_flipped_saves_no_start() -> None:
    at = Short([*seen(D, 3)])
    (name,) = (each.id for each in at.decodes[:1])
    at.changes.gave(do.Flip(instance=name, role=D), -10.0)
    at.decodes = [replace(each, flips=each.id == name) for each in at.decodes]
    assert at.started(0.0) == 2


def test_a_refused_flip_is_tried_with_another_instance_and_counts_for_nothing() -> None:
    at = Short(rules=ControlRules(flips_hour=0.0))
    tried = []
    for number in range(4):
        tried.append(at.flipped(10.0 * number))
        flip = do.Flip(instance=tried[-1], role=P)
        at.changes.refused(Answered(flip, "it has no agent that could be told"), 10.0 * number)
    assert len(set(tried)) == 4
    assert at.started(50.0) == 2
    assert at.flipped(10.0 + at.rules.blocked_s) == tried[0], "it is tried again later"


def test_a_flip_without_an_answer_counts() -> None:
    at = Short(rules=ControlRules(flips_hour=0.0))
    for now in (0.0, 100.0):
        flip = do.Flip(instance=at.flipped(now), role=P)
        at.changes.refused(Answered(flip, "no answer", unsure=True), now)
    assert at.started(200.0) == 2


@pytest.mark.parametrize("ordered", [True, False])
def test_no_flip_takes_from_a_role_that_is_as_an_operator_wants_it(ordered: bool) -> None:
    """Both are short; before, the flip that evens them out took an instance from the operator's four."""
    at = Short()
    needs = {
        P: Need(now=8, ahead=8, keep=8, have=2.0, ready=2.0),
        D: Need(now=4, ahead=4, keep=4, have=4.0, ready=4.0),
    }
    at.standing.see([*seen(P, 2), *seen(D, 4)], 0.0)
    orders = {D: (4, "ada")} if ordered else {}
    found = [each for now in (0.0, 20.0) for each in at.changes.choose(needs, OUTLOOK, now, 60.0, orders).actions]
    assert any(isinstance(each, do.Flip) for each in found) is not ordered
