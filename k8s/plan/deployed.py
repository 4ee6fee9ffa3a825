"""What Kubernetes reports of Deployments: whether routers and the registry serve, and which Deployment is stuck. Pure.

Instances are judged by their pods and agents; of their Deployments only a deadline that has passed counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from k8s.crd.names import LABEL_PART
from k8s.plan.observe import condition, is_ours, unix
from k8s.plan.plan import Look

Json = Mapping[str, Any]

DOWN_S: Final = 120.0
"""Seconds for which pods of routers or of the registry are missing before it is reported: a node that is drained takes
them for shorter."""


def no_router(seen: Look, uid: str) -> str:
    """Why no request is answered; empty: a router serves, or Kubernetes has not reported it yet."""
    for thing in _deployments(seen, uid, "router"):
        if _is_reported(thing) and not thing["status"].get("availableReplicas"):
            return f"{thing['metadata']['name']}: no router serves"
    return ""


def unfinished(seen: Look, uid: str) -> Iterator[str]:
    """Deployments of routers and registry that are not whole and new, by the rules of ``kubectl rollout status``. A
    rollout that Kubernetes has given up is not under way: it is `stuck`.
    """
    for thing in _deployments(seen, uid, "router", "registry"):
        if not _is_reported(thing):
            continue
        name, wanted, said = thing["metadata"]["name"], _wanted(thing), thing["status"]
        if int(said["observedGeneration"]) < int(thing["metadata"].get("generation") or 0):
            yield f"{name}: a change is under way"
            continue
        if _is_given_up(thing):
            continue
        updated, serving = int(said.get("updatedReplicas") or 0), int(said.get("availableReplicas") or 0)
        if updated < wanted or int(said.get("replicas") or 0) > updated or serving < updated:
            yield f"{name}: {updated} of {wanted} pods are new, {serving} serve"


def stuck(seen: Look, uid: str, now: float) -> str:
    """The first Deployment whose pods do not come up, or that lost them; empty: there is none. `now`: Unix seconds."""
    leaving = {each.name for each in seen.instances if each.leaving}
    for thing in _deployments(seen, uid, "router", "registry", "instance"):
        name = thing["metadata"]["name"]
        progress, available = condition(thing, "Progressing"), condition(thing, "Available")
        if _is_given_up(thing) and name not in leaving:
            return f"{name}: {progress.get('message', 'its pods do not come up')}"
        since = unix(available.get("lastTransitionTime"))
        is_down = available.get("status") == "False" and since is not None and now - since > DOWN_S
        has_been_up = progress.get("reason") == "NewReplicaSetAvailable"
        if is_down and has_been_up and thing["metadata"]["labels"][LABEL_PART] != "instance":
            serving = int(thing["status"].get("availableReplicas") or 0)
            return f"{name}: {serving} of {_wanted(thing)} pods serve"
    return ""


def _deployments(seen: Look, uid: str, *parts: str) -> Iterator[Json]:
    for (kind, _), thing in sorted(seen.live.items()):
        is_one = kind == "Deployment" and thing["metadata"].get("labels", {}).get(LABEL_PART) in parts
        if is_one and is_ours(thing, uid) and not thing["metadata"].get("deletionTimestamp"):
            yield thing


def _is_reported(thing: Json) -> bool:
    return (thing.get("status") or {}).get("observedGeneration") is not None


def _is_given_up(thing: Json) -> bool:
    """Whether Kubernetes no longer expects the pods to come up (``ProgressDeadlineExceeded``)."""
    return bool(condition(thing, "Progressing").get("status") == "False")


def _wanted(thing: Json) -> int:
    return int(thing["spec"].get("replicas", 1))
