"""Routers that start and stop: the controller scales again as soon as the load is known, and does not take the load of
a router that is not heard to be zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.pretend_fleet import Drive, PretendFleet, drive

from goodput import actions as do
from goodput.counters import FORGOTTEN_S, STALE_S, Counters
from goodput.decision import What
from goodput.manual import Manual
from goodput.observation import ClassCounts, RouterCounts

TTL_S = 6.0
"""The registry drops an entry so many seconds after its last heartbeat."""


@dataclass
class Replica:
    """One router: its counts, and its entry in the registry."""

    address: str
    counts: PretendFleet = field(default_factory=PretendFleet)
    serves: bool = True
    heard_s: float = 0.0
    reaches: bool = True
    """Whether the router reaches the registry."""
    began_s: float | None = None
    """When it began to serve: at its first look, heard or not."""
    said: str = ""
    """``goodbye``: the router says goodbye at the next look; ``gone``: it did so before; empty: neither."""


class Replicas(PretendFleet):
    """A fleet with several routers. A load balancer divides arrivals among them."""

    def __init__(self, fleet: PretendFleet, *names: str) -> None:
        super().__init__(startup_s=fleet.startup_s, instances=fleet.instances)
        self.routers = {name: Replica(f"http://{name}") for name in names}

    def arrive(self, count: int, met: float = 1.0) -> None:
        serving = [each for each in self.routers.values() if each.serves]
        for number, each in enumerate(serving):
            each.counts.arrive(count // len(serving) + (number < count % len(serving)), met)

    def heard(self, now: float) -> tuple[RouterCounts, ...]:
        found = []
        for name, each in sorted(self.routers.items()):
            each.began_s = now if each.began_s is None else each.began_s
            if each.serves and each.reaches:
                each.heard_s = now
            if each.said != "gone" and now - each.heard_s < TTL_S:
                row = replace(each.counts.counts(each.heard_s), router=name, life=name, address=each.address)
                found.append(replace(row, left=each.said == "goodbye", began_s=each.began_s))
            each.said = "gone" if each.said else ""
        return tuple(found)

    def leave(self, name: str) -> None:
        """End this router in order, with a goodbye to the registry."""
        self.routers[name].serves, self.routers[name].said = False, "goodbye"

    def crash(self, name: str) -> None:
        self.routers[name].serves = False

    def join(self, name: str, address: str = "") -> None:
        self.routers[name] = Replica(address or f"http://{name}")


def served(*names: str) -> tuple[Drive, Replicas]:
    """A fleet that has served 2 requests a second for a while by these routers."""
    at = drive(3, 4)
    at.fleet = fleet = Replicas(at.fleet, *names)
    run(at, 2.0, 300)
    return at, fleet


def run(at: Drive, rate: float, seconds: float) -> list[do.Action]:
    """The actions of the controller during `seconds` at `rate` requests a second."""
    before = len(at.fleet.actions)
    at.run(lambda _: rate, seconds, np.random.default_rng(int(at.now)))
    return [each for _, each in at.fleet.actions[before:]]


def scales(at: Drive) -> None:
    """Assert that the controller scales up and down again."""
    assert not at.controller._counters.missing
    assert any(isinstance(each, do.Start) for each in run(at, 5.0, 120)), at.decisions[-1]
    assert any(isinstance(each, do.Drain) for each in run(at, 1.0, 800)), at.decisions[-1]


def test_the_only_router_is_replaced() -> None:
    at, fleet = served("a")
    fleet.leave("a")
    run(at, 0.0, 10)
    assert at.decisions[-1].because == "no router's metrics could be read"
    fleet.join("b", "http://a")
    run(at, 2.0, 30)
    assert at.decisions[-1].rate == pytest.approx(2.0, rel=0.3)
    scales(at)


def test_a_rollout_of_routers_one_after_the_other() -> None:
    at, fleet = served("a1", "b1")
    for old, new in (("a1", "a2"), ("b1", "b2")):
        fleet.join(new)
        run(at, 2.0, 10)
        fleet.leave(old)
        run(at, 2.0, 40)
        assert at.decisions[-1].rate == pytest.approx(2.0, rel=0.3)
        assert not any("router" in each for each in at.decisions[-1].conditions)
    scales(at)


def test_fewer_routers() -> None:
    at, fleet = served("a", "b", "c")
    fleet.leave("c")
    run(at, 2.0, 5)
    fleet.leave("b")
    run(at, 2.0, 40)
    assert at.decisions[-1].rate == pytest.approx(2.0, rel=0.3)
    scales(at)


def test_one_of_two_routers_crashes_and_starts_again() -> None:
    at, fleet = served("a", "b")
    fleet.crash("b")
    run(at, 2.0, 30)
    assert at.controller._counters.missing
    fleet.join("b2", fleet.routers["b"].address)
    run(at, 2.0, 10)
    scales(at)


TOLD = "b left without a goodbye and may still serve: nothing ends or flips"


def test_one_of_two_routers_crashes_for_good() -> None:
    """The clients of the crashed router move to the other router; from then on the load is known again."""
    at, fleet = served("a", "b")
    fleet.crash("b")
    run(at, 2.0, STALE_S + 10)
    assert at.decisions[-1].rate == pytest.approx(2.0, rel=0.4)
    assert TOLD in at.decisions[-1].conditions
    run(at, 2.0, 60)
    assert TOLD not in at.decisions[-1].conditions
    scales(at)


def test_one_of_two_routers_crashes_while_the_load_falls() -> None:
    """No rise of arrivals shows that router b is dead. So the counts of router a are a lower bound: for `FORGOTTEN_S`
    they are enough to start instances, and not to end any.
    """
    at, fleet = served("a", "b")
    fleet.crash("b")
    began = at.now
    taken = run(at, 1.0, 300)
    assert TOLD in at.decisions[-1].conditions
    taken += run(at, 0.8, began + FORGOTTEN_S - at.now)
    assert not any(isinstance(each, do.Drain | do.Flip) for each in taken)
    assert any(isinstance(each, do.Drain) for each in run(at, 0.8, 600))


def test_while_a_router_is_missing_the_load_of_the_others_starts_instances() -> None:
    at, fleet = served("a", "b")
    fleet.crash("b")
    assert any(isinstance(each, do.Start) for each in run(at, 5.0, 60))
    assert TOLD in at.decisions[-1].conditions


def test_a_router_that_lost_only_the_registry_keeps_its_instances() -> None:
    at, fleet = served("a", "b")
    fleet.routers["b"].reaches = False
    ready = {role: fleet.of_role(role) for role in at.controller.kinds.roles}
    run(at, 2.0, 600)
    assert at.decisions[-1].rate == pytest.approx(1.0, rel=0.3), "half of the load is not heard"
    assert all(fleet.of_role(role) >= count for role, count in ready.items())
    fleet.routers["b"].reaches = True
    run(at, 2.0, 60)
    assert not at.controller._counters.missing
    assert at.decisions[-1].rate is not None and at.decisions[-1].rate < 3.0, (
        "its counts of 10 minutes do not count as a burst"
    )


def test_a_router_that_a_new_controller_hears_late_is_no_burst() -> None:
    """The controller starts while router b is cut off from the registry. What b has counted is no load of now."""
    at, fleet = served("a", "b")
    fleet.routers["b"].reaches = False
    run(at, 2.0, 60)
    assert at.make is not None
    at.controller = at.make()
    run(at, 2.0, 120)
    assert at.decisions[-1].rate == pytest.approx(1.0, rel=0.4), "half of the load is not heard"
    fleet.routers["b"].reaches = True
    started = [each for each in run(at, 2.0, 60) if isinstance(each, do.Start)]
    assert len(started) <= 3, at.decisions[-1]
    assert at.decisions[-1].rate is not None and at.decisions[-1].rate < 3.0


@pytest.mark.parametrize("checks", [False, True])
def test_an_operators_size_is_kept_while_a_router_is_missing(checks: bool) -> None:
    at, fleet = served("a", "b")
    fleet.crash("b")
    run(at, 2.0, STALE_S + 10)
    at.controller.rules = replace(at.controller.rules, checks=checks)  # type: ignore[misc]
    manual: Manual = at.controller.manual
    role = at.controller.kinds.roles[0]
    manual.resize(role, 1, "an operator")
    run(at, 2.0, 40 if checks else 200)  # with checks: before the arrivals show that router b is dead
    assert fleet.of_role(role) == 1
    assert at.decisions[-1].what is What.HOLD


def published(router: str, at_s: float, arrivals: int, **more: object) -> RouterCounts:
    classes = {"": ClassCounts(arrivals=arrivals)}
    row = RouterCounts(router=router, life=router, at_s=at_s, classes=classes, waiting=0, oldest_wait_s=0.0)
    return replace(row, **more)  # type: ignore[arg-type]


def test_the_last_counts_of_a_router_that_left_count() -> None:
    """The counts count even if no other router is heard at that look."""
    counters = Counters()
    assert counters.see([published("a", 0.0, 500)], 0.0) is None
    assert counters.see([published("a", 5.0, 504, left=True)], 5.0) is None
    assert counters.silent
    found = counters.see([published("b", 10.0, 3)], 10.0)
    assert found is not None
    assert (found.classes[""].arrivals, found.seconds, counters.missing) == (7, 10.0, "")


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("began_s", "counts"), [(None, True), (31.0, True), (4.0, False)])
def test_counts_of_a_router_that_is_heard_late_begin_there(began_s: float | None, counts: bool, left: bool) -> None:
    """A router that has just started has counted nothing before; one that began earlier was heard late."""
    counters = Counters()
    counters.see([published("a", 30.0, 500)], 30.0)
    heard = published("b", 33.0, 70, began_s=began_s, left=left)
    found = counters.see([published("a", 33.0, 500), heard], 33.0)
    assert found is not None
    assert found.classes.get("", ClassCounts()).arrivals == (70 if counts else 0)
    rest = () if left else (published("b", 36.0, 73, began_s=began_s),)
    found = counters.see([published("a", 36.0, 501), *rest], 36.0)
    assert found is not None
    assert found.classes[""].arrivals == (1 if left else 4)


def test_a_router_that_restarts_under_its_name_while_it_is_cut_off_is_no_burst() -> None:
    counters = Counters()
    counters.see([published("a", 0.0, 5), published("b", 0.0, 5)], 0.0)
    for at_s in range(3, 63, 3):
        counters.see([published("a", float(at_s), 5)], float(at_s))
    found = counters.see([published("a", 63.0, 5), published("b", 63.0, 900, life="b2", began_s=5.0)], 63.0)
    assert found is not None
    assert found.classes[""].arrivals == 0


def test_a_running_router_at_the_same_address_replaces_no_other() -> None:
    """Two routers may announce the same address: on two machines, each 127.0.0.1. Neither is the successor of the
    other.
    """
    counters = Counters()
    both = {"address": "http://127.0.0.1:8001"}
    counters.see([published("a", 0.0, 5, **both), published("b", 0.0, 5, **both)], 0.0)
    counters.see([published("a", 5.0, 5, **both), published("b", 5.0, 5, **both)], 5.0)
    counters.see([published("a", 40.0, 5, **both)], 40.0)
    assert counters.missing.startswith("b ")
