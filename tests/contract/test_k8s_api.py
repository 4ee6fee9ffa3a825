"""The API double keeps the rules that the operator's tests rely on. With --kubeconfig, a real API server is tested."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from support.k8s_api import ApiServer, serving
from support.k8s_json import NS
from support.k8s_stage import prepared

pytest.importorskip("kubernetes", reason="the kubernetes client is not installed: pip install kubernetes==37.0.2")

from k8s.crd.names import API_VERSION
from k8s.operator.client import ApiClient, ApiFailed

CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": NS}, "data": {"x": "1"}}
PATH = f"/api/v1/namespaces/{NS}/configmaps"


@pytest.fixture
async def api(pytestconfig: pytest.Config) -> AsyncIterator[tuple[ApiClient, ApiServer | None]]:
    """The double. With --kubeconfig: a real API server, where this fixture deletes what the tests make."""
    if kubeconfig := pytestconfig.getoption("kubeconfig", ""):
        client = await ApiClient.open(kubeconfig)
        await prepared(client)
        yield client, None
        made = [("v1", "ConfigMap", "a"), ("v1", "ConfigMap", "b"), ("v1", "ConfigMap", "c"), ("v1", "Service", "s")]
        made += [("apps/v1", "Deployment", "d"), (API_VERSION, "BatonCluster", "c")]
        for api_version, kind, name in made:
            await client.delete(api_version, kind, NS, name)
        with suppress(ApiFailed):
            await client.request("DELETE", f"/api/v1/namespaces/{NS}/pods/p", body={"gracePeriodSeconds": 0})
        for api_version, kind, name in made:
            await until_gone(client, api_version, kind, name)
        await client.close()
        return
    async with serving(time.time) as (server, _, url):
        client = await ApiClient.open(host=url)
        await prepared(client)
        yield client, server
        await client.close()


async def until_gone(client: ApiClient, api_version: str, kind: str, name: str) -> None:
    async with asyncio.timeout(60):
        while await client.get(api_version, kind, NS, name) is not None:
            await asyncio.sleep(0.05)


async def foreign(client: ApiClient, manifest: Any, manager: str, *, force: bool = False) -> Any:
    query = {"fieldManager": manager, "force": str(force).lower()}
    path = f"{PATH}/{manifest['metadata']['name']}"
    return await client.request("PATCH", path, query=query, body=manifest, content="application/apply-patch+yaml")


async def test_versions_conflict(api: tuple[ApiClient, ApiServer | None]) -> None:
    client, _ = api
    made = await client.create(CONFIG)
    with pytest.raises(ApiFailed, match="AlreadyExists"):
        await client.create(CONFIG)
    await client.replace({**made, "data": {"x": "2"}})
    with pytest.raises(ApiFailed, match="409 Conflict"):
        await client.replace({**made, "data": {"x": "3"}})


async def test_an_apply_of_nothing_new_keeps_the_version(api: tuple[ApiClient, ApiServer | None]) -> None:
    client, _ = api
    first = await client.apply(CONFIG)
    again = await client.apply(CONFIG)
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_apply_owns_fields_conflicts_and_takes_away(api: tuple[ApiClient, ApiServer | None]) -> None:
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


async def test_an_apply_without_an_owner_takes_the_whole_entry_away(api: tuple[ApiClient, ApiServer | None]) -> None:
    """The entry's own fields go with the key that tells it apart: an apply gives an object to another controller."""
    client, _ = api
    for name in ("owner-a", "owner-b"):
        of = await client.apply({**CONFIG, "metadata": {"name": name, "namespace": NS}})
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": of["metadata"]["uid"]}
        metadata = {**CONFIG["metadata"], "ownerReferences": [{**owner, "controller": True}]}
        after = await client.apply({**CONFIG, "metadata": metadata})
        assert [each["name"] for each in after["metadata"]["ownerReferences"]] == [name]
    for name in ("owner-a", "owner-b"):
        await client.delete("v1", "ConfigMap", NS, name)


