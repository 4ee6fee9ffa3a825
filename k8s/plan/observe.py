"""Reads live objects: instances from their workloads and pods, and which objects are ours. Pure.

Labels of children and the API server's fields of pods have everything; a plan keeps no state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from cluster.instance import Role
from k8s.crd.names import (
    FIELD_MANAGER,
    LABEL_DRAINING,
    LABEL_FAMILY,
    LABEL_GPU,
    LABEL_MANAGED,
    LABEL_MODEL,
    LABEL_PARKED,
    LABEL_PART,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_ROLE,
    READY_GATE,
    read_gpu_label,
)
from k8s.plan.readiness import Known
from k8s.plan.values import PlannedObject

INSTANCE: Final = "serving.baton.dev/instance"
"""Label of workloads and pods: the instance's name."""
DISRUPTION: Final = "DisruptionTarget"
"""The condition that Kubernetes sets on a pod before it takes it (kubernetes.io, "Pod disruption conditions")."""
REPLICA_FAILURE: Final = "ReplicaFailure"
"""The condition of a Deployment whose pods the API server refuses: a quota, an admission policy."""
WORKLOAD: Final = "Deployment"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCluster:
    """The present state of a cluster. It has many attributes: API objects, answers of agents and routers, and the words
    of whatever decides on sizes come together here.
    """

    objects: tuple[Json, ...] = ()
    """Live objects with the cluster's label, and objects of others that have a name which the cluster wants."""
    pods: tuple[Json, ...] = ()
    """Pods of instances."""
    routers: tuple[Json, ...] = ()
    """Pods of routers."""
    drained: frozenset[str] = frozenset()
    """Instances whose agents have no stream and no hold left."""
    working: frozenset[str] = frozenset()
    """Instances whose agents take work."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By instance, the role that its agent reports; an instance that is not named has the role of its workload."""
    known: Known = field(default_factory=Known)
    external: Mapping[str, int] = field(default_factory=dict)
    """Replicas by pool that BatonPools want."""
    advised: Mapping[str, int] = field(default_factory=dict)
    """Replicas by pool that the goodput controller wants."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By pool, why the controller wants so many."""
    scales: bool = False
    """Whether a goodput controller runs for this cluster."""
    advice: str = ""
    """What the goodput controller would do if others decide, or why there is none; for people."""
    accepted: Mapping[tuple[str, str], Json] = field(default_factory=dict)
    """By kind and name, the server's form of objects that it keeps in another form than they were applied."""
    refused: tuple[str, ...] = ()
    """What the server refused at this look, and why."""
    attainment: float | None = None
    """Share of the last five minutes' requests that met their targets, as routers report it; None: unknown."""


def is_ours(thing: Json, uid: str) -> bool:
    """Whether an object is a child of the resource with this UID, and made by this operator."""
    metadata = thing.get("metadata", {})
    if metadata.get("labels", {}).get(LABEL_MANAGED) != FIELD_MANAGER:
        return False
    return any(each.get("uid") == uid and each.get("controller") for each in metadata.get("ownerReferences", ()))


