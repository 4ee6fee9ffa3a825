"""A goodput controller's actions on Kubernetes, as pool sizes and marks on instances. Each action is idempotent."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.k8s_api import Refused
from support.k8s_stage import MODE, NS, Stage, image, quicken, spec, staged

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput.actions import Drain, Flip, Start, Stop
from goodput.actuate.existing import Existing, ExistingFleet, InstanceLife
from goodput.actuate.kubernetes import KubernetesActuator
from goodput.actuate.protocol import Unobservable, carry_out

pytest.importorskip("kubernetes", reason="the kubernetes client is not installed: pip install kubernetes==37.0.2")

from k8s.crd.names import API_VERSION, LABEL_REVISION
from k8s.operator.scaling import OperatorWorld


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture(autouse=True)
def mode(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODE, "kubeconfig", pytestconfig.getoption("kubeconfig", ""))


class Memory:
    """An operator's world in memory. After `left` changes, each further change raises."""

    def __init__(self, left: int = 1 << 30) -> None:
        self.there: dict[InstanceId, Existing] = {}
        self.sizes = self.former = {"decode": 0}
        self.left = left
        self.done: list[str] = []
        self.is_alone = False

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        assert not self.is_alone, "not within itself"
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    async def look(self) -> ExistingFleet:
        return ExistingFleet(now_s=0.0, instances=tuple(self.there.values()))

    def _note(self, what: str) -> None:
        assert self.is_alone, "a plan could see one fact without the other"
        if self.left == 0:
            raise ConnectionError("killed")
        self.left -= 1
        self.done.append(what)

    async def may_resize(self, pool: str, by: int) -> str:
        return "" if 0 <= self.sizes[pool] + by <= 2 else "decode has 0 to 2 instances"

    async def resize(self, pool: str, by: int) -> str:
        because = await self.may_resize(pool, by)
        if not because:
            self._note(f"size {by:+d}")
            self.former = dict(self.sizes)
            self.sizes[pool] += by
        return because

    async def take_back(self, pool: str) -> None:
        self._note("size as before")
        self.sizes = self.former

    async def make(self, name: InstanceId, pool: str, because: str) -> str:
        self._note(f"make {name}")
        self.there[name] = Existing(instance=name, pool=pool, life=InstanceLife.PENDING)
        return ""

    async def mark(self, name: InstanceId, because: str) -> str:
        self._note(f"mark {name}")
        self.there[name] = replace(self.there[name], life=InstanceLife.LEAVING)
        return ""

    async def flip(self, name: InstanceId, role: Role) -> str:
        self._note(f"flip {name} {role.value}")
        return ""

    async def remove(self, name: InstanceId, because: str) -> str:
        self._note(f"remove {name}")
        del self.there[name]
        return ""


A, B, C = (InstanceId(f"decode-{name}") for name in "abc")


async def test_every_action_is_idempotent() -> None:
    world = Memory()
    actuator = KubernetesActuator(world)
    for _ in range(2):
        assert await actuator.start(Start(instance=A, pool="decode")) == ""
    assert world.done == ["size +1", f"make {A}"]
    assert await actuator.stop(Stop(instance=A)) == ""
    assert world.there == {}
    assert world.sizes == {"decode": 0}
    await actuator.start(Start(instance=A, pool="decode"))
    world.there[A] = replace(world.there[A], life=InstanceLife.RUNNING)
    world.done.clear()
    for _ in range(2):
        assert await actuator.drain(Drain(instance=A)) == ""
    assert world.done == [f"mark {A}", "size -1"]
    for _ in range(2):
        assert await actuator.stop(Stop(instance=A)) == ""
    assert world.done == [f"mark {A}", "size -1", f"remove {A}"], "its place was given up with the mark"
    assert world.sizes == {"decode": 0}
    assert await actuator.drain(Drain(instance=A)) == ""
    assert await actuator.flip(Flip(instance=A, role=Role.PREFILL)) == f"{A} is not there"


async def test_a_refusal_changes_nothing() -> None:
    world = Memory()
    actuator = KubernetesActuator(world)
    for name in (A, B):
        assert await actuator.start(Start(instance=name, pool="decode")) == ""
    before = list(world.done)
    assert await actuator.start(Start(instance=C, pool="decode")) == "decode has 0 to 2 instances"
    assert world.done == before


