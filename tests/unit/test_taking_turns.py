"""Requests in the flow-control queue and outside it take turns in asking first, so that neither keeps all places."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cluster.ids import InstanceId
from router.core.values import Wanted
from router.fleet import events as d
from router.fleet.view import FleetView
from router.scheduler.decision_log import fleet_of, scheduler_of
from router.scheduler.dispatch import Dispatch
from router.scheduler.placements import SchedulingContext
from router.scheduler.scoring.policies import POLICIES


class Machine:
    """A scheduler that calls the same request at each event."""

    def __init__(self, called: SchedulingContext) -> None:
        self.called = called

    def handle(self, _: d.SchedulerEvent, __: float) -> tuple[SchedulingContext, ...]:
        return (self.called,)


async def asked_first(dispatch: Dispatch, queued: SchedulingContext, event: d.SchedulerEvent | None) -> str:
    """Who asks first after the event; None: a change of the fleet."""
    order: list[str] = []
    outside: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    outside.add_done_callback(lambda _: order.append("outside"))
    dispatch.outside[outside] = None
    dispatch.line.wait(queued, lambda: order.append("queue"))
    if event is None:
        dispatch.fleet_changed()
    else:
        dispatch.tell(event, 1.0)
    await asyncio.sleep(0)
    del dispatch.outside[outside]
    assert sorted(order) == ["outside", "queue"]
    return order[0]


@pytest.mark.interpreted
@pytest.mark.parametrize("event", [d.LegEnded(InstanceId("d")), None])
async def test_they_take_turns(event: d.SchedulerEvent | None) -> None:
    view, queued = FleetView(), SchedulingContext(Wanted(model=None, hand_over=False))
    scheduler, _ = scheduler_of(None, view, POLICIES["workload"], admission=False, foresees=True)
    dispatch = Dispatch(view, scheduler, fleet_of(None, view), cast("Any", Machine(queued)))
    assert [await asked_first(dispatch, queued, event) for _ in range(4)] == ["outside", "queue"] * 2


async def test_events_that_free_no_place_wake_none_outside() -> None:
    view, queued = FleetView(), SchedulingContext(Wanted(model=None, hand_over=False))
    scheduler, scheduling = scheduler_of(None, view, POLICIES["workload"], admission=False, foresees=True)
    dispatch = Dispatch(view, scheduler, fleet_of(None, view), scheduling)
    outside: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    dispatch.outside[outside] = None
    dispatch.tell(d.FoundNone(queued), 1.0)
    dispatch.tell(d.Roomy(), 1.0)
    assert not outside.done()
