"""All objects that the operator watches, in one namespace or in all, and the cluster of each object. A shell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from k8s.crd import Resource
from k8s.crd.names import API_VERSION, FIELD_MANAGER, LABEL_CLUSTER, LABEL_MANAGED, LABEL_PART, label_value
from k8s.operator.client import ApiClient
from k8s.operator.secrets import Access, access
from k8s.operator.watch import WatchCache
from k8s.plan.observe import is_ours
from k8s.plan.pods import fleet_secret, internal_secret

Json = Mapping[str, Any]

WATCHED: Final = (
    ("v1", "ConfigMap"),
    ("v1", "Pod"),
    ("v1", "Secret"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("apps/v1", "Deployment"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
)
OURS: Final = f"{LABEL_MANAGED}={FIELD_MANAGER}"


class WatchedObjects:
    """Clusters, their BatonPools, and their children of every watched kind."""

    def __init__(self, client: ApiClient, namespace: str, changed: Callable[[str, str], None]) -> None:
        """`changed` is called with namespace and name of a cluster if an object of it has come, changed or gone."""
        self._client: Final = client
        self._namespace: Final = namespace
        self._changed: Final = changed
        self._group: asyncio.TaskGroup | None = None
        self.clusters: Final = self._cache(API_VERSION, "BatonCluster", "", self._cluster_changed)
        self.pools: Final = self._cache(API_VERSION, "BatonPool", "", self._pool_changed)
        self.children: Final = [self._cache(*each, OURS, self._child_changed) for each in WATCHED]

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Watch until the group ends. Returns once every kind was listed: a plan without all objects would make
        existing ones again.
        """
        self._group = group
        every = self._every()
        for each in every:
            group.create_task(each.run(), name=f"watch {each.kind}")
        for each in every:
            await each.listed.wait()

    def watch(self, api_version: str, kind: str) -> WatchCache:
        """Watch children of one more kind, from now on."""
        assert self._group is not None
        kept = self._cache(api_version, kind, OURS, self._child_changed)
        self.children.append(kept)
        self._group.create_task(kept.run(), name=f"watch {kind}")
        return kept

    def put(self, thing: Json) -> None:
        """Take an object from an answer of the server, before its watch reports it."""
        for kept in self._every():
            if kept.kind == thing.get("kind"):
                kept.put(thing)

    # -- objects --

    def cluster(self, namespace: str, name: str) -> Json | None:
        """A `BatonCluster`; None: there is none of this name."""
        return self.clusters.objects.get((namespace, name))

    def pools_of(self, namespace: str, name: str) -> list[Json]:
        """The BatonPools that name a cluster, which need not exist."""
        return [
            each
            for (place, _), each in self.pools.objects.items()
            if place == namespace and each.get("spec", {}).get("cluster") == name
        ]

    def children_of(self, resource: Resource) -> list[Json]:
        """All objects of one cluster but its pods."""
        return [thing for kept in self.children if kept.kind != "Pod" for thing in _of(resource, kept)]

    def pods_of(self, resource: Resource, part: str) -> list[Json]:
        """Its pods of one part: ``instance`` or ``router``."""
        pods = self._children("Pod")
        return [each for each in _of(resource, pods) if each["metadata"]["labels"].get(LABEL_PART) == part]

    def access(self, resource: Resource) -> Access:
        """The operator's credentials for a cluster's agents and routers."""
        kept = self._children("Secret").objects
        names = (internal_secret(resource), fleet_secret(resource))
        found = (kept.get((resource.namespace, name)) for name in names)
        return access(*(each if each is not None and is_ours(each, resource.uid) else None for each in found))

    def _children(self, kind: str) -> WatchCache:
        return next(each for each in self.children if each.kind == kind)

    def _every(self) -> tuple[WatchCache, ...]:
        return (self.clusters, self.pools, *self.children)

    # -- which cluster an object belongs to --

    def _cache(self, api_version: str, kind: str, selector: str, changed: Callable[[Json], None]) -> WatchCache:
        return WatchCache(self._client, api_version, kind, self._namespace, selector, changed)

    def _cluster_changed(self, thing: Json) -> None:
        self._changed(thing["metadata"]["namespace"], thing["metadata"]["name"])

    def _pool_changed(self, thing: Json) -> None:
        self._changed(thing["metadata"]["namespace"], str(thing.get("spec", {}).get("cluster", "")))

    def _child_changed(self, thing: Json) -> None:
        metadata = thing["metadata"]
        named = metadata.get("labels", {}).get(LABEL_CLUSTER, "")
        for namespace, name in self.clusters.objects:
            if namespace == metadata.get("namespace") and label_value(name) == named:
                self._changed(namespace, name)


def _of(resource: Resource, kept: WatchCache) -> list[Json]:
    """A cluster's objects of one kind."""
    named = label_value(resource.name)
    return [
        each
        for (namespace, _), each in kept.objects.items()
        if namespace == resource.namespace and each["metadata"].get("labels", {}).get(LABEL_CLUSTER) == named
    ]
