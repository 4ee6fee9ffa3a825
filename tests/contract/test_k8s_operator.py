"""The operator's own code against the API double: one test for each fault that users report of other operators."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import re
import time
from base64 import b64decode
from collections.abc import Callable
from typing import Any, cast

import pytest
from support.k8s_api import Refused
from support.k8s_apply import Owners
from support.k8s_nodes import by_part
from support.k8s_real import Kubelet
from support.k8s_stage import MODE, NS, REAL_LIMIT_S, Stage, image, quicken, spec, staged

pytest.importorskip("kubernetes", reason="the kubernetes client is not installed: pip install kubernetes==37.0.2")

from k8s.crd.names import API_VERSION, LABEL_PART, LABEL_REVISION
from k8s.operator import controller
from k8s.operator.client import ApiClient, ApiFailed
from k8s.operator.election import Candidate, Election
from k8s.operator.secrets import keys_in
from k8s.plan import limits_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture(autouse=True)
def mode(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODE, "kubeconfig", pytestconfig.getoption("kubeconfig", ""))


async def test_a_resource_becomes_a_cluster_and_then_nothing_is_written() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(2, 1))
        await stage.until(lambda: stage.settled(2, 1))
        assert stage.condition("Available")["status"] == "True"
        assert {each["metadata"]["name"] for each in stage.server.all("secrets")} == {
            "chat-internal",
            "chat-ticket-keys",
            *(f"chat-{name}-keys" for name in ("prefill-0", "prefill-1", "decode-0")),
        }
        assert not any("annotations" in each["metadata"] for each in stage.server.all("batonclusters"))
        before, actions = versions(stage), stage.operators[0].counters.actions
        writes = stage.inside.writes() if stage.inside else 0
        await asyncio.sleep(1.2)  # two idle rounds
        assert versions(stage) == before
        assert stage.operators[0].counters.actions == actions
        assert stage.inside is None or stage.inside.writes() == writes


def versions(stage: Stage) -> dict[str, str]:
    """Resource versions, by uid, of all objects that the operator writes."""
    plurals = ("batonclusters", "configmaps", "deployments", "networkpolicies", "poddisruptionbudgets", "secrets")
    found = [each["metadata"] for plural in (*plurals, "services") for each in stage.server.all(plural)]
    return {each["uid"]: each["resourceVersion"] for each in found}


async def test_a_restart_changes_no_pod_and_status_comes_back() -> None:
    async with staged() as stage:
        first = stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        first.cancel()
        await asyncio.wait([first])
        stage.tasks.remove(first)
        pods = {each["metadata"]["uid"] for each in stage.server.all("pods")}
        status = copy.deepcopy(stage.cluster()["status"])
        path = f"/apis/serving.baton.dev/v1alpha1/namespaces/{NS}/batonclusters/chat/status"
        await stage.client.request("PUT", path, body={**stage.cluster(), "status": {}})
        stage.operate()
        await stage.until(stage.settled)
        assert {each["metadata"]["uid"] for each in stage.server.all("pods")} == pods
        assert {key: stage.cluster()["status"][key] for key in ("prefill", "decode", "revision")} == {
            key: status[key] for key in ("prefill", "decode", "revision")
        }


async def test_a_new_image_rolls_out_and_something_always_serves() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(2, 2))
        await stage.until(lambda: stage.settled(2, 2))
        stage.nodes.down.clear()
        old = {name: each["metadata"]["labels"][LABEL_REVISION] for name, each in stage.instances().items()}
        await stage.change(image("engine:2"))
        await stage.until(lambda: stage.settled(2, 2))
        assert not set(old.values()) & {
            each["metadata"]["labels"][LABEL_REVISION] for each in stage.instances().values()
        }
        assert min(stage.nodes.down) >= 4, "with room no instance leaves before another one serves"
        assert {name for what, name in stage.fleet.told if what == "drain"} == set(old), "all were drained first"


async def test_a_rollout_without_a_spare_gpu() -> None:
    async with staged(gpus=2) as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        stage.nodes.down.clear()
        await stage.change(image("engine:2"))
        await stage.until(stage.settled)
        images = {
            each["spec"]["containers"][0]["image"]
            for each in stage.server.all("pods")
            if "engine" in str(each["spec"]["containers"][0]["name"])
        }
        assert images == {"engine:2"}
        assert min(stage.nodes.down) >= 1


async def test_a_revert_in_the_middle_keeps_the_pods_that_serve() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(2, 2))
        await stage.until(lambda: stage.settled(2, 2))
        stage.nodes.down.clear()
        stage.nodes.broken = {"engine:2"}
        kept = {each["metadata"]["uid"] for each in stage.server.all("pods")}
        await stage.change(image("engine:2"))
        await stage.until(lambda: len(stage.instances()) > 4)
        await stage.change({"kubernetes": {"image": None}})
        await stage.until(lambda: stage.settled(2, 2))
        assert kept <= {each["metadata"]["uid"] for each in stage.server.all("pods")}
        assert min(stage.nodes.down) >= 4


async def test_two_changes_in_a_row_end_at_the_second() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(2, 1))
        await stage.until(lambda: stage.settled(2, 1))
        stage.nodes.down.clear()
        await stage.change(image("engine:2"))
        await stage.until(lambda: len(stage.instances()) > 3)
        await stage.change(image("engine:3"))
        await stage.until(lambda: stage.settled(2, 1))
        engines = [each["spec"]["containers"][0] for each in stage.server.all("pods")]
        assert {each["image"] for each in engines if each["name"] == "engine"} == {"engine:3"}
        assert min(stage.nodes.down) >= 3


async def test_replace_of_the_whole_resource_loses_nothing() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        pods = {each["metadata"]["uid"] for each in stage.server.all("pods")}
        bare = {"apiVersion": "serving.baton.dev/v1alpha1", "kind": "BatonCluster", "spec": spec()}
        version = stage.cluster()["metadata"]["resourceVersion"]  # `kubectl replace` reads it
        await stage.client.replace({**bare, "metadata": {"name": "chat", "namespace": NS, "resourceVersion": version}})
        await asyncio.sleep(0.3)
        await stage.until(stage.settled)
        assert {each["metadata"]["uid"] for each in stage.server.all("pods")} == pods


async def scale(stage: Stage, replicas: int) -> None:
    path = f"/apis/serving.baton.dev/v1alpha1/namespaces/{NS}/batonpools/chat-decode/scale"
    metadata = {"name": "chat-decode", "namespace": NS}
    scaled = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": metadata, "spec": {"replicas": replicas}}
    await stage.client.request("PUT", path, body=scaled)


async def test_fifty_scale_patches_touch_no_template() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        old = {each["metadata"]["uid"] for each in stage.server.all("pods")}
        pool = {"cluster": "chat", "pool": "decode", "replicas": 2}
        metadata = {"name": "chat-decode", "namespace": NS}
        await stage.client.create(
            {"apiVersion": "serving.baton.dev/v1alpha1", "kind": "BatonPool", "metadata": metadata, "spec": pool}
        )
        for number in range(50):
            await scale(stage, 2 + number % 5)
        await scale(stage, 4)
        await stage.until(lambda: stage.settled(1, 4))
        assert stage.condition("Scaling")["reason"] == "ScalingExternal"
        assert old <= {each["metadata"]["uid"] for each in stage.server.all("pods")}
        revisions = {each["metadata"]["labels"][LABEL_REVISION] for each in stage.instances().values()}
        assert len(revisions) == 2, "one of prefill, one of decode"
        path = f"/apis/serving.baton.dev/v1alpha1/namespaces/{NS}/batonpools/chat-decode/scale"
        async with asyncio.timeout(REAL_LIMIT_S):  # a pool's status is written after its cluster's
            while (said := await stage.client.request("GET", path))["status"]["replicas"] != 4:
                await asyncio.sleep(0.02)
        assert "serving.baton.dev/pool=decode" in said["status"]["selector"]


async def test_deletion_ends_without_the_operator() -> None:
    """The resource has no finalizer, so everything ends whatever is uninstalled first (docs/decisions/0010)."""
    async with staged() as stage:
        task = stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        task.cancel()
        await asyncio.wait([task])
        stage.tasks.remove(task)
        await stage.client.delete("serving.baton.dev/v1alpha1", "BatonCluster", NS, "chat")
        async with asyncio.timeout(REAL_LIMIT_S):
            while any(stage.server.all(plural) for plural in ("pods", "deployments", "secrets", "services")):
                await asyncio.sleep(0.02)
        assert stage.server.all("batonclusters") == []


async def test_a_hand_in_a_child_and_a_foreign_manager() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        added = {"metadata": {"labels": {"team": "x"}}, "spec": {"ports": [{"name": "http", "port": 81}]}}
        await stage.client.merge("v1", "Service", NS, "chat", added)

        def healed() -> bool:
            """Whether port 81 is gone. An apply alone is refused: 81 is a second entry with the same name."""
            service = stage.server.get("services", "chat")
            assert service is not None
            return [each["port"] for each in service["spec"]["ports"]] == [8000]

        await stage.until(healed)
        service = stage.server.get("services", "chat")
        assert service is not None
        assert service["metadata"]["labels"]["team"] == "x"


@pytest.mark.parametrize("replicas", [0, 2])
async def test_a_hand_in_the_replicas_of_a_workload_is_undone(replicas: int) -> None:
    """``kubectl scale deployment chat-decode-0``: an instance has one pod, as two would announce one name."""
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        await stage.client.merge("apps/v1", "Deployment", NS, "chat-decode-0", {"spec": {"replicas": replicas}})
        await stage.until(lambda: stage.instances()["chat-decode-0"]["spec"]["replicas"] == 1)
        await stage.until(stage.settled)
        assert sorted(stage.instances()) == ["chat-decode-0", "chat-prefill-0"]


async def test_an_object_that_is_not_ours_is_left_alone() -> None:
    async with staged() as stage:
        theirs = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "chat", "namespace": NS},
            "spec": {"ports": [{"port": 1}]},
        }
        before = await stage.client.create(theirs)
        stage.operate()
        await stage.make(spec())
        await stage.until(lambda: stage.condition("Degraded").get("reason") == "NameTaken")
        service = stage.server.get("services", "chat")
        assert service is not None
        assert service["spec"] == before["spec"]
        await stage.client.delete("v1", "Service", NS, "chat")
        await stage.until(lambda: stage.condition("Degraded").get("status") == "False" and stage.settled())


async def test_the_api_server_away_and_watches_that_are_too_old() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        stage.double.away = True
        assert stage.wire is not None
        stage.wire.end_watches()
        await asyncio.sleep(0.3)
        lists = stage.operators[0]._watched.clusters.lists
        stage.double.away = False
        stage.double.forget()
        gone = by_part(stage.server, "instance")["chat-decode-0"]
        stage.double.remove("deployments", gone)  # while no watch was open
        stage.double.forget()
        await stage.until(lambda: stage.operators[0]._watched.clusters.lists > lists)
        await stage.until(lambda: len(stage.instances()) == 2 and stage.settled())
        made = {each["metadata"]["uid"] for name, each in stage.instances().items() if "-decode-" in name}
        assert made.isdisjoint({gone["metadata"]["uid"]}), "it has the old name if the old pod had ended, else another"


async def test_a_wrong_spec_is_refused_or_reported_and_running_instances_stay() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        with pytest.raises(ApiFailed, match="`max` is below `min`"):
            await stage.change({"models": [{"name": "m", "pools": {"decode": {"min": 3, "max": 2}}}]})
        pods = len(stage.server.all("pods"))
        await stage.change({"tenants": {"acme": {"key_file": "/etc/x"}}})
        await stage.until(lambda: stage.condition("Degraded").get("reason") == "InvalidSpec")
        assert "tenants.acme.key_file" in stage.condition("Degraded")["message"]
        assert stage.condition("Available")["status"] == "True"
        assert len(stage.server.all("pods")) == pods
        await stage.until(
            lambda: any("tenants.acme.key_file" in each["message"] for each in stage.server.all("events"))
        )


async def test_an_operator_killed_at_every_write_recovers() -> None:
    for number in (1, 9, 17, 20):  # the long test in test_k8s_scenarios.py tries every write
        async with staged() as stage:
            left = number

            def refuse(_method: str, _path: str) -> None:
                nonlocal left
                left -= 1
                if left <= 0:
                    raise Refused(500, "InternalError", "killed")

            task = stage.operate()
            await stage.make(spec())
            stage.double.refuse = refuse
            await stage.until(lambda: left <= 0 or stage.settled())  # noqa: B023
            task.cancel()
            await asyncio.wait([task])
            stage.tasks.remove(task)
            stage.double.refuse = None
            stage.operate()
            await stage.until(stage.settled)
            assert sorted(stage.instances()) == ["chat-decode-0", "chat-prefill-0"]


async def test_of_two_operators_one_acts() -> None:
    async with staged() as stage:
        now = [0.0]
        elections = [Election(stage.client, NS, "baton", name, lambda: now[0], time.time) for name in "ab"]
        await elections[0]._once()
        await elections[1]._once()
        assert [each.holds() for each in elections] == [True, False]
        now[0] = 16.0
        assert not elections[0].holds(), "it could not renew: it stops before the other begins"
        await elections[1]._once()
        assert [each.holds() for each in elections] == [False, True]
        await elections[0]._once()
        assert [each.holds() for each in elections] == [False, True]
        await elections[1]._release()
        now[0] += 2
        await elections[0]._once()
        assert elections[0].holds()


async def test_a_candidate_counts_from_the_answer_not_from_its_question() -> None:
    """If an answer takes as long as a lease lasts, the holder may have renewed the lease since the request was sent."""
    now = [0.0]

    class SlowClient:
        def __init__(self) -> None:
            self.lease: Any = {"holderIdentity": "other", "renewTime": "x", "leaseDurationSeconds": 15}

        async def get(self, *_: str) -> Any:
            now[0] += 16.0
            return {"metadata": {"resourceVersion": "1"}, "spec": self.lease}

        async def replace(self, lease: Any) -> Any:
            self.lease = lease["spec"]
            return lease

    client = SlowClient()
    election = Election(cast("ApiClient", client), NS, "baton", "me", lambda: now[0], time.time)
    await election._once()
    assert election.candidate.seen_at == 16.0
    now[0] = 17.0
    client.lease = {**client.lease, "renewTime": "y"}
    await election._once()
    assert client.lease["holderIdentity"] == "other"
    assert election.candidate.seen_at == 33.0
    await election._once()
    assert client.lease["holderIdentity"] == "me", "sixteen seconds after the last change was seen"
    assert election.candidate.renewed_at == 33.0, "counted from the request, which may be long before the write"
    assert not election.holds()


def test_a_candidate_waits_by_its_own_clock() -> None:
    one = Candidate("me")
    lease = {"spec": {"holderIdentity": "other", "renewTime": "x", "leaseDurationSeconds": 15}}
    assert not one.look(lease, 100.0)
    assert not one.look(lease, 114.0)
    assert not one.look({"spec": {**lease["spec"], "renewTime": "y"}}, 116.0)
    assert one.look({"spec": {**lease["spec"], "renewTime": "y"}}, 131.0)


async def test_a_pod_is_ready_only_when_routers_know_it() -> None:
    async with staged() as stage:
        stage.fleet.unknown = {"chat-decode-0"}
        stage.operate()
        await stage.make(spec())
        await stage.until(lambda: "chat-prefill-0" in stage.nodes.serving())
        await asyncio.sleep(0.2)
        assert "chat-decode-0" not in stage.nodes.serving()
        stage.fleet.unknown = set()
        await stage.until(stage.settled)


@pytest.mark.parametrize(
    "scenario",
    [test_a_rollout_without_a_spare_gpu, test_fifty_scale_patches_touch_no_template],
    ids=["rollout", "scale"],
)
async def test_the_suite_runs_over_the_wire_alone(scenario: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a real API server, the tests read by watches and run pods through the API."""
    if MODE.kubeconfig:
        pytest.skip("with --kubeconfig all scenarios run over the wire")
    monkeypatch.setattr(MODE, "wire_alone", True)
    await scenario()
    assert MODE.wire_alone


