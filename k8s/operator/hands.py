"""Carries out actions, one at a time, on the API server and on agents. A shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from weakref import WeakValueDictionary

from k8s.crd import Resource
from k8s.crd.names import LABEL_DRAINING, LABEL_PARKED, READY_GATE
from k8s.operator.client import ApiClient, ApiFailed
from k8s.operator.fleet import ClusterPrograms
from k8s.operator.secrets import Access, fleet, internal, keys_in, of_instance, replaced
from k8s.plan import (
    Action,
    Admit,
    Apply,
    Delete,
    Derive,
    Drain,
    Generate,
    ObservedCluster,
    Park,
    Rekey,
    RenewUsers,
    Resume,
    Unpark,
)
from k8s.plan.merge import contains, view
from k8s.plan.observe import WORKLOAD, is_ours, pods_by_instance
from k8s.plan.pods import fleet_secret, order_name

logger = logging.getLogger("baton.operator")

Json = Mapping[str, Any]


@dataclass(slots=True)
class OperatorCounters:
    """Counters for the metrics."""

    reconciles: int = 0
    actions: int = 0
    failures: int = 0
    events: int = 0


class Hands:
    """Carries out the actions of plans and of goodput controllers."""

    def __init__(
        self,
        client: ApiClient,
        fleet: ClusterPrograms,
        wall: Callable[[], float],
        put: Callable[[Json], None],
        counters: OperatorCounters,
    ) -> None:
        """`wall`: returns Unix time. `put`: takes over objects that the server has answered."""
        self.foreign: Final[dict[tuple[str, str, str], Json]] = {}
        """Objects of others that have a wanted name, by namespace, kind and name. They may be another cluster's."""
        self.accepted: Final[dict[tuple[str, str, str], Json]] = {}
        """The server's form of objects that it keeps in another form than they were applied (a quantity, a field that a
        webhook has changed), by namespace, kind and name."""
        self._orders: Final[dict[tuple[str, str], tuple[str, str]]] = {}
        """By cluster, its UID, and the UID of the object that keeps the order of its deletion."""
        self._fresh: Final[dict[tuple[str, str], Json]] = {}
        """Secrets that were made and that the watch has not reported yet."""
        self._making: Final[WeakValueDictionary[tuple[str, str, str], asyncio.Lock]] = WeakValueDictionary()
        """Locks of objects that are made: another cluster that wants the name looks after it is taken, not before."""
        self._client: Final = client
        self._fleet: Final = fleet
        self._wall: Final = wall
        self._put: Final = put
        self._counters: Final = counters

    async def do(self, action: Action, resource: Resource, observed: ObservedCluster, access: Access) -> None:
        """Carry out one action.

        Raises:
            ApiFailed: the server refused it.
            ApiAway: the server cannot be reached.
        """
        self._counters.actions += 1
        logger.info("%s/%s: %s: %s", resource.namespace, resource.name, shown(action), action.because)
        match action:
            case Apply(manifest):
                await self._apply(manifest, resource, observed)
            case Delete(api_version, kind, name, uid):
                await self._client.delete(api_version, kind, resource.namespace, name, uid)
                self.accepted.pop((resource.namespace, kind, name), None)
            case Generate(name):
                await self._generate(name, resource)
            case RenewUsers(name):
                kept = self._secret(resource, name, observed)
                if kept is not None:
                    self._put(await self._client.apply(internal(resource, name, kept)))
            case Rekey(name, stage):
                live = self._secret(resource, name, observed)
                if live is not None and keys_in(live):
                    self._put(await self._client.replace(replaced(resource, live, stage, self._wall())))
            case Derive(name):
                await self._derive(name, resource, observed)
            case Admit(pod, because):
                await self._open_gate(resource, pod, because)
            case Drain(name) | Resume(name):
                await self._drain_or_resume(action, name, resource, observed, access)
            case Park(name) | Unpark(name):
                mark = {LABEL_PARKED: "true" if isinstance(action, Park) else None}
                replicas = 0 if isinstance(action, Park) else 1
                await self._patch_workload(resource, observed, name, mark, {"spec": {"replicas": replicas}})

    async def _generate(self, name: str, resource: Resource) -> None:
        made = fleet(resource) if name == fleet_secret(resource) else internal(resource, name)
        self._fresh[resource.namespace, name] = await self._client.create(made)

    async def _derive(self, name: str, resource: Resource, observed: ObservedCluster) -> None:
        """Write one instance's keys, from the fleet's. If another Secret has the name, the server answers 409."""
        live = self._secret(resource, fleet_secret(resource), observed)
        if live is None or not keys_in(live):
            logger.warning("%s holds no keys: those of %s cannot be made", fleet_secret(resource), name)
            return
        made = of_instance(resource, live, name)
        if self._secret(resource, made["metadata"]["name"], observed) is None:
            await self._client.create(made)
        else:
            self._put(await self._client.apply(made))

    def _secret(self, resource: Resource, name: str, observed: ObservedCluster) -> Json | None:
        """This resource's Secret as the watch has it, or as it was just made: the operator's Role may not read one.
        None: there is none; the Secret of a deleted resource of the same name does not count.
        """
        for each in observed.objects:
            if each["kind"] == "Secret" and each["metadata"]["name"] == name and is_ours(each, resource.uid):
                self._fresh.pop((resource.namespace, name), None)
                return each
        fresh = self._fresh.get((resource.namespace, name))
        return fresh if fresh is not None and is_ours(fresh, resource.uid) else None

    async def look_again(self, namespace: str) -> None:
        """Forget objects of others in `foreign` that are gone, so that their names can be used."""
        for place in [each for each in self.foreign if each[0] == namespace]:
            _, kind, name = place
            noted = self.foreign.get(place)
            if noted is not None and await self._client.get(noted["apiVersion"], kind, namespace, name) is None:
                self.foreign.pop(place, None)

    async def _apply(self, manifest: Json, resource: Resource, observed: ObservedCluster) -> None:
        """Apply an object. An existing one that is not this resource's is left alone, and noted in `foreign` for the
        condition: an apply would take over an object of another BatonCluster, with its pod.
        """
        api_version, kind, name = manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]
        place = (resource.namespace, kind, name)
        there = any(each["kind"] == kind and each["metadata"]["name"] == name for each in observed.objects)
        wanted = self._ordered(manifest, resource)
        async with nullcontext() if there else self._making.setdefault(place, asyncio.Lock()):
            live = None if there else await self._client.get(api_version, kind, resource.namespace, name)
            if live is not None and not is_ours(live, resource.uid):
                self.foreign[place] = {"apiVersion": api_version, "kind": kind, **live}
                return
            self.foreign.pop(place, None)
            applied = await self._applied(wanted, there=there)
        if (kind, name) == ("ConfigMap", order_name(resource)):
            self._orders[resource.namespace, resource.name] = (resource.uid, applied["metadata"]["uid"])
        if contains(applied, wanted):
            self.accepted.pop(place, None)
        else:
            self.accepted[place] = view(applied, wanted)
        self._put(applied)

    def _ordered(self, manifest: Json, resource: Resource) -> Json:
        """The manifest with the UID of the object that keeps the order; without that owner if it is unknown."""
        of, uid = self._orders.get((resource.namespace, resource.name), ("", ""))
        uid = uid if of == resource.uid else ""
        owners = manifest["metadata"]["ownerReferences"]
        known = [each if each["uid"] else {**each, "uid": uid} for each in owners if each["uid"] or uid]
        return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": known}}

    async def _applied(self, manifest: Json, *, there: bool) -> Json:
        """Apply; if the server refuses it with 422, write the whole `spec` first. If someone has changed the key of one
        of our list entries (a port's number), an apply would keep both entries; a merge patch replaces the list.
        """
        try:
            return await self._client.apply(manifest)
        except ApiFailed as refusal:
            if refusal.status != 422 or not there or "spec" not in manifest:
                raise
        metadata = manifest["metadata"]
        where = (manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])
        await self._client.merge(*where, {"spec": manifest["spec"]})
        return await self._client.apply(manifest)

    async def _open_gate(self, resource: Resource, pod: str, because: str) -> None:
        said = {
            "type": READY_GATE,
            "status": "True",
            "reason": "Serving",
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
        self, action: Drain | Resume, name: str, resource: Resource, observed: ObservedCluster, access: Access
    ) -> None:
        """A drain is marked before its agent is told, a resume unmarked after it: a crash in between repeats either."""
        pod = pods_by_instance(observed.pods).get(name)
        if isinstance(action, Drain):
            if not _is_marked(observed, name):
                mark = {LABEL_DRAINING: str(int(self._wall()))}
                await self._patch_workload(resource, observed, name, mark, {})
            if pod is not None:
                await self._fleet.drain(pod, resource.kubernetes.drain_s, access)
        elif pod is not None and await self._fleet.resume(pod, access):
            await self._patch_workload(resource, observed, name, {LABEL_DRAINING: None}, {})

    async def _patch_workload(
        self, resource: Resource, observed: ObservedCluster, name: str, labels: Mapping[str, str | None], more: Json
    ) -> None:
        for each in observed.objects:
            if each["metadata"]["name"] == name and each["kind"] == WORKLOAD:
                patch = {"metadata": {"labels": labels}, **more}
                done = await self._client.merge(each["apiVersion"], each["kind"], resource.namespace, name, patch)
                self._put(done)


def _is_marked(observed: ObservedCluster, name: str) -> bool:
    """Whether an instance's drain is marked already: its time is counted from the first mark."""
    workloads = (each for each in observed.objects if each["kind"] == WORKLOAD and each["metadata"]["name"] == name)
    return any(LABEL_DRAINING in each["metadata"].get("labels", {}) for each in workloads)


def shown(action: Action) -> str:
    """The action in a few words, for logs and events: ``apply Deployment chat-prefill-0``."""
    match action:
        case Apply(manifest):
            return f"apply {manifest['kind']} {manifest['metadata']['name']}"
        case Delete(_, kind, name):
            return f"delete {kind} {name}"
        case Admit(pod):
            return f"admit Pod {pod}"
        case Generate(name):
            return f"make Secret {name}"
        case RenewUsers(name):
            return f"write the registry's users into Secret {name} again"
        case Rekey(name, stage):
            return f"replace a key of Secret {name}, step `{stage.value or 'done'}`"
        case Derive(name):
            return f"make the keys of {name}"
        case _:
            return f"{type(action).__name__.lower()} {action.name}"
