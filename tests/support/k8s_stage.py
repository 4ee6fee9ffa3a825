"""A stage for the operator's scenarios: an API server (the double or a real one), a kubelet, and a BatonCluster."""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.k8s_api import ApiServer, Json, Wire, serving
from support.k8s_json import NS
from support.k8s_nodes import FakeFleet, Nodes, by_part
from support.k8s_real import NODE, Kubelet, Remote
from support.no_idling import no_idling

from k8s.crd import crds
from k8s.crd.names import API_VERSION
from k8s.operator import controller, kinds, watch
from k8s.operator.client import PLURALS, ApiClient, ApiFailed
from k8s.operator.controller import Operator, OperatorSettings
from k8s.operator.watched import WATCHED
from k8s.plan import Images

IMAGES = Images(engine="engine:1", router="router:1", redis="redis:8")
LIMIT_S = 240.0
"""Seconds of a clock that jumps over idle time. The operator lists all objects once a minute, and so corrects what a
disturbed watch has missed."""
REAL_LIMIT_S = 120.0
"""Seconds on a real server, whose controllers and garbage collector are slower."""
TEST_LABEL = "serving.baton.dev/test"
ROOT_CA = "kube-root-ca.crt"
"""A ConfigMap that the controller-manager puts into every namespace, and puts back if it is deleted."""


_open_context = ssl.create_default_context


@functools.cache
def _trusting(**words: Any) -> ssl.SSLContext:
    """One SSL context for all clients of the double: to read the system's certificates takes 0.1 s of CPU each time."""
    return _open_context(**words)


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the operator's intervals and retries, which take minutes in a cluster, to fractions of a second."""
    monkeypatch.setattr(controller, "BUSY_S", 0.1)
    monkeypatch.setattr(controller, "IDLE_S", 0.5)
    monkeypatch.setattr(kinds, "UNSURE_S", 0.1)
    monkeypatch.setattr(kinds, "ASK_AGAIN_S", 0.5)
    monkeypatch.setattr(watch, "WAIT_S", (0.02, 0.05))
    monkeypatch.setattr(ssl, "create_default_context", _trusting)


def spec(prefill: int = 1, decode: int = 1, **more: Any) -> Json:
    pools = {"prefill": {"min": 1, "max": 8, "start": prefill}, "decode": {"min": 1, "max": 8, "start": decode}}
    return {"models": [{"name": "m", "pools": pools}], **more}


def image(name: str) -> Json:
    return {"kubernetes": {"image": name}}


@dataclass
class Mode:
    """Where the scenarios run: on a real API server (`kubeconfig`), on the double through its HTTP interface alone
    (`wire_alone`), or on the double with direct access to its objects.
    """

    kubeconfig: str = ""
    wire_alone: bool = False


MODE = Mode()


