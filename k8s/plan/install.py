"""The operator's own objects: account, Role, NetworkPolicy, Deployment; one source for manifests and chart. Pure."""

from __future__ import annotations

from typing import Any, Final

from k8s.plan.pods import container_security, field_env, pod_security
from k8s.plan.rights import rules

NAME: Final = "baton-operator"
METRICS_PORT: Final = 8080


def _metadata(namespace: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/part-of": "baton"}
    return {"name": NAME, "namespace": namespace, "labels": labels}


def operator_objects(
    namespace: str,
    *,
    image: str,
    engine: str,
    router: str,
    redis: str,
    prometheus_in: str | None = None,
    replicas: object = 2,
) -> tuple[dict[str, Any], ...]:
    """All objects but the CustomResourceDefinitions. Arguments may be expressions of a template language (Helm).

    `prometheus_in`: the namespace of Prometheus; None: the operator's own.
    """
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
    words = ["baton", "operator", "--host", "$(POD_IP)", "--port", str(METRICS_PORT)]
    words += ["--image", engine, "--router-image", router, "--redis-image", redis]
    policy = _policy(metadata, prometheus_in or namespace)
    return account, role, binding, policy, _deployment(metadata, words, image, replicas)


def _policy(metadata: dict[str, Any], prometheus_in: str) -> dict[str, Any]:
    """Pods of the operator's namespace and of Prometheus' reach the port of probes and metrics. So does the kubelet:
    traffic from a pod's own node passes every policy.
    """
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": prometheus_in}}}
    ingress = {
        "from": [{"podSelector": {}}, prometheus],
        "ports": [{"protocol": "TCP", "port": METRICS_PORT}],
    }
    body = {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
        "policyTypes": ["Ingress"],
        "ingress": [ingress],
    }
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": body}


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
        "env": [
            field_env("POD_IP", "status.podIP"),
            {"name": "XDG_STATE_HOME", "value": "/tmp"},  # noqa: S108
        ],
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
