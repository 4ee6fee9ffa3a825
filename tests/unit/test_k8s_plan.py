"""The plan for a resource: children, pods, status. A plan that was carried out leaves nothing to do."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import random
import re
import secrets
from datetime import UTC, datetime
from typing import Any

import pytest
from support.k8s_objects import IMAGES, SMALL, applied, conditions, desired, manifests, resource, settled
from support.k8s_world import World

from baton.commands import router
from baton.makes import makes_of
from baton.scaling import wants_scaling
from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from cluster.spec import parse
from cluster.spec.example import EXAMPLE
from cluster.spec.flags import NUMBERS, SAME_ANSWERS, SAME_ON_BOTH_SIDES
from k8s.crd import read_resource
from k8s.crd.names import (
    CONDITIONS,
    FIELD_MANAGER,
    LABEL_DRAINING,
    LABEL_FAMILY,
    LABEL_GPU,
    LABEL_MANAGED,
    LABEL_PARKED,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_USERS,
)
from k8s.plan import (
    Apply,
    Delete,
    Derive,
    Desired,
    Drain,
    ObservedCluster,
    Park,
    PlanLimits,
    RenewUsers,
    Resume,
    Unpark,
    limits_of,
    look,
    plan,
    pool_status,
    status,
)
from k8s.plan.children import children, file_text
from k8s.plan.merge import contains, patched, view
from k8s.plan.observe import instances
from router.api.config import RouterConfig


@pytest.fixture(autouse=True)
def no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and passwords are the same each time, so that objects can be compared."""
    monkeypatch.setattr(secrets, "token_bytes", lambda count: bytes(range(count)))
    monkeypatch.setattr(secrets, "token_urlsafe", lambda count: "p" * count)


def test_a_role_that_somebody_misspelt_in_a_label_ends_no_plan() -> None:
    there = settled(desired())
    for each in there.objects:
        if each["metadata"]["name"] == "chat-prefill-0" and each["kind"] == "Deployment":
            each["metadata"]["labels"][LABEL_ROLE] = "prefil"
    assert "chat-prefill-0" in {each.name for each in look(desired(), there).instances}


def test_the_children_of_a_small_cluster() -> None:
    names = set(manifests())
    assert names == {
        ("ServiceAccount", "chat-engines"),
        ("ConfigMap", "chat-file"),
        ("ConfigMap", "chat-order"),
        ("Secret", "chat-internal"),
        ("Secret", "chat-ticket-keys"),
        ("Secret", "chat-prefill-0-keys"),
        ("Secret", "chat-decode-0-keys"),
        ("Deployment", "chat-registry"),
        ("Service", "chat-registry"),
        ("Deployment", "chat-router"),
        ("Service", "chat"),
        ("PodDisruptionBudget", "chat-router"),
        ("PodDisruptionBudget", "chat-prefill"),
        ("PodDisruptionBudget", "chat-decode"),
        ("NetworkPolicy", "chat-instance"),
        ("NetworkPolicy", "chat-router"),
        ("NetworkPolicy", "chat-registry"),
        ("Deployment", "chat-prefill-0"),
        ("Deployment", "chat-decode-0"),
    }


def test_every_child_is_owned_and_labelled() -> None:
    for each in manifests().values():
        assert each["metadata"]["labels"][LABEL_MANAGED] == FIELD_MANAGER
        assert each["metadata"]["ownerReferences"][0]["uid"] == "u-1"
        assert each["metadata"]["namespace"] == "llm"


def test_what_was_planned_and_carried_out_leaves_nothing_to_do() -> None:
    wanted = desired()
    assert plan(wanted, settled(wanted), PlanLimits(), 100.0) == ()


def test_lost_actions_are_planned_again() -> None:
    """An operator that was killed after any action continues with the remaining actions."""
    wanted = desired()
    whole = plan(wanted, ObservedCluster(), PlanLimits(), 0.0)
    for at in range(len(whole) + 1):
        there = applied(whole[:at])
        rest = plan(wanted, ObservedCluster(objects=there), PlanLimits(), 0.0)
        assert {str(each) for each in applied(rest, there)} == {str(each) for each in applied(whole)}


def test_a_drain_that_never_reached_the_agent_is_taken_back_without_a_second_drain() -> None:
    """With a second drain in the same plan, the agent would drain after its mark is gone, and serve no more."""
    wanted = desired()
    there = settled(wanted)
    name = "chat-decode-0"
    for each in there.objects:
        if each["kind"] == "Deployment" and each["metadata"]["name"] == name:
            each["metadata"]["labels"][LABEL_DRAINING] = "90"
    todo = plan(wanted, dataclasses.replace(there, working=frozenset({name})), PlanLimits(), 100.0)
    assert [each for each in todo if isinstance(each, Drain | Resume)] == [Resume(name, "its revision is wanted again")]


def changed(change: str) -> tuple[Desired, tuple[Any, ...]]:
    """The changed resource, and the plan for it in a settled cluster."""
    before = desired()
    spec = copy.deepcopy(SMALL)
    pools: Any = spec["models"][0]["pools"]  # type: ignore[index]
    match change:
        case "slo":
            spec["slo"] = {"fast": {"ttft_ms": 500}}  # type: ignore[assignment]
        case "image":
            spec["kubernetes"] = {"image": "engine:2"}  # type: ignore[assignment]
        case "prefill_env":
            pools["prefill"]["env"] = {"A": "1"}
        case "pools":
            pools["decode"]["max"] = 6
    after = desired(spec)
    return after, plan(after, settled(before), PlanLimits(), 1.0)


def test_a_change_of_slo_starts_no_new_engine() -> None:
    _, actions = changed("slo")
    assert {each.manifest["metadata"]["name"] for each in actions if isinstance(each, Apply)} == {
        "chat-file",
        "chat-router",
    }
    assert len(actions) == 2


def test_a_new_tenant_starts_no_new_engine() -> None:
    """Engines mount no tenant's key: a file of the spec that only routers read is in no engine's template."""
    before = desired({**SMALL, "tenants": {"a": {"key_file": "keys/a"}}})
    after = desired({**SMALL, "tenants": {"a": {"key_file": "keys/a"}, "b": {"key_file": "keys/b"}}})
    actions = plan(after, settled(before), PlanLimits(), 1.0)
    assert {each.manifest["metadata"]["name"] for each in actions if isinstance(each, Apply)} == {
        "chat-file",
        "chat-router",
    }
    assert len(actions) == 2


def file_keys(deployment: Any) -> set[str]:
    """The keys of the Secret with the spec's files that the pods of a Deployment mount."""
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    sources = next(each for each in volumes if each["name"] == "files")["projected"]["sources"]
    return {item["key"] for each in sources if "secret" in each for item in each["secret"]["items"]}


