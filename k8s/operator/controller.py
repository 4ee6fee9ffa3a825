"""The operator's loop: watch, plan each cluster that changed, carry the plan out, report. A shell around `k8s.plan`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from cluster.instance import Role
from goodput.actuate.protocol import Unobservable
from k8s.crd import Resource, read_resource
from k8s.operator.client import ApiAway, ApiClient, ApiFailed
from k8s.operator.fleet import ClusterPrograms
from k8s.operator.hands import Hands, OperatorCounters, shown
from k8s.operator.kinds import OPTIONAL, OptionalKinds
from k8s.operator.observing import ClusterObserver
from k8s.operator.scaling import ActionRefused, ClusterSeen, ScalingBoard
from k8s.operator.teller import Teller
from k8s.operator.watched import WatchedObjects
from k8s.operator.work_queue import WorkQueue
from k8s.plan import (
    Action,
    Apply,
    Desired,
    Images,
    ObservedCluster,
    limits_of,
    look,
    misnamed,
    missing_kinds,
    plan,
)
from k8s.plan.observe import pods_by_instance

logger = logging.getLogger("baton.operator")

Json = Mapping[str, Any]

BUSY_S: Final = 2.0
"""Seconds until the next look at a cluster that is not as wanted yet: agents and routers send no events."""
IDLE_S: Final = 60.0
"""The same for a cluster that is as wanted, or after a fault of the operator's."""
AT_ONCE: Final = 8
"""Most clusters that are planned at one time: one whose API requests hang (an admission webhook) delays no other."""
REFUSALS: Final = frozenset({400, 403, 422})
"""HTTP statuses of refusals that concern one object (invalid, a quota, a policy): the rest of a plan goes on."""
WEBHOOK: Final = "failed calling webhook"
"""Part of the message (500 InternalError) if an admission webhook does not answer, which may serve one kind only."""


@dataclass(slots=True, kw_only=True)
class OperatorSettings:
    """What the operator is started with."""

    namespace: str
    """The namespace in which it acts; empty: all."""
    images: Images
    pod_namespace: str = ""
    """That of its own pod; empty: it runs in none."""
    board: ScalingBoard = field(default_factory=ScalingBoard)
    """The sizes that goodput controllers want."""


