"""Goodput controllers in the operator: what a controller is made of, and which changes need a new one."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from support.k8s_objects import desired, settled

from baton.k8s_scaling import Controllers, _mark, _plan, _Running
from cluster.errors import UsageError
from k8s.operator import scaling
from k8s.operator.scaling import ClusterSeen, ControllerWanted, OperatorWorld, RegistryPlace, ScalingBoard
from k8s.operator.secrets import Access
from k8s.plan import Desired, ObservedCluster, deciding, look
from kvtransfer.ticket import SigningKey

KEY = SigningKey("k1", b"s" * 32)


def seen(observed: ObservedCluster, of: Desired | None = None) -> ClusterSeen:
    wanted = of or desired()
    found = look(wanted, observed)
    return ClusterSeen(resource=wanted.resource, desired=wanted, observed=observed, look=found, access=Access())


def test_a_misspelt_batonpool_does_not_switch_the_controller_off() -> None:
    spec = desired().resource.spec
    assert spec is not None
    there = settled(desired())
    wrong, right = (seen(dataclasses.replace(there, external={name: 3})) for name in ("decod", "decode"))
    assert not _plan(wrong, spec).rules.dry
    assert _plan(right, spec).rules.dry
    assert _mark(wrong) == _mark(seen(there))
    assert _mark(right) != _mark(wrong)


def test_a_resource_that_is_made_again_needs_a_new_controller() -> None:
    """The new resource has another registry at the same address, with other passwords."""
    there = settled(desired())
    again = dataclasses.replace(desired(), resource=dataclasses.replace(desired().resource, uid="u-2"))
    assert _mark(seen(there)) == _mark(seen(there))
    assert _mark(seen(there)) != _mark(seen(there, again))
    other = copy.deepcopy(there.objects)
    for each in other:
        if each["metadata"]["name"] == "chat-internal":
            each["data"]["baton-controller-password"] = "bmV3"
    assert _mark(seen(there)) != _mark(seen(dataclasses.replace(there, objects=other)))


async def test_a_controller_that_cannot_begin_ends_no_other_cluster() -> None:
    """Before, a registry password missing in one cluster's Secret ended the operator, and then each standby."""
    controllers = Controllers(None, ScalingBoard(), None, lambda: 0.0)  # type: ignore[arg-type]

    async def fails() -> None:
        raise UsageError("--registry-password-file: the file is empty")

    task = asyncio.ensure_future(fails())
    await asyncio.wait({task})
    controllers._running["ns", "chat"] = _Running(mark="", shell=None, task=task)  # type: ignore[arg-type]
    assert await controllers._end(("ns", "chat")) == "--registry-password-file: the file is empty"
    assert controllers._running == {}


class Sized:
    """The controller of one cluster: its task ends `goodbye` after it was cancelled, and then raises `last`."""

    def __init__(self, last: Exception | None = None) -> None:
        self.begun, self.leaving, self.goodbye = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.last = last

    async def run(self) -> None:
        try:
            self.begun.set()
            await asyncio.Event().wait()
        finally:
            self.leaving.set()
            await self.goodbye.wait()
            if self.last is not None:
                raise self.last

    async def begin(self, controllers: Controllers, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self.run())
        controllers._running["ns", name] = _Running(mark="", shell=None, task=task)  # type: ignore[arg-type]
        await self.begun.wait()
        return task


def no_clusters() -> Controllers:
    """Controllers of an operator that sees no cluster."""
    operator = SimpleNamespace(clusters=frozenset, seen=lambda *_: None, may_act=lambda: True)
    return Controllers(operator, ScalingBoard(), None, lambda: 0.0)  # type: ignore[arg-type]


async def test_controllers_end_while_they_wait_for_the_goodbye_of_one() -> None:
    """A cluster was deleted, and its registry answers no goodbye. SIGTERM ends the operator all the same."""
    controllers = no_clusters()
    one = Sized()
    task = await one.begin(controllers, "chat")
    running = asyncio.create_task(controllers.run())
    await one.leaving.wait()
    running.cancel()
    await asyncio.sleep(0)
    one.goodbye.set()
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()
    assert task.cancelled()
    assert controllers._running == {}


async def test_a_controller_whose_clean_up_fails_ends_no_other_cluster(caplog: pytest.LogCaptureFixture) -> None:
    controllers = no_clusters()
    one, other = Sized(OSError(104, "connection reset")), Sized()
    for each, name in ((one, "chat"), (other, "code")):
        await each.begin(controllers, name)
        each.goodbye.set()
    assert await controllers._end(("ns", "chat")) == ""
    assert "the controller of ns/chat ended: [Errno 104] connection reset" in caplog.text
    assert await controllers._end(("ns", "code")) == ""
    assert controllers._running == {}


async def test_a_full_disk_ends_no_controller_and_is_told() -> None:
    """A controller's registry password is kept in a file."""
    controllers = no_clusters()
    pools = {"prefill": {"gpu": "L4"}, "decode": {"min": 1, "max": 4, "gpu": "L4"}}
    of = desired({"models": [{"name": "meta-llama/Llama-3.1-8B", "pools": pools}]})
    assert of.resource.spec is not None

    async def full(*_: object) -> _Running:
        raise OSError(28, "No space left on device")

    controllers._begun = full  # type: ignore[method-assign, assignment]
    await controllers._keep(("ns", "chat"), seen(settled(of), of), of.resource.spec)
    assert controllers._board.of("ns", "chat").advice == "[Errno 28] No space left on device"