def test_engines_mount_only_the_registrys_files() -> None:
    spec = {
        **SMALL,
        "registry": {"url": "rediss://r:6379", "password_file": "keys/registry", "ca_file": "ca.pem"},
        "router": {"tls_cert_file": "router.pem", "tls_key_file": "router.key", "admin_key_file": "keys/admin"},
        "tenants": {"acme": {"key_file": "keys/acme"}},
    }
    made = manifests(spec)
    for name in ("chat-prefill-0", "chat-decode-0"):
        assert file_keys(made["Deployment", name]) == {"keys.registry", "ca.pem"}
    routers = {"keys.registry", "ca.pem", "router.pem", "router.key", "keys.admin", "keys.acme"}
    assert file_keys(made["Deployment", "chat-router"]) == routers


def test_probes_of_a_router_with_a_certificate_speak_tls() -> None:
    """The clients' port speaks nothing but TLS then, and a plain probe would never succeed."""
    for told, scheme in (({"tls_cert_file": "router.pem"}, "HTTPS"), ({}, "HTTP")):
        container = router_container({**SMALL, "router": told})
        probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe")]
        assert [each.get("scheme", "HTTP") for each in probes] == [scheme] * 2
        assert {each["port"] for each in probes} == {8000}


def test_a_router_whose_clients_take_every_connection_is_not_killed() -> None:
    """The admin side has connections of its own, and speaks no TLS whatever the cluster's certificate is."""
    for told in ({"tls_cert_file": "router.pem"}, {}):
        probe = router_container({**SMALL, "router": told})["livenessProbe"]
        assert probe["httpGet"] == {"path": "/health", "port": 8001}


