"""The loop: keep what there is, plan each cluster that changed, carry out, tell. A shell around `k8s.plan`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from cluster.instance import Role
from goodput.actuate.protocol import Unobservable
from k8s.crd import Resource, read_resource
from k8s.crd.names import (
    API_VERSION,
    FIELD_MANAGER,
    LABEL_CLUSTER,
    LABEL_MANAGED,
    LABEL_PART,
    label_value,
)
from k8s.crd.resource import secret_key
from k8s.operator.client import ApiAway, ApiClient, ApiFailed
from k8s.operator.fleet import ClusterPrograms, FleetTold
from k8s.operator.hands import Hands, OperatorCounters, shown
from k8s.operator.scaling import ClusterSeen, RegistryPlace, ScalingBoard, internal_of
from k8s.operator.secrets import Access, access, text_in
from k8s.operator.teller import Teller
from k8s.operator.watch import WatchCache
from k8s.plan import (
    Action,
    Apply,
    Desired,
    Images,
    ObservedCluster,
    deciding,
    limits_of,
    look,
    misnamed,
    missing_kinds,
    plan,
)
from k8s.plan.observe import is_ours, pods_by_instance
from k8s.plan.pods import fleet_secret, internal_secret, registry_url

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
LIST_S: Final = 10.0
"""How long plans wait for the first list of a kind of another operator's: a Role may lack it."""
ASK_AGAIN_S: Final = (1.0, 2.0, 5.0)
"""Between attempts to learn which of them the API server knows, before it is planned without those."""
REFUSALS: Final = frozenset({400, 403, 422})
"""What the API server answers for one object alone (invalid, a quota, a policy): others go on."""
ATTAINMENT_S: Final = 30.0
"""Between two changes of the share of requests in a status."""


@dataclass(slots=True, kw_only=True)
class OperatorSettings:
    """What the operator is started with."""

    namespace: str
    """Where it acts; empty: everywhere."""
    images: Images
    board: ScalingBoard = field(default_factory=ScalingBoard)
    """What goodput controllers want."""


