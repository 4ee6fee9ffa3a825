"""Observes one cluster: by the watches, by what goodput controllers want, by agents and routers. A shell."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from k8s.crd import Resource
from k8s.operator.fleet import ClusterPrograms, FleetTold
from k8s.operator.hands import Hands
from k8s.operator.scaling import ScalingBoard
from k8s.operator.secrets import Access
from k8s.operator.watched import WatchedObjects
from k8s.plan import ObservedCluster, external_sizes
from k8s.plan.observe import is_ours

ATTAINMENT_S: Final = 30.0
"""Seconds between two changes of the attainment in a status."""


class ClusterObserver:
    """Observes clusters: makes the `ObservedCluster` that a plan starts from."""

    def __init__(self, watched: WatchedObjects, hands: Hands, board: ScalingBoard, fleet: ClusterPrograms) -> None:
        self._watched: Final = watched
        self._hands: Final = hands
        self._board: Final = board
        self._fleet: Final = fleet
        self._attained: Final[dict[tuple[str, str], tuple[float, float | None]]] = {}
        """By cluster: the attainment in the status, and since when it is there."""

    def observed(self, resource: Resource) -> ObservedCluster:
        """The cluster as the watches have it."""
        namespace, name = resource.namespace, resource.name
        objects = self._watched.children_of(resource)
        foreign = [each for (place, _, _), each in self._hands.foreign.items() if place == namespace]
        objects += [each for each in foreign if not is_ours(each, resource.uid)]
        external = external_sizes(self._watched.pools_of(namespace, name))
        wanted = self._board.of(namespace, name)
        wanted.belong_to(resource.uid)
        for stem in external.keys() & wanted.sizes.keys():
            del wanted.sizes[stem]  # a controller that decides later begins with the BatonPool's last size
        return ObservedCluster(
            objects=tuple(objects),
            pods=tuple(self._watched.pods_of(resource, "instance")),
            routers=tuple(self._watched.pods_of(resource, "router")),
            external=external,
            advised=dict(wanted.sizes),
            reasons=dict(wanted.reasons),
            advice=wanted.advice,
            scales=wanted.scales,
            accepted={
                (kind, name): each for (place, kind, name), each in self._hands.accepted.items() if place == namespace
            },
        )

    async def asked(self, resource: Resource, access: Access) -> ObservedCluster:
        """The cluster as the watches have it, with the answers of its agents and routers."""
        observed = self.observed(resource)
        if not observed.pods or resource.spec is None:
            return observed
        told = await self._fleet.look(observed.pods, self._watched.pods_of(resource, "router"), access)
        return replace(
            observed,
            drained=told.drained,
            working=told.working,
            roles=told.roles,
            known=told.known,
            attainment=self._steady(resource, told),
        )

    def _steady(self, resource: Resource, told: FleetTold) -> float | None:
        """The attainment for the status: it changes with every request, and is written every `ATTAINMENT_S`."""
        now, key = asyncio.get_running_loop().time(), (resource.namespace, resource.name)
        kept = self._attained.get(key)
        if kept is None or now - kept[0] >= ATTAINMENT_S:
            kept = self._attained[key] = (now, told.attainment)
        return kept[1]
