"""Actions carried out, one at a time, on the API server and on agents. A shell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from k8s.crd import Resource
from k8s.crd.names import FIELD_MANAGER, LABEL_DRAINING, LABEL_MANAGED, LABEL_PARKED, READY_GATE
from k8s.operator.client import Client
from k8s.operator.fleet import Fleet
from k8s.operator.secrets import internal
from k8s.plan import Action, Admit, Apply, Delete, Drain, Generate, Observed, Park, Resume, Unpark
from k8s.plan.observe import pods_by_instance

logger = logging.getLogger("baton.operator")

Json = Mapping[str, Any]


@dataclass(slots=True)
class Counters:
    """For the metrics."""

    reconciles: int = 0
    actions: int = 0
    failures: int = 0
    events: int = 0


class Hands:
    """What the operator does with."""

    def __init__(
        self,
        client: Client,
        fleet: Fleet,
        wall: Callable[[], float],
        put: Callable[[Json], None],
        counters: Counters,
    ) -> None:
        """`put` takes objects as the server has answered them."""
        self.foreign: Final[dict[tuple[str, str, str], Json]] = {}
        """Objects of wanted names that are not ours, by namespace, kind and name."""
        self._client: Final = client
        self._fleet: Final = fleet
        self._wall: Final = wall
        self._put: Final = put
        self._counters: Final = counters

    async def do(self, action: Action, resource: Resource, observed: Observed, key: str) -> None:
        """One action.

        Raises:
            ApiFailed: the server refused it.
            ApiAway: the server cannot be reached.
        """
        self._counters.actions += 1
        logger.info("%s/%s: %s: %s", resource.namespace, resource.name, shown(action), action.because)
        match action:
            case Apply(manifest, because):
                await self._apply(manifest, because, resource)
            case Delete(api_version, kind, name, uid):
                await self._client.delete(api_version, kind, resource.namespace, name, uid)
            case Generate(name):
                await self._client.create(internal(resource, name))
            case Admit(pod, ready, because):
                await self._gate(resource, pod, ready, because)
            case Drain(name) | Resume(name):
                await self._drain_or_resume(action, name, resource, observed, key)
            case Park(name) | Unpark(name):
                mark = {LABEL_PARKED: "true" if isinstance(action, Park) else None}
                replicas = 0 if isinstance(action, Park) else 1
                await self._patch_workload(resource, observed, name, mark, {"spec": {"replicas": replicas}})

    async def _apply(self, manifest: Json, because: str, resource: Resource) -> None:
        """Apply; what is there already and is not ours is left alone, and remembered for the condition."""
        api_version, kind, name = manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]
        place = (resource.namespace, kind, name)
        if because == "it is not there":
            live = await self._client.get(api_version, kind, resource.namespace, name)
            if live is not None and live["metadata"].get("labels", {}).get(LABEL_MANAGED) != FIELD_MANAGER:
                self.foreign[place] = {"apiVersion": api_version, "kind": kind, **live}
                return
        self.foreign.pop(place, None)
        self._put(await self._client.apply(manifest))

    async def _gate(self, resource: Resource, pod: str, ready: bool, because: str) -> None:  # noqa: FBT001
        said = {
            "type": READY_GATE,
            "status": str(ready),
            "reason": "Serving" if ready else "NotServing",
            "message": because,
            "lastTransitionTime": datetime.fromtimestamp(int(self._wall()), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod, "namespace": resource.namespace},
            "status": {"conditions": [said]},
        }
        await self._client.apply(manifest, sub="status")

    async def _drain_or_resume(
        self, action: Drain | Resume, name: str, resource: Resource, observed: Observed, key: str
    ) -> None:
        """A drain is marked first and asked for then, a resume asked for first: after a crash both are done again."""
        pod = pods_by_instance(observed.pods).get(name)
        if isinstance(action, Drain):
            mark = {LABEL_DRAINING: str(int(self._wall()))}
            await self._patch_workload(resource, observed, name, mark, {})
            if pod is not None:
                await self._fleet.drain(pod, resource.kubernetes.drain_s, key)
        elif pod is not None and await self._fleet.resume(pod, key):
            await self._patch_workload(resource, observed, name, {LABEL_DRAINING: None}, {})

    async def _patch_workload(
        self, resource: Resource, observed: Observed, name: str, labels: Mapping[str, str | None], more: Json
    ) -> None:
        for each in observed.objects:
            if each["metadata"]["name"] == name and each["kind"] in {"Deployment", "LeaderWorkerSet"}:
                patch = {"metadata": {"labels": labels}, **more}
                done = await self._client.merge(each["apiVersion"], each["kind"], resource.namespace, name, patch)
                self._put(done)


def shown(action: Action) -> str:
    """``start Deployment chat-prefill-0``."""
    match action:
        case Apply(manifest):
            return f"apply {manifest['kind']} {manifest['metadata']['name']}"
        case Delete(_, kind, name):
            return f"delete {kind} {name}"
        case Admit(pod):
            return f"admit Pod {pod}"
        case Generate(name):
            return f"make Secret {name}"
        case _:
            return f"{type(action).__name__.lower()} {action.name}"
