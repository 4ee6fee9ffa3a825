"""The operator's `goodput.actuate.kubernetes.KubernetesCluster`: what a goodput controller observes and may change.

A shell. Names of a controller's pools begin with the cluster's name, so that the instance names it makes are names of
workloads. The sizes that it wants are kept here; the next plan writes them into a label of each pool (`LABEL_COUNT`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput.actuate.existing import Existing, InstanceLife
from goodput.actuate.existing import ExistingFleet as Exists
from goodput.actuate.protocol import Unobservable
from k8s.crd.names import WORKLOAD_CHARS_MAX, short
from k8s.crd.resource import Resource, secret_key
from k8s.operator.client import ApiClient
from k8s.operator.secrets import Access, text_in
from k8s.plan import Action, Apply, Delete, Derive, Desired, Drain, ObservedCluster
from k8s.plan.observe import WORKLOAD, is_ours, pods_by_instance, unix
from k8s.plan.plan import Look
from k8s.plan.pods import internal_secret, registry_url, workload
from k8s.plan.values import PlannedObject, WantedPool

Json = Mapping[str, Any]
Place = tuple[str, str]
"""Namespace and name of a cluster."""

NAME_CHARS: Final = 17
"""Characters that a controller adds to a pool's name: the time in hexadecimal milliseconds, a number, two hyphens."""

REASON_CHARS: Final = 200
"""Most characters of a reason in a pool's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryPlace:
    """A cluster's registry, and the operator's credentials for it."""

    url: str
    cluster: str
    """Name under which the fleet is kept in the registry."""
    password: str | None = field(default=None, repr=False)
    ca: str | None = None
    """Certificates in PEM form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSeen:
    """One cluster as it is now."""

    resource: Resource
    desired: Desired
    observed: ObservedCluster
    look: Look
    access: Access

    @property
    def rolls_out(self) -> bool:
        """Whether instances of other revisions than the wanted ones exist."""
        wanted = {pool.stem: pool.revision for model in self.look.models for pool in model.pools}
        return any(each.revision != wanted.get(each.pool) for each in self.look.instances)


class ActionRefused(Unobservable):
    """The API server has refused an action: it is not carried out."""


class Acting(Protocol):
    """What `OperatorWorld` needs of the operator."""

    def seen(self, namespace: str, name: str) -> ClusterSeen | None:
        """A cluster as the watches have it; None: it is gone, wrong or paused, or another operator acts."""

    def alone(self, namespace: str, name: str) -> AbstractAsyncContextManager[None]:
        """A lock that keeps a cluster's plan from running."""

    async def act(self, action: Action, seen: ClusterSeen) -> None:
        """Carry one action out now, and plan soon.

        Raises:
            ActionRefused: the API server refuses it.
            Unobservable: whether it was carried out is unknown.
        """

    async def flip(self, seen: ClusterSeen, instance: str, role: Role) -> bool:
        """Tell an agent to take `role`. Returns whether it accepted."""


@dataclass(slots=True)
class ControllerWanted:
    """What the controller of one cluster wants."""

    uid: str = ""
    """UID of the resource for which it wants this."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Wanted instances, by stem."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By stem: why the size is what it is."""
    scales: bool = False
    """Whether a controller runs."""
    advice: str = ""
    """What it would do if others decide, or why there is none; for people."""

    def belong_to(self, uid: str) -> None:
        """Forget what was wanted for an earlier resource of the same name."""
        if uid != self.uid:
            self.forget()
            self.uid = uid

    def forget(self) -> None:
        """Forget sizes and reasons: plans go by the labels of children again."""
        self.sizes.clear()
        self.reasons.clear()


class ScalingBoard:
    """What all controllers want, for plans and status."""

    def __init__(self) -> None:
        self._wanted: Final[dict[Place, ControllerWanted]] = {}

    def of(self, namespace: str, name: str) -> ControllerWanted:
        """What the controller of one cluster wants."""
        return self._wanted.setdefault((namespace, name), ControllerWanted())

    def keep(self, keys: frozenset[Place]) -> None:
        """Forget all clusters but these."""
        for key in self._wanted.keys() - keys:
            del self._wanted[key]

    def forget(self) -> None:
        """Forget all sizes: while another operator leads, its controllers decide on them."""
        for each in self._wanted.values():
            each.forget()


