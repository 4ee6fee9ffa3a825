"""The section `kubernetes` of a `BatonCluster`, beside the cluster file. Settings are written as in `cluster/spec`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from cluster.spec.about import about
from k8s.crd.names import NODE_GPUS_MAX

DNS_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""An RFC 1123 label."""
SUBDOMAIN: Final = re.compile(rf"{DNS_NAME.pattern}(\.{DNS_NAME.pattern})*")
"""An RFC 1123 subdomain, as names of most objects are, clusters among them: ``chat.v2``."""

KEYS_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""A label's value (RFC 1123, and capital letters)."""

ROUTERS_MAX: Final = 64
WHOLE_NODE_GPUS: Final = 8
"""GPUs of one node by default."""


class PodEngine(StrEnum):
    """What runs in an instance's pod."""

    VLLM = "vllm"
    MOCK = "mock"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTemplate:
    """What is added to the pods of one pool."""

    pod_template: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=about(
            text="A strategic-merge patch of the pods: tolerations, `resourceClaims`, volumes, pull secrets, "
            "priority, queue labels.",
            why="the generated pod",
            aka=("template", "podTemplate", "pod"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRoute:
    """A Gateway API route to the routers."""

    gateway: str = field(
        metadata=about(
            text="Name of the Gateway, in this namespace.",
            why="required: nothing else says which gateway",
            form=DNS_NAME,
        ),
    )
    hostnames: tuple[str, ...] = field(
        default=(),
        metadata=about(text="Host names that the route takes. Left out: the gateway's.", why="the gateway knows them"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubernetes:
    """What only Kubernetes asks for.

    It has many attributes: each is one setting of the section.
    """

    engine: PodEngine = field(
        default=PodEngine.VLLM,
        metadata=about(text="What instances run: vLLM, or engines without a model.", why="serving is the purpose"),
    )
    image: str | None = field(
        default=None,
        metadata=about(
            text="Image of the engines. Left out: the operator's.", why="operator and engine of one release"
        ),
    )
    router_image: str | None = field(
        default=None,
        metadata=about(
            text="Image of the routers. Left out: the operator's.", why="routers need neither vLLM nor torch"
        ),
    )
    redis_image: str | None = field(
        default=None,
        metadata=about(text="Image of the registry. Left out: the operator's.", why="used only without `registry.url`"),
    )
    routers: int = field(
        default=2,
        metadata=about(
            text="Router pods.",
            why="one may be lost or replaced at any time",
            at_least=1,
            at_most=ROUTERS_MAX,
            aka=("router_replicas",),
        ),
    )
    files_secret: str | None = field(
        default=None,
        metadata=about(
            text="The Secret with every file that the spec names; `keys/acme` is its key `keys.acme`. Left out: "
            "`NAME-files`.",
            why="one place for all keys and certificates",
            form=DNS_NAME,
            aka=("secret", "secret_name"),
        ),
    )
    env_secret: str | None = field(
        default=None,
        metadata=about(
            text="A Secret whose keys are environment variables of the engines (`HF_TOKEN`).",
            why="models that are public need none",
            form=DNS_NAME,
        ),
    )
    ticket_keys: str = field(
        default="1",
        metadata=about(
            text="A name for the fleet's keys, by which instances and routers prove themselves. Another name makes the "
            "operator replace the key: it adds one, lets it sign, rolls the instances, and takes the old one away.",
            why="a key is replaced when its owner says so, and never otherwise",
            form=KEYS_NAME,
            aka=("keys", "key_rotation"),
        ),
    )
    paused: bool = field(
        default=False,
        metadata=about(text="Whether the operator changes nothing.", why="following the resource is the purpose"),
    )
    gpu_resource: str = field(
        default="nvidia.com/gpu",
        metadata=about(text="Extended resource that GPUs are asked by.", why="NVIDIA's device plugin"),
    )
    node_gpus: int = field(
        default=WHOLE_NODE_GPUS,
        metadata=about(
            text="GPUs of one node. No instance spans several nodes: a pool whose shape has more GPUs is an error.",
            why="most servers for models have eight",
            at_least=1,
            at_most=NODE_GPUS_MAX,
        ),
    )
    rdma_resource: str | None = field(
        default=None,
        metadata=about(
            text="Extended resource of RDMA devices, one for each engine pod: `rdma/hca`.",
            why="most small clusters have none",
        ),
    )
    rack_topology: str = field(
        default="kubernetes.io/hostname",
        metadata=about(
            text="Node label within which prefill and decode instances are put near each other.",
            why="a hand-over inside one machine is the fastest",
        ),
    )
    drain_s: float = field(
        default=600.0,
        metadata=about(
            text="Time that an instance has to let streams end and holds be pulled before it is deleted; routers have "
            "as long, or `limits.drain_s` if that is longer.",
            why="long answers take minutes",
            at_least=1,
            at_most=86400,
        ),
    )
    start_s: float = field(
        default=1800.0,
        metadata=about(
            text="Longest time from a pod's start to its first token.",
            why="weights of large models load for many minutes",
            at_least=10,
            at_most=86400,
        ),
    )
    gang_s: float = field(
        default=120.0,
        metadata=about(
            text="How long scheduled instances wait for the rest of the smallest fleet before they give GPUs back.",
            why="a scheduler places what fits within seconds",
            at_least=1,
            at_most=86400,
        ),
    )
    pod_monitor: bool = field(
        default=False,
        metadata=about(text="Whether to make a PodMonitor.", why="works without Prometheus' operator"),
    )
    prometheus_namespace: str | None = field(
        default=None,
        metadata=about(
            text="Namespace that Prometheus runs in: network policies let it reach the ports with metrics. Left out: "
            "nothing but routers and the operator reaches them.",
            why="where Prometheus runs is not known",
            form=DNS_NAME,
        ),
    )
    http_route: HttpRoute | None = field(
        default=None,
        metadata=about(text="A route from a Gateway to the routers. Left out: none.", why="the Service is enough"),
    )
    router_template: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=about(text="A strategic-merge patch of the router's pods.", why="the generated pod"),
    )
    pools: Mapping[str, PoolTemplate] = field(
        default_factory=dict,
        metadata=about(
            text="Patches by pool: `prefill`, `decode`, `both`; with several models by the beginning of its "
            "instances' names, such as `qwen3-32b-prefill`.",
            why="the generated pods",
            keys=DNS_NAME,
        ),
    )