def router_container(spec: dict[str, Any]) -> dict[str, Any]:
    deployment = manifests(spec)["Deployment", "chat-router"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(container)


MAY_BE_EMPTY = {"min": 0, "max": 3}


@pytest.mark.parametrize(
    ("pools", "path"),
    [
        ({"prefill": {}, "decode": {}}, "/ready"),
        ({"both": {}}, "/ready"),
        ({"both": {}, "prefill": MAY_BE_EMPTY}, "/ready"),
        ({"decode": {}, "extra": {"prompts": {"role": "prefill"}}}, "/ready"),
        ({"prefill": MAY_BE_EMPTY, "decode": {"min": 1, "max": 3}}, "/health"),
        ({"prefill": {"min": 0, "max": 3, "start": 1}, "decode": {}}, "/health"),
        ({"decode": {}}, "/health"),
        ({"prefill": MAY_BE_EMPTY, "decode": MAY_BE_EMPTY}, "/health"),
    ],
)
def test_routers_wait_for_a_whole_fleet_only_where_there_always_is_one(pools: dict[str, Any], path: str) -> None:
    """Otherwise no router would ever start: ``/ready`` is a 503 as long as a leg has no instance."""
    router = router_container({"models": [{"name": "m", "pools": pools}]})
    assert router["startupProbe"]["httpGet"]["path"] == path


def test_a_routers_admin_side_takes_the_users_keys_and_the_operators() -> None:
    deployment = manifests({**SMALL, "router": {"admin_key_file": "keys/admin"}})["Deployment", "chat-router"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    words = [re.sub(r"\$\(POD_IP\)", "10.0.0.1", word) for word in container["command"][2:]]
    assert parser.parse_args(words).admin_key_file == ["/run/baton/operator-key-digest", "/etc/baton/keys/admin"]
    assert words.index("/run/baton/operator-key-digest") < words.index("/etc/baton/keys/admin"), (
        "a router of an earlier image goes by the last file alone: the user's, as before"
    )


def test_a_new_image_is_a_new_family_of_both_roles() -> None:
    after, actions = changed("image")
    made = [each.manifest for each in actions if isinstance(each, Apply)]
    started = {each["metadata"]["name"] for each in made}
    assert started == {"chat-prefill-1", "chat-decode-1"}
    assert len({each["metadata"]["labels"][LABEL_FAMILY] for each in made}) == 1
    assert after.resource.spec is not None


def with_images(image: str, **by_pool: str) -> set[Any]:
    """The families of a cluster whose pools' patches name images."""
    patches = {
        name: {"pod_template": {"spec": {"containers": [{"name": "engine", "image": each}]}}}
        for name, each in by_pool.items()
    }
    made = manifests({**SMALL, "kubernetes": {"image": image, "pools": patches}}).values()
    return {each["metadata"]["labels"].get(LABEL_FAMILY) for each in made} - {None}


def test_the_image_in_a_pools_patch_belongs_to_the_family() -> None:
    """As another `kubernetes.image`: old and new engines would hand over to each other while it rolls out."""
    pinned = with_images("engine:1", prefill="engine:2", decode="engine:2-arm")
    assert len(pinned) == 1, "one family, whatever the images are: the pools are made for each other"
    assert pinned != with_images("engine:1", prefill="engine:3", decode="engine:3-arm")
    assert pinned != with_images("engine:1", prefill="engine:2", decode="engine:3-arm")
    assert pinned == with_images("engine:9", prefill="engine:2", decode="engine:2-arm"), "no engine has the default"
    assert with_images("engine:2") == with_images("engine:1", prefill="engine:2", decode="engine:2")


def test_an_extra_pools_engine_belongs_to_the_family_as_well() -> None:
    """Instances whose KV caches differ in format cannot hand over, whatever their pools are called."""
    families = []
    for dtype in ("bfloat16", "float16"):
        pool = {"engine_args": {"dtype": dtype}}
        extra = {"prefill-a": {"role": "prefill", **pool}, "decode-a": {"role": "decode", **pool}}
        made = manifests({"models": [{"name": "m", "pools": {"extra": extra}}]}).values()
        families.append({each["metadata"]["labels"].get(LABEL_FAMILY) for each in made} - {None})
    first, second = families
    assert len(first) == len(second) == 1
    assert first != second


def with_flags(**engine_args: Any) -> dict[str, Any]:
    return {"models": [{"name": "m", "pools": {role: {"engine_args": engine_args} for role in ("prefill", "decode")}}]}


@pytest.mark.parametrize("flag", [*SAME_ON_BOTH_SIDES, *SAME_ANSWERS, "block-size"])
def test_a_flag_that_makes_another_model_of_the_same_files_is_a_new_family(flag: str) -> None:
    """The family is what agents announce as their weights: a broken stream goes on within one family only."""
    families = []
    for value in ("one", "another") if flag not in NUMBERS else (16, 32):
        made = manifests(with_flags(**{flag.replace("-", "_"): value})).values()
        families.append({each["metadata"]["labels"].get(LABEL_FAMILY) for each in made} - {None})
    first, second = families
    assert len(first) == len(second) == 1
    assert first != second


def test_a_flag_that_changes_no_answer_stays_in_the_family() -> None:
    families = [
        manifests(with_flags(max_num_seqs=seqs))["Deployment", "chat-decode-0"]["metadata"]["labels"][LABEL_FAMILY]
        for seqs in (64, 128)
    ]
    assert len(set(families)) == 1


def test_another_chat_template_rolls_out_without_a_free_gpu() -> None:
    """Proofs between both templates fail for ever, so no new instance may wait for a proof with an old one."""
    ((before,), (after,)) = (
        look(desired(with_flags(chat_template=name)), ObservedCluster()).models for name in ("old.jinja", "new.jinja")
    )
    new = {pool.revision for pool in after.pools}
    agree = lambda one, other: (one.revision in new) == (other.revision in new)  # noqa: E731
    world = World(before, gpus=2, tell_free=True, chance=random.Random(1), agree=agree)
    world.settle()
    world.model = after
    world.settle()
    assert {each.revision for each in world.instances.values()} == new
    assert all(each.ready for each in world.instances.values())


def test_where_all_gpus_are_taken_an_old_instance_goes_first() -> None:
    pools = {role: {"gpu": "H200"} for role in ("prefill", "decode")}
    spec = {"models": [{"name": "m", "pools": pools}], "hardware": {"H200": {"count": 2}}}
    before = desired(spec)
    after = desired({**spec, "kubernetes": {"image": "engine:2"}})
    there = settled(before)
    assert limits_of(after, there).free_gpus == {"H200": 0}
    (action,) = plan(after, there, limits_of(after, there), 1.0)
    assert isinstance(action, Drain), action
    roomy = desired({**spec, "hardware": {"H200": {"count": 4}}, "kubernetes": {"image": "engine:2"}})
    started = [each for each in plan(roomy, there, limits_of(roomy, there), 1.0) if isinstance(each, Apply)]
    assert {each.manifest["metadata"]["name"] for each in started} >= {"chat-prefill-1", "chat-decode-1"}


def test_one_pools_environment_rolls_that_pool_and_pairs_stay() -> None:
    before = {name: each for (_, name), each in manifests().items()}
    _, actions = changed("prefill_env")
    made = [each.manifest for each in actions if isinstance(each, Apply)]
    assert [each["metadata"]["name"] for each in made] == ["chat-prefill-1"]
    assert made[0]["metadata"]["labels"][LABEL_FAMILY] == before["chat-decode-0"]["metadata"]["labels"][LABEL_FAMILY]


def test_a_bound_changes_nothing_that_runs() -> None:
    assert changed("pools")[1] == ()


def test_a_batonpool_decides_within_the_bounds_and_touches_no_template() -> None:
    wanted = desired()
    there = settled(wanted)
    before = {each["metadata"]["name"]: each for each in there.objects}
    actions = plan(
        wanted, ObservedCluster(objects=there.objects, pods=there.pods, external={"decode": 9}), PlanLimits(), 1.0
    )
    names = [each.manifest["metadata"]["name"] for each in actions if isinstance(each, Apply)]
    assert names == ["chat-decode", "chat-decode-1", "chat-decode-2", "chat-decode-3"]
    revision = before["chat-decode-0"]["metadata"]["labels"][LABEL_REVISION]
    assert {type(each) for each in actions} == {Apply, Derive}, "new instances, and their keys"
    for each in actions:
        if isinstance(each, Apply) and each.manifest["kind"] == "Deployment":
            assert each.manifest["metadata"]["labels"][LABEL_REVISION] == revision


def test_the_size_is_remembered_by_a_child() -> None:
    wanted = desired()
    there = settled(wanted)
    scaled = ObservedCluster(objects=there.objects, pods=there.pods, advised={"decode": 3})
    objects = applied(plan(wanted, scaled, PlanLimits(), 1.0), there.objects)
    alone = plan(wanted, ObservedCluster(objects=objects, pods=there.pods), PlanLimits(), 2.0)
    assert alone == ()


def test_a_size_is_remembered_wherever_a_controller_may_size() -> None:
    """`start` above `min` and no `max`: the pool may shrink below `start`, and keeps that size after a restart."""
    wanted = desired({"models": [{"name": "m", "pools": {"prefill": {}, "decode": {"min": 1, "start": 3}}}]})
    there = settled(wanted)
    sized = dataclasses.replace(there, advised={"decode": 1})
    objects = applied(plan(wanted, sized, PlanLimits(), 1.0), there.objects, of=wanted)
    alone = look(wanted, dataclasses.replace(there, objects=objects))
    assert {pool.stem: pool.count for model in alone.models for pool in model.pools} == {"prefill": 1, "decode": 1}
    assert wanted.resource.spec is not None
    assert wants_scaling(wanted.resource.spec)


def test_a_pod_that_still_ends_keeps_its_name() -> None:
    wanted = desired()
    there = settled(wanted)
    objects = tuple(each for each in there.objects if each["metadata"]["name"] != "chat-decode-0")
    ending = copy.deepcopy(there.pods)
    for pod in ending:
        if pod["metadata"]["labels"]["serving.baton.dev/instance"] == "chat-decode-0":
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    actions = plan(wanted, dataclasses.replace(there, objects=objects, pods=ending), PlanLimits(), 1.0)
    made = [each.manifest for each in actions if isinstance(each, Apply) and each.manifest["kind"] == "Deployment"]
    assert [each["metadata"]["name"] for each in made] == ["chat-decode-1"]


def test_a_foreign_object_of_a_wanted_name_is_left_alone() -> None:
    wanted = desired()
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat"}, "spec": {}}
    observed = ObservedCluster(objects=(theirs,))
    actions = plan(wanted, observed, PlanLimits(), 0.0)
    assert not [
        each
        for each in actions
        if isinstance(each, Apply)
        and each.manifest["kind"] == "Service"
        and each.manifest["metadata"]["name"] == "chat"
    ]
    said = conditions(status(wanted, observed, actions, 0.0, {}))
    assert said["Degraded"]["reason"] == "NameTaken"
    assert "Service chat" in said["Degraded"]["message"]


def test_a_manual_change_of_a_child_is_undone_and_fields_that_others_add_stay() -> None:
    wanted = desired()
    there = settled(wanted)
    objects = copy.deepcopy(there.objects)
    service = next(each for each in objects if (each["kind"], each["metadata"]["name"]) == ("Service", "chat"))
    service["spec"]["clusterIP"] = "10.0.0.1"
    service["metadata"]["labels"]["theirs"] = "1"
    assert plan(wanted, ObservedCluster(objects=objects, pods=there.pods), PlanLimits(), 1.0) == ()
    service["spec"]["ports"][0]["port"] = 81
    (action,) = plan(wanted, ObservedCluster(objects=objects, pods=there.pods), PlanLimits(), 1.0)
    assert isinstance(action, Apply)
    assert action.because == "it is not as it was applied"


def test_an_instance_has_one_pod_or_none_while_it_is_parked() -> None:
    wanted = desired()
    there = settled(wanted)
    decode = next(each for each in there.objects if each["metadata"]["name"] == "chat-decode-0")
    decode["spec"]["replicas"] = 2
    assert plan(wanted, there, PlanLimits(), 1.0) == (Unpark("chat-decode-0", "its workload has 2 replicas, not 1"),)
    decode["metadata"]["labels"][LABEL_PARKED] = "true"
    waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": STARTED}
    pods = [{**each, "spec": {}, "status": {"conditions": [waiting]}} for each in there.pods]
    parked = dataclasses.replace(there, pods=tuple(each for each in pods if "prefill" in each["metadata"]["name"]))
    todo = plan(wanted, parked, PlanLimits(), STARTED_AT + 1.0)
    assert todo == (Park("chat-decode-0", "its workload has 2 replicas, not 0"),)


def test_an_object_that_is_not_wanted_any_more_is_deleted() -> None:
    with_monitor = desired({**SMALL, "kubernetes": {"pod_monitor": True}})
    there = settled(with_monitor)
    (monitor,) = (each for each in there.objects if each["kind"] == "PodMonitor")
    monitor["metadata"]["uid"] = "u-7"
    (action,) = plan(desired(), ObservedCluster(objects=there.objects, pods=there.pods), PlanLimits(), 1.0)
    assert isinstance(action, Delete)
    assert (action.kind, action.name) == ("PodMonitor", "chat")
    assert action.uid == "u-7", "a new object of that name is not deleted"


def test_paused_wrong_or_deleted_resources_are_left_alone() -> None:
    assert plan(desired({**SMALL, "kubernetes": {"paused": True}}), ObservedCluster(), PlanLimits(), 0.0) == ()
    assert plan(desired({"models": []}), ObservedCluster(), PlanLimits(), 0.0) == ()
    gone = resource() | {"metadata": {**resource()["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert plan(Desired(resource=read_resource(gone), images=IMAGES), ObservedCluster(), PlanLimits(), 0.0) == ()


def test_a_kind_that_is_missing_is_told_and_not_applied() -> None:
    without = desired({**SMALL, "kubernetes": {"pod_monitor": True}}, kinds=frozenset())
    actions = plan(without, ObservedCluster(), PlanLimits(), 0.0)
    assert not [each for each in actions if isinstance(each, Apply) and each.manifest["kind"] == "PodMonitor"]
    said = conditions(status(without, ObservedCluster(), actions, 0.0, {}))
    assert said["Degraded"]["reason"] == "KindMissing"
    assert "PodMonitor" in said["Degraded"]["message"]


def test_an_instance_asks_for_the_gpus_of_its_shape() -> None:
    made = manifests({"models": [{"name": "m", "pools": {"both": {"shape": {"tp": 4, "pp": 2}}}}]})
    (container,) = made["Deployment", "chat-both-0"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_grace_is_longer_than_the_drain_and_the_agent_is_the_first_process() -> None:
    pod = manifests()["Deployment", "chat-prefill-0"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert command[:2] == ["baton", "engine"]
    drain_s, linger_s = (float(command[command.index(each) + 1]) for each in ("--drain-s", "--linger-s"))
    assert pod["terminationGracePeriodSeconds"] >= linger_s + drain_s + 60
    router = manifests()["Deployment", "chat-router"]["spec"]["template"]["spec"]["containers"][0]
    assert linger_s > router["lifecycle"]["preStop"]["sleep"]["seconds"], "what a router still admits must be prefilled"
    assert pod["readinessGates"] == [{"conditionType": "serving.baton.dev/serving"}]


@pytest.mark.parametrize(
    ("of_cluster", "drain_s"), [({}, 600), ({"limits": {"drain_s": 700.5}}, 700.5), ({"limits": {"drain_s": 0}}, 600)]
)
def test_a_router_lets_streams_end_as_long_as_instances_do(of_cluster: dict[str, Any], drain_s: float) -> None:
    """A rollout of routers, or the cluster's deletion, cuts off no stream that instances would still finish."""
    pod = manifests({**SMALL, **of_cluster})["Deployment", "chat-router"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = container["command"]
    assert float(words[words.index("--drain-s") + 1]) == drain_s
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before_s + drain_s + 60


@pytest.mark.parametrize(
    ("limits", "bounds"),
    [
        ({}, (128 << 20, 64 << 20)),
        ({"body_bytes_max": 1 << 30}, (128 << 20, 64 << 20)),
        ({"open_bytes_max": 5 << 30}, (5 << 30, 64 << 20)),
        ({"uploads_bytes_max": 1 << 30, "open_bytes_max": 9 << 30}, (9 << 30, 1 << 30)),
    ],
)
def test_a_routers_bounds_of_bodies_fit_its_memory_unless_the_file_says_otherwise(
    limits: dict[str, int], bounds: tuple[int, int]
) -> None:
    """As the router's command reads its flags and its file. Parsed, a body takes up to ten times its bytes."""
    spec = {**SMALL, "limits": limits}
    container = router_container(spec)
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    words = [re.sub(r"\$\(POD_IP\)", "10.0.0.1", word) for word in container["command"][2:]]
    config = RouterConfig(has_registry=True, **router._settings(parser.parse_args(words), desired(spec).resource.spec))
    assert (config.open_bytes, config.uploads_bytes) == bounds
    assert container["resources"]["limits"]["memory"] == "2Gi"
    if not limits.get("open_bytes_max"):
        assert 10 * config.open_bytes + config.uploads_bytes < 0.75 * (2 << 30)


def test_routers_follow_an_edited_slo_without_a_restart() -> None:
    """They read it again by themselves (`router.api.server.Router.renew`), but for the first and the last class."""

    def rolled(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
        actions = plan(desired({**SMALL, **after}), settled(desired({**SMALL, **before})), PlanLimits(), 1.0)
        return {each.manifest["metadata"]["name"] for each in actions if isinstance(each, Apply)}

    fast, slow = {"slo": {"fast": {"ttft_ms": 500}}}, {"slo": {"fast": {"ttft_ms": 900}, "slow": {"e2e_ms": 9000}}}
    assert rolled(fast, slow) == rolled(slow, fast) == {"chat-file"}
    for one, other in ((fast, {}), (fast, {"slo": {}})):
        assert rolled(one, other) == rolled(other, one) == {"chat-file", "chat-router"}


def test_a_router_listens_on_both_families_and_where_kubectl_forwards_a_port_to() -> None:
    """An earlier image goes by the last address of a flag alone, and listens as before."""
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    args = parser.parse_args(router_container(SMALL)["command"][2:])
    config = RouterConfig(has_registry=True, **router._settings(args, None))
    assert {config.host, *config.hosts_beside} == {"0.0.0.0", "::"}
    assert (config.admin_host, config.admin_hosts_beside) == ("$(POD_IP)", ("127.0.0.1",))
    assert (args.host[-1], args.admin_host[-1]) == ("0.0.0.0", "$(POD_IP)")


def test_a_router_that_is_given_no_address_goes_by_its_file() -> None:
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    spec = parse("models: [{name: m}]\nrouter: {host: 10.0.0.1}", "f").usable()
    args = parser.parse_args(["--admin-host", "10.0.0.2"])
    config = RouterConfig(has_registry=True, **router._settings(args, spec))
    assert (config.host, config.hosts_beside) == ("10.0.0.1", ())
    assert (config.admin_host, config.admin_hosts_beside) == ("10.0.0.2", ())
    args = parser.parse_args(["--registry", "redis://h", "--host", "::", "--host", "0.0.0.0"])
    config = RouterConfig(has_registry=True, **router._settings(args, spec))
    assert router._processes(args, spec, config) == 1
    args.processes = 2
    with pytest.raises(UsageError, match="--host ::: with --processes 2 give --host once"):
        router._processes(args, spec, config)


def test_the_words_of_commands_are_flags_that_exist() -> None:
    import importlib

    for name, words in (("chat-prefill-0", "engine"), ("chat-router", "router")):
        command = manifests({**SMALL, "transfer": {"lease_s": 9}})["Deployment", name]["spec"]["template"]["spec"][
            "containers"
        ][0]["command"]
        parser = argparse.ArgumentParser()
        importlib.import_module(f"baton.commands.{words}").add_arguments(parser)
        told = parser.parse_args([re.sub(r"\$\(POD_IP\)", "10.0.0.1", word) for word in command[2:]])
        assert told.registry.startswith("redis://baton-")


def test_dollars_reach_engines_as_they_stand_in_the_resource() -> None:
    """Kubernetes expands ``$(NAME)`` and ``$$`` in a container's command (`expand` of third_party/forked/golang)."""
    env = {"A": "a$$b", "B": "$(POD_IP)", "C": "$$(POD_IP) $x $", "D": "$(NONE)"}
    pool = {"env": env, "engine_args": {"override-generation-config": '{"stop": "$$"}'}}
    made = manifests({"models": [{"name": "m", "pools": {"both": pool}}]})
    (container,) = made["Deployment", "chat-both-0"]["spec"]["template"]["spec"]["containers"]
    known = {"POD_IP": "10.0.0.1", "NODE_NAME": "n", "BATON_INSTANCE": "chat-both-0"}

    def expanded(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else known.get(found[1], found[0])

    words = [re.sub(r"\$\$|\$\((\w+)\)", expanded, word) for word in container["command"]]
    given = [after for flag, after in itertools.pairwise(words) if flag == "--env"]
    assert given == [f"{name}={value}" for name, value in env.items()]
    assert words[-1].endswith('{"stop": "$$"}')
    assert words[words.index("--host") + 1] == "10.0.0.1"


def test_a_patch_reaches_the_pod_and_the_gpu_label_is_not_read_back_from_it() -> None:
    patch = {
        "spec": {
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}],
            "containers": [
                {"name": "engine", "resources": {"claims": [{"name": "gpu"}], "limits": None, "requests": None}}
            ],
        }
    }
    spec = {**SMALL, "kubernetes": {"pools": {"prefill": {"pod_template": patch}}}}
    made = manifests(spec)
    pod = made["Deployment", "chat-prefill-0"]["spec"]["template"]["spec"]
    assert pod["tolerations"] == patch["spec"]["tolerations"]
    assert pod["containers"][0]["resources"] == {"claims": [{"name": "gpu"}]}
    assert "tolerations" not in made["Deployment", "chat-decode-0"]["spec"]["template"]["spec"]
    assert made["Deployment", "chat-prefill-0"]["metadata"]["labels"]["serving.baton.dev/gpu"] == "any.1"


@pytest.mark.parametrize("gpu", ["NVIDIA H100", "H100-SXM", "H100.2", "_", "x" * 63, "ä" * 99, None])
@pytest.mark.parametrize("tp", [1, 4])
def test_whatever_a_gpu_is_called_its_type_and_number_are_read_back(gpu: str | None, tp: int) -> None:
    wanted = desired({"models": [{"name": "m", "pools": {"both": {"gpu": gpu, "shape": {"tp": tp}}}}]})
    there = settled(wanted)
    made = next(each for each in there.objects if each["metadata"]["name"] == "chat-both-0")
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", made["metadata"]["labels"][LABEL_GPU])
    (found,) = look(wanted, there).instances
    assert (found.gpu, found.gpus) == (gpu or "", tp)


def test_the_gpus_of_a_type_whose_name_is_no_label_count_against_the_hardware() -> None:
    hardware = {"x" * 63: {"count": 9}}
    pools = {"both": {"gpu": "x" * 63, "shape": {"tp": 4}}}
    wanted = desired({"models": [{"name": "m", "pools": pools}], "hardware": hardware})
    assert limits_of(wanted, settled(wanted)).free_gpus == {"x" * 63: 5}


def test_names_fit_into_labels_for_any_cluster() -> None:
    for kind, name in manifests(SMALL, name="x" * 63):
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name), (kind, name)
        if kind == "Deployment":
            assert len(name) <= 46


def test_status_is_made_anew_and_keeps_its_times() -> None:
    wanted = desired()
    there = settled(wanted)
    first = status(wanted, there, (), 1000.0, {})
    assert set(conditions(first)) == set(CONDITIONS)
    assert conditions(first)["Available"]["status"] == "True"
    assert conditions(first)["Progressing"]["status"] == "False"
    assert (first["prefill"], first["decode"], first["revision"]) == ("1/1", "1/1", "2/2")
    assert status(wanted, there, (), 2000.0, first) == first
    deleted = status(wanted, there, (), 2000.0, {})
    assert [{**each, "lastTransitionTime": ""} for each in deleted["conditions"]] == [
        {**each, "lastTransitionTime": ""} for each in first["conditions"]
    ]


def test_a_wrong_spec_is_a_condition_that_names_the_field() -> None:
    wrong = desired({"models": [{"name": "m", "pools": {"decode": {"min": 3, "max": 2}}}]})
    said = conditions(status(wrong, ObservedCluster(), (), 0.0, {}))
    assert said["Degraded"]["reason"] == "InvalidSpec"
    assert "models[0].pools.decode.max" in said["Degraded"]["message"]


ENGINE = {"name": "engine"}


@pytest.mark.parametrize(
    ("patch", "told"),
    [
        ({"spec": "x"}, "spec: must be a mapping (x) → write `spec: {…}`, or leave it out"),
        ({"spec": None}, "spec: cannot be removed → leave it out"),
        ({"metadata": []}, "metadata: must be a mapping ([…]) → write `metadata: {…}`"),
        ({"metadata": {"labels": "a=b"}}, "metadata.labels: must be a mapping (a=b) → write `labels: {…}`"),
        ({"metadata": {"labels": None}}, "metadata.labels: cannot be removed → leave it out"),
        ({"spec": {"volumes": None}}, "spec.volumes: cannot be removed → leave it out"),
        ({"spec": {"volumes": {"a": {}}}}, "spec.volumes: must be a list ({…}) → write `volumes: [{name: …}]`"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.volumes[0].name: missing → "),
        ({"spec": {"volumes": [{"name": ["x"]}]}}, "spec.volumes[0].name: must be a text ([…]) → "),
        ({"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}}, "spec.volumes[1].name: given twice (a) → "),
        ({"spec": {"containers": None}}, "spec.containers: cannot be removed → leave it out"),
        ({"spec": {"containers": ["x"]}}, "spec.containers[0]: must be a mapping (x) → write `{name: …}`"),
        ({"spec": {"containers": [{"image": "i"}]}}, "spec.containers[0].name: missing → "),
        ({"spec": {"containers": [{**ENGINE, "env": None}]}}, "spec.containers[0].env: cannot be removed → "),
        (
            {"spec": {"containers": [{**ENGINE, "env": ["A=1"]}]}},
            "containers[0].env[0]: must be a mapping (***) → ",
        ),
        ({"spec": {"containers": [{**ENGINE, "env": "A=1"}]}}, "containers[0].env: must be a list (***) → "),
        ({"spec": {"containers": [{**ENGINE, "env": {"A": "1"}}]}}, "spec.containers[0].env: must be a list ({…}) → "),
        ({"spec": {"containers": [{**ENGINE, "volumeMounts": None}]}}, "[0].volumeMounts: cannot be removed → "),
        ({"spec": {"containers": [{**ENGINE, "volumeMounts": [{"name": "n"}]}]}}, "[0].mountPath: missing → "),
        (
            {"spec": {"containers": [{**ENGINE, "ports": [{"containerPort": []}]}]}},
            "must be a number or a text ([…])",
        ),
        ({"spec": {"containers": [{**ENGINE, "ports": [80]}]}}, "ports[0]: must be a mapping (80) → "),
        ({"spec": {"readinessGates": "x"}}, "spec.readinessGates: must be a list (x) → "),
    ],
)
def test_a_malformed_template_is_a_condition_that_names_the_field(patch: dict[str, Any], told: str) -> None:
    """For pools and for routers: the resource is InvalidSpec, and the plan has no action."""
    router = json.loads(json.dumps(patch).replace('"engine"', '"router"'))
    for kubernetes, field in (
        ({"pools": {"decode": {"pod_template": patch}}}, "kubernetes.pools.decode.pod_template."),
        ({"router_template": router}, "kubernetes.router_template."),
    ):
        wrong = desired({**SMALL, "kubernetes": kubernetes})
        assert plan(wrong, ObservedCluster(), PlanLimits(), 0.0) == ()
        said = conditions(status(wrong, ObservedCluster(), (), 0.0, {}))
        assert said["Degraded"]["reason"] == "InvalidSpec"
        assert said["Degraded"]["message"].startswith(field)
        assert told in said["Degraded"]["message"]


def test_template_fields_that_the_operator_does_not_read_are_left_to_the_api_server() -> None:
    patch = {
        "metadata": {"annotations": {"spec": "x"}, "labels": {"env": "prod", "volumes": "none"}},
        "spec": {
            "nodeSelector": {"containers": "many"},
            "securityContext": None,
            "containers": [
                {
                    "name": "engine",
                    "command": None,
                    "ports": [{"containerPort": 9}, {"containerPort": 9, "protocol": "UDP"}],
                },
                {"name": "side", "env": None, "volumeMounts": []},
            ],
            "initContainers": [{"name": "first", "image": 5}],
            "tolerations": "x",
            "readinessGates": None,
        },
    }
    wanted = desired({**SMALL, "kubernetes": {"pools": {"decode": {"pod_template": patch}}}})
    assert wanted.resource.problems == ()
    assert plan(wanted, ObservedCluster(), PlanLimits(), 0.0)


def test_a_pools_status_has_a_selector_that_finds_its_pods() -> None:
    wanted = desired()
    there = settled(wanted)
    said = pool_status(wanted, there, "decode", 4)
    assert (said["replicas"], said["readyReplicas"], said["observedGeneration"]) == (1, 1, 4)
    labels = dict(each.split("=") for each in said["selector"].split(","))
    chosen = [pod for pod in there.pods if labels.items() <= pod["metadata"]["labels"].items()]
    assert [pod["metadata"]["name"] for pod in chosen] == ["chat-decode-0-abc"]


def test_patches_merge_as_kubernetes_does() -> None:
    base = {"a": 1, "env": [{"name": "x", "v": 1}], "args": ["one"], "tolerations": [{"key": "a"}], "command": ["c"]}
    patch = {"a": None, "env": [{"name": "x", "w": 2}, {"name": "y"}], "args": ["two"], "tolerations": [{"key": "b"}]}
    assert patched(base, {**patch, "command": []}) == {
        "env": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}],
        "args": ["two"],
        "tolerations": [{"key": "b"}],
        "command": [],
    }
    assert contains({"env": [{"name": "x", "b": 1}, {"name": "z"}], "c": 2}, {"env": [{"name": "x", "b": 1}]})
    assert not contains({"env": [{"name": "x", "b": 2}]}, {"env": [{"name": "x", "b": 1}]})
    assert not contains({}, {"a": 1})
    assert not contains({"a": [1, 2]}, {"a": [1]})


def test_volume_mounts_are_told_apart_by_their_path() -> None:
    base = {"volumeMounts": [{"name": "state", "mountPath": "/state"}]}
    two = [{"name": "disk", "mountPath": path, "subPath": path[1:]} for path in ("/models", "/cache")]
    there = {"name": "state", "mountPath": "/elsewhere"}
    made = patched(base, {"volumeMounts": [*two, there]})
    assert made == {"volumeMounts": [*base["volumeMounts"], *two, there]}
    assert patched(made, {"volumeMounts": [{"mountPath": "/cache", "readOnly": True}]})["volumeMounts"][2] == {
        **two[1],
        "readOnly": True,
    }
    live = {"volumeMounts": [{**each, "recursiveReadOnly": "Disabled"} for each in made["volumeMounts"]]}
    assert contains(live, made) and view(live, made) == made
    live["volumeMounts"][2]["subPath"] = "other"
    assert not contains(live, made)


def test_entries_with_one_merge_key_are_told_apart_by_the_servers_keys() -> None:
    """One port for two protocols, or one topology with two rules: the API server keeps both entries."""
    ports = [{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}]
    assert patched({"ports": ports[:1]}, {"ports": ports}) == {"ports": ports}
    live = {"ports": [{"containerPort": 53, "protocol": "TCP"}, ports[1]]}
    assert contains(live, {"ports": ports})
    spread = [{"topologyKey": "zone", "whenUnsatisfiable": each} for each in ("DoNotSchedule", "ScheduleAnyway")]
    made = patched({"topologySpreadConstraints": spread[:1]}, {"topologySpreadConstraints": spread[1:]})
    assert made == {"topologySpreadConstraints": spread[1:]}
    assert patched({}, {"topologySpreadConstraints": spread}) == {"topologySpreadConstraints": spread}
    policy = {"ports": [{"port": 8000}]}
    assert not contains({"ports": [{"port": 8000}, {"port": 22}]}, policy), "a NetworkPolicy's ports are one value"


def test_a_patch_keeps_the_operators_readiness_gate() -> None:
    patch = {"spec": {"readinessGates": [{"conditionType": "example.com/ours"}]}}
    made = manifests({**SMALL, "kubernetes": {"pools": {"prefill": {"pod_template": patch}}}})
    gates = made["Deployment", "chat-prefill-0"]["spec"]["template"]["spec"]["readinessGates"]
    assert [each["conditionType"] for each in gates] == ["example.com/ours", "serving.baton.dev/serving"]


def test_the_example_makes_a_cluster() -> None:
    import yaml

    spec = yaml.safe_load(EXAMPLE)
    made = manifests({**spec, "kubernetes": {"node_gpus": 8}})
    assert ("Deployment", "chat-registry") not in made, "the example names a registry"
    pod = made["Deployment", "chat-router"]["spec"]["template"]["spec"]
    files = next(each for each in pod["volumes"] if each["name"] == "files")["projected"]["sources"]
    assert {"key": "keys.acme", "path": "keys/acme"} in files[1]["secret"]["items"]
    told = yaml.safe_load(made["ConfigMap", "chat-file"]["data"]["baton.yaml"])["router"]
    assert not {"host", "port", "admin_host", "admin_port", "processes"} & told.keys()


def test_routers_read_the_file_as_the_operator_does() -> None:
    """Texts that only one version of YAML reads as numbers, and a whole number that JSON writes with a point."""
    registry = {"url": "redis://r:6379", "password_file": "1.0e5"}
    models = [{**SMALL["models"][0], "served_name": "1e5"}]
    given = {**SMALL, "models": models, "registry": registry, "limits": {"body_bytes_max": 2e6}}
    wanted = desired(given).resource
    assert wanted.spec is not None
    read = parse(file_text(wanted), "baton.yaml").usable()
    assert (read.registry, read.limits) == (wanted.spec.registry, wanted.spec.limits)
    assert [each.served_name for each in read.models] == ["1e5"]


def test_routers_make_of_their_file_what_the_spec_says_engines_cost() -> None:
    """Routers price steps and transfers by two of an engine's flags; the others are not in their file."""
    args = {"max_num_batched_tokens": 8192, "kv-cache-dtype": "fp8", "max-model-len": 4096}
    pool = {"gpu": "H100", "engine_args": args}
    models = [{"name": "Qwen/Qwen3-32B", "pools": {"prefill": pool, "decode": {**pool, "shape": {"tp": 2}}}}]
    wanted = desired({"models": models}).resource
    assert wanted.spec is not None
    read = parse(file_text(wanted), "baton.yaml").usable()
    for role in (Role.PREFILL, Role.DECODE):
        instance = Instance(id=InstanceId(f"chat-{role.value}-0"), role=role, url="http://10.0.0.1:8100")
        make = makes_of(read)(instance)
        assert make == makes_of(wanted.spec)(instance)
        assert make is not None
        assert (make.kv_bytes, make.budget_tokens) == (131_072, 8192)
    assert "max-model-len" not in file_text(wanted)


def test_a_change_that_only_engines_read_restarts_no_router_in_extra_pools_either() -> None:
    def text(**changed: Any) -> str:
        extra = {"min": {"role": "decode", "shape": {"tp": 2}, **changed}}
        return file_text(desired({"models": [{"name": "m", "pools": {"prefill": {}, "extra": extra}}]}).resource)

    assert text() == text(max=3, env={"A": "b"}, engine_args={"seed": 1})
    (model,) = parse(text(), "baton.yaml").usable().models
    assert model.pools.extra["min"].shape.tp == 2, "a pool's name is no setting"


STARTED = "2026-01-01T00:00:00Z"
STARTED_AT = 1767225600.0


def loading(pods: tuple[Any, ...], name: str, took_s: float) -> tuple[Any, ...]:
    """Every pod's container runs since `STARTED` and came up after `took_s` seconds; only `name`'s still loads."""
    found = []
    for pod in copy.deepcopy(pods):
        is_up = pod["metadata"]["labels"]["serving.baton.dev/instance"] != name
        pod["status"]["containerStatuses"] = [{"started": is_up, "state": {"running": {"startedAt": STARTED}}}]
        stamp = datetime.fromtimestamp(STARTED_AT + took_s, UTC).isoformat()
        for each in pod["status"]["conditions"]:
            each |= {"lastTransitionTime": stamp, "status": str(is_up)}
        found.append(pod)
    return tuple(found)


def test_a_start_is_slow_compared_with_its_pool_and_changes_no_revision() -> None:
    wanted = desired({"models": [{"name": "m", "pools": {"prefill": {}, "decode": {"min": 2}}}]})
    there = settled(wanted)
    observed = ObservedCluster(
        objects=there.objects, pods=loading(there.pods, "chat-decode-1", 90.0), known=there.known
    )

    def said(after_s: float) -> dict[str, Any]:
        return conditions(status(wanted, observed, (), STARTED_AT + after_s, {}))["Degraded"]

    assert said(170.0)["reason"] == "Healthy", "below twice the longest start of its pool"
    assert said(190.0)["reason"] == "SlowStart"
    assert said(190.0)["message"].startswith(
        "chat-decode-1 has been loading for 190 s, others of its pool took at most 90 s"
    )
    assert not [each for each in plan(wanted, observed, PlanLimits(), STARTED_AT + 190.0) if isinstance(each, Apply)]
    alone = loading(there.pods, "chat-prefill-0", 90.0)
    observed = ObservedCluster(objects=there.objects, pods=alone, known=there.known)
    assert said(9999.0)["reason"] == "Healthy", "no other start of its pool is known: only the startup probe decides"


def test_instances_and_the_registry_are_owned_by_an_object_that_routers_own() -> None:
    wanted = desired()
    there = settled(wanted)
    objects = tuple(
        {**each, "metadata": {**each["metadata"], "uid": "u-order"}}
        if each["metadata"]["name"] == "chat-order"
        else each
        for each in there.objects
    )
    routers = tuple({"metadata": {"name": f"chat-router-{each}", "uid": f"u-{each}", "labels": {}}} for each in "ab")
    observed = ObservedCluster(objects=objects, pods=there.pods, routers=routers, known=there.known)
    made = {
        (each.manifest["kind"], each.manifest["metadata"]["name"]): each.manifest["metadata"]["ownerReferences"]
        for each in plan(wanted, observed, PlanLimits(), 0.0)
        if isinstance(each, Apply)
    }
    assert [each["kind"] for each in made.pop(("ConfigMap", "chat-order"))] == ["BatonCluster", "Pod", "Pod"]
    assert {name for _, name in made} == {
        *("chat-decode-0", "chat-prefill-0", "chat-registry", "chat-instance", "chat-router"),
    }
    for (kind, name), owners in made.items():
        assert kind in {"Deployment", "Service", "NetworkPolicy"}, name
        assert [each["uid"] for each in owners] == ["u-1", "u-order"]
        assert [each.get("controller", False) for each in owners] == [True, False]


def test_refused_pods_count_as_unschedulable() -> None:
    wanted = desired()
    there = settled(wanted)
    said = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota", "lastTransitionTime": STARTED}
    objects = tuple(
        {**each, "status": {"conditions": [said]}} if each["metadata"]["name"] == "chat-decode-0" else each
        for each in there.objects
    )
    pods = tuple(each for each in there.pods if "decode" not in each["metadata"]["name"])
    observed = ObservedCluster(objects=objects, pods=pods, known=there.known)
    (found,) = (each for each in instances(observed, "u-1") if each.name == "chat-decode-0")
    assert found.unschedulable_since == STARTED_AT
    fact = conditions(status(wanted, observed, (), 0.0, {}))["Degraded"]
    assert (fact["reason"], fact["message"]) == ("PodsRefused", "chat-decode-0: exceeded quota")


def reported(name: str, **said: Any) -> ObservedCluster:
    """The settled cluster, with what the Deployment controller reports of one Deployment."""
    there = settled(desired())
    found: Any = next(
        each for each in there.objects if (each["kind"], each["metadata"]["name"]) == ("Deployment", name)
    )
    found["metadata"]["generation"] = 2
    found["status"] = {"observedGeneration": 2, **said}
    return there


def deployed(progressing: str, available: str = "True", **said: Any) -> dict[str, Any]:
    """The status of a Deployment with two conditions: `progressing` is the reason of the first."""
    kinds = {"Progressing": "False" if progressing == "ProgressDeadlineExceeded" else "True", "Available": available}
    each = {"reason": progressing, "message": "has timed out progressing.", "lastTransitionTime": STARTED}
    return {**said, "conditions": [{"type": kind, "status": value, **each} for kind, value in kinds.items()]}


WHOLE = {"replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}


def told(there: ObservedCluster, after_s: float = 1000.0) -> dict[str, Any]:
    return conditions(status(desired(), there, (), STARTED_AT + after_s, {}))


def test_a_rollout_of_routers_is_under_way_until_the_last_old_one_is_gone() -> None:
    """``kubectl wait --for=condition=Progressing=false`` after a new `router_image` returned at once."""
    done = told(reported("chat-router", **WHOLE))
    assert (done["Progressing"]["status"], done["Degraded"]["status"]) == ("False", "False")
    for said in ({"updatedReplicas": 1}, {"replicas": 3}, {"availableReplicas": 1}, {"observedGeneration": 1}):
        fact = told(reported("chat-router", **{**WHOLE, **said}))["Progressing"]
        assert fact["status"] == "True", said
        assert fact["message"].startswith("chat-router: ")
    fact = told(reported("chat-router", **{**WHOLE, "updatedReplicas": 1}))["Progressing"]
    assert fact["message"] == "chat-router: 1 of 2 pods are new, 2 serve"


@pytest.mark.parametrize("name", ["chat-router", "chat-registry", "chat-decode-0"])
def test_pods_that_do_not_come_up_are_reported(name: str) -> None:
    """An image that cannot be pulled: the status said that nothing is wrong."""
    fact = told(reported(name, **deployed("ProgressDeadlineExceeded")))["Degraded"]
    assert (fact["status"], fact["reason"]) == ("True", "PodsDown")
    assert fact["message"] == f"{name}: has timed out progressing.; look at its pods"


def test_a_rollout_that_kubernetes_has_given_up_is_not_under_way() -> None:
    """`Progressing` stayed True for ever, and with it the operator's short interval."""
    half = deployed("ProgressDeadlineExceeded", **{**WHOLE, "updatedReplicas": 1})
    facts = told(reported("chat-router", **half))
    assert (facts["Progressing"]["status"], facts["Progressing"]["reason"]) == ("False", "AsWanted")
    assert (facts["Degraded"]["status"], facts["Degraded"]["reason"]) == ("True", "PodsDown")
    facts = told(reported("chat-router", **{**half, "observedGeneration": 1}))
    assert facts["Progressing"]["message"] == "chat-router: a change is under way", "the next change ends the waiting"


def test_routers_that_are_lost_are_reported_and_one_that_a_node_gives_up_is_not() -> None:
    lost = reported("chat-router", **deployed("NewReplicaSetAvailable", "False", **{**WHOLE, "availableReplicas": 1}))
    assert told(lost, 60.0)["Degraded"]["status"] == "False"
    fact = told(lost, 121.0)["Degraded"]
    assert (fact["reason"], fact["message"]) == ("PodsDown", "chat-router: 1 of 2 pods serve; look at its pods")
    starts = reported("chat-router", **deployed("ReplicaSetUpdated", "False", replicas=2, updatedReplicas=2))
    assert told(starts)["Degraded"]["status"] == "False", "its first start has the time of `start_s`"


def test_without_a_router_nothing_is_available() -> None:
    assert told(reported("chat-router", **WHOLE))["Available"]["status"] == "True"
    fact = told(reported("chat-router", replicas=2, updatedReplicas=2))["Available"]
    assert (fact["status"], fact["reason"], fact["message"]) == ("False", "NoRouter", "chat-router: no router serves")


@pytest.mark.parametrize("operator_in", ["", "its own", "baton-system"])
def test_only_the_operators_own_namespace_passes_the_network_policies(operator_in: str) -> None:
    """Any namespace's pods may carry the operator's label."""
    wanted = desired()
    its_own = wanted.resource.namespace if operator_in == "its own" else operator_in
    made = children(wanted.resource, IMAGES, {}, operator_in=its_own)
    policies = [each for each in made if each["kind"] == "NetworkPolicy"]
    peers = [peer for each in policies for rule in each["spec"]["ingress"] for peer in rule.get("from", ())]
    mine = [each for each in peers if "baton-operator" in str(each)]
    elsewhere = {"matchLabels": {"kubernetes.io/metadata.name": "baton-system"}}
    assert len(mine) == 3
    assert all(each.get("namespaceSelector") == (elsewhere if operator_in == "baton-system" else None) for each in mine)


def test_the_registrys_users_are_written_again_when_their_rights_change_and_keep_their_passwords() -> None:
    """A newer version's programs need keys and channels that the list of an older one does not give them."""
    objects = settled(desired()).objects
    (secret,) = [each for each in objects if each["metadata"]["name"] == "chat-internal"]
    old = copy.deepcopy(secret)
    old["metadata"]["labels"].pop(LABEL_USERS)
    old["data"]["users.acl"] = "b2xk"
    before = tuple(old if each is secret else each for each in objects)
    todo = plan(desired(), ObservedCluster(objects=before), PlanLimits(), 2000.0)
    assert [each.name for each in todo if isinstance(each, RenewUsers)] == ["chat-internal"]
    after = applied(todo, before)
    (made,) = [each for each in after if each["metadata"]["name"] == "chat-internal"]
    assert made["data"] == secret["data"], "passwords, the operator's key and the list"
    again = plan(desired(), ObservedCluster(objects=after), PlanLimits(), 2000.0)
    assert not [each for each in again if isinstance(each, RenewUsers)]


def test_another_name_in_the_registry_starts_the_registry_again_with_its_users() -> None:
    """The list allows one cluster's keys: programs of another name would be refused."""
    spec = {**SMALL, "registry": {"cluster": "other"}}
    before, after = (
        next(each for each in children(desired(of).resource, IMAGES, {}) if each["metadata"]["name"] == "chat-registry")
        for of in (SMALL, spec)
    )
    marks = {each["spec"]["template"]["metadata"]["labels"][LABEL_USERS] for each in (before, after)}
    assert len(marks) == 2
