"""Objects of one small cluster, as the plan makes them and an API server would keep them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from k8s.crd import read_resource
from k8s.crd.names import LABEL_REVISION
from k8s.operator.secrets import fleet, internal, of_instance, replaced
from k8s.plan import (
    Apply,
    Delete,
    Derive,
    Desired,
    Generate,
    Images,
    Known,
    ObservedCluster,
    PlanLimits,
    Rekey,
    RenewUsers,
    plan,
)
from k8s.plan.pods import fleet_secret

IMAGES = Images(engine="engine:1", router="router:1", redis="redis:8")
SMALL = {"models": [{"name": "m", "pools": {"prefill": {}, "decode": {"min": 1, "max": 4}}}]}


def resource(spec: Mapping[str, Any] = SMALL, name: str = "chat") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "llm", "uid": "u-1", "generation": 1}
    return {"kind": "BatonCluster", "metadata": metadata, "spec": copy.deepcopy(dict(spec))}


def desired(spec: Mapping[str, Any] = SMALL, name: str = "chat", **more: Any) -> Desired:
    return Desired(resource=read_resource(resource(spec, name)), images=IMAGES, **more)


def applied(
    actions: Any, before: tuple[Any, ...] = (), of: Desired | None = None, now: float = 1000.0
) -> tuple[Any, ...]:
    """The objects `before` after these actions of a plan, as an API server would keep them."""
    objects = {(each["kind"], each["metadata"]["name"]): each for each in before}
    owner = (of or desired()).resource
    for action in actions:
        if isinstance(action, Apply):
            manifest = copy.deepcopy(dict(action.manifest))
            objects[manifest["kind"], manifest["metadata"]["name"]] = manifest
        elif isinstance(action, Generate):
            is_fleets = action.name == fleet_secret(owner)
            objects["Secret", action.name] = fleet(owner) if is_fleets else internal(owner, action.name)
        elif isinstance(action, RenewUsers):
            objects["Secret", action.name] = internal(owner, action.name, objects["Secret", action.name])
        elif isinstance(action, Derive):
            made = of_instance(owner, objects["Secret", fleet_secret(owner)], action.name)
            objects["Secret", made["metadata"]["name"]] = made
        elif isinstance(action, Rekey):
            live = {**objects["Secret", action.name]}
            live["metadata"] = {"resourceVersion": "1", **live["metadata"]}
            objects["Secret", action.name] = replaced(owner, live, action.stage, now)
        elif isinstance(action, Delete):
            del objects[action.kind, action.name]
    return tuple(objects.values())


def pod_of(workload: Mapping[str, Any], *, ready: bool = True) -> dict[str, Any]:
    template = workload["spec"]["template"]
    true = "True" if ready else "False"
    kinds = ("PodScheduled", "ContainersReady", "Ready", "serving.baton.dev/serving")
    conditions = [{"type": kind, "status": true, "lastTransitionTime": "2026-01-01T00:00:00Z"} for kind in kinds]
    return {
        "metadata": {"name": f"{workload['metadata']['name']}-abc", "labels": template["metadata"]["labels"]},
        "spec": {"nodeName": "n1"},
        "status": {"conditions": conditions, "containerStatuses": [{"started": ready}]},
    }


def settled(wanted: Desired) -> ObservedCluster:
    objects = applied(plan(wanted, ObservedCluster(), PlanLimits(), 0.0), of=wanted)
    pods = tuple(pod_of(each) for each in objects if each.get("metadata", {}).get("labels", {}).get(LABEL_REVISION))
    return ObservedCluster(objects=objects, pods=pods, known=Known(routers=frozenset({"r"})))


def manifests(spec: Mapping[str, Any] = SMALL, **more: Any) -> dict[tuple[str, str], Any]:
    wanted = desired(spec, **more)
    made = applied(plan(wanted, ObservedCluster(), PlanLimits(), 0.0), of=wanted)
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def conditions(said: Mapping[str, Any]) -> dict[str, Any]:
    return {each["type"]: each for each in said["conditions"]}