def internal_of(seen: ClusterSeen) -> Json | None:
    """The Secret with the passwords of this very resource; None: it does not exist yet."""
    name, uid = internal_secret(seen.resource), seen.resource.uid
    secrets = (each for each in seen.observed.objects if each["kind"] == "Secret" and is_ours(each, uid))
    return next((each for each in secrets if each["metadata"]["name"] == name), None)


async def registry_place(client: ApiClient, seen: ClusterSeen) -> RegistryPlace:
    """The registry of a cluster, with the credentials of its controller.

    Raises:
        ApiFailed: the Secret with the files may not be read.
        ApiAway: the server cannot be reached.
    """
    resource = seen.resource
    assert resource.spec is not None
    said = resource.spec.registry
    if said.url is None:
        password = text_in(internal_of(seen), "baton-controller-password")
        url = registry_url(resource, "baton-controller")
        return RegistryPlace(url=url, cluster=said.cluster, password=password)
    files = None
    if said.password_file or said.ca_file:
        files = await client.named("v1", "Secret", resource.namespace, resource.files_secret)
    named = {
        name: None if path is None else text_in(files, secret_key(path))
        for name, path in (("password", said.password_file), ("ca", said.ca_file))
    }
    return RegistryPlace(url=said.url, cluster=said.cluster, **named)


def pool_name(cluster: str, stem: str) -> str:
    """The name of a pool for a controller: instance names begin with it."""
    return short(f"{cluster}-{stem}", WORKLOAD_CHARS_MAX - NAME_CHARS)


