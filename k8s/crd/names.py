"""Names in Kubernetes' API: the group, labels, annotations, conditions, the field manager, keys of lists. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

GROUP: Final = "serving.baton.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
CLUSTER: Final = "BatonCluster"
POOL: Final = "BatonPool"

FIELD_MANAGER: Final = "baton-operator"

LIST_KEYS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "containers": (("name",),),
    "initContainers": (("name",),),
    "ephemeralContainers": (("name",),),
    "env": (("name",),),
    "ports": (("containerPort",), ("containerPort", "protocol"), ("name",)),
    "volumes": (("name",),),
    "volumeMounts": (("mountPath",),),
    "volumeDevices": (("devicePath",),),
    "imagePullSecrets": (("name",),),
    "hostAliases": (("ip",),),
    "topologySpreadConstraints": (("topologyKey",), ("topologyKey", "whenUnsatisfiable")),
    "schedulingGates": (("name",),),
    "resourceClaims": (("name",),),
    "claims": (("name",),),
    "ownerReferences": (("uid",),),
}
"""Lists whose entries have an identity, by field, and the fields that tell entries apart: the `patchMergeKey` of
Kubernetes' core/v1, then the `listMapKey`s where two entries may share it. A Service's ports have names. All other
lists are one value."""

READY_GATE: Final = f"{GROUP}/serving"
"""The pod condition that the operator sets once the instance is proven and known to every Ready router."""

LABEL_CLUSTER: Final = f"{GROUP}/cluster"
LABEL_PART: Final = f"{GROUP}/part"
"""What a child is for: ``router``, ``registry``, ``instance``, ``network`` …"""
LABEL_MODEL: Final = f"{GROUP}/model"
LABEL_POOL: Final = f"{GROUP}/pool"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_GPU: Final = f"{GROUP}/gpu"
LABEL_REVISION: Final = f"{GROUP}/revision"
LABEL_FAMILY: Final = f"{GROUP}/family"
"""Instances hand over to each other within one family only: the same model, image and KV-cache format."""
LABEL_COUNT: Final = f"{GROUP}/count"
"""On a pool's disruption budget: the pool's last size, for a restarted operator."""
LABEL_DRAINING: Final = f"{GROUP}/draining-since"
"""On an instance's workload: the Unix time, in whole seconds, at which its drain began."""
LABEL_PARKED: Final = f"{GROUP}/parked"
"""On an instance's workload that has no replicas, so that it keeps no GPUs."""
LABEL_USERS: Final = f"{GROUP}/registry-users"
"""On the Secret with the registry's passwords, and on the registry's pods: which list of users is meant."""

LABEL_KEYS: Final = f"{GROUP}/ticket-keys"
"""On the fleet's key Secret and on instances: which value of `kubernetes.ticket_keys` they were made for."""
LABEL_STAGE: Final = f"{GROUP}/ticket-keys-stage"
"""On the fleet's key Secret: the stage of a key's replacement (`k8s.plan.values.KeyStage`)."""
LABEL_STAGE_SINCE: Final = f"{GROUP}/ticket-keys-since"
"""On the fleet's key Secret: when the new key counts as made, in Unix seconds; 0: no replacement is under way."""
MADE_FROM: Final = f"{GROUP}/made-from"
"""Annotation of an instance's key Secret: digest of the fleet's keys that it was derived from."""
CONTENT: Final = f"{GROUP}/content"
"""Annotation of an instance's key Secret: digest of what was written into it."""
LABEL_MANAGED: Final = "app.kubernetes.io/managed-by"
APPLIED: Final = f"{GROUP}/applied"
"""Annotation of a child: the digest of the manifest that the operator applied last."""

CONDITIONS: Final = ("Available", "Progressing", "Degraded", "Scaling", "Paused")

WORKLOAD_CHARS_MAX: Final = 46
"""Of a Deployment's name: its pods' names are up to 17 characters longer, and must be labels of at most 63 (RFC
1123)."""

NODE_GPUS_MAX: Final = 1024
"""Most GPUs of one node, so of an instance."""

NAME_CHARS_MAX: Final = 63
"""Of every name and label value (RFC 1123 label)."""


def digest(text: str, length: int = 10) -> str:
    """The first `length` hexadecimal digits of a text's SHA-256: a short name for it."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def plain_name(name: str) -> str:
    """`name` in the letters, digits and dashes of an RFC 1123 label, of any length."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-") or "x"


def short(name: str, limit: int = NAME_CHARS_MAX) -> str:
    """`name` as an RFC 1123 label of at most `limit` characters. A name that is cut or changed ends in a digest."""
    clean = plain_name(name)
    if len(clean) <= limit and clean == name:
        return clean
    if len(clean) <= limit and clean == name.lower():
        return clean
    mark = digest(name, 8)
    return f"{clean[: limit - len(mark) - 1].rstrip('-')}-{mark}"


def service_name(name: str) -> str:
    """`name` as the name of a Service: an RFC 1035 label, which begins with a letter."""
    return short(name if name[:1].isalpha() else f"svc-{name}")


def label_value(text: str, limit: int = NAME_CHARS_MAX) -> str:
    """`text` as a label's value: up to `limit` characters of ``A-Za-z0-9._-``, with letters or digits at both ends."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
    if clean == text and len(clean) <= limit:
        return clean
    return f"{clean[: limit - 9].rstrip('-._')}-{digest(text, 8)}" if clean else digest(text, 8)


def gpu_type(gpu: str | None) -> str:
    """A GPU type as it stands in `LABEL_GPU`; ``any`` for None."""
    return label_value(gpu or "any", NAME_CHARS_MAX - len(f".{NODE_GPUS_MAX}"))


def gpu_label(gpu: str | None, count: int) -> str:
    """The value of `LABEL_GPU`: the type, a point, the number of GPUs. Whatever the type is, the number can be read."""
    return f"{gpu_type(gpu)}.{count}"


def read_gpu_label(value: str) -> tuple[str, int]:
    """The type as it stands in `LABEL_GPU`, empty for any, and the number of GPUs; 1 if the label has none."""
    gpu, _, count = value.rpartition(".")
    return "" if gpu == "any" else gpu, int(count) if count.isdecimal() else 1
