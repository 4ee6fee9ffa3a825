"""The operator's own objects: account, Role, Deployment. One source for plain manifests and the chart. Pure."""

from __future__ import annotations

from typing import Any, Final

from k8s.plan.pods import container_security, pod_security
from k8s.plan.rights import rules

NAME: Final = "baton-operator"
METRICS_PORT: Final = 8080


def _metadata(namespace: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/part-of": "baton"}
    return {"name": NAME, "namespace": namespace, "labels": labels}


def operator_objects(
    namespace: str, *, image: str, engine: str, router: str, redis: str, replicas: object = 2
) -> tuple[dict[str, Any], ...]:
    """All objects but the CustomResourceDefinitions. Arguments may be expressions of a template language (Helm)."""
    metadata = _metadata(namespace)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules()}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}],
    }
    words = ["baton", "operator", "--host", "0.0.0.0", "--port", str(METRICS_PORT)]  # noqa: S104 - a pod's own
    words += ["--image", engine, "--router-image", router, "--redis-image", redis]
    return account, role, binding, _deployment(metadata, words, image, replicas)


def _deployment(metadata: dict[str, Any], words: list[str], image: str, replicas: object) -> dict[str, Any]:
    chosen = {"app.kubernetes.io/name": NAME}
    probe = {"httpGet": {"path": "/health", "port": "metrics"}, "periodSeconds": 10, "timeoutSeconds": 5}
    container = {
        "name": "operator",
        "image": image,
        "command": words,
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "securityContext": container_security(),
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
        "livenessProbe": probe,
        "readinessProbe": probe,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - an emptyDir of the pod's own
        "env": [{"name": "XDG_STATE_HOME", "value": "/tmp"}],  # noqa: S108
    }
    pod = {
        "metadata": {"labels": metadata["labels"]},
        "spec": {
            "serviceAccountName": NAME,
            "securityContext": pod_security(),
            "terminationGracePeriodSeconds": 30,
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }
    body = {"replicas": replicas, "selector": {"matchLabels": chosen}, "template": pod}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": body}
