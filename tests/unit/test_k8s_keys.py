"""Ticket keys of a cluster on Kubernetes: which program gets which keys, when keys are made and how replaced."""

from __future__ import annotations

import copy
import dataclasses
from base64 import b64decode
from typing import Any

import pytest
from support.k8s_objects import SMALL, applied, conditions, desired, manifests, settled

from cluster.ids import InstanceId
from k8s.crd.names import LABEL_KEYS, LABEL_REVISION
from k8s.operator.secrets import access, keys_in
from k8s.plan import (
    Apply,
    Delete,
    Derive,
    Desired,
    Generate,
    KeyStage,
    ObservedCluster,
    PlanLimits,
    Rekey,
    plan,
    status,
)
from k8s.plan.keys import is_before_key, made_for
from kvtransfer.keys import instance_key, read_instance
from kvtransfer.seal import read_identity

FLEET = ("Secret", "chat-ticket-keys")
LIMITS = PlanLimits(keys_s=100.0)


def text(secret: Any, key: str = "tickets") -> str:
    return b64decode(secret["data"][key]).decode()


def mounted(manifest: Any) -> dict[str, set[str] | None]:
    """By name, the Secrets that a workload's pods mount, and the keys mounted of each Secret (None: all)."""
    found: dict[str, set[str] | None] = {}
    for volume in manifest["spec"]["template"]["spec"]["volumes"]:
        sources = [volume, *volume.get("projected", {}).get("sources", ())]
        for said in (each["secret"] for each in sources if "secret" in each):
            items = said.get("items")
            found[said.get("secretName") or said["name"]] = items and {each["key"] for each in items}
    return found


def test_each_program_mounts_its_own_keys_and_no_others() -> None:
    made = manifests()
    assert mounted(made["Deployment", "chat-router"]) == {
        "chat-internal": {"operator-key-digest", "baton-router-password"},
        "chat-ticket-keys": None,
    }
    for name in ("chat-prefill-0", "chat-decode-0"):
        assert mounted(made["Deployment", name]) == {
            "chat-internal": {"operator-key-digest", "baton-agent-password"},
            f"{name}-keys": None,
        }
    assert mounted(made["Deployment", "chat-registry"]) == {"chat-internal": {"users.acl"}}
    for name in ("chat-router", "chat-prefill-0"):
        (container,) = made["Deployment", name]["spec"]["template"]["spec"]["containers"]
        assert container["command"][container["command"].index("--ticket-keys-file") + 1] == "/run/baton-keys/tickets"
        assert all(each["readOnly"] for each in container["volumeMounts"] if each["mountPath"].startswith("/run/"))


def test_an_instances_keys_are_derived_from_the_fleets_keys() -> None:
    made = manifests()
    fleet = keys_in(made[FLEET])
    for name in ("chat-prefill-0", "chat-decode-0"):
        secret = made["Secret", f"{name}-keys"]
        own = read_instance(text(secret))
        assert own.instance == name
        assert own.keys == (instance_key(fleet[0], InstanceId(name)),)
        assert read_identity(text(secret, "tickets.identity")).me == name
        assert fleet[0].secret.hex() not in str({key: b64decode(each) for key, each in secret["data"].items()})


def test_no_key_stands_in_an_action_or_a_pod() -> None:
    wanted = desired()
    made = manifests()
    actions = plan(wanted, settled(wanted), LIMITS, 0.0) + plan(wanted, ObservedCluster(), LIMITS, 0.0)
    seen = str(actions) + str([each for (kind, _), each in made.items() if kind != "Secret"])
    for (kind, _), each in made.items():
        for value in each["data"].values() if kind == "Secret" else ():
            for line in b64decode(value).decode().splitlines():
                long = [word for word in line.split() if len(word) > 30 and not word.startswith(("~", "%", "&", "#"))]
                assert not [word for word in long if word in seen and len(word) == 64]
    assert "Key(" not in repr(access(made["Secret", "chat-internal"], made[FLEET]))


def test_only_routers_and_the_operator_reach_an_agent() -> None:
    rules = manifests()["NetworkPolicy", "chat-instance"]["spec"]["ingress"]
    reach = []
    for rule in rules:
        for port in rule["ports"]:
            low = port.get("port", 1)
            if port["protocol"] == "TCP" and low <= 8200 <= port.get("endPort", low):
                reach += [each["podSelector"]["matchLabels"] for each in rule["from"]]
    assert [each.get("serving.baton.dev/part") or each["app.kubernetes.io/name"] for each in reach] == [
        "router",
        "baton-operator",
    ]
    assert all(rule["from"] for rule in rules), "a rule without `from` lets every pod in"