async def test_a_flip_keeps_the_size_and_a_drain_that_stays_is_refused() -> None:
    """Only scripts of the simulator drain an instance and keep it. On Kubernetes a drained instance ends."""
    world = Memory()
    actuator = KubernetesActuator(world)
    await actuator.start(Start(instance=A, pool="decode"))
    world.there[A] = replace(world.there[A], life=InstanceLife.RUNNING)
    world.done.clear()
    assert "to leave" in await carry_out(actuator, Drain(instance=A, leave=False))
    assert await actuator.flip(Flip(instance=A, role=Role.PREFILL)) == ""
    assert world.done == [f"flip {A} prefill"]


@pytest.mark.parametrize("left", range(4))
async def test_a_controller_killed_between_two_changes_can_do_it_again(left: int) -> None:
    """The operator's plan completes a half-done action: a size without its workload, or a mark without its size."""
    world = Memory(left)
    actuator = KubernetesActuator(world)

    async def once() -> None:
        await actuator.start(Start(instance=A, pool="decode"))
        await actuator.drain(Drain(instance=A))

    with pytest.raises(ConnectionError):
        await once()
    leaving = [each for each in world.there.values() if each.life is InstanceLife.LEAVING]
    assert world.sizes["decode"] >= len(world.there) - len(leaving), "the size counts all that stay"


# -- the operator's world, on the API double --


@asynccontextmanager
async def sized(prefill: int = 1, decode: int = 1) -> AsyncIterator[tuple[Stage, KubernetesActuator]]:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(prefill, decode))
        await stage.until(lambda: stage.settled(prefill, decode))
        yield stage, controller_of(stage)


def controller_of(stage: Stage) -> KubernetesActuator:
    operator = stage.operators[-1]
    return KubernetesActuator(OperatorWorld(operator, NS, "chat", operator._settings.board.of(NS, "chat")))


async def lives(actuator: KubernetesActuator) -> dict[str, InstanceLife]:
    return {str(each.instance): each.life for each in (await actuator.observe()).instances}


NEW = InstanceId("chat-decode-19a2b3c4d5e-1")


async def test_the_controller_sizes_a_pool_and_the_spec_stays() -> None:
    async with sized() as (stage, actuator):
        before = copy.deepcopy(stage.cluster()["spec"])
        for _ in range(2):
            assert await actuator.start(Start(instance=NEW, pool="chat-decode", because="more arrive")) == ""
        assert (await lives(actuator)).keys() >= {NEW} or NEW in stage.instances()
        await stage.until(lambda: stage.settled(1, 2) and NEW in stage.instances())
        assert sorted(stage.instances()) == sorted(["chat-decode-0", NEW, "chat-prefill-0"])
        pool = stage.cluster()["status"]["pools"]["decode"]
        assert pool["because"] == "the goodput controller says 2: more arrive"
        assert stage.condition("Scaling")["reason"] == "Controller"
        assert await actuator.drain(Drain(instance=InstanceId("chat-decode-0"), because="fewer arrive")) == ""
        await stage.until(lambda: stage.settled(1, 1))
        assert sorted(stage.instances()) == sorted([NEW, "chat-prefill-0"]), "the one that it has chosen left"
        assert ("drain", "chat-decode-0") in stage.fleet.told
        assert stage.cluster()["spec"] == before
        writes = [
            path for method, path in stage.double.asked if method != "GET" and path.endswith("batonclusters/chat")
        ]
        assert writes == [], "the user's object was not written"


async def test_sizes_outlive_the_operator() -> None:
    async with sized() as (stage, actuator):
        await actuator.start(Start(instance=NEW, pool="chat-decode"))
        await stage.until(lambda: stage.settled(1, 2))
        stage.tasks[-1].cancel()
        await asyncio.wait([stage.tasks.pop()])
        pods = {each["metadata"]["uid"] for each in stage.server.all("pods")}
        stage.operate()
        await stage.until(lambda: stage.operators[-1].knows_all)
        await asyncio.sleep(0.3)
        await stage.until(lambda: stage.settled(1, 2))
        assert {each["metadata"]["uid"] for each in stage.server.all("pods")} == pods
        assert len(await lives(controller_of(stage))) == 3