async def cluster(client: ApiClient, **spec: Any) -> Any:
    made = {"apiVersion": "serving.baton.dev/v1alpha1", "kind": "BatonCluster"}
    return await client.create({**made, "metadata": {"name": "c", "namespace": NS}, "spec": spec})


async def test_unknown_fields_are_pruned_and_rules_hold(api: tuple[ApiClient, ApiServer | None]) -> None:
    client, _ = api
    made = await cluster(client, models=[{"name": "m"}], modles=3)
    assert "modles" not in made["spec"]
    with pytest.raises(ApiFailed, match="`max` is below `min`"):
        await cluster(client, models=[{"name": "m", "pools": {"both": {"min": 2, "max": 1}}}])
    with pytest.raises(ApiFailed, match="Required value"):
        await cluster(client)


async def test_status_is_a_subresource_and_the_generation_counts_specs(api: tuple[ApiClient, ApiServer | None]) -> None:
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


async def test_finalizers_grace_and_owners(api: tuple[ApiClient, ApiServer | None]) -> None:
    client, _ = api
    held = await client.create({**CONFIG, "metadata": {**CONFIG["metadata"], "finalizers": ["x.dev/y"]}})  # type: ignore[dict-item]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": held["metadata"]["uid"]}
    child = {**CONFIG, "metadata": {"name": "b", "namespace": NS, "ownerReferences": [owner]}}
    await client.create(child)
    await client.delete("v1", "ConfigMap", NS, "a")
    waiting = await client.get("v1", "ConfigMap", NS, "a")
    assert waiting is not None
    assert waiting["metadata"]["deletionTimestamp"]
    await client.merge("v1", "ConfigMap", NS, "a", {"metadata": {"finalizers": None}})
    assert await client.get("v1", "ConfigMap", NS, "a") is None
    await until_gone(client, "v1", "ConfigMap", "b")
    body = {"nodeName": "n", "containers": [{"name": "c", "image": "x:1"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": NS}, "spec": body}
    await client.create(pod)
    await client.delete("v1", "Pod", NS, "p")
    ending = await client.get("v1", "Pod", NS, "p")
    assert ending is not None
    assert ending["metadata"]["deletionGracePeriodSeconds"] == 30


async def test_of_several_owners_the_last_one_takes_the_child_along(api: tuple[ApiClient, ApiServer | None]) -> None:
    client, _ = api
    owners = []
    for name in ("a", "b"):
        made = await client.create({**CONFIG, "metadata": {"name": name, "namespace": NS}})
        owners.append({"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": made["metadata"]["uid"]})
    await client.create({**CONFIG, "metadata": {"name": "c", "namespace": NS, "ownerReferences": owners}})
    await client.delete("v1", "ConfigMap", NS, "a")
    async with asyncio.timeout(60):
        while len((await the_child(client))["metadata"]["ownerReferences"]) > 1:
            await asyncio.sleep(0.05)
    assert [each["name"] for each in (await the_child(client))["metadata"]["ownerReferences"]] == ["b"]
    await client.delete("v1", "ConfigMap", NS, "b")
    await until_gone(client, "v1", "ConfigMap", "c")


async def the_child(client: ApiClient) -> Any:
    found = await client.get("v1", "ConfigMap", NS, "c")
    assert found is not None
    return found


SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "s", "namespace": NS},
    "spec": {"selector": {"a": "b"}, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
}


async def test_a_list_with_keys_keeps_what_another_hand_has_added(api: tuple[ApiClient, ApiServer | None]) -> None:
    """A Service's ports are keyed by number and protocol, so port 81 is a second entry. Both have one name: a 422."""
    client, _ = api
    made = await client.apply(SERVICE)
    assert made["spec"]["ports"][0]["protocol"] == "TCP", "defaults are put in"
    await client.merge("v1", "Service", NS, "s", {"spec": {"ports": [{"name": "http", "port": 81}]}})
    with pytest.raises(ApiFailed, match=r"422 Invalid.*Duplicate value"):
        await client.apply(SERVICE)


DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "d", "namespace": NS},
    "spec": {
        "replicas": 0,
        "selector": {"matchLabels": {"a": "b"}},
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "containers": [
                    {
                        "name": "c",
                        "image": "x:1",
                        "env": [{"name": "EMPTY", "value": ""}],
                        "resources": {"limits": {"cpu": "1000m", "memory": "1024Mi", "x.dev/gpu": 2}},
                    }
                ]
            },
        },
    },
}