async def test_a_cluster_that_cannot_be_read_ends_no_controller_of_another(caplog: pytest.LogCaptureFixture) -> None:
    """Before, one such resource ended the operator, and then each standby."""
    there = dataclasses.replace(seen(settled(desired())), access=Access(fleet=(KEY,)))

    def one(_namespace: str, name: str) -> ClusterSeen:
        if name == "broken":
            raise KeyError("metadata")
        return there

    keys = frozenset({("ns", "broken"), ("ns", "chat")})
    operator = SimpleNamespace(clusters=lambda: keys, seen=one, may_act=lambda: True)
    controllers = Controllers(operator, ScalingBoard(), None, lambda: 0.0)  # type: ignore[arg-type]
    kept = []

    async def keep(key: tuple[str, str], *_: object) -> None:
        kept.append(key)

    controllers._keep = keep  # type: ignore[method-assign, assignment]
    for _ in range(2):
        await controllers.look()
    assert kept == [("ns", "chat")] * 2
    assert controllers._board.of("ns", "broken").advice == "KeyError: 'metadata'"
    assert caplog.text.count("ns/broken is not sized: a fault of the operator's") == 1, "once, not every two seconds"


def test_sizes_that_cannot_be_computed_switch_one_model_off() -> None:
    file = {
        "hardware": {"L4": {"memory_gib": 1e308}},
        "models": [{"name": "meta-llama/Llama-3.1-8B", "pools": {"decode": {"min": 1, "max": 4, "gpu": "L4"}}}],
    }
    of = desired(file)
    assert of.resource.spec is not None
    plan = _plan(seen(settled(of), of), of.resource.spec)
    assert plan.pools == {}
    assert "OverflowError" in plan.off["meta-llama/Llama-3.1-8B"]


def test_the_operators_own_replacements_freeze_no_size() -> None:
    """Before, each instance that a rollout or an eviction replaced counted as a person's: no sizing for 30 minutes."""
    of = desired({"models": [{"name": "m", "pools": {"decode": {"min": 1, "max": 4}}}]})
    assert of.resource.spec is not None
    plan = _plan(seen(settled(of), of), of.resource.spec)
    assert plan.rules.manual_s == 0
    assert not plan.made.by_hand, "a replay of the log follows the same rule"


@pytest.mark.parametrize("why", ["Unschedulable", "SchedulingGated"])
async def test_a_pod_that_comes_again_waits_since_then(why: str) -> None:
    """`kubectl delete pod` on an old instance: its age was its Deployment's, so the pool shrank at once."""
    there = settled(desired())
    for each in there.objects:
        each["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    (pod,) = (each for each in there.pods if each["metadata"]["name"].startswith("chat-decode-0"))
    since = datetime.now(UTC) - timedelta(minutes=1)
    pod["spec"], pod["status"] = {}, {"conditions": [{"type": "PodScheduled", "status": "False", "reason": why}]}
    pod["metadata"]["creationTimestamp"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
    operator = SimpleNamespace(seen=lambda *_: seen(there))
    found = await OperatorWorld(operator, "llm", "chat", ControllerWanted()).look()  # type: ignore[arg-type]
    ages = {
        str(each.instance): None if each.asked_s is None else found.now_s - each.asked_s for each in found.instances
    }
    assert ages["chat-decode-0"] == pytest.approx(60.0, abs=5.0)


def test_each_cluster_of_all_namespaces_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of all namespaces: one cluster's password, log and orders were another's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    clusters = {("team", "a-chat"): "secret-1", ("team-a", "chat"): "secret-2"}
    for key, password in clusters.items():
        place = RegistryPlace(url="redis://r:6379", cluster="default", password=password)
        monkeypatch.setattr(scaling, "registry_place", AsyncMock(return_value=place))
        asyncio.run(no_clusters()._registry(key, seen(settled(desired()))))
    assert sorted(each.read_text() for each in tmp_path.rglob("password")) == ["secret-1", "secret-2"]


def test_sizes_belong_to_one_resource_and_not_to_its_name() -> None:
    wanted = ControllerWanted()
    wanted.belong_to("u-1")
    wanted.sizes["decode"], wanted.reasons["decode"] = 5, "more arrive"
    wanted.belong_to("u-1")
    assert wanted.sizes == {"decode": 5}
    wanted.belong_to("u-2")
    assert (wanted.sizes, wanted.reasons) == ({}, {})


def batonpool(name: str, made: str, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "creationTimestamp": made, **metadata},
        "spec": {"cluster": "chat", "pool": "decode", "replicas": 2},
    }


def test_of_several_batonpools_the_oldest_decides_whatever_their_order() -> None:
    old, new = batonpool("z", "2026-01-01T00:00:00Z"), batonpool("a", "2026-01-02T00:00:00Z")
    twin = batonpool("y", "2026-01-01T00:00:00Z")
    gone = batonpool("0", "2025-01-01T00:00:00Z", deletionTimestamp="2026-01-03T00:00:00Z")
    for pools in ([old, new, gone], [new, gone, old]):
        assert deciding(pools) == {"decode": old}
    assert deciding([old, twin]) == deciding([twin, old]) == {"decode": twin}