def test_prometheus_reaches_metrics_if_its_namespace_is_named_and_authenticates() -> None:
    made = manifests({**SMALL, "kubernetes": {"pod_monitor": True, "prometheus_namespace": "monitoring"}})
    for part, port in (("instance", 8200), ("router", 8001)):
        (rule,) = [
            rule
            for rule in made["NetworkPolicy", f"chat-{part}"]["spec"]["ingress"]
            if "monitoring" in str(rule.get("from"))
        ]
        assert rule["ports"] == [{"protocol": "TCP", "port": port}]
    for point in made["PodMonitor", "chat"]["spec"]["podMetricsEndpoints"]:
        assert point["authorization"]["credentials"] == {"name": "chat-internal", "key": "operator-key"}
        (job,) = (rule for rule in point["relabelings"] if rule["targetLabel"] == "job")
        assert (job["action"], job["replacement"]) == ("replace", "baton-llm/chat"), "as alerts want it"


def test_a_manual_change_of_an_instances_keys_is_undone() -> None:
    wanted = desired()
    there = settled(wanted)
    objects = copy.deepcopy(there.objects)
    for each in objects:
        if each["metadata"]["name"] == "chat-decode-0-keys":
            each["data"] = {"tickets": "AAAA"}
    actions = plan(wanted, dataclasses.replace(there, objects=objects), LIMITS, 1.0)
    assert actions == (Derive("chat-decode-0", "its keys are not as they were made"),)


def test_keys_are_deleted_with_their_instance() -> None:
    wanted = desired()
    there = settled(wanted)
    gone = tuple(each for each in there.objects if each["metadata"]["name"] != "chat-decode-0")
    extra = copy.deepcopy(next(each for each in gone if each["metadata"]["name"] == "chat-decode-0-keys"))
    extra["metadata"]["name"] = "chat-decode-7-keys"
    pods = tuple(each for each in there.pods if each["metadata"]["name"] != "chat-decode-0-abc")
    actions = plan(wanted, dataclasses.replace(there, objects=(*gone, extra), pods=pods), LIMITS, 1.0)
    assert [each.name for each in actions if isinstance(each, Delete)] == ["chat-decode-7-keys"]


def without_fleet(there: ObservedCluster) -> ObservedCluster:
    return dataclasses.replace(there, objects=tuple(each for each in there.objects if key_of(each) != FLEET))


def key_of(thing: Any) -> tuple[str, str]:
    return thing["kind"], thing["metadata"]["name"]


def test_lost_keys_are_reported_and_made_anew_only_for_a_new_name_of_keys() -> None:
    wanted = desired({**SMALL, "models": [{"name": "m", "pools": {"prefill": {}, "decode": {"min": 1, "max": 4}}}]})
    there = without_fleet(settled(wanted))
    lost = dataclasses.replace(there, external={"decode": 3})
    actions = plan(wanted, lost, LIMITS, 1.0)
    assert not [each for each in actions if isinstance(each, Generate | Derive | Rekey)]
    started = [each for each in actions if isinstance(each, Apply) and each.manifest["kind"] == "Deployment"]
    assert started == [], "an instance without keys is not started"
    said = conditions(status(wanted, lost, actions, 1.0, {}))
    assert said["Degraded"]["reason"] == "KeysLost"
    asked = desired({**SMALL, "kubernetes": {"ticket_keys": "2"}})
    again = plan(asked, there, LIMITS, 1.0)
    assert (
        Generate("chat-ticket-keys", "the keys that routers and instances prove themselves by are not there") in again
    )


def younger(there: ObservedCluster, when: str, keys: str = "1") -> ObservedCluster:
    """The cluster with every pod made anew at `when`, for the ticket keys named `keys`."""
    pods = []
    for pod in there.pods:
        metadata = {**pod["metadata"], "creationTimestamp": when}
        metadata["labels"] = {**metadata["labels"], LABEL_KEYS: keys}
        pods.append({**pod, "metadata": metadata})
    return dataclasses.replace(there, pods=tuple(pods))


def condition_of(wanted: Desired, there: ObservedCluster, kind: str, now: float) -> Any:
    return conditions(status(wanted, there, plan(wanted, there, LIMITS, now), now, {}))[kind]


