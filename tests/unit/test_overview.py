"""The data of several routers as one overview, also if a router peer has another version."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.admin.overview import Overview, whole
from router.admin.peer_words import own_word
from router.core.journey import Choose
from router.core.values import Wanted
from router.fleet.view import FleetView
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES
from router.telemetry.explain_store import ExplainStore
from router.telemetry.pairs import Pairs
from router.telemetry.recomputed import Recomputed
from router.telemetry.rolling import SLOTS, RollingStatistics

P, D = InstanceId("p"), InstanceId("d")
NOW = 1000.0


def told(queued: int = 0, waiting: int = 0, ended: int = 0, unseeded: str = "") -> dict[str, Any]:
    """The data of a router: `queued` requests wait in its queue, all for decode, its decode engine reports `waiting`
    requests, and `ended` of its requests have ended now.
    """
    view = FleetView()
    for name, role in ((P, Role.PREFILL), (D, Role.DECODE)):
        view.add(Instance(id=name, role=role, url=f"http://{name}"))
        view.seen(name, ({"id": "m"},), Load(waiting=waiting if name is D else 0))
        view.get(name).credits = 1
    scheduler, lately, pairs = Scheduler(view, POLICIES["least_load"]), RollingStatistics(), Pairs()
    view.leg_started(D)
    for _ in range(queued):
        scheduler.choose(SchedulingContext(Wanted(model="m", hand_over=True)), Choose(frozenset(), hand_over=True), NOW)
    for _ in range(ended):
        lately.ended(NOW, "served")
    pairs.tried(P, D, None)
    overview = Overview(scheduler, ExplainStore(10), lately, pairs, Recomputed(), {})
    overview.look(NOW, {})
    own = overview.own("router", NOW)
    own["pairs"][0]["unseeded"] = unseeded
    return own


def heard(own: dict[str, Any]) -> Any:
    """The data of a peer, as this router reads them."""
    word = own_word(msgspec.json.encode(own))
    assert not isinstance(word, str), word
    return word


def test_a_peer_tells_why_a_pair_is_not_seeded() -> None:
    found = whole(told(), {"peer": heard(told(unseeded="other weights"))})
    assert [pair["unseeded"] for pair in found["pairs"]] == ["other weights"]
    older = told()
    del older["pairs"][0]["unseeded"]
    assert [pair["unseeded"] for pair in whole(told(), {"peer": heard(older)})["pairs"]] == [""]


def test_waiting_requests_of_the_history_are_the_engines_and_all_routers_queues() -> None:
    """Every router hears of the same waiting requests in engines, so these are not added up."""
    found = whole(told(queued=2, waiting=5), {"peer": heard(told(queued=3, waiting=5))})
    assert found["history"]["slots"][-1]["waiting"] == {"prefill": 0.0, "decode": 10.0, "both": 0.0, "handoff": 0.0}
    assert found["history"]["slots"][0]["waiting"]["decode"] == 0.0
    older = told(queued=3, waiting=5)
    del older["in_line"]
    assert whole(told(queued=2), {"peer": heard(older)})["history"]["slots"][-1]["waiting"]["decode"] == 2.0


@pytest.mark.parametrize("slots", [0, 3, SLOTS - 1, SLOTS + 1, 3 * SLOTS])
def test_a_peer_with_another_number_of_slots_is_counted_from_the_newest_on(slots: int) -> None:
    peer = told(queued=3, ended=4)
    for at, name in ((peer["lately"], "history"), (peer, "in_line")):
        oldest = {"of_another_version": 1.0}
        at[name] = ([oldest] * slots + at[name])[len(at[name]) :]
    found = whole(told(queued=2, ended=1), {"peer": heard(peer)})["history"]["slots"]
    assert len(found) == SLOTS
    assert found[-1]["ended"] == (5 if slots else 1)
    assert found[-1]["waiting"]["decode"] == (5.0 if slots else 2.0)
    assert all(slot["ended"] == 0 and slot["line"] == 0 for slot in found[:-1])