async def test_one_object_of_an_old_shape_stops_no_other() -> None:
    async with staged() as stage:
        bad = {"name": "bad", "namespace": NS, "uid": "u-bad", "resourceVersion": "1", "generation": 1}
        stage.double.owners["u-bad"] = Owners()
        for wrong in ({"models": 3}, {"models": [{"name": "m", "polls": {}}], "kubernetes": 7}):
            thing = {"apiVersion": API_VERSION, "kind": "BatonCluster", "metadata": bad, "spec": wrong}
            stage.double._put("batonclusters", copy.deepcopy(thing), "ADDED", None)  # as an older server stored it
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        assert not [name for name in stage.instances() if name.startswith("bad")]


async def test_deleting_the_definition_ends_everything() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        for each in stage.double.all("batonclusters"):  # what an API server does with the objects of a definition
            stage.double.delete(stage.double.kinds["batonclusters"], each, {})
        async with asyncio.timeout(10):
            while stage.double.all("pods") or stage.double.all("deployments"):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        assert stage.double.all("deployments") == [], "the operator does not make them again"


async def test_a_replaced_key_reaches_every_program_and_stands_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setattr(controller, "limits_of", lambda *given: dataclasses.replace(limits_of(*given), keys_s=1.0))
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        secret: set[str] = set()

        def keys() -> tuple[str, ...]:
            fleet = stage.server.get("secrets", "chat-ticket-keys")
            assert fleet is not None
            secret.update(secrets_in(stage))
            return tuple(key.secret.hex() for key in keys_in(fleet))

        (old,) = keys()
        await stage.change({"kubernetes": {"ticket_keys": "2"}})
        await stage.until(lambda: len(keys()) == 2)
        await stage.until(lambda: len(keys()) == 1 and stage.settled())
        assert keys() != (old,)
        assert len(secret) >= 10
        plurals = ("pods", "deployments", "events", "configmaps", "batonclusters", "services", "networkpolicies")
        told = json.dumps([stage.server.all(plural) for plural in plurals]) + caplog.text
        assert [each for each in secret if each in told] == []