def fleet_of(there: ObservedCluster) -> Any:
    return next(each for each in there.objects if key_of(each) == FLEET)


def step(wanted: Desired, there: ObservedCluster, now: float) -> tuple[list[KeyStage], ObservedCluster]:
    """The key stages that one plan sets, and the cluster after them; workloads stay as they are."""
    actions = [each for each in plan(wanted, there, LIMITS, now) if isinstance(each, Rekey | Derive)]
    objects = applied(actions, there.objects, wanted, now)
    then = dataclasses.replace(there, objects=objects)
    derived = [each for each in plan(wanted, then, LIMITS, now) if isinstance(each, Derive)]
    then = dataclasses.replace(then, objects=applied(derived, then.objects, wanted, now))
    return [each.stage for each in actions if isinstance(each, Rekey)], then


def starts(wanted: Desired, there: ObservedCluster, now: float) -> list[str]:
    actions = plan(wanted, there, LIMITS, now)
    made = [each.manifest for each in actions if isinstance(each, Apply) and each.manifest["kind"] == "Deployment"]
    live = {key_of(each) for each in there.objects}
    return [each["metadata"]["name"] for each in made if key_of(each) not in live]


def test_a_key_is_replaced_in_steps_that_reach_every_pod() -> None:
    there = younger(settled(desired()), "1970-01-01T00:10:00Z")
    old = keys_in(fleet_of(there))
    wanted = desired({**SMALL, "kubernetes": {"ticket_keys": "2026-11"}})
    assert starts(wanted, there, 1000.0) == [], "a new pod would read the old key alone"
    stages, there = step(wanted, there, 1000.0)
    assert stages == [KeyStage.ADDED]
    assert starts(wanted, there, 1000.5) == [], "nor does a pod start in the second in which the new key was made"
    assert starts(wanted, there, 1001.0) != []
    added = keys_in(fleet_of(there))
    assert added[0] == old[0], "the old key signs until all programs have the new key"
    assert len(added) == 2
    instance = next(each for each in there.objects if key_of(each) == ("Secret", "chat-decode-0-keys"))
    assert [key.id for key in read_instance(text(instance)).keys] == [key.id for key in added]
    assert step(wanted, there, 1100.0)[0] == []
    stages, there = step(wanted, there, 1101.0)
    assert stages == [KeyStage.SIGNS]
    assert keys_in(fleet_of(there)) == (added[1], added[0])
    assert step(wanted, there, 9000.0)[0] == [], "a pod from before the change has read the old key alone"
    there = younger(there, "1970-01-01T00:30:00Z", "2026-11")
    assert step(wanted, there, 1150.0)[0] == []
    stages, there = step(wanted, there, 1201.0)
    assert stages == [KeyStage.NONE]
    assert keys_in(fleet_of(there)) == (added[1],)
    assert fleet_of(there)["metadata"]["labels"][LABEL_KEYS] == "2026-11"
    assert step(wanted, there, 99999.0)[0] == [], "keys change only when the spec does"


@pytest.mark.parametrize("stage", [KeyStage.ADDED, KeyStage.SIGNS])
def test_a_second_change_of_keys_during_the_first_begins_the_steps_again(stage: KeyStage) -> None:
    """If pods started for the third key before that key exists, no later change would roll them."""
    there = younger(settled(desired()), "1970-01-01T00:10:00Z")
    old = keys_in(fleet_of(there))
    second, third = (desired({**SMALL, "kubernetes": {"ticket_keys": name}}) for name in "23")
    _, there = step(second, there, 1000.0)
    there = younger(there, "1970-01-01T00:17:00Z", "2")
    if stage is KeyStage.SIGNS:
        _, there = step(second, there, 1101.0)
    before = keys_in(fleet_of(there))
    assert starts(third, there, 1150.0) == [], "a new pod would read no third key"
    stages, there = step(third, there, 1150.0)
    assert stages == [KeyStage.ADDED]
    assert starts(third, there, 1151.0) != []
    again = keys_in(fleet_of(there))
    assert again[0] == before[0], "the key that signs goes on signing"
    assert set(again) & set(before) == set(before if stage is KeyStage.SIGNS else old), "a key that never signed goes"
    stages, there = step(third, there, 1300.0)
    assert stages == [KeyStage.SIGNS]
    assert step(third, there, 9000.0)[0] == [], "pods that were made for the second key still run"
    there = younger(there, "1970-01-01T00:19:00Z", "3")
    stages, there = step(third, there, 9000.0)
    assert stages == [KeyStage.NONE]
    assert keys_in(fleet_of(there)) == (again[-1],)
    assert fleet_of(there)["metadata"]["labels"][LABEL_KEYS] == "3"


