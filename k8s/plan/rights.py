"""The verbs that the operator's Role allows: one table for chart, manifests and `baton k8s doctor`. Pure."""

from __future__ import annotations

from typing import Any, Final

from k8s.crd.names import GROUP

_CHILD: Final = ("create", "delete", "get", "list", "patch", "watch")
_KEPT: Final = ("create", "get", "list", "patch", "watch")
"""Verbs for kinds whose objects exist as long as their cluster: the garbage collector deletes them with it."""

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
    ("monitoring.coreos.com", "podmonitors"): _CHILD,
    ("networking.k8s.io", "networkpolicies"): _CHILD,
    ("policy", "poddisruptionbudgets"): _CHILD,
}
"""Verbs by API group and resource. Two are needed only with the admission plugin OwnerReferencesPermissionEnforcement,
as in OpenShift: ``batonclusters/finalizers`` for `blockOwnerDeletion` of children, and the deletion of ConfigMaps for
the one that keeps the order of a deletion, whose owners change."""


def rules() -> list[dict[str, Any]]:
    """The rules of a Role."""
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for (group, resource), verbs in sorted(RIGHTS.items())
    ]