class Operator:
    """Follows all clusters of one namespace, or of all. `k8s.plan` decides what to do.

    It has many attributes: it makes and holds the parts that watch, observe, act and report.
    """

    def __init__(
        self, client: ApiClient, fleet: ClusterPrograms, settings: OperatorSettings, wall: Callable[[], float]
    ) -> None:
        """`wall`: returns Unix time, in seconds."""
        self.counters: Final = OperatorCounters()
        self.may_act: Callable[[], bool] = lambda: True
        """Whether this operator holds the Lease; replaced where there is an election."""
        self.knows_all = False
        """Whether every watched kind has been listed once."""
        self._fleet: Final = fleet
        self._settings: Final = settings
        self._wall: Final = wall
        self._queue: Final = WorkQueue()
        self._watched: Final = WatchedObjects(client, settings.namespace, self._queue.add)
        self._kinds: Final = OptionalKinds(client, self._watched.watch)
        self._hands: Final = Hands(client, fleet, wall, self._watched.put, self.counters)
        self._teller: Final = Teller(client, wall, self._watched.put, self.counters)
        self._observer: Final = ClusterObserver(self._watched, self._hands, settings.board, fleet)
        self._refused: Final[dict[tuple[str, str], int]] = {}
        """By cluster, how many looks in a row had a refusal."""
        self._locks: Final[dict[tuple[str, str], asyncio.Lock]] = {}
        """By cluster: its plan and its goodput controller write one at a time."""

    def counted(self) -> dict[str, int]:
        """Counters for the metrics, by name."""
        return asdict(self.counters)

    # -- the loop --

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            await self._watched.start(group)
            await self._kinds.start()
            self.knows_all = True
            for number in range(AT_ONCE):
                group.create_task(self._follow(), name=f"plan {number}")

    async def _follow(self) -> None:
        while True:
            key = await self._queue.next()
            try:
                if self.may_act():
                    await self._try(key)
                else:
                    self._queue.add(*key, after_s=BUSY_S)
            finally:
                self._queue.done(key)

    async def _try(self, key: tuple[str, str]) -> None:
        try:
            settled = await self.reconcile(*key)
            if self._watched.cluster(*key) is not None:
                again_s = min(IDLE_S, BUSY_S * 2 ** min(self._refused.get(key, 0), 10))
                self._queue.add(*key, after_s=IDLE_S if settled else again_s)
        except (ApiFailed, ApiAway) as error:
            self.counters.failures += 1
            logger.warning("%s/%s: %s", *key, error)
            self._queue.add(*key, after_s=BUSY_S)
        except Exception:  # one resource must never stop the others
            self.counters.failures += 1
            logger.exception("%s/%s: a fault of the operator's", *key)
            self._queue.add(*key, after_s=IDLE_S)

    async def reconcile(self, namespace: str, name: str) -> bool:
        """Plan one cluster and carry the plan out. Returns whether it is as wanted: no action, nothing to wait for."""
        async with self.alone(namespace, name):
            thing = self._watched.cluster(namespace, name)
            done = None if thing is None else await self._carried_out(thing)
        if thing is None:
            self._locks.pop((namespace, name), None)
            await self._tell_strays(namespace, name)
            return True
        if done is None:
            return False
        desired, observed, actions = done
        await self._teller.tell(thing, self._watched.pools_of(namespace, name), desired, observed, actions)
        return not actions and all(each.get("status") != "True" for each in self._unsettled(thing))

    def alone(self, namespace: str, name: str) -> asyncio.Lock:
        """The lock of one cluster: only its holder plans, carries out a plan, or writes for a goodput controller."""
        return self._locks.setdefault((namespace, name), asyncio.Lock())

    async def _carried_out(self, thing: Json) -> tuple[Desired, ObservedCluster, tuple[Action, ...]] | None:
        """Plan, and carry the plan out; None: this operator may not act any more, or the resource is gone."""
        self.counters.reconciles += 1
        desired = await self._with_kinds(read_resource(thing))
        resource = desired.resource
        place = (resource.namespace, resource.name)
        key = self._watched.access(resource)
        await self._hands.look_again(resource.namespace)
        observed = await self._observer.asked(resource, key)
        actions = plan(desired, observed, limits_of(desired, observed), self._wall())
        refused = []
        for action in actions:
            live = self._watched.cluster(*place)
            if not self.may_act() or live is None or live["metadata"]["uid"] != resource.uid:
                return None
            try:
                await self._hands.do(action, resource, observed, key)
            except ApiFailed as refusal:
                if not self._is_of_one_object(action, refusal):
                    raise
                logger.warning("%s/%s: %s: %s", *place, shown(action), refusal)
                refused.append(f"{shown(action)}: {refusal}")
        if self._count_refusals(place, len(refused)) > 1:  # a single refusal may come from a watch that lags behind
            observed = replace(observed, refused=tuple(refused))
        return desired, observed, actions

    def _is_of_one_object(self, action: Action, refusal: ApiFailed) -> bool:
        """Whether a refusal concerns one object, so that the rest of a plan goes on. Notes a kind that is gone."""
        if isinstance(action, Apply) and action.manifest["kind"] in OPTIONAL and refusal.status == 404:
            self._kinds.gone(action.manifest["kind"])
            return True
        return refusal.status in REFUSALS or refusal.reason == "AlreadyExists" or WEBHOOK in str(refusal)

    def _count_refusals(self, key: tuple[str, str], count: int) -> int:
        """Count a look with `count` refusals; returns how many looks in a row had some."""
        if not count:
            self._refused.pop(key, None)
            return 0
        self.counters.failures += count
        self._refused[key] = self._refused.get(key, 0) + 1
        return self._refused[key]

    async def _with_kinds(self, resource: Resource) -> Desired:
        """What is desired. Asks again for missing kinds, which may be installed or allowed at any time."""
        desired = self._desired(resource)
        if missing_kinds(desired) and await self._kinds.asked_again():
            return self._desired(resource)
        return desired

    def _desired(self, resource: Resource) -> Desired:
        kinds = self._kinds
        settings, known = self._settings, {"kinds": kinds.known, "hidden": kinds.hidden}
        return Desired(resource=resource, images=settings.images, operator_in=settings.pod_namespace, **known)

    async def _tell_strays(self, namespace: str, name: str) -> None:
        """Report BatonPools whose cluster does not exist."""
        for pool in self._watched.pools_of(namespace, name):
            await self._teller.stray(pool, misnamed(None, name, pool["spec"].get("pool", "")))

    def _unsettled(self, thing: Json) -> list[Json]:
        live = self._watched.cluster(thing["metadata"]["namespace"], thing["metadata"]["name"]) or thing
        return [each for each in live.get("status", {}).get("conditions", ()) if each["type"] == "Progressing"]

    # -- for goodput controllers (`k8s.operator.scaling.Acting`) --

    def clusters(self) -> frozenset[tuple[str, str]]:
        """All clusters, by namespace and name."""
        return frozenset(self._watched.clusters.objects)

    def seen(self, namespace: str, name: str) -> ClusterSeen | None:
        """One cluster; None: it is gone, wrong, paused or being deleted, or this operator may not act."""
        thing = self._watched.cluster(namespace, name)
        if thing is None or not self.knows_all or not self.may_act():
            return None
        resource = read_resource(thing)
        if resource.spec is None or resource.kubernetes.paused or resource.deleting:
            return None
        desired, observed = self._desired(resource), self._observer.observed(resource)
        return ClusterSeen(
            resource=resource,
            desired=desired,
            observed=observed,
            look=look(desired, observed),
            access=self._watched.access(resource),
        )

    async def act(self, action: Action, seen: ClusterSeen) -> None:
        """Carry one action out now; a plan follows.

        Raises:
            ActionRefused: the server refuses it.
            Unobservable: the server is away, or has failed at it.
        """
        try:
            await self._hands.do(action, seen.resource, seen.observed, seen.access)
        except (ApiFailed, ApiAway) as error:
            refused = isinstance(error, ApiFailed) and (400 <= error.status < 500 or WEBHOOK in str(error))
            raise (ActionRefused if refused else Unobservable)(str(error)) from error
        finally:
            self._queue.add(seen.resource.namespace, seen.resource.name)

    async def flip(self, seen: ClusterSeen, instance: str, role: Role) -> bool:
        """Tell an agent to take `role`. Returns whether it accepted."""
        pod = pods_by_instance(seen.observed.pods).get(instance)
        if pod is None:
            return False
        return await self._fleet.flip(pod, role, seen.access)
