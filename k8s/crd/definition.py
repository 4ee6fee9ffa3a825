"""The CustomResourceDefinitions of `BatonCluster` and `BatonPool`, as objects. Pure."""

from __future__ import annotations

from typing import Any, Final

from cluster.spec.settings import POOL_MAX, Spec
from k8s.crd.names import CLUSTER, CONDITIONS, GROUP, POOL, VERSION
from k8s.crd.schema import described, properties, section_schema
from k8s.crd.settings import DNS_NAME, SUBDOMAIN, Kubernetes


def _condition() -> dict[str, Any]:
    """The schema of a condition, by Kubernetes' API conventions (``metav1.Condition``)."""
    return properties(
        {
            "type": described("string", f"One of {', '.join(CONDITIONS)}.", maxLength=316),
            "status": described("string", "True, False or Unknown.", enum=["True", "False", "Unknown"]),
            "observedGeneration": described("integer", "The generation it was said of.", format="int64", minimum=0),
            "lastTransitionTime": described("string", "When its status changed last.", format="date-time"),
            "reason": described("string", "One word for programs.", minLength=1, maxLength=1024),
            "message": described("string", "One line for people.", maxLength=32768),
        },
        required=["type", "status", "lastTransitionTime", "reason", "message"],
    )


def _conditions() -> dict[str, Any]:
    return {
        "type": "array",
        "description": "What holds now.",
        "items": _condition(),
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }


def _count(text: str) -> dict[str, Any]:
    return described("integer", text, format="int32", minimum=0)


def _pool_status() -> dict[str, Any]:
    return properties(
        {
            "role": described("string", "prefill, decode or both."),
            "desired": _count("Instances wanted."),
            "ready": _count("Instances that serve."),
            "updated": _count("Instances of the wanted revision."),
            "draining": _count("Instances that leave."),
            "gpus": _count("GPUs of its instances."),
            "revision": described("string", "The wanted revision."),
            "because": described("string", "Why so many are wanted."),
        }
    )


def _cluster_status() -> dict[str, Any]:
    return properties(
        {
            "observedGeneration": described("integer", "The generation that was read last.", format="int64"),
            "model": described("string", "Names of the models."),
            "prefill": described("string", "Ready and wanted prefill instances, as 1/2."),
            "decode": described("string", "Ready and wanted decode instances, as 1/2."),
            "both": described("string", "Ready and wanted instances of both roles, as 1/2."),
            "attainment": described("string", "Share of requests that met their targets, in percent."),
            "revision": described("string", "Instances of the wanted revision and all instances, as 3/4."),
            "because": described("string", "The last thing that was done or is waited for."),
            "pools": {
                "type": "object",
                "description": "By pool.",
                "additionalProperties": _pool_status(),
            },
            "conditions": _conditions(),
        }
    )


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, "priority": priority}


_COLUMNS: Final = [
    _column("Model", ".status.model"),
    _column("Prefill", ".status.prefill"),
    _column("Decode", ".status.decode"),
    _column("Both", ".status.both", priority=1),
    _column("Attainment", ".status.attainment"),
    _column("Revision", ".status.revision"),
    _column("Available", '.status.conditions[?(@.type=="Available")].status'),
    _column("Because", ".status.because"),
    _column("Age", ".metadata.creationTimestamp", "date"),
]


def _object(text: str, spec: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    names = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
    fields = {**names, "spec": spec, "status": status}
    return {"openAPIV3Schema": properties(fields, description=text, required=["spec"])}


def _definition(kind: str, plural: str, version: dict[str, Any], short_names: list[str]) -> dict[str, Any]:
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {**names, "shortNames": short_names, "categories": ["all"]},
            "versions": [{"name": VERSION, "served": True, "storage": True, **version}],
        },
    }


def _cluster_spec() -> dict[str, Any]:
    schema = section_schema(Spec)
    schema["properties"]["kubernetes"] = section_schema(Kubernetes)
    return schema


def _pool_spec() -> dict[str, Any]:
    name = {"minLength": 1, "maxLength": 63, "pattern": f"^({DNS_NAME.pattern})$"}
    cluster = {"minLength": 1, "maxLength": 253, "pattern": f"^({SUBDOMAIN.pattern})$"}
    replicas = described("integer", "Instances of the pool.", format="int32", minimum=0, maximum=POOL_MAX)
    rule = {
        "rule": "self.cluster == oldSelf.cluster && self.pool == oldSelf.pool",
        "message": "`cluster` and `pool` cannot change: make another BatonPool",
    }
    fields = {
        "cluster": described("string", "The BatonCluster, in this namespace.", **cluster),
        "pool": described("string", "The pool: `prefill`, or `qwen3-32b-prefill` with several models.", **name),
        "replicas": replicas,
    }
    required = ["cluster", "pool", "replicas"]
    return properties(fields, required=required) | {"x-kubernetes-validations": [rule]}


def _scaled_status() -> dict[str, Any]:
    return properties(
        {
            "observedGeneration": described("integer", "The generation that was read last.", format="int64"),
            "replicas": _count("Instances there are."),
            "readyReplicas": _count("Instances that serve."),
            "selector": described("string", "Labels of its pods, for the HorizontalPodAutoscaler."),
            "conditions": _conditions(),
        }
    )


CLUSTER_CRD: Final = _definition(
    CLUSTER,
    "batonclusters",
    {
        "schema": _object("A cluster that serves models, whole.", _cluster_spec(), _cluster_status()),
        "subresources": {"status": {}},
        "additionalPrinterColumns": _COLUMNS,
    },
    ["bc"],
)

POOL_CRD: Final = _definition(
    POOL,
    "batonpools",
    {
        "schema": _object(
            "The size of one pool in other hands: a person's, or a HorizontalPodAutoscaler's. While it is there, "
            "Baton's own controller only advises.",
            _pool_spec(),
            _scaled_status(),
        ),
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            _column("Cluster", ".spec.cluster"),
            _column("Pool", ".spec.pool"),
            _column("Replicas", ".spec.replicas", "integer"),
            _column("Ready", ".status.readyReplicas", "integer"),
        ],
    },
    ["bp"],
)


def crds() -> tuple[dict[str, Any], ...]:
    """Both definitions."""
    return (CLUSTER_CRD, POOL_CRD)
