"""Controllers, a scheduler and a kubelet for the API double, and a stand-in for the agents and routers in its pods."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from support.k8s_api import ApiServer, Json
from support.k8s_json import copied

from cluster.instance import Role
from k8s.operator.fleet import FleetTold
from k8s.operator.secrets import Access
from k8s.plan.observe import INSTANCE, is_true, pods_by_instance
from k8s.plan.readiness import Known, PairsHeard

STEP_S = 0.04


@dataclass
class FakeFleet:
    """A stand-in for agents and routers: routers know every healthy instance, and have proven every pair of them."""

    draining: set[str] = field(default_factory=set)
    streams: dict[str, int] = field(default_factory=dict)
    """By instance: for how many calls of `look` its streams go on after a drain has begun."""
    told: list[tuple[str, str]] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)
    deaf: int = 0
    """How many of the next drains do not reach the agent."""
    drain_s: float = 0.0
    """Seconds that an agent takes to answer a drain."""
    unknown: set[str] = field(default_factory=set)
    """Instances that no router knows yet."""

    async def look(self, pods: Sequence[Any], routers: Sequence[Any], access: Access) -> FleetTold:
        assert access.admin.startswith("sk-baton-")
        assert access.fleet
        ready = frozenset(each["metadata"]["name"] for each in routers if is_true(each, "Ready"))
        healthy = [name for name, pod in pods_by_instance(tuple(pods)).items() if is_true(pod, "ContainersReady")]
        for name in self.draining:
            self.streams[name] = max(0, self.streams.get(name, 0) - 1)
        known = Known(
            routers=ready,
            known_to={name: ready for name in healthy if name not in self.unknown},
            pairs=(PairsHeard(circles=dict.fromkeys(healthy)),),
        )
        drained = frozenset(name for name in self.draining if not self.streams.get(name))
        working = frozenset(healthy) - self.draining
        return FleetTold(drained=drained, working=working, roles=self.roles, known=known)

    async def drain(self, pod: Any, deadline_s: float, access: Access) -> bool:
        name = pod["metadata"]["labels"][INSTANCE]
        if not any(each.get("started") for each in pod.get("status", {}).get("containerStatuses", ())):
            return False  # the agent does not listen yet
        if self.deaf:
            self.deaf -= 1
            return False
        self.told.append(("drain", name))
        self.draining.add(name)
        await asyncio.sleep(self.drain_s)
        return True

    async def resume(self, pod: Any, access: Access) -> bool:
        name = pod["metadata"]["labels"][INSTANCE]
        self.told.append(("resume", name))
        self.draining.discard(name)
        return True

    async def flip(self, pod: Any, role: Role, access: Access) -> bool:
        name = pod["metadata"]["labels"][INSTANCE]
        self.told.append((role.value, name))
        self.roles[name] = role
        return True


@dataclass
class Nodes:
    """The Deployment controller, the scheduler and the kubelet: makes pods and runs them."""

    server: ApiServer
    fleet: FakeFleet
    gpus: int | None = None
    start_steps: int = 3
    stop_steps: int = 2
    controls_only: bool = False
    """Whether another object runs the pods (`support.k8s_real.Kubelet`)."""
    quota: int | None = None
    """How many pods the namespace may have."""
    broken: set[str] = field(default_factory=set)
    """Images whose engines never become ready."""
    ages: dict[str, int] = field(default_factory=dict)
    down: list[int] = field(default_factory=list)
    """How many instances served at each step. Tests check that the number never fell below a floor."""

    async def run(self) -> None:
        while True:
            before = self.server.version
            self.step()
            if self.server.version != before:
                async with self.server.changed:
                    self.server.changed.notify_all()
            await asyncio.sleep(STEP_S)

    def step(self) -> None:
        self.server.collect()
        for deployment in self.server.all("deployments"):
            self._control(deployment)
        for pod in [] if self.controls_only else self.server.all("pods"):
            self._run(pod)
        self.down.append(len(self.serving()))

    def serving(self) -> list[str]:
        """Instances whose pods are Ready and whose agents take work."""
        pods = self.server.all("pods")
        named = [each["metadata"]["labels"].get(INSTANCE) for each in pods if is_true(each, "Ready")]
        return [name for name in named if name and name not in self.fleet.draining]

    # -- the Deployment controller --

    def _control(self, deployment: Json) -> None:
        spec = deployment["spec"]
        mark = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:10]
        uid = deployment["metadata"]["uid"]
        ours = [
            each
            for each in self.server.all("pods")
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", ()))
        ]
        live = [each for each in ours if not each["metadata"].get("deletionTimestamp")]
        wanted = spec.get("replicas", 1)
        current = [each for each in live if each["metadata"]["labels"]["pod-template-hash"] == mark]
        old = [each for each in live if each not in current]
        if spec.get("strategy", {}).get("type") == "Recreate":
            for each in old:
                self._delete(each)
            if not old and len(ours) == len(current):
                self._make(deployment, mark, wanted - len(current))
        else:
            self._make(deployment, mark, wanted - len(current))
            if sum(is_true(each, "Ready") for each in current) >= wanted:
                for each in old:
                    self._delete(each)
        for each in current[wanted:]:
            self._delete(each)

    def _make(self, deployment: Json, mark: str, count: int) -> None:
        kind = self.server.kinds["pods"]
        template = copied(deployment["spec"]["template"])
        metadata = deployment["metadata"]
        for _ in range(count):
            if self.quota is not None and len(self.server.all("pods")) >= self.quota:
                self._refused(deployment, f'pods "{metadata["name"]}-{mark}-" is forbidden: exceeded quota: q')
                return
            owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
            labels = {**template["metadata"].get("labels", {}), "pod-template-hash": mark}
            pod = {
                "metadata": {
                    "generateName": f"{metadata['name']}-{mark}-",
                    "labels": labels,
                    "ownerReferences": [{**owner, "controller": True}],
                },
                "spec": template["spec"],
                "status": {"phase": "Pending"},
            }
            self.server.create(kind, metadata["namespace"], pod, "controller")

        if count > 0:
            self._refused(deployment, "")

    def _refused(self, deployment: Json, because: str) -> None:
        """Set the Deployment's condition `ReplicaFailure`, or remove it if `because` is empty."""
        live = self.server.get("deployments", deployment["metadata"]["name"], deployment["metadata"]["namespace"])
        if live is None:
            return
        there = [each for each in live.get("status", {}).get("conditions", ()) if each["type"] == "ReplicaFailure"]
        if bool(there) == bool(because):
            return
        said = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": because}
        conditions = [said | {"lastTransitionTime": self.server.stamp()}] if because else []
        after = {**live, "status": {**live.get("status", {}), "conditions": conditions}}
        self.server.change(self.server.kinds["deployments"], live, after, "status", "deployment-controller")

    def _delete(self, pod: Json) -> None:
        if not pod["metadata"].get("deletionTimestamp"):
            self.server.delete(self.server.kinds["pods"], pod, {})

    # -- the scheduler and the kubelet --

    def _asked(self, pod: Json) -> int:
        limits = [each.get("resources", {}).get("limits", {}) for each in pod["spec"]["containers"]]
        return sum(int(each.get("nvidia.com/gpu", 0)) for each in limits)

    def _free(self) -> int:
        assert self.gpus is not None
        return self.gpus - sum(self._asked(each) for each in self.server.all("pods") if each["spec"].get("nodeName"))

    def _run(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        name = pod["metadata"]["labels"].get(INSTANCE, "")
        if pod["metadata"].get("deletionTimestamp"):
            self.ages[uid] = min(0, self.ages.get(uid, 0)) - 1
            if self.ages[uid] <= -self.stop_steps:
                self.fleet.draining.discard(name)
                self.server.remove("pods", pod)
            return
        if not pod["spec"].get("nodeName"):
            if self.gpus is not None and self._free() < self._asked(pod):
                self._say(pod, PodScheduled=(False, "Unschedulable"))
                return
            placed = {**pod, "spec": {**pod["spec"], "nodeName": "node-1"}}
            pod = self.server.change(self.server.kinds["pods"], pod, placed, "", "scheduler")
        self.ages[uid] = self.ages.get(uid, 0) + 1
        broken = pod["spec"]["containers"][0]["image"] in self.broken
        up = self.ages[uid] >= self.start_steps and not broken
        takes_work = up and name not in self.fleet.draining
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", ())]
        ready = takes_work and all(is_true(pod, gate) for gate in gates)
        self._say(pod, started=up, PodScheduled=(True, ""), ContainersReady=(takes_work, ""), Ready=(ready, ""))

    def _say(self, pod: Json, *, started: bool = False, **conditions: tuple[bool, str]) -> None:
        status = copied(pod.get("status", {}))
        there = {each["type"]: each for each in status.get("conditions", ())}
        for kind, (holds, reason) in conditions.items():
            if there.get(kind, {}).get("status") != str(holds):
                since = self.server.stamp()
                there[kind] = {"type": kind, "status": str(holds), "reason": reason, "lastTransitionTime": since}
        status |= {"conditions": list(there.values()), "podIP": "10.0.0.1", "containerStatuses": [{"started": started}]}
        if status != pod.get("status"):
            with suppress(KeyError):
                self.server.change(self.server.kinds["pods"], pod, {**pod, "status": status}, "status", "kubelet")


def by_part(server: Any, part: str) -> Mapping[str, Json]:
    """The Deployments of one part of the cluster, by name."""
    return {
        each["metadata"]["name"]: each
        for each in server.all("deployments")
        if each["metadata"].get("labels", {}).get("serving.baton.dev/part") == part
    }
