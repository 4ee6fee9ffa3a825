"""The loop: keep what there is, plan each cluster that changed, carry out, tell. A shell around `k8s.plan`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from k8s.crd import Resource, read_resource
from k8s.crd.names import (
    API_VERSION,
    FIELD_MANAGER,
    LABEL_CLUSTER,
    LABEL_MANAGED,
    LABEL_PART,
    label_value,
)
from k8s.operator.client import ApiAway, ApiFailed, Client
from k8s.operator.fleet import Fleet, Told
from k8s.operator.hands import Counters, Hands
from k8s.operator.secrets import Access, access
from k8s.operator.teller import Teller
from k8s.operator.watch import Kept
from k8s.plan import (
    Desired,
    Images,
    Observed,
    limits_of,
    plan,
)
from k8s.plan.pods import fleet_secret, internal_secret

logger = logging.getLogger("baton.operator")

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
OPTIONAL: Final = {
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
}
OURS: Final = f"{LABEL_MANAGED}={FIELD_MANAGER}"
SETTLE_S: Final = 0.05
"""Changes within this are planned together."""
BUSY_S: Final = 2.0
"""A cluster that is not as it should be is looked at again after this: agents and routers send no events."""
IDLE_S: Final = 60.0


@dataclass(slots=True, kw_only=True)
class Settings:
    """What the operator is started with."""

    namespace: str
    """Where it acts; empty: everywhere."""
    images: Images
    advised: Callable[[str, str], Mapping[str, int]] = field(default=lambda _namespace, _name: {})
    """Replicas by pool that the goodput controller wants, of one cluster."""


class Operator:
    """All clusters of one namespace, or of all."""

    def __init__(self, client: Client, fleet: Fleet, settings: Settings, wall: Callable[[], float]) -> None:
        """`wall`: Unix time."""
        self.counters: Final = Counters()
        self.may_act: Callable[[], bool] = lambda: True
        self._client: Final = client
        self._fleet: Final = fleet
        self._settings: Final = settings
        self._wall: Final = wall
        self._due: Final[dict[tuple[str, str], float]] = {}
        self._wake: Final = asyncio.Event()
        self._hands: Final = Hands(client, fleet, wall, self._put, self.counters)
        self._teller: Final = Teller(client, wall, self._put, self.counters)
        self._kinds: frozenset[str] = frozenset()
        self._clusters = self._keep(API_VERSION, "BatonCluster", "", self._cluster_changed)
        self._pools = self._keep(API_VERSION, "BatonPool", "", self._pool_changed)
        self._children: list[Kept] = [self._keep(*each, OURS, self._child_changed) for each in WATCHED]

    def _keep(self, api_version: str, kind: str, selector: str, changed: Callable[[Json], None]) -> Kept:
        return Kept(self._client, api_version, kind, self._settings.namespace, selector, changed)

    def counted(self) -> dict[str, int]:
        """For the metrics, by name."""
        return asdict(self.counters)

    # -- what wakes it --

    def _cluster_changed(self, thing: Json) -> None:
        self._plan_soon(thing["metadata"]["namespace"], thing["metadata"]["name"])

    def _pool_changed(self, thing: Json) -> None:
        self._plan_soon(thing["metadata"]["namespace"], str(thing.get("spec", {}).get("cluster", "")))

    def _child_changed(self, thing: Json) -> None:
        metadata = thing["metadata"]
        named = metadata.get("labels", {}).get(LABEL_CLUSTER, "")
        for namespace, name in self._clusters.objects:
            if namespace == metadata.get("namespace") and label_value(name) == named:
                self._plan_soon(namespace, name)

    def _plan_soon(self, namespace: str, name: str, after_s: float = SETTLE_S) -> None:
        at = asyncio.get_running_loop().time() + after_s
        key = (namespace, name)
        self._due[key] = min(at, self._due.get(key, at))
        self._wake.set()

    # -- the loop --

    async def run(self) -> None:
        """Until cancelled."""
        self._kinds = await self._client.kinds(tuple(OPTIONAL.values()))
        self._children += [
            self._keep(group, kind, OURS, self._child_changed)
            for kind, group in OPTIONAL.items()
            if kind in self._kinds
        ]
        async with asyncio.TaskGroup() as group:
            kept = (self._clusters, self._pools, *self._children)
            for each in kept:
                group.create_task(each.run(), name=f"watch {each.kind}")
            for each in kept:  # a plan without the whole picture would make what is there already
                await each.listed.wait()
            group.create_task(self._follow(), name="plan")

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            ready = [key for key, at in self._due.items() if at <= now]
            for key in ready:
                del self._due[key]
                if self.may_act():
                    await self._try(key)
                else:
                    self._plan_soon(*key, after_s=BUSY_S)
            if not ready:
                self._wake.clear()
                wait_s = min(self._due.values(), default=now + IDLE_S) - now
                try:
                    async with asyncio.timeout(max(0.0, wait_s)):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _try(self, key: tuple[str, str]) -> None:
        try:
            settled = await self.reconcile(*key)
            if key in self._clusters.objects:
                self._plan_soon(*key, after_s=IDLE_S if settled else BUSY_S)
        except (ApiFailed, ApiAway) as error:
            self.counters.failures += 1
            logger.warning("%s/%s: %s", *key, error)
            self._plan_soon(*key, after_s=BUSY_S)
        except Exception:  # one resource must never stop the others
            self.counters.failures += 1
            logger.exception("%s/%s: a fault of the operator's", *key)
            self._plan_soon(*key, after_s=IDLE_S)

    async def reconcile(self, namespace: str, name: str) -> bool:
        """Plan one cluster and carry it out; whether nothing was to be done and nothing is waited for."""
        thing = self._clusters.objects.get((namespace, name))
        if thing is None:
            return True
        self.counters.reconciles += 1
        resource = read_resource(thing)
        desired = Desired(resource=resource, images=self._settings.images, kinds=self._kinds)
        key = self._access(resource)
        observed = await self._observe(resource, key)
        actions = plan(desired, observed, limits_of(desired, observed), self._wall())
        for action in actions:
            live = self._clusters.objects.get((namespace, name))
            if not self.may_act() or live is None or live["metadata"]["uid"] != resource.uid:
                return False
            await self._hands.do(action, resource, observed, key)
        await self._teller.tell(thing, self._pools_of(resource), desired, observed, actions)
        return not actions and all(each.get("status") != "True" for each in self._unsettled(thing))

    def _unsettled(self, thing: Json) -> list[Json]:
        live = self._clusters.objects.get((thing["metadata"]["namespace"], thing["metadata"]["name"]), thing)
        return [each for each in live.get("status", {}).get("conditions", ()) if each["type"] == "Progressing"]

    # -- what there is --

    def _of(self, resource: Resource, kept: Kept) -> list[Json]:
        named = label_value(resource.name)
        return [
            each
            for (namespace, _), each in kept.objects.items()
            if namespace == resource.namespace and each["metadata"].get("labels", {}).get(LABEL_CLUSTER) == named
        ]

    def _access(self, resource: Resource) -> Access:
        """What the operator proves itself by to a cluster's agents and routers."""
        kept = next(each.objects for each in self._children if each.kind == "Secret")
        names = (internal_secret(resource), fleet_secret(resource))
        return access(*(kept.get((resource.namespace, name)) for name in names))

    async def _observe(self, resource: Resource, key: Access) -> Observed:
        pods: list[Json] = []
        objects: list[Json] = []
        for kept in self._children:
            (pods if kept.kind == "Pod" else objects).extend(self._of(resource, kept))
        objects += [each for (namespace, _, _), each in self._hands.foreign.items() if namespace == resource.namespace]
        parts = {
            part: [p for p in pods if p["metadata"]["labels"].get(LABEL_PART) == part]
            for part in ("instance", "router")
        }
        told = Told()
        if parts["instance"] and resource.spec is not None:
            told = await self._fleet.look(parts["instance"], parts["router"], key)
        return Observed(
            objects=tuple(objects),
            pods=tuple(parts["instance"]),
            drained=told.drained,
            roles=told.roles,
            known=told.known,
            external=self._external(resource),
            advised=self._settings.advised(resource.namespace, resource.name),
        )

    def _external(self, resource: Resource) -> dict[str, int]:
        return {
            each["spec"]["pool"]: int(each["spec"]["replicas"])
            for each in self._pools_of(resource)
            if not each["metadata"].get("deletionTimestamp")
        }

    def _pools_of(self, resource: Resource) -> list[Json]:
        return [
            each
            for (namespace, _), each in self._pools.objects.items()
            if namespace == resource.namespace and each.get("spec", {}).get("cluster") == resource.name
        ]

    def _put(self, thing: Json) -> None:
        for kept in (self._clusters, self._pools, *self._children):
            if kept.kind == thing.get("kind"):
                kept.put(thing)
