"""The actuator of a Ray cluster reads and writes its records of instances in Ray's thread alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from baton.clusterfile import read
from baton.plan import WantedEngine
from baton.ray_fleet import launches
from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.spec.plan import stems
from goodput.actions import Drain, Start, Stop
from goodput.actuate import ray_connection
from goodput.actuate.agents import Agents
from goodput.actuate.existing import InstanceLife
from goodput.actuate.protocol import Unobservable
from goodput.actuate.ray_actor import Launch
from goodput.actuate.ray_cluster import RayActuator
from goodput.actuate.ray_connection import RayConnection
from goodput.actuate.ray_tables import LABEL, RayGroup, RayLook, RayPool

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
    made.connection.close()


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


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(2, "No such file or directory", "/keys/registry"), UsageError("no keys"), ValueError("x")],
)
async def test_a_start_without_its_secrets_is_refused(actuator: RayActuator, error: Exception) -> None:
    """The file of a password may be missing for a while. The controller goes on, and says why."""

    def launch(*_: str) -> Launch:
        raise error

    actuator._launch = launch  # type: ignore[misc]
    assert await actuator.start(Start(instance=NAMES[0], pool="decode")) == f"decode-0 cannot be started: {error}"
    assert await lives(actuator) == {}


def test_a_password_that_cannot_be_read_is_told_by_its_flag(tmp_path: Path) -> None:
    wanted = WantedEngine(name="", role=Role.DECODE, model="m", engine="mock")
    file = tmp_path / "registry"
    launch = launches({"decode": wanted}, ["--registry", "redis://h:1"], file, None)
    with pytest.raises(UsageError, match=f"--registry-password-file {file}: no such file or directory; .*again"):
        launch("decode-0", "decode")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=f"--registry-password-file {file}: the file is in UTF-16"):
        launch("decode-0", "decode")
    file.write_text("secret\n")
    assert launch("decode-0", "decode").files == {"registry": "secret\n"}


def test_each_group_of_the_kuberay_example_has_its_gpus_label_where_kuberay_takes_it() -> None:
    """KubeRay refuses `labels` in `rayStartParams` since a group has labels of its own (1.5)."""
    folder = Path(__file__).resolve().parents[2] / "examples" / "ray"
    cluster, _ = yaml.safe_load_all((folder / "raycluster.yaml").read_text())
    groups = cluster["spec"]["workerGroupSpecs"]
    assert all("labels" not in each["rayStartParams"] for each in (cluster["spec"]["headGroupSpec"], *groups))
    wanted = {pool.gpu for _, _, pool in stems(read(str(folder / "baton.yaml")).usable()).values()}
    assert {each["labels"][LABEL] for each in groups} == wanted


async def test_a_call_that_hangs_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "CLOSE_S", 0.01)
    connection, answered = RayConnection("auto", "c"), threading.Event()
    for work in (answered.wait, lambda: True):
        with pytest.raises(Unobservable, match="does not answer within"):
            await connection.call(work, within_s=0.01)
    connection.close()
    assert connection._thread.daemon, "the interpreter does not wait for it"
    answered.set()
