"""The API double itself keeps the rules that the operator's tests rely on. Each also holds on a real API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.k8s_api import ApiServer, serving

pytest.importorskip("kubernetes", reason="the kubernetes client is not installed: pip install kubernetes==37.0.2")

from k8s.crd import crds
from k8s.operator.client import ApiFailed, Client

NS = "llm"
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": NS}, "data": {"x": "1"}}
PATH = f"/api/v1/namespaces/{NS}/configmaps"


@pytest.fixture
async def api() -> AsyncIterator[tuple[Client, ApiServer]]:
    async with serving(time.time) as (server, _, url):
        client = await Client.open(host=url)
        for crd in crds():
            await client.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body=crd)
        yield client, server
        await client.close()


async def foreign(client: Client, manifest: Any, manager: str, *, force: bool = False) -> Any:
    query = {"fieldManager": manager, "force": str(force).lower()}
    path = f"{PATH}/{manifest['metadata']['name']}"
    return await client.request("PATCH", path, query=query, body=manifest, content="application/apply-patch+yaml")


async def test_versions_conflict(api: tuple[Client, ApiServer]) -> None:
    client, _ = api
    made = await client.create(CONFIG)
    with pytest.raises(ApiFailed, match="AlreadyExists"):
        await client.create(CONFIG)
    await client.replace({**made, "data": {"x": "2"}})
    with pytest.raises(ApiFailed, match="409 Conflict"):
        await client.replace({**made, "data": {"x": "3"}})


async def test_an_apply_of_nothing_new_keeps_the_version(api: tuple[Client, ApiServer]) -> None:
    client, _ = api
    first = await client.apply(CONFIG)
    again = await client.apply(CONFIG)
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_apply_owns_fields_conflicts_and_takes_away(api: tuple[Client, ApiServer]) -> None:
    client, _ = api
    await client.apply({**CONFIG, "data": {"x": "1", "y": "1"}})
    theirs = {**CONFIG, "data": {"x": "2", "z": "3"}}
    with pytest.raises(ApiFailed, match="conflict"):
        await foreign(client, theirs, "them")
    await foreign(client, theirs, "them", force=True)
    after = await client.apply({**CONFIG, "data": {"y": "5"}})
    assert after["data"] == {"x": "2", "y": "5", "z": "3"}, "what they own stays, what we dropped goes"
    only = await client.apply({**CONFIG, "data": {}})
    assert only["data"] == {"x": "2", "z": "3"}
    managers = {each["manager"] for each in only["metadata"]["managedFields"]}
    assert managers >= {"them"}


async def cluster(client: Client, **spec: Any) -> Any:
    made = {"apiVersion": "serving.baton.dev/v1alpha1", "kind": "BatonCluster"}
    return await client.create({**made, "metadata": {"name": "c", "namespace": NS}, "spec": spec})


async def test_unknown_fields_are_pruned_and_rules_hold(api: tuple[Client, ApiServer]) -> None:
    client, _ = api
    made = await cluster(client, models=[{"name": "m"}], modles=3)
    assert "modles" not in made["spec"]
    with pytest.raises(ApiFailed, match="`max` is below `min`"):
        await cluster(client, models=[{"name": "m", "pools": {"both": {"min": 2, "max": 1}}}])
    with pytest.raises(ApiFailed, match="Required value"):
        await cluster(client)


async def test_status_is_a_subresource_and_the_generation_counts_specs(api: tuple[Client, ApiServer]) -> None:
    client, _ = api
    made = await cluster(client, models=[{"name": "m"}])
    kind = ("serving.baton.dev/v1alpha1", "BatonCluster", NS, "c")
    ignored = await client.merge(*kind, {"status": {"model": "x"}})
    assert "status" not in ignored
    told = await client.merge(*kind, {"status": {"model": "x"}, "spec": {"models": [{"name": "n"}]}}, sub="status")
    assert (told["status"], told["spec"]) == ({"model": "x"}, made["spec"])
    assert told["metadata"]["generation"] == 1
    changed = await client.merge(*kind, {"spec": {"models": [{"name": "n"}]}})
    assert changed["metadata"]["generation"] == 2
    assert changed["status"] == {"model": "x"}


async def test_finalizers_grace_and_owners(api: tuple[Client, ApiServer]) -> None:
    client, server = api
    held = await client.create({**CONFIG, "metadata": {**CONFIG["metadata"], "finalizers": ["x/y"]}})  # type: ignore[dict-item]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": held["metadata"]["uid"]}
    child = {**CONFIG, "metadata": {"name": "b", "namespace": NS, "ownerReferences": [owner]}}
    await client.create(child)
    await client.delete("v1", "ConfigMap", NS, "a")
    assert server.get("configmaps", "a") is not None
    assert server.get("configmaps", "a")["metadata"]["deletionTimestamp"]  # type: ignore[index]
    await client.merge("v1", "ConfigMap", NS, "a", {"metadata": {"finalizers": None}})
    assert server.get("configmaps", "a") is None
    assert server.get("configmaps", "b") is None, "the garbage collector follows"
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": NS}, "spec": {"nodeName": "n"}}
    await client.create(pod)
    await client.delete("v1", "Pod", NS, "p")
    assert server.get("pods", "p")["metadata"]["deletionGracePeriodSeconds"] == 30  # type: ignore[index]


async def test_a_delete_of_another_uid_deletes_nothing(api: tuple[Client, ApiServer]) -> None:
    client, server = api
    await client.create(CONFIG)
    await client.delete("v1", "ConfigMap", NS, "a", "another")
    assert server.get("configmaps", "a") is not None


async def test_a_watch_tells_what_its_selector_sees_and_410_when_too_old(api: tuple[Client, ApiServer]) -> None:
    client, server = api
    version = (await client.list("v1", "ConfigMap", NS))["metadata"]["resourceVersion"]
    labelled = {**CONFIG, "metadata": {**CONFIG["metadata"], "labels": {"a": "b"}}}  # type: ignore[dict-item]
    await client.create(labelled)
    await client.merge("v1", "ConfigMap", NS, "a", {"metadata": {"labels": {"a": "c"}}})
    seen = []
    async with asyncio.timeout(5):
        async for event in client.watch("v1", "ConfigMap", NS, version, "a=b"):
            seen.append(event["type"])
            if len(seen) == 2:
                break
    assert seen == ["ADDED", "DELETED"], "what leaves a selector is told as deleted"
    server.forget()
    with pytest.raises(ApiFailed, match="410 Expired"):
        async for _ in client.watch("v1", "ConfigMap", NS, version):
            pass