async def test_no_plan_sees_a_mark_without_its_size() -> None:
    """Else a plan made during the drain call would count an instance too few, take the mark back and drain another."""
    async with sized(1, 2) as (stage, actuator):
        stage.fleet.drain_s = 0.2  # two plans
        stage.fleet.streams = {"chat-decode-0": 8}
        assert await actuator.drain(Drain(instance=InstanceId("chat-decode-0"), because="fewer arrive")) == ""
        await stage.until(lambda: stage.settled(1, 1))
        assert sorted(stage.instances()) == ["chat-decode-1", "chat-prefill-0"]
        assert [told for told in stage.fleet.told if told[0] == "resume"] == []


async def test_an_operator_that_leads_again_has_forgotten_its_sizes() -> None:
    """Another operator led meanwhile and made the pool larger. The former sizes would drain its new instances."""
    from baton.k8s_scaling import Controllers

    async with staged() as stage:
        leads = ["a"]
        for name in "ab":
            stage.operate(lambda name=name: leads[0] == name)  # type: ignore[misc]
        await stage.make(spec())
        await stage.until(stage.settled)
        boards = [each._settings.board for each in stage.operators]
        a, b = (
            KubernetesActuator(OperatorWorld(each, NS, "chat", board.of(NS, "chat")))
            for each, board in zip(stage.operators, boards, strict=True)
        )
        assert await a.start(Start(instance=NEW, pool="chat-decode")) == ""
        await stage.until(lambda: stage.settled(1, 2))
        leads[0] = "b"
        await Controllers(stage.operators[0], boards[0], stage.client, time.monotonic).look()
        for number in (2, 3, 4):
            assert await b.start(Start(instance=InstanceId(f"{NEW}{number}"), pool="chat-decode")) == ""
        await stage.until(lambda: stage.settled(1, 5))
        leads[0] = "a"
        before = stage.operators[0].counters.reconciles
        await stage.until(lambda: stage.operators[0].counters.reconciles > before + 2)
        assert stage.fleet.told == []
        assert stage.settled(1, 5)


async def test_a_cluster_made_again_has_the_size_of_its_start() -> None:
    async with sized() as (stage, actuator):
        await actuator.start(Start(instance=NEW, pool="chat-decode"))
        await stage.until(lambda: stage.settled(1, 2))
        await stage.client.delete(API_VERSION, "BatonCluster", NS, "chat")
        await stage.make(spec())
        await stage.until(lambda: stage.settled(1, 1) and len(stage.instances()) == 2)
        assert not any("19a2b3c4d5e" in name for name in stage.instances())


QUOTA = Refused(403, "Forbidden", "exceeded quota: gpus")
SLOW = Refused(500, "InternalError", "etcd is slow")


@pytest.mark.parametrize("failure", [QUOTA, SLOW], ids=["refused", "answer lost"])
@pytest.mark.parametrize("start", [1, 2])
async def test_starts_that_fail_raise_the_size_once_at_most(failure: Refused, start: int) -> None:
    """Before, each try made the pool one larger, up to its most. A refused start leaves the size: a quota is full. With
    a lost answer the operator makes the instance.
    """

    def refuse(method: str, path: str) -> None:
        if "/deployments" in path:
            raise failure

    async with sized(decode=start) as (stage, actuator):
        sizes = stage.operators[-1]._settings.board.of(NS, "chat").sizes
        stage.double.refuse = refuse
        for number in range(3):
            try:
                refusal = await actuator.start(Start(instance=InstanceId(f"{NEW}{number}"), pool="chat-decode"))
            except Unobservable as error:
                refusal = str(error)
            assert failure.args[-1] in refusal
        stage.double.refuse = None
        lost = failure is SLOW
        assert sizes.get("decode", start) == start + lost
        assert lost or await actuator.start(Start(instance=NEW, pool="chat-decode")) == ""
        await stage.until(lambda: stage.settled(1, start + 1))


