"""The custom resources: their schemas, made from `cluster/spec`, and how a resource is read. Pure."""

from k8s.crd.definition import CLUSTER_CRD, POOL_CRD, crds
from k8s.crd.resource import Resource, cluster_file, read_resource
from k8s.crd.settings import HttpRoute, Kubernetes, PoolTemplate

__all__ = [
    "CLUSTER_CRD",
    "POOL_CRD",
    "HttpRoute",
    "Kubernetes",
    "PoolTemplate",
    "Resource",
    "cluster_file",
    "crds",
    "read_resource",
]
