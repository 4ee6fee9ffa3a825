"""Requests in the flow-control queue and outside it take turns in asking first, so that neither keeps all places."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.journey import Choose
from router.core.values import Wanted
from router.fleet import events as d
from router.fleet.view import FleetView
from router.request.scheduled import ScheduledRequest
from router.scheduler.decision_log import fleet_of, scheduler_of
from router.scheduler.dispatch import Dispatch
from router.scheduler.placements import SchedulingContext
from router.scheduler.scoring.policies import POLICIES

pytestmark = pytest.mark.interpreted  # a stand-in for `Parts`, which compiled code refuses

D, D2 = InstanceId("d"), InstanceId("d2")
ALONE = Wanted(model="m", hand_over=False)


class Chat:
    """A request of the queue."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.context = SchedulingContext(ALONE)
        parts = cast("Any", SimpleNamespace(dispatch=house.dispatch, scheduler=house.dispatch.scheduler, meters=Mock()))
        self.scheduled = ScheduledRequest(parts, self.context, None, Mock())

    def ask(self, *excluded: InstanceId) -> None:
        """Ask for a place; without one, wait in the queue."""
        chosen = self.scheduled.choose(Choose(frozenset(excluded), hand_over=False), relayed=False)
        if chosen.decode is not None:
            self.house.served.append(self)
            self.scheduled.occupy(chosen.decode)  # its leg is sent
        else:
            self.scheduled.found_none()
            self.house.dispatch.line.wait(self.context, self.ask)

    def end(self) -> None:
        """Its answer is over."""
        self.scheduled.occupy(None)
        self.scheduled.finish(2.0, None, None, cut_off=False, complete=True, paused=False)


class Message:
    """A request outside the queue."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.place: InstanceId | None = None

    def ask(self, _: object = None) -> None:
        """Ask for a place; without one, wait outside."""
        dispatch = self.house.dispatch
        if self.house.room is not None:
            del dispatch.outside[self.house.room]
            self.house.room = None
        (chosen,) = cast("Any", dispatch.scheduling.handle(d.Picked(ALONE), 1.0))
        if chosen.decode is not None:
            self.place = chosen.decode
            dispatch.outside_took()
            dispatch.leg_started(chosen.decode)
            self.house.served.append(self)
        else:
            room = self.house.room = asyncio.get_running_loop().create_future()
            dispatch.outside[room] = None
            room.add_done_callback(self.ask)

    def end(self) -> None:
        """Its answer is over."""
        assert self.place is not None
        self.house.dispatch.leg_ended(self.place)


class House:
    """Instances with one place each."""

    def __init__(self, *names: InstanceId) -> None:
        view = FleetView()
        for name in names:
            view.add(Instance(id=name, role=Role.BOTH, url=f"http://{name}"))
            view.seen(name, ({"id": "m"},), Load())
            view.get(name).credits = 1
        scheduler, scheduling = scheduler_of(None, view, POLICIES["least_load"], admission=False, foresees=False)
        self.dispatch = Dispatch(view, scheduler, fleet_of(None, view), scheduling)
        self.served: list[Chat | Message] = []
        """The requests in the order in which they got places."""
        self.room: asyncio.Future[None] | None = None
        """The future of the message that waits outside."""

    def waits_outside(self) -> asyncio.Future[None]:
        """A future outside the queue."""
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.dispatch.outside[room] = None
        return room


async def callbacks_run() -> None:
    """Run the callbacks of this loop turn and those that they schedule."""
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.parametrize("moves", [False, True])
async def test_they_take_turns(moves: bool) -> None:
    """`moves`: a change of the fleet, which wakes all requests, comes with each place that becomes free."""
    house = House(D)
    Message(house).ask()
    for _ in range(5):
        Chat(house).ask()
    for turn in range(8):
        if house.room is None:
            Message(house).ask()
        house.served[turn].end()
        if moves:
            house.dispatch.fleet_changed()
        await callbacks_run()
    kinds = [type(each) for each in house.served]
    assert kinds == [Message, Chat] * 4 + [Message]


async def test_a_place_left_for_another_one_is_offered_outside() -> None:
    house = House(D, D2)
    chat, other = Chat(house), Message(house)
    chat.ask()
    other.ask()
    assert chat.context.decode is not None and other.place is not None
    waiting, freed = Message(house), chat.context.decode
    waiting.ask()
    other.end()  # wakes `waiting`, which asks on the next loop turn
    chat.ask(freed)  # the chat moves to the place that has just become free
    await callbacks_run()
    assert (chat.context.decode, waiting.place) == (other.place, freed)


async def test_a_chat_that_moves_wakes_those_outside() -> None:
    house = House(D, D2)
    chat = Chat(house)
    chat.ask()
    room, left = house.waits_outside(), chat.context.decode
    assert left is not None
    chat.ask(left)
    assert chat.context.decode not in {left, None} and room.done()


async def test_events_that_free_no_place_wake_none_outside() -> None:
    house = House(D)
    chat, queued = Chat(house), Chat(house)
    chat.ask()
    room = house.waits_outside()
    for event in (d.FoundNone(queued.context), d.Roomy(), d.Occupied(chat.context, D)):
        house.dispatch.tell(event, 1.0)
        assert not room.done(), event
    chat.ask()
    assert chat.context.decode == D and not room.done(), "it keeps its place"
    house.dispatch.tell(d.Occupied(chat.context, None), 1.0)
    assert room.done()