async def test_keys_that_are_set_back_while_they_are_replaced_end_with_one_new_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pods that have read only the old key must be replaced, though their template is the wanted one again."""
    monkeypatch.setattr(controller, "limits_of", lambda *given: dataclasses.replace(limits_of(*given), keys_s=1.0))
    monkeypatch.setattr("k8s.plan.keys.SKEW_S", 0.0)
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)

        def keys() -> tuple[str, ...]:
            fleet = stage.server.get("secrets", "chat-ticket-keys")
            assert fleet is not None
            return tuple(key.secret.hex() for key in keys_in(fleet))

        (old,) = keys()

        def instances() -> set[str]:
            found = [each["metadata"] for each in stage.server.all("pods")]
            return {each["uid"] for each in found if each["labels"].get(LABEL_PART) == "instance"}

        before = instances()
        await stage.change({"kubernetes": {"ticket_keys": "2"}})
        await stage.until(lambda: len(keys()) == 2)
        await stage.change({"kubernetes": {"ticket_keys": "1"}})
        await stage.until(lambda: len(keys()) == 1 and stage.settled())
        assert keys() != (old,)
        assert before and instances() and not before & instances()


def secrets_in(stage: Stage) -> set[str]:
    """All words in Secrets that look like keys or passwords, except digests."""
    found = set()
    for each in stage.server.all("secrets"):
        for name, value in each["data"].items():
            text = b64decode(value).decode()
            words = [word for line in text.splitlines() for word in line.replace(">", " ").split()]
            if not name.endswith("-digest"):
                found |= {word for word in words if re.fullmatch(r"[0-9a-f]{64,}|sk-baton-\S+|[\w-]{32}", word)}
    return found


async def test_an_instance_with_streams_is_waited_for() -> None:
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(1, 1))
        await stage.until(stage.settled)
        stage.fleet.streams = {"chat-decode-0": 8}
        await stage.change(image("engine:2"))
        await stage.until(lambda: ("drain", "chat-decode-0") in stage.fleet.told)
        assert "chat-decode-0" in stage.instances()
        await stage.until(stage.settled)
        assert stage.fleet.streams["chat-decode-0"] == 0


async def test_a_drain_that_its_agent_has_not_heard_is_told_again() -> None:
    """The engine may have been starting, or the call was lost. Without another call it would go on taking work."""
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        stage.fleet.deaf = 3
        await stage.change(image("engine:2"))
        await stage.until(lambda: stage.settled() and len(stage.instances()) == 2)
        assert stage.fleet.deaf == 0
        assert {name for what, name in stage.fleet.told if what == "drain"} == {"chat-decode-0", "chat-prefill-0"}


async def test_a_value_that_the_server_writes_in_its_own_way_is_applied_once() -> None:
    """The server writes `1000m` as `1`, and an empty variable without a value. Neither is a change to be undone."""
    resources = {"limits": {"cpu": "1000m", "memory": "1024Mi"}}
    container = {"name": "engine", "resources": resources, "env": [{"name": "EMPTY", "value": ""}]}
    patch = {"pod_template": {"spec": {"hostNetwork": False, "containers": [container]}}}
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(kubernetes={"pools": {"decode": patch}}))
        await stage.until(stage.settled)
        made = stage.instances()["chat-decode-0"]["spec"]["template"]["spec"]["containers"][0]
        assert made["resources"]["limits"]["cpu"] == "1"
        writes, actions = stage.inside.writes() if stage.inside else 0, stage.operators[0].counters.actions
        await asyncio.sleep(1.2)  # two idle rounds
        assert stage.operators[0].counters.actions == actions
        assert stage.inside is None or stage.inside.writes() == writes
        path = f"/apis/apps/v1/namespaces/{NS}/deployments/chat-decode-0"
        body = {"spec": {"template": {"spec": {"containers": [{**made, "image": "hand:1"}]}}}}
        await stage.client.request("PATCH", path, body=body, content="application/merge-patch+json")
        await stage.until(
            lambda: (
                stage.instances()["chat-decode-0"]["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:1"
            )
        )


async def test_what_the_server_refuses_is_reported_and_the_rest_goes_on() -> None:
    patch = {"pod_template": {"spec": {"containers": [{"name": "engine", "image": ""}]}}}
    async with staged() as stage:
        stage.operate()
        await stage.make(spec(kubernetes={"pools": {"decode": patch}}))
        await stage.until(lambda: stage.condition("Degraded").get("reason") == "Refused")
        message = stage.condition("Degraded")["message"]
        assert message.startswith("the API server refuses to apply Deployment chat-decode-0: 422 Invalid"), message
        await stage.until(lambda: "chat-prefill-0" in stage.instances())
        await stage.change({"kubernetes": {"pools": None}})
        await stage.until(stage.settled)
        assert stage.condition("Degraded")["status"] == "False"


async def test_a_webhook_that_does_not_answer_stops_no_other_object_and_is_told() -> None:
    """A policy engine is down, and its `failurePolicy` is Fail: the API server answers 500 for one kind of objects."""
    called = 'Internal error occurred: failed calling webhook "v.example": failed to call webhook: connection refused'

    def refuse(_method: str, path: str) -> None:
        if "/services" in path:
            raise Refused(500, "InternalError", called)

    async with staged() as stage:
        stage.double.refuse = refuse
        stage.operate()
        await stage.make(spec())
        await stage.until(lambda: stage.condition("Degraded").get("reason") == "Refused")
        assert 'failed calling webhook "v.example"' in stage.condition("Degraded")["message"]
        await stage.until(lambda: len(stage.nodes.serving()) == 2)
        stage.double.refuse = None
        await stage.until(stage.settled)


async def test_a_webhook_that_hangs_delays_no_other_cluster() -> None:
    """The API server waits up to 30 s for it, and the operator for the API server."""
    held, goes_on = asyncio.Queue[str](), asyncio.Event()

    async def hold(path: str) -> None:
        if path.rpartition("/")[2].startswith("slow"):
            held.put_nowait(path)
            await goes_on.wait()

    async with staged(gpus=4) as stage:
        stage.double.hold = hold
        stage.operate()
        await stage.make(spec(), "slow")
        await held.get()
        try:
            await stage.make(spec())
            await stage.until(stage.settled)
            assert held.empty(), "the first write is still held: the other cluster did not wait for its time to end"
        finally:
            goes_on.set()
        await stage.until(lambda: len(stage.nodes.serving()) == 4)


async def test_pods_that_a_quota_refuses_are_told_and_an_old_one_gives_its_place() -> None:
    """A quota acts as a lack of free GPUs: if the operator did not notice it, a rollout would wait for ever."""
    async with staged() as stage:
        stage.operate()
        await stage.make(spec())
        await stage.until(stage.settled)
        nodes = stage.nodes
        if isinstance(nodes, Kubelet):
            quota = {"hard": {"pods": str(len(stage.server.all("pods")))}}
            metadata = {"name": "q", "namespace": NS}
            path = f"/api/v1/namespaces/{NS}/resourcequotas"
            await stage.client.request("POST", path, body={"metadata": metadata, "spec": quota})
            async with asyncio.timeout(REAL_LIMIT_S):  # it is no limit before it has been counted
                while "used" not in (await stage.client.request("GET", f"{path}/q")).get("status", {}):
                    await asyncio.sleep(0.1)
        else:
            nodes.quota = len(stage.server.all("pods"))
        try:
            await stage.change(image("engine:2"))
            await stage.until(lambda: stage.condition("Degraded").get("reason") == "PodsRefused")
            assert "exceeded quota" in stage.condition("Degraded")["message"]
            await stage.until(stage.settled)
        finally:
            if isinstance(nodes, Kubelet):
                await stage.client.request("DELETE", f"{path}/q", body={})
        images = [each["spec"]["template"]["spec"]["containers"][0]["image"] for each in stage.instances().values()]
        assert images == ["engine:2", "engine:2"]
