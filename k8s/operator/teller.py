"""Writes status and events of resources, for people and programs. A shell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from k8s.crd.names import API_VERSION, FIELD_MANAGER, short
from k8s.operator.client import ApiClient, ApiFailed
from k8s.operator.hands import OperatorCounters, shown
from k8s.plan import Action, Desired, ObservedCluster, deciding, misnamed, pool_status, status, stray_status
from k8s.plan.events import EventBudget
from k8s.plan.merge import contains

logger = logging.getLogger("baton.operator")

Json = Mapping[str, Any]


class Teller:
    """Writes status and events."""

    def __init__(
        self, client: ApiClient, wall: Callable[[], float], put: Callable[[Json], None], counters: OperatorCounters
    ) -> None:
        """`wall`: returns Unix time. `put`: takes over objects that the server has answered."""
        self._client: Final = client
        self._wall: Final = wall
        self._put: Final = put
        self._counters: Final = counters
        self._budget: Final = EventBudget()

    async def tell(
        self, thing: Json, pools: Sequence[Json], desired: Desired, observed: ObservedCluster, actions: Sequence[Action]
    ) -> None:
        resource = desired.resource
        last = thing.get("status") or {}
        said = status(desired, observed, actions, self._wall(), last, attainment=observed.attainment)
        if _sorted(said) != _sorted(last):
            await self._status("BatonCluster", thing, said)
        for problem in resource.problems:
            await self._event(thing, "Warning", "InvalidSpec" if resource.errors else "SpecWarning", str(problem))
        for action in actions:
            await self._event(thing, "Normal", type(action).__name__, f"{shown(action)}: {action.because}")
        if resource.spec is None:
            return
        decided = deciding(pools)
        for pool in pools:
            wrong = misnamed(desired, resource.name, pool["spec"]["pool"])
            if wrong:
                await self.stray(pool, wrong)
                continue
            decides = decided.get(str(pool["spec"]["pool"]), pool)
            if decides is not pool and not pool["metadata"].get("deletionTimestamp"):
                name, stem = decides["metadata"]["name"], pool["spec"]["pool"]
                await self.stray(pool, f"BatonPool {name} is older and sizes {stem}: delete one of the two", "Ignored")
                continue
            last, generation = pool.get("status") or {}, pool["metadata"].get("generation", 0)
            wanted = pool_status(desired, observed, pool["spec"]["pool"], generation, self._wall(), last)
            if not contains(last, wanted):
                await self._status("BatonPool", pool, wanted)

    async def stray(self, pool: Json, because: str, reason: str = "NotFound") -> None:
        """Write status and event of a `BatonPool` that has no effect."""
        last = pool.get("status") or {}
        wanted = stray_status(because, self._wall(), last, pool["metadata"].get("generation", 0), reason)
        if not contains(last, wanted):
            await self._status("BatonPool", pool, wanted)
        await self._event(pool, "Warning", reason, because)

    async def _status(self, kind: str, thing: Json, said: Json) -> None:
        metadata = {"name": thing["metadata"]["name"], "namespace": thing["metadata"]["namespace"]}
        manifest = {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "status": said}
        try:
            self._put(await self._client.apply(manifest, sub="status"))
        except ApiFailed as refusal:
            if refusal.status != 404:  # deleted meanwhile
                raise

    async def _event(self, thing: Json, kind: str, reason: str, message: str) -> None:
        metadata = thing["metadata"]
        now = self._wall()
        if not self._budget.allows(metadata["uid"], reason, message, now):
            return
        self._counters.events += 1
        stamp = datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{short(metadata['name'], 40)}-", "namespace": metadata["namespace"]},
            "involvedObject": {"apiVersion": API_VERSION, "kind": thing.get("kind", "BatonCluster"), **about},
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            await self._client.create(event)
        except ApiFailed as refusal:
            logger.info("an event was refused: %s", refusal)


def _sorted(status: Json) -> Json:
    """The status with its conditions sorted by type: the server keeps them in an order of its own."""
    return {**status, "conditions": sorted(status.get("conditions", ()), key=lambda each: str(each["type"]))}