def unix(text: object) -> float | None:
    """A time of the API server (RFC 3339) in Unix seconds; None for any other text."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def condition(thing: Json, kind: str) -> Json:
    """The condition of type `kind` of an object; empty if it has none."""
    found = thing.get("status", {}).get("conditions") or ()
    return next((each for each in found if each.get("type") == kind), {})


def is_true(thing: Json, kind: str) -> bool:
    """Whether a condition is True."""
    return condition(thing, kind).get("status") == "True"


def pods_by_instance(pods: tuple[Json, ...]) -> dict[str, Json]:
    """The current pod of each instance: one that is not ending, else the youngest."""
    best: dict[str, Json] = {}
    for pod in pods:
        name = pod["metadata"].get("labels", {}).get(INSTANCE)
        if name and (name not in best or _rank(pod) > _rank(best[name])):
            best[name] = pod
    return best


def _rank(pod: Json) -> tuple[bool, bool, str]:
    metadata = pod["metadata"]
    ended = pod.get("status", {}).get("phase") in {"Failed", "Succeeded"}
    return not metadata.get("deletionTimestamp"), not ended, str(metadata.get("creationTimestamp", ""))


def instances(
    observed: ObservedCluster, uid: str, types: Mapping[str, str] = MappingProxyType({})
) -> Iterator[PlannedObject]:
    """Every instance that has a workload. `types`: GPU types by their form in a label; others keep that form."""
    pods = pods_by_instance(observed.pods)
    taken = {pod["metadata"].get("labels", {}).get(INSTANCE) for pod in observed.pods if is_true(pod, DISRUPTION)}
    for thing in observed.objects:
        labels = thing["metadata"].get("labels", {})
        if thing["kind"] == WORKLOAD and labels.get(LABEL_PART) == "instance" and is_ours(thing, uid):
            found = _instance(thing, labels, pods.get(thing["metadata"]["name"]), observed)
            yield replace(found, gpu=types.get(found.gpu, found.gpu), disrupted=found.name in taken)


def _instance(thing: Json, labels: Mapping[str, str], pod: Json | None, observed: ObservedCluster) -> PlannedObject:
    name = thing["metadata"]["name"]
    gpu, gpus = read_gpu_label(labels.get(LABEL_GPU, "any.1"))
    scheduled = pod is not None and bool(pod.get("spec", {}).get("nodeName"))
    live = scheduled and pod is not None and not pod["metadata"].get("deletionTimestamp")
    statuses = (pod or {}).get("status", {}).get("containerStatuses") or ()
    unplaced = condition(pod, "PodScheduled") if pod is not None else {}
    waiting = unplaced.get("status") == "False" and unplaced.get("reason") == "Unschedulable" and not scheduled
    unplaced_since = (unix(unplaced.get("lastTransitionTime")) or 0.0) if waiting else None
    loading_since, loaded_s = _loading(pod, statuses) if live and pod is not None else (None, None)
    return PlannedObject(
        name=name,
        model=labels.get(LABEL_MODEL, ""),
        pool=labels.get(LABEL_POOL, ""),
        role=observed.roles.get(name) or _role(labels),
        revision=labels.get(LABEL_REVISION, ""),
        family=labels.get(LABEL_FAMILY, ""),
        gpu=gpu,
        gpus=gpus,
        parked=LABEL_PARKED in labels,
        scheduled=scheduled,
        unschedulable_since=_waits_since(thing) if pod is None else unplaced_since,
        loading_since=loading_since,
        loaded_s=loaded_s,
        started=live and bool(statuses) and all(each.get("started") for each in statuses),
        healthy=live and pod is not None and is_true(pod, "ContainersReady"),
        ready=live and pod is not None and is_true(pod, "Ready"),
        draining_since=_since(labels),
        drained=name in observed.drained,
        deleting=bool(thing["metadata"].get("deletionTimestamp")),
    )


def _role(labels: Mapping[str, str]) -> Role:
    """The role in a workload's labels; both, if the label has another word."""
    return next((each for each in Role if each.value == labels.get(LABEL_ROLE)), Role.BOTH)


def _loading(pod: Json, statuses: Sequence[Json]) -> tuple[float | None, float | None]:
    """Since when (Unix time) a pod's engine loads, or how many seconds loading took, until its containers were ready.

    If readiness was lost and came back, the time is longer than the load took: it is an upper bound.
    """
    began = [unix(each.get("state", {}).get("running", {}).get("startedAt")) for each in statuses]
    known = [each for each in began if each is not None]
    if not known or len(known) < len(statuses):
        return None, None
    if not all(each.get("started") for each in statuses):
        return max(known), None
    ready_at = unix(condition(pod, "ContainersReady").get("lastTransitionTime"))
    return None, None if ready_at is None or not is_true(pod, "ContainersReady") else max(0.0, ready_at - max(known))


def _waits_since(workload: Json) -> float | None:
    """Since when (Unix time) the API server refuses a workload's pods: a used-up quota counts like a missing node."""
    said = condition(workload, REPLICA_FAILURE)
    return (unix(said.get("lastTransitionTime")) or 0.0) if said.get("status") == "True" else None


def _since(labels: Mapping[str, str]) -> float | None:
    text = labels.get(LABEL_DRAINING, "")
    return float(text) if text.isdecimal() else None


def gate_of(pod: Json) -> bool:
    """Whether a pod's readiness gate is open."""
    return is_true(pod, READY_GATE)
