"""The operator's tests on a real API server: its objects, kept up to date by watches, and pods that the tests "run".

Such a server has a controller-manager, but neither a scheduler nor a kubelet. So `Kubelet` binds pods and sets their
conditions, through the API (`make test-k8s KUBECONFIG=…`). The same code also runs against the double in every
`make test` (`test_the_suite_runs_over_the_wire_alone`), so that it is known to work.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from support.k8s_nodes import FakeFleet

from k8s.crd.names import API_VERSION
from k8s.operator.client import PLURALS, ApiClient, ApiFailed
from k8s.operator.watch import WatchCache
from k8s.operator.watched import WATCHED
from k8s.plan.observe import INSTANCE, is_true

Json = dict[str, Any]
NODE = "baton-test-node"
STEP_S = 0.05
BEAT_S = 5.0


class Remote:
    """The objects of one namespace, with the double's methods for reading."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        kinds = (*WATCHED, (API_VERSION, "BatonCluster"), (API_VERSION, "BatonPool"), ("v1", "Event"))
        self.kept = {
            PLURALS[kind]: WatchCache(client, api_version, kind, namespace, "", lambda _: None)
            for api_version, kind in kinds
        }

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for each in self.kept.values():
                group.create_task(each.run())

    async def listed(self) -> None:
        for each in self.kept.values():
            await each.listed.wait()

    def all(self, plural: str) -> list[Any]:
        return list(self.kept[plural].objects.values())

    def get(self, plural: str, name: str, namespace: str = "") -> Any:
        return self.kept[plural].objects.get((namespace or self.namespace, name))


class Kubelet:
    """Binds pods to a node and sets their conditions, through the API alone."""

    def __init__(self, remote: Remote, fleet: FakeFleet, gpus: int | None = None, start_steps: int = 3) -> None:
        self.remote = remote
        self.fleet = fleet
        self.gpus = gpus
        self.start_steps = start_steps
        self.stop_steps = 2
        self.broken: set[str] = set()
        self.ages: dict[str, int] = {}
        self.down: list[int] = []
        self.placed: set[str] = set()
        self.since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def _beat(self) -> None:
        """Report that the node is Ready. After 40 s without a report, Kubernetes marks its pods as not ready and evicts
        them.
        """
        now = datetime.now(UTC)
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "the tests'"}
        ready |= {"lastHeartbeatTime": stamp, "lastTransitionTime": self.since}
        status = {"conditions": [ready], "capacity": {"cpu": "64", "memory": "256Gi", "pods": "500"}}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        with suppress(ApiFailed):  # the node exists already
            await self.remote.client.request("POST", "/api/v1/nodes", body=node)
        content = "application/merge-patch+json"
        body = {"status": {**status, "allocatable": status["capacity"]}}
        await self.remote.client.request("PATCH", f"/api/v1/nodes/{NODE}/status", body=body, content=content)

    async def run(self) -> None:
        beaten_at = -math.inf
        while True:
            if time.monotonic() - beaten_at >= BEAT_S:
                beaten_at = time.monotonic()
                await self._beat()
            for pod in self.remote.all("pods"):
                with suppress(ApiFailed):  # another writer was faster: try again at the next step
                    await self._run(pod)
            self.down.append(len(self.serving()))
            await asyncio.sleep(STEP_S)

    def serving(self) -> list[str]:
        named = [
            each["metadata"].get("labels", {}).get(INSTANCE)
            for each in self.remote.all("pods")
            if is_true(each, "Ready")
        ]
        return [name for name in named if name and name not in self.fleet.draining]

    def _path(self, pod: Mapping[str, Any], sub: str = "") -> str:
        path = f"/api/v1/namespaces/{self.remote.namespace}/pods/{pod['metadata']['name']}"
        return f"{path}/{sub}" if sub else path

    @staticmethod
    def _asked(pod: Mapping[str, Any]) -> int:
        limits = [each.get("resources", {}).get("limits", {}) for each in pod["spec"]["containers"]]
        return sum(int(each.get("nvidia.com/gpu", 0)) for each in limits)

    def _free(self) -> int:
        assert self.gpus is not None
        there = {each["metadata"]["uid"]: each for each in self.remote.all("pods")}
        return self.gpus - sum(self._asked(pod) for uid, pod in there.items() if uid in self.placed)

    async def _run(self, pod: Mapping[str, Any]) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"].get("labels", {}).get(INSTANCE, "")
        if pod["metadata"].get("deletionTimestamp"):
            self.ages[uid] = min(0, self.ages.get(uid, 0)) - 1
            if self.ages[uid] == -self.stop_steps:
                self.fleet.draining.discard(name)
                await self.remote.client.request("DELETE", self._path(pod), body={"gracePeriodSeconds": 0})
            return
        if uid not in self.placed:
            if self.gpus is not None and self._free() < self._asked(pod):
                await self._say(pod, started=False, PodScheduled=(False, "Unschedulable"))
                return
            self.placed.add(uid)
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            metadata = {"name": pod["metadata"]["name"], "namespace": self.remote.namespace}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
            await self.remote.client.request("POST", self._path(pod, "binding"), body=binding)
            return
        self.ages[uid] = self.ages.get(uid, 0) + 1
        broken = pod["spec"]["containers"][0]["image"] in self.broken
        up = self.ages[uid] >= self.start_steps and not broken
        well = up and name not in self.fleet.draining
        gates = [each["conditionType"] for each in pod["spec"].get("readinessGates", ())]
        ready = well and all(is_true(pod, gate) for gate in gates)
        await self._say(pod, started=up, PodScheduled=(True, ""), ContainersReady=(well, ""), Ready=(ready, ""))

    async def _say(self, pod: Mapping[str, Any], *, started: bool, **conditions: tuple[bool, str]) -> None:
        there = {each["type"]: each for each in pod.get("status", {}).get("conditions", ())}
        changed = False
        for kind, (holds, reason) in conditions.items():
            if there.get(kind, {}).get("status") != str(holds):
                stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                said = {"type": kind, "status": str(holds), "lastTransitionTime": stamp}
                there[kind] = said | ({"reason": reason} if reason else {})
                changed = True
        if not changed:
            return
        container = pod["spec"]["containers"][0]
        told = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        state = {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}
        told |= {"started": started, "ready": started, "state": state}
        status = {"conditions": list(there.values()), "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}
        body = {"status": {**status, "phase": "Running", "containerStatuses": [told]}}
        version = {"metadata": {"resourceVersion": pod["metadata"]["resourceVersion"]}}
        path = self._path(pod, "status")
        content = "application/merge-patch+json"
        await self.remote.client.request("PATCH", path, body=version | body, content=content)