@dataclass
class Stage:
    client: ApiClient
    fleet: FakeFleet
    server: ApiServer | Remote
    nodes: Nodes | Kubelet
    inside: ApiServer | None = None
    wire: Wire | None = None
    clock: Callable[[], float] = time.time
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)

    def operate(self, may_act: Callable[[], bool] = lambda: True) -> asyncio.Task[Any]:
        operator = Operator(self.client, self.fleet, OperatorSettings(namespace=NS, images=IMAGES), self.clock)
        operator.may_act = may_act
        self.operators.append(operator)
        task = asyncio.get_running_loop().create_task(operator.run(), name="operator")
        self.tasks.append(task)
        return task

    async def make(self, wanted: Json, name: str = "chat") -> None:
        metadata = {"name": name, "namespace": NS}
        thing = {"apiVersion": API_VERSION, "kind": "BatonCluster", "metadata": metadata, "spec": wanted}
        await self._seen(await self.client.create(thing))

    async def change(self, wanted: Json) -> None:
        await self._seen(await self.client.merge(API_VERSION, "BatonCluster", NS, "chat", {"spec": wanted}))

    async def _seen(self, thing: Json) -> None:
        """Wait until the stage's own copy of the objects has this version of the resource."""
        name, version = thing["metadata"]["name"], int(thing["metadata"]["resourceVersion"])
        async with asyncio.timeout(LIMIT_S):
            while True:
                found = self.server.get("batonclusters", name, NS)
                if found is not None and int(found["metadata"]["resourceVersion"]) >= version:
                    return
                await asyncio.sleep(0.01)

    @property
    def double(self) -> ApiServer:
        """The double, for scenarios that need its faults or its record of requests; without it they are skipped."""
        if self.inside is None or not isinstance(self.server, ApiServer):
            pytest.skip("needs the API double")
        return self.inside

    def cluster(self, name: str = "chat") -> Json:
        found = self.server.get("batonclusters", name)
        assert found is not None
        return found

    def condition(self, kind: str) -> Json:
        said = self.cluster().get("status", {}).get("conditions", ())
        return next((each for each in said if each["type"] == kind), {})

    def instances(self) -> dict[str, Json]:
        return dict(by_part(self.server, "instance"))

    def settled(self, prefill: int = 1, decode: int = 1) -> bool:
        status = self.cluster().get("status", {})
        whole = (status.get("prefill"), status.get("decode")) == (f"{prefill}/{prefill}", f"{decode}/{decode}")
        fresh = status.get("observedGeneration") == self.cluster()["metadata"]["generation"]
        return whole and fresh and self.condition("Progressing").get("status") == "False"

    async def until(self, holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        limit_s = max(limit_s, REAL_LIMIT_S) if MODE.kubeconfig else limit_s
        try:
            async with asyncio.timeout(limit_s):
                while not holds():
                    await asyncio.sleep(0.03)
                    for task in self.tasks:
                        if task.done() and not task.cancelled():
                            task.result()
        except TimeoutError:
            status = self.cluster().get("status")
            raise AssertionError(f"not within {limit_s} s: {status} {sorted(self.instances())}") from None


@asynccontextmanager
async def staged(gpus: int | None = None) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        fleet = FakeFleet()
        if MODE.kubeconfig:
            client = await ApiClient.open(MODE.kubeconfig)
            stage = await remote_stage(client, fleet, gpus)
        else:
            clock = stack.enter_context(no_idling())
            server, wire, url = await stack.enter_async_context(serving(clock))
            client = await ApiClient.open(host=url)
            nodes = Nodes(server, fleet, gpus=gpus, controls_only=MODE.wire_alone)
            controllers = asyncio.get_running_loop().create_task(nodes.run())
            stage = Stage(client, fleet, server, nodes, server, wire, clock)
            await prepared(client)
            if MODE.wire_alone:
                stage = await remote_stage(client, fleet, gpus)
                stage.clock = clock
            stage.tasks.append(controllers)
        try:
            try:
                yield stage
            finally:  # also after a skip or a failure: the next scenario uses the same server
                if isinstance(stage.server, Remote):
                    await emptied(stage)
        finally:
            for task in stage.tasks:
                task.cancel()
            await asyncio.wait(stage.tasks)
            await client.close()


async def prepared(client: ApiClient) -> None:
    """Create the CRDs and the namespace if the server has none. An existing namespace must have the tests' label."""
    metadata = {"name": NS, "labels": {TEST_LABEL: "true"}}
    try:
        await client.request("POST", "/api/v1/namespaces", body={"kind": "Namespace", "metadata": metadata})
    except ApiFailed as refusal:
        if refusal.reason != "AlreadyExists":
            raise
        there = await client.request("GET", f"/api/v1/namespaces/{NS}")
        assert there["metadata"].get("labels", {}).get(TEST_LABEL) == "true", f"namespace {NS} is not the tests'"
    for crd in crds():
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
        await client.request(
            "PATCH",
            path,
            query={"fieldManager": "baton-test", "force": "true"},
            body=crd,
            content="application/apply-patch+yaml",
        )
    async with asyncio.timeout(REAL_LIMIT_S):
        while "BatonPool" not in await client.kinds([API_VERSION]):
            await asyncio.sleep(0.1)


async def swept(kubeconfig: str) -> None:
    """Delete the namespace, the node and the CRDs after the last scenario on a real server."""
    client = await ApiClient.open(kubeconfig)
    paths = [f"/api/v1/namespaces/{NS}", f"/api/v1/nodes/{NODE}"]
    paths += [f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}" for crd in crds()]
    try:
        for path in paths:
            with suppress(ApiFailed):
                await client.request("DELETE", path, body={})
        async with asyncio.timeout(REAL_LIMIT_S):
            while await _is_there(client, paths[0]):  # a namespace that is being deleted accepts no new objects
                await asyncio.sleep(0.5)
    finally:
        await client.close()


async def _is_there(client: ApiClient, path: str) -> bool:
    try:
        await client.request("GET", path)
    except ApiFailed:
        return False
    return True


async def remote_stage(client: ApiClient, fleet: FakeFleet, gpus: int | None) -> Stage:
    await prepared(client)
    remote = Remote(client, NS)
    kubelet = Kubelet(remote, fleet, gpus)
    stage = Stage(client, fleet, remote, kubelet)
    stage.tasks.append(asyncio.get_running_loop().create_task(remote.run()))
    await remote.listed()
    stage.tasks.append(asyncio.get_running_loop().create_task(kubelet.run()))
    return stage


async def emptied(stage: Stage) -> None:
    """Delete all objects before the next scenario on the same server: clusters first, then objects without an owner."""
    for task in stage.tasks[1:]:  # the first task keeps the watches, which are needed below
        if task.get_name() == "operator":
            task.cancel()
    for kind, plural in (("BatonPool", "batonpools"), ("BatonCluster", "batonclusters")):
        for each in stage.server.all(plural):
            await stage.client.delete(API_VERSION, kind, NS, each["metadata"]["name"])
    async with asyncio.timeout(REAL_LIMIT_S):
        while left := [(of, each) for of in WATCHED for each in stage.server.all(PLURALS[of[1]]) if not _kept(each)]:
            for (api_version, kind), each in left:
                if kind != "Pod" and not each["metadata"].get("ownerReferences"):
                    await stage.client.delete(api_version, kind, NS, each["metadata"]["name"])
            await asyncio.sleep(0.1)


def _kept(thing: Json) -> bool:
    """Whether every namespace has such an object, so that it stays."""
    name = thing["metadata"]["name"]
    return name in {ROOT_CA, "default"} or thing.get("type") == "kubernetes.io/service-account-token"