async def test_the_server_keeps_values_in_its_own_form(api: tuple[ApiClient, ApiServer | None]) -> None:
    client, _ = api
    made = await client.apply(DEPLOYMENT)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "1Gi", "x.dev/gpu": "2"}
    assert container["env"] == [{"name": "EMPTY"}]
    assert made["spec"]["strategy"]["type"] == "RollingUpdate"
    again = await client.apply(DEPLOYMENT)
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def changed(thing: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(thing)
    *steps, last = path.split(".")
    at = found
    for step in steps:
        at = at[int(step)] if step.isdecimal() else at[step]  # type: ignore[index]
    at[last] = value
    return found


@pytest.mark.parametrize(
    ("thing", "path", "value"),
    [
        (SERVICE, "metadata.name", "S"),
        (SERVICE, "metadata.name", "a.b"),
        (SERVICE, "spec.ports", []),
        (CONFIG, "metadata.labels", {"a": "b c"}),
        (CONFIG, "metadata.labels", {"a": "x" * 64}),
        (CONFIG, "metadata.ownerReferences", [{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": ""}]),
        (DEPLOYMENT, "spec.selector", {"matchLabels": {"a": "c"}}),
        (DEPLOYMENT, "spec.template.spec.containers", []),
        (DEPLOYMENT, "spec.template.spec.containers.0.volumeMounts", [{"name": "v", "mountPath": "/v"}]),
        (DEPLOYMENT, "spec.progressDeadlineSeconds", 0),
    ],
    ids=lambda each: str(each)[:30] if isinstance(each, str) else None,
)
async def test_what_is_not_valid_is_refused(
    api: tuple[ApiClient, ApiServer | None], thing: dict[str, Any], path: str, value: Any
) -> None:
    client, _ = api
    with pytest.raises(ApiFailed, match="422 Invalid"):
        await client.create(changed(thing, path, value))


async def test_a_replace_names_its_object_and_a_selector_stays(api: tuple[ApiClient, ApiServer | None]) -> None:
    client, _ = api
    made = await cluster(client, models=[{"name": "m"}])
    path = f"/apis/{API_VERSION}/namespaces/{NS}/batonclusters/c"
    with pytest.raises(ApiFailed, match="400"):
        await client.request("PUT", path, body={**made, "metadata": {"namespace": NS}})
    with pytest.raises(ApiFailed, match=r"422 Invalid.*resourceVersion"):
        await client.replace({**made, "metadata": {"name": "c", "namespace": NS}})
    await client.create(DEPLOYMENT)
    labels = {"matchLabels": {"a": "c"}}
    other = changed(changed(DEPLOYMENT, "spec.selector", labels), "spec.template.metadata.labels", {"a": "c"})
    with pytest.raises(ApiFailed, match=r"422 Invalid.*immutable"):
        await client.replace(other)


async def test_a_delete_of_another_uid_deletes_nothing(api: tuple[ApiClient, ApiServer | None]) -> None:
    client, _ = api
    await client.create(CONFIG)
    await client.delete("v1", "ConfigMap", NS, "a", "another")
    assert await client.get("v1", "ConfigMap", NS, "a") is not None


async def test_a_watch_reports_what_its_selector_matches_and_410_when_too_old(
    api: tuple[ApiClient, ApiServer | None],
) -> None:
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
    if server is None:
        return  # a real server forgets after minutes
    server.forget()
    with pytest.raises(ApiFailed, match="410 Expired"):
        async for _ in client.watch("v1", "ConfigMap", NS, version):
            pass
