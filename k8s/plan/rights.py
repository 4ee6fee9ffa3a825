"""What the operator's Role allows, verb by verb: the one table of chart, manifests and `doctor`. Pure."""

from __future__ import annotations

from typing import Any, Final

from k8s.crd.names import GROUP

_CHILD: Final = ("create", "delete", "get", "list", "patch", "watch")
_KEPT: Final = ("create", "get", "list", "patch", "watch")
"""Of a kind whose objects are there as long as their cluster is: the garbage collector deletes them with it."""

RIGHTS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    (GROUP, "batonclusters"): ("list", "watch"),
    (GROUP, "batonclusters/finalizers"): ("update",),
    (GROUP, "batonclusters/status"): ("patch",),
    (GROUP, "batonpools"): ("list", "watch"),
    (GROUP, "batonpools/status"): ("patch",),
    ("", "configmaps"): _CHILD,
    ("", "events"): ("create",),
    ("", "pods"): ("list", "watch"),
    ("", "pods/status"): ("patch",),
    ("", "secrets"): ("create", "delete", "list", "patch", "update", "watch"),
    ("", "serviceaccounts"): _KEPT,
    ("", "services"): _CHILD,
    ("apps", "deployments"): _CHILD,
    ("coordination.k8s.io", "leases"): ("create", "get", "update"),
    ("gateway.networking.k8s.io", "httproutes"): _CHILD,
    ("leaderworkerset.x-k8s.io", "leaderworkersets"): _CHILD,
    ("monitoring.coreos.com", "podmonitors"): _CHILD,
    ("networking.k8s.io", "networkpolicies"): _CHILD,
    ("policy", "poddisruptionbudgets"): _CHILD,
}
"""By API group and resource. Two are asked for only where the admission plugin OwnerReferencesPermissionEnforcement is
on, as in OpenShift: ``batonclusters/finalizers`` for `blockOwnerDeletion` of children, and the deletion of ConfigMaps
for the one whose owners change, which keeps the order of a deletion."""


def rules() -> list[dict[str, Any]]:
    """As they stand in a Role."""
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for (group, resource), verbs in sorted(RIGHTS.items())
    ]