async def test_where_a_batonpool_decides_the_controller_only_advises() -> None:
    async with sized() as (stage, actuator):
        metadata = {"name": "chat-decode", "namespace": NS}
        pool = {"cluster": "chat", "pool": "decode", "replicas": 2}
        await stage.client.create({"apiVersion": API_VERSION, "kind": "BatonPool", "metadata": metadata, "spec": pool})
        await stage.until(lambda: stage.settled(1, 2))
        stage.operators[-1]._settings.board.of(NS, "chat").advice = "would up: decode: 3 needed"
        assert await actuator.start(Start(instance=NEW, pool="chat-decode")) == "a BatonPool decides on decode"
        assert "BatonPool" in await actuator.drain(Drain(instance=InstanceId("chat-decode-0")))
        assert NEW not in stage.instances()
        await stage.until(lambda: "would up" in stage.condition("Scaling").get("message", ""))
        assert stage.condition("Scaling")["reason"] == "ScalingExternal"
        await stage.client.delete(API_VERSION, "BatonPool", NS, "chat-decode")
        await stage.until(lambda: stage.condition("Scaling").get("reason") != "ScalingExternal")
        assert await actuator.start(Start(instance=NEW, pool="chat-decode")) == ""
        await stage.until(lambda: stage.settled(1, 3))


async def test_a_flip_restarts_no_pod() -> None:
    async with sized(1, 2) as (stage, actuator):
        pods = {each["metadata"]["uid"] for each in stage.server.all("pods")}
        assert await actuator.flip(Flip(instance=InstanceId("chat-decode-1"), role=Role.PREFILL)) == ""
        assert ("prefill", "chat-decode-1") in stage.fleet.told
        await asyncio.sleep(0.3)
        await stage.until(lambda: stage.settled(1, 2))
        assert {each["metadata"]["uid"] for each in stage.server.all("pods")} == pods
        assert await actuator.flip(Flip(instance=NEW, role=Role.PREFILL)) == f"{NEW} is not there"


async def test_the_controller_drains_nothing_while_a_revision_rolls_out() -> None:
    async with sized(1, 2) as (stage, actuator):
        stage.nodes.broken = {"engine:2"}
        await stage.change(image("engine:2"))
        await stage.until(lambda: len(stage.instances()) > 3)
        refusal = await actuator.drain(Drain(instance=InstanceId("chat-decode-0")))
        assert refusal == "a revision rolls out: instances come and go by themselves"
        assert ("drain", "chat-decode-0") not in stage.fleet.told
        stage.nodes.broken = set()
        await stage.until(lambda: stage.settled(1, 2))
        assert len({each["metadata"]["labels"][LABEL_REVISION] for each in stage.instances().values()}) == 2


async def test_a_model_that_cannot_be_sized_says_so_and_a_pool_that_cannot_move_has_no_controller() -> None:
    from baton.k8s_scaling import Controllers

    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        operator = stage.operators[-1]
        controllers = Controllers(operator, operator._settings.board, stage.client, time.monotonic)
        await controllers.look()
        assert controllers._running == {}
        await stage.change({"kubernetes": {"paused": None}, "slo": {"fast": {"ttft_ms": 900}}})
        await stage.until(lambda: stage.condition("Scaling").get("reason") == "NotSized")
        assert stage.condition("Scaling")["message"].startswith("m: no ")
        fixed = {role: {"min": 1} for role in ("prefill", "decode")}
        await stage.change({"models": [{"name": "m", "pools": fixed}]})
        await stage.until(lambda: stage.condition("Scaling").get("observedGeneration") == 3)
        await controllers.look()
        await stage.until(lambda: stage.condition("Scaling").get("reason") == "Fixed")


async def test_bounds_hold_and_another_leader_stops_it() -> None:
    from goodput.actuate.protocol import Unobservable

    async with sized() as (stage, actuator):
        assert await actuator.drain(Drain(instance=InstanceId("chat-decode-0"))) == "decode has 1 to 8 instances"
        assert ("drain", "chat-decode-0") not in stage.fleet.told
        stage.operators[-1].may_act = lambda: False
        with pytest.raises(Unobservable):
            await actuator.start(Start(instance=NEW, pool="chat-decode"))
        assert NEW not in stage.instances()
