"""The actuator of a Ray cluster reads and writes its records of instances in Ray's thread alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.ids import InstanceId
from goodput.actions import Drain, Start, Stop
from goodput.actuate.agents import Agents
from goodput.actuate.existing import InstanceLife
from goodput.actuate.ray_cluster import RayActuator
from goodput.actuate.ray_tables import RayGroup, RayLook, RayPool

NAMES = [InstanceId(f"decode-{number}") for number in range(3)]


class Remembered(dict[Any, Any]):
    """A dictionary that refuses every thread except Ray's."""

    def _check(self) -> None:
        assert threading.current_thread().name.startswith("ray"), "another thread than Ray's"


def _checked(name: str) -> Callable[..., Any]:
    def checked(self: Remembered, *args: Any) -> Any:
        self._check()
        return getattr(dict, name)(self, *args)

    return checked


for _name in ("__getitem__", "__setitem__", "__delitem__", "__iter__", "get", "pop", "setdefault", "items", "clear"):
    setattr(Remembered, _name, _checked(_name))


class Tables:
    """Ray's tables, in memory."""

    def __init__(self) -> None:
        self.there: dict[InstanceId, RayGroup] = {}

    def look(self) -> RayLook:
        return RayLook(groups=self.groups())

    def groups(self) -> list[RayGroup]:
        return [*self.there.values()]

    def group_of(self, name: InstanceId) -> RayGroup | None:
        return self.there.get(name)

    def place(self, name: InstanceId, pool: str, _: RayPool, __: object) -> None:
        self.there[name] = RayGroup(str(name), pool, name, "CREATED", "")

    def remove(self, group: RayGroup) -> None:
        del self.there[group.instance]

    def actor(self, _: InstanceId) -> Any:
        return SimpleNamespace(drain=SimpleNamespace(remote=lambda: None))


@pytest.fixture
async def actuator() -> AsyncIterator[RayActuator]:
    made = RayActuator("auto", "c", {"decode": RayPool()}, lambda *_: object(), dict, Agents(None))  # type: ignore[arg-type]
    made._tables = Tables()  # type: ignore[misc, assignment]
    made._known = Remembered()  # type: ignore[misc]
    yield made
    made.connection._thread.shutdown()


async def lives(actuator: RayActuator) -> dict[str, InstanceLife]:
    return {str(each.instance): each.life for each in (await actuator.observe()).instances}


async def test_actions_during_looks(actuator: RayActuator) -> None:
    """An operator's order comes while the fleet is looked at."""
    looks = [actuator.observe() for _ in range(3)]
    await asyncio.gather(*(actuator.start(Start(instance=name, pool="decode")) for name in NAMES), *looks)
    assert await lives(actuator) == dict.fromkeys(map(str, NAMES), InstanceLife.RUNNING)
    answers = await asyncio.gather(
        actuator.drain(Drain(instance=NAMES[0])), actuator.observe(), actuator.stop(Stop(instance=NAMES[1]))
    )
    assert answers[0] == answers[2] == ""
    assert await lives(actuator) == {"decode-0": InstanceLife.LEAVING, "decode-2": InstanceLife.RUNNING}
    del actuator._tables.there[NAMES[2]]  # type: ignore[attr-defined]
    assert (await lives(actuator))["decode-2"] is InstanceLife.FAILED
    await actuator.start(Start(instance=NAMES[2], pool="decode"))
    assert (await lives(actuator))["decode-2"] is InstanceLife.RUNNING
    await actuator.stop_all()
    assert await lives(actuator) == {}