@pytest.mark.parametrize("stage", [KeyStage.ADDED, KeyStage.SIGNS])
def test_keys_that_are_set_back_to_their_former_name_roll_the_pods_of_that_name(stage: KeyStage) -> None:
    """The pods' template is the wanted one again. Nothing else would roll them, and the old key would stay for ever."""
    first, second = (desired({**SMALL, "kubernetes": {"ticket_keys": name}}) for name in "12")
    there = younger(settled(first), "1970-01-01T00:10:00Z")
    _, there = step(second, there, 1000.0)
    if stage is KeyStage.SIGNS:
        _, there = step(second, there, 1101.0)
    stages, there = step(first, there, 1150.0)
    assert stages == [KeyStage.ADDED]
    assert starts(first, there, 1150.0) == [], "no pod starts in the second in which the new key was made"
    assert starts(first, there, 1151.0) == ["chat-prefill-1", "chat-decode-1"], "the old pods have not read the new key"
    assert not condition_of(first, there, "Progressing", 1151.0)["message"].startswith("every")
    stages, there = step(first, there, 1300.0)
    assert stages == [KeyStage.SIGNS]
    newest = keys_in(fleet_of(there))[0]
    assert step(first, there, 9000.0)[0] == []
    there = younger(there, "1970-01-01T00:20:00Z")
    assert starts(first, there, 9000.0) == []
    stages, there = step(first, there, 9000.0)
    assert stages == [KeyStage.NONE]
    assert keys_in(fleet_of(there)) == (newest,)


def test_keys_are_not_set_back_while_pods_of_that_name_may_look_younger_than_the_next_key() -> None:
    """Only a pod's age shows whether it has read the next key, and the two clocks may differ by a minute."""
    first, second = (desired({**SMALL, "kubernetes": {"ticket_keys": name}}) for name in "12")
    there = younger(settled(first), "1970-01-01T00:18:00Z")  # second 1080
    _, there = step(second, there, 1000.0)
    assert step(first, there, 1130.0)[0] == []
    assert step(first, there, 1139.5)[0] == [], "the next key would count as made in second 1140"
    assert step(first, there, 1141.0)[0] == [KeyStage.ADDED]


@pytest.mark.parametrize("tenths", range(0, 30, 3))
def test_once_keys_are_set_back_every_pod_of_that_name_is_rolled(tenths: int) -> None:
    first, second = (desired({**SMALL, "kubernetes": {"ticket_keys": name}}) for name in "12")
    there = younger(settled(first), "1970-01-01T00:18:00Z")
    _, there = step(second, there, 1000.0)
    stages, there = step(first, there, 1138.5 + tenths / 10)
    pods = [each for each in there.pods if made_for(each) == "1"]
    assert pods
    assert not stages or all(is_before_key(each, fleet_of(there)) for each in pods)


@pytest.mark.parametrize(("made", "ends"), [("1970-01-01T00:16:00Z", True), ("1970-01-01T00:10:00Z", False)])
def test_the_clocks_of_operator_and_server_may_differ(made: str, ends: bool) -> None:
    """By the server's clock a pod is made before its key. A pod from an earlier use of the key's name is far older."""
    wanted = desired({**SMALL, "kubernetes": {"ticket_keys": "2"}})
    _, there = step(wanted, settled(desired()), 1000.0)
    _, there = step(wanted, there, 1101.0)
    assert step(wanted, younger(there, made, "2"), 9000.0)[0] == ([KeyStage.NONE] if ends else [])


def test_another_name_of_keys_rolls_every_instance_and_keeps_pairs() -> None:
    revisions = {
        name: [
            each["metadata"]["labels"][label]
            for each in manifests({**SMALL, "kubernetes": {"ticket_keys": name}}).values()
            if each["kind"] == "Deployment" and LABEL_REVISION in each["metadata"]["labels"]
            for label in (LABEL_REVISION, "serving.baton.dev/family")
        ]
        for name in ("1", "2")
    }
    assert revisions["1"][0] != revisions["2"][0]
    assert revisions["1"][1] == revisions["2"][1]