class Operator:
    """All clusters of one namespace, or of all namespaces.

    Long, as it is one loop: what was listed, what is due and what was refused are the state that each step of a look
    reads. What to do is decided in `k8s.plan`.
    """

    def __init__(
        self, client: ApiClient, fleet: ClusterPrograms, settings: OperatorSettings, wall: Callable[[], float]
    ) -> None:
        """`wall`: Unix time."""
        self.counters: Final = OperatorCounters()
        self.may_act: Callable[[], bool] = lambda: True
        self.knows_all = False
        """Whether everything there is has been listed once."""
        self._client: Final = client
        self._fleet: Final = fleet
        self._settings: Final = settings
        self._wall: Final = wall
        self._due: Final[dict[tuple[str, str], float]] = {}
        self._wake: Final = asyncio.Event()
        self._hands: Final = Hands(client, fleet, wall, self._put, self.counters)
        self._teller: Final = Teller(client, wall, self._put, self.counters)
        self._refused: Final[dict[tuple[str, str], int]] = {}
        """Looks in a row that something was refused at, by cluster."""
        self._locks: Final[dict[tuple[str, str], asyncio.Lock]] = {}
        """By cluster: one of its plan and its controller writes at a time."""
        self._kinds_at = 0.0
        self._group: asyncio.TaskGroup | None = None
        self._attained: Final[dict[tuple[str, str], tuple[float, float | None]]] = {}
        self._kinds: frozenset[str] = frozenset()
        """Of `OPTIONAL`: those that the API server knows and that were listed."""
        self._hidden: frozenset[str] = frozenset()
        """Those that it knows and that it does not let be listed."""
        self._optional: Final[dict[str, WatchCache]] = {}
        self._clusters = self._keep(API_VERSION, "BatonCluster", "", self._cluster_changed)
        self._pools = self._keep(API_VERSION, "BatonPool", "", self._pool_changed)
        self._children: list[WatchCache] = [self._keep(*each, OURS, self._child_changed) for each in WATCHED]

    def _keep(self, api_version: str, kind: str, selector: str, changed: Callable[[Json], None]) -> WatchCache:
        return WatchCache(self._client, api_version, kind, self._settings.namespace, selector, changed)

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
        async with asyncio.TaskGroup() as group:
            self._group = group
            kept = (self._clusters, self._pools, *self._children)
            for each in kept:
                group.create_task(each.run(), name=f"watch {each.kind}")
            for each in kept:  # a plan without the whole picture would make what is there already
                await each.listed.wait()
            for wait_s in (*ASK_AGAIN_S, None):
                if await self._learn_kinds() or wait_s is None:
                    break
                await asyncio.sleep(wait_s)
            self.knows_all = True
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
                again_s = min(IDLE_S, BUSY_S * 2 ** min(self._refused.get(key, 0), 10))
                self._plan_soon(*key, after_s=IDLE_S if settled else again_s)
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
        async with self.alone(namespace, name):
            thing = self._clusters.objects.get((namespace, name))
            done = None if thing is None else await self._carried_out(thing)
        if thing is None:
            self._locks.pop((namespace, name), None)
            await self._tell_strays(namespace, name)
            return True
        if done is None:
            return False
        desired, observed, actions = done
        await self._teller.tell(thing, self._pools_of(desired.resource), desired, observed, actions)
        return not actions and all(each.get("status") != "True" for each in self._unsettled(thing))

    def alone(self, namespace: str, name: str) -> asyncio.Lock:
        """No plan of this cluster is made or carried out while it is held, and no two facts of a controller's are
        written.
        """
        return self._locks.setdefault((namespace, name), asyncio.Lock())

    async def _carried_out(self, thing: Json) -> tuple[Desired, ObservedCluster, tuple[Action, ...]] | None:
        """Plan, and carry the plan out; None where that has to stop in the middle."""
        self.counters.reconciles += 1
        desired = await self._with_kinds(read_resource(thing))
        resource = desired.resource
        place = (resource.namespace, resource.name)
        key = self._access(resource)
        await self._hands.look_again(resource.namespace)
        observed = await self._asked(resource, self._observed(resource), key)
        actions = plan(desired, observed, limits_of(desired, observed), self._wall())
        refused = []
        for action in actions:
            live = self._clusters.objects.get(place)
            if not self.may_act() or live is None or live["metadata"]["uid"] != resource.uid:
                return None
            try:
                await self._hands.do(action, resource, observed, key)
            except ApiFailed as refusal:
                if not self._is_of_one_object(action, refusal):
                    raise
                logger.warning("%s/%s: %s: %s", *place, shown(action), refusal)
                refused.append(f"{shown(action)}: {refusal}")
        if self._count_refusals(place, len(refused)) > 1:  # once may be the watch that lags behind
            observed = replace(observed, refused=tuple(refused))
        return desired, observed, actions

    def _is_of_one_object(self, action: Action, refusal: ApiFailed) -> bool:
        """Whether a refusal is about one object, so that the rest of a plan goes on; notes a kind that is gone."""
        if isinstance(action, Apply) and action.manifest["kind"] in OPTIONAL and refusal.status == 404:
            self._kinds -= {action.manifest["kind"]}
            return True
        return refusal.status in REFUSALS or refusal.reason == "AlreadyExists"

    def _count_refusals(self, key: tuple[str, str], count: int) -> int:
        """Looks in a row that something was refused at."""
        if not count:
            self._refused.pop(key, None)
            return 0
        self.counters.failures += count
        self._refused[key] = self._refused.get(key, 0) + 1
        return self._refused[key]

    async def _learn_kinds(self) -> bool:
        """Learn which kinds of other operators the API server knows, and keep their objects; whether it has said so.

        A kind that cannot be listed counts as missing until it can: its watch goes on trying.
        """
        assert self._group is not None
        now = asyncio.get_running_loop().time()
        known, is_sure = set(self._kinds | self._hidden), True
        for kind, group in OPTIONAL.items():
            try:
                is_there = kind in await self._client.kinds([group])
            except (ApiFailed, ApiAway) as error:  # as it was before
                logger.warning("whether the API server knows %s is not told: %s", kind, error)
                is_sure = False
            else:
                known = known | {kind} if is_there else known - {kind}
        self._kinds_at = now if is_sure else now - IDLE_S + BUSY_S
        fresh = known - self._optional.keys()
        for kind in sorted(fresh):
            kept = self._optional[kind] = self._keep(OPTIONAL[kind], kind, OURS, self._child_changed)
            self._children.append(kept)
            self._group.create_task(kept.run(), name=f"watch {kind}")
        with suppress(TimeoutError):
            async with asyncio.timeout(LIST_S):
                for kind in fresh:
                    await self._optional[kind].listed.wait()
        self._kinds = frozenset(kind for kind in known if self._optional[kind].listed.is_set())
        hidden = known - self._kinds
        for kind in sorted(hidden - self._hidden):
            logger.warning("%s cannot be listed: clusters are planned without it; does the Role allow it?", kind)
        self._hidden = frozenset(hidden)
        return is_sure

    async def _with_kinds(self, resource: Resource) -> Desired:
        """What is desired. A kind that the resource waits for may be installed at any time, or be allowed."""
        desired = Desired(resource=resource, images=self._settings.images, kinds=self._kinds, hidden=self._hidden)
        now = asyncio.get_running_loop().time()
        if not missing_kinds(desired) or now - self._kinds_at < IDLE_S:
            return desired
        await self._learn_kinds()
        return replace(desired, kinds=self._kinds, hidden=self._hidden)

    async def _tell_strays(self, namespace: str, name: str) -> None:
        """BatonPools of a cluster that is not there."""
        for (place, _), pool in tuple(self._pools.objects.items()):
            if place == namespace and pool.get("spec", {}).get("cluster") == name:
                await self._teller.stray(pool, misnamed(None, name, pool["spec"].get("pool", "")))

    def _unsettled(self, thing: Json) -> list[Json]:
        live = self._clusters.objects.get((thing["metadata"]["namespace"], thing["metadata"]["name"]), thing)
        return [each for each in live.get("status", {}).get("conditions", ()) if each["type"] == "Progressing"]

    # -- what there is --

    def _of(self, resource: Resource, kept: WatchCache) -> list[Json]:
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
        found = (kept.get((resource.namespace, name)) for name in names)
        return access(*(each if each is not None and is_ours(each, resource.uid) else None for each in found))

    def _pods(self, resource: Resource, part: str) -> list[Json]:
        pods = next(each for each in self._children if each.kind == "Pod")
        return [each for each in self._of(resource, pods) if each["metadata"]["labels"].get(LABEL_PART) == part]

    def _observed(self, resource: Resource) -> ObservedCluster:
        """As the watches have it."""
        objects = [thing for kept in self._children if kept.kind != "Pod" for thing in self._of(resource, kept)]
        objects += [each for (namespace, _, _), each in self._hands.foreign.items() if namespace == resource.namespace]
        wanted, external = self._settings.board.of(resource.namespace, resource.name), self._external(resource)
        wanted.belong_to(resource.uid)
        for stem in external.keys() & wanted.sizes.keys():
            del wanted.sizes[stem]  # the controller that decides after the BatonPool begins with its last word
        return ObservedCluster(
            objects=tuple(objects),
            pods=tuple(self._pods(resource, "instance")),
            routers=tuple(self._pods(resource, "router")),
            external=external,
            advised=dict(wanted.sizes),
            reasons=dict(wanted.reasons),
            advice=wanted.advice,
            scales=wanted.scales,
            accepted={
                (kind, name): each
                for (namespace, kind, name), each in self._hands.accepted.items()
                if namespace == resource.namespace
            },
        )

    async def _asked(self, resource: Resource, observed: ObservedCluster, key: Access) -> ObservedCluster:
        """And as agents and routers say themselves."""
        if not observed.pods or resource.spec is None:
            return observed
        told = await self._fleet.look(observed.pods, self._pods(resource, "router"), key)
        return replace(
            observed,
            drained=told.drained,
            working=told.working,
            roles=told.roles,
            known=told.known,
            attainment=self._steady(resource, told),
        )

    def _steady(self, resource: Resource, told: FleetTold) -> float | None:
        """A share of requests that changes every second is written down twice a minute."""
        now, key = asyncio.get_running_loop().time(), (resource.namespace, resource.name)
        kept = self._attained.get(key)
        if kept is None or now - kept[0] >= ATTAINMENT_S:
            kept = self._attained[key] = (now, told.attainment)
        return kept[1]

    # -- what controllers do (`k8s.operator.scaling.Acting`) --

    def clusters(self) -> frozenset[tuple[str, str]]:
        """All there are, by namespace and name."""
        return frozenset(self._clusters.objects)

    def seen(self, namespace: str, name: str) -> ClusterSeen | None:
        """One cluster; None where nothing may be done now."""
        thing = self._clusters.objects.get((namespace, name))
        if thing is None or not self.knows_all or not self.may_act():
            return None
        resource = read_resource(thing)
        if resource.spec is None or resource.kubernetes.paused or resource.deleting:
            return None
        desired = Desired(resource=resource, images=self._settings.images, kinds=self._kinds, hidden=self._hidden)
        observed = self._observed(resource)
        return ClusterSeen(
            resource=resource,
            desired=desired,
            observed=observed,
            look=look(desired, observed),
            access=self._access(resource),
        )

    async def act(self, action: Action, seen: ClusterSeen) -> None:
        """One action now; the plan follows.

        Raises:
            Unobservable: the server refuses it, or is away.
        """
        try:
            await self._hands.do(action, seen.resource, seen.observed, seen.access)
        except (ApiFailed, ApiAway) as error:
            raise Unobservable(str(error)) from error
        finally:
            self._plan_soon(seen.resource.namespace, seen.resource.name)

    async def tell(self, seen: ClusterSeen, instance: str, role: Role | None, deadline_s: float) -> bool:
        """Tell an agent; whether it has heard."""
        pod = pods_by_instance(seen.observed.pods).get(instance)
        if pod is None:
            return False
        if role is None:
            return await self._fleet.drain(pod, deadline_s, seen.access)
        return await self._fleet.flip(pod, role, seen.access)

    async def registry(self, seen: ClusterSeen) -> RegistryPlace:
        """Where a cluster's controller meets its fleet.

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
            files = await self._client.named("v1", "Secret", resource.namespace, resource.files_secret)
        named = {
            name: None if path is None else text_in(files, secret_key(path))
            for name, path in (("password", said.password_file), ("ca", said.ca_file))
        }
        return RegistryPlace(url=said.url, cluster=said.cluster, **named)

    def _external(self, resource: Resource) -> dict[str, int]:
        return {stem: int(each["spec"]["replicas"]) for stem, each in deciding(self._pools_of(resource)).items()}

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