class OperatorWorld:
    """See `goodput.actuate.kubernetes.KubernetesCluster`."""

    def __init__(self, operator: Acting, namespace: str, name: str, wanted: ControllerWanted) -> None:
        self._operator: Final = operator
        self._key: Final = (namespace, name)
        self._wanted: Final = wanted
        self._former: dict[str, int] = {}
        """The sizes before the last change of one."""

    def alone(self) -> AbstractAsyncContextManager[None]:
        return self._operator.alone(*self._key)

    async def look(self) -> Exists:
        seen = self._seen()
        now, unix_now = time.monotonic(), time.time()  # noqa: TID251 - ages of workloads are told in Unix time
        created = {key[1]: _made(each) for key, each in seen.look.live.items()}
        pods = pods_by_instance(seen.observed.pods)
        nodes = _nodes(seen.observed.pods)
        found = []
        for each in seen.look.instances:
            pod = pods.get(each.name)  # an old instance whose pod was evicted has waited for a node since then
            since = each.unschedulable_since or created.get(each.name) if pod is None else _made(pod)
            found.append(
                Existing(
                    instance=InstanceId(each.name),
                    pool=pool_name(seen.resource.name, each.pool),
                    life=_life(each),
                    asked_s=None if since is None else now - max(0.0, unix_now - since),
                    gpu=each.gpu,
                    gpus=each.gpus,
                    node=nodes.get(each.name, ""),
                    because="" if each.scheduled else "no node has room for it" if each.unschedulable_since else "",
                )
            )
        return Exists(now_s=now, instances=tuple(found))

    async def may_resize(self, pool: str, by: int) -> str:
        return self._refusal(self._seen(), pool, by)

    async def resize(self, pool: str, by: int) -> str:
        seen = self._seen()
        because = self._refusal(seen, pool, by)
        wanted = self._pool(seen, pool)
        if not because and wanted is not None:
            self._former = dict(self._wanted.sizes)
            there = sum(each.pool == wanted.stem and not each.leaving for each in seen.look.instances)
            if by < 0 or wanted.count <= there:  # else the size counts a start whose answer was lost: this is that one
                self._wanted.sizes[wanted.stem] = wanted.count + by
        return because

    async def take_back(self, pool: str) -> None:
        self._wanted.sizes.clear()
        self._wanted.sizes.update(self._former)

    def _refusal(self, seen: ClusterSeen, pool: str, by: int) -> str:
        wanted = self._pool(seen, pool)
        if wanted is None:
            return f"{pool} is no pool of this cluster any more"
        if seen.look.scaled.get(wanted.stem) == "BatonPool":
            return f"a BatonPool decides on {wanted.stem}"
        if by < 0 and seen.rolls_out:
            return "a revision rolls out: instances come and go by themselves"
        count, settings = wanted.count + by, seen.look.pools[wanted.stem][2]
        if not settings.min <= count <= settings.at_most:
            return f"{wanted.stem} has {settings.min} to {settings.at_most} instances"
        return ""

    async def make(self, name: InstanceId, pool: str, because: str) -> str:
        seen = self._seen()
        wanted = self._pool(seen, pool)
        if wanted is None or len(name) > WORKLOAD_CHARS_MAX:
            return f"{name} of {pool} cannot be a workload of this cluster"
        if seen.look.keys_lost or seen.look.keys.fleet is None:
            return "the fleet's ticket keys are not there"
        model, role, settings = seen.look.pools[wanted.stem]
        manifest = workload(
            seen.resource,
            stem=wanted.stem,
            model=model,
            role=role,
            pool=settings,
            name=str(name),
            images=seen.desired.images,
        )
        if manifest["kind"] in seen.look.missing_kinds:
            return f"the API server does not know {manifest['kind']}"
        self._wanted.reasons[wanted.stem] = because[:REASON_CHARS]
        refusal = await self._acted(Derive(str(name), because), seen)
        return refusal or await self._acted(Apply(manifest, because), seen)

    async def mark(self, name: InstanceId, because: str) -> str:
        seen = self._seen()
        stem = next((each.pool for each in seen.look.instances if each.name == name), "")
        self._wanted.reasons[stem] = because[:REASON_CHARS]
        return await self._acted(Drain(str(name), because), seen)

    async def flip(self, name: InstanceId, role: Role) -> str:
        heard = await self._operator.flip(self._seen(), str(name), role)
        return "" if heard else f"the agent of {name} does not answer, or refuses"

    async def remove(self, name: InstanceId, because: str) -> str:
        seen = self._seen()
        thing = seen.look.live.get((WORKLOAD, str(name)))
        if thing is not None:
            uid = thing["metadata"].get("uid", "")
            return await self._acted(Delete(thing["apiVersion"], WORKLOAD, str(name), uid, because), seen)
        return ""

    async def _acted(self, action: Action, seen: ClusterSeen) -> str:
        """Carry one action out; empty, or the refusal."""
        try:
            await self._operator.act(action, seen)
        except ActionRefused as refusal:
            return str(refusal)
        return ""

    def _seen(self) -> ClusterSeen:
        seen = self._operator.seen(*self._key)
        if seen is None:
            raise Unobservable("this operator does not act on the cluster now")
        return seen

    @staticmethod
    def _pool(seen: ClusterSeen, pool: str) -> WantedPool | None:
        pools = (each for model in seen.look.models for each in model.pools)
        return next((each for each in pools if pool_name(seen.resource.name, each.stem) == pool), None)


def _made(thing: Json) -> float | None:
    """Unix time at which the API server made an object."""
    return unix(thing["metadata"].get("creationTimestamp"))


def _life(instance: PlannedObject) -> InstanceLife:
    if instance.leaving:
        return InstanceLife.LEAVING
    return InstanceLife.RUNNING if instance.scheduled else InstanceLife.PENDING


def _nodes(pods: tuple[Json, ...]) -> dict[str, str]:
    """The node of each instance."""
    found = {}
    for pod in pods:
        name = pod["metadata"].get("labels", {}).get("serving.baton.dev/instance")
        if name and pod.get("spec", {}).get("nodeName"):
            found[str(name)] = str(pod["spec"]["nodeName"])
    return found
