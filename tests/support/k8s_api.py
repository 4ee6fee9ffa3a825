"""A double of the Kubernetes API server over HTTP, as far as the operator uses one.

docs/decisions/0010-kubernetes.md lists what it does not do.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from support.k8s_apply import Conflict, Owners, apply, leaves, updated
from support.k8s_builtin import LABEL, canonical
from support.k8s_builtin import faults as builtin_faults
from support.k8s_json import NS, copied
from support.k8s_schema import defaulted, faults, pruned

Json = dict[str, Any]
Key = tuple[str, str]

BUILT_IN = {
    "v1": {
        "ConfigMap": "configmaps",
        "Event": "events",
        "Namespace": "namespaces",
        "Node": "nodes",
        "Pod": "pods",
        "Secret": "secrets",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"Deployment": "deployments"},
    "apiextensions.k8s.io/v1": {"CustomResourceDefinition": "customresourcedefinitions"},
    "coordination.k8s.io/v1": {"Lease": "leases"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
}
WITH_STATUS = {"nodes", "pods", "deployments", "poddisruptionbudgets"}
CLUSTER_WIDE = {"namespaces", "nodes", "customresourcedefinitions"}


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def body(self) -> Json:
        said = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        return {**said, "code": self.code, "reason": self.reason, "message": self.message}


@dataclass
class Kind:
    api_version: str
    kind: str
    plural: str
    has_status: bool
    scale: Json | None = None
    schema: Json | None = None


@dataclass
class ApiServer:
    """All objects, their history, and the faults that a test asks for."""

    now: Callable[[], float]
    kinds: dict[str, Kind] = field(default_factory=dict)
    store: dict[str, dict[Key, Json]] = field(default_factory=dict)
    owners: dict[str, Owners] = field(default_factory=dict)
    history: deque[tuple[int, str, str, Json, Json | None]] = field(default_factory=lambda: deque(maxlen=20000))
    version: int = 100
    oldest: int = 100
    asked: list[tuple[str, str]] = field(default_factory=list)
    """The method and the path of every request."""
    verbs: set[tuple[str, str, str]] = field(default_factory=set)
    """The rights that role-based access control would demand of the sender: group, resource, verb."""
    away: bool = False
    hidden: set[str] = field(default_factory=set)
    """Plurals of the kinds that the sender's Role may not read."""
    unsure: set[str] = field(default_factory=set)
    """API versions (`group/version`) for which discovery fails."""
    refuse: Callable[[str, str], None] | None = None
    """Called before every write with method and path; may raise."""
    hold: Callable[[str], Awaitable[None]] | None = None
    """Called before every write with the path; the write waits for it."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    watchers: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for api_version, named in BUILT_IN.items():
            for kind, plural in named.items():
                self.kinds[plural] = Kind(api_version, kind, plural, plural in WITH_STATUS)

    # -- objects --

    def all(self, plural: str) -> list[Json]:
        return list(self.store.get(plural, {}).values())

    def get(self, plural: str, name: str, namespace: str = NS) -> Json | None:
        return self.store.get(plural, {}).get((namespace, name))

    def writes(self) -> int:
        return sum(method != "GET" for method, _ in self.asked)

    def stamp(self) -> str:
        return datetime.fromtimestamp(self.now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _put(self, plural: str, thing: Json, how: str, before: Json | None) -> Json:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        key = (thing["metadata"].get("namespace", ""), thing["metadata"]["name"])
        if how == "DELETED":
            self.store[plural].pop(key, None)
        else:
            self.store.setdefault(plural, {})[key] = thing
        self.history.append((self.version, how, plural, copied(thing), before))
        if plural == "customresourcedefinitions":
            self._define(thing)
        return thing

    def _define(self, crd: Json) -> None:
        spec = crd["spec"]
        version = spec["versions"][0]
        subresources = version.get("subresources", {})
        plural = spec["names"]["plural"]
        self.kinds[plural] = Kind(
            f"{spec['group']}/{version['name']}",
            spec["names"]["kind"],
            plural,
            "status" in subresources,
            subresources.get("scale"),
            version["schema"]["openAPIV3Schema"],
        )

    def forget(self) -> None:
        """Compact the history: a watch can no longer start at a version before now."""
        self.oldest = self.version
        self.history.clear()

    # -- writes --

    def _checked(self, kind: Kind, thing: Json, before: Json | None) -> Json:
        if kind.schema is None:
            thing = canonical(kind.kind, thing)
            if wrong := builtin_faults(kind.kind, thing, before):
                raise Refused(
                    422, "Invalid", f"{kind.kind} {thing['metadata']['name']!r} is invalid: {'; '.join(wrong)}"
                )
            return thing
        thing = defaulted(pruned(thing, kind.schema), kind.schema)
        if wrong := faults(thing, kind.schema, before):
            raise Refused(422, "Invalid", f"{kind.kind} {thing['metadata']['name']!r} is invalid: {'; '.join(wrong)}")
        return thing

    def create(self, kind: Kind, namespace: str, thing: Json, manager: str = "test") -> Json:
        thing = copied(thing)
        metadata = thing.setdefault("metadata", {})
        if "name" not in metadata:
            if not re.fullmatch(LABEL, metadata["generateName"].removesuffix("-")):
                raise Refused(422, "Invalid", f"metadata.generateName: Invalid value: {metadata['generateName']!r}")
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if kind.plural not in CLUSTER_WIDE:
            metadata["namespace"] = namespace
        if kind.has_status and kind.plural != "pods":
            thing.pop("status", None)
        thing = self._checked(kind, {"apiVersion": kind.api_version, "kind": kind.kind, **thing}, None)
        metadata = thing["metadata"]
        if (metadata.get("namespace", ""), metadata["name"]) in self.store.get(kind.plural, {}):
            raise Refused(409, "AlreadyExists", f'{kind.plural} "{metadata["name"]}" already exists')
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.stamp(), "generation": 1}
        owners = self.owners[metadata["uid"]] = Owners()
        updated(None, thing, manager, owners)
        metadata["managedFields"] = owners.as_managed_fields()
        return self._put(kind.plural, thing, "ADDED", None)

    def change(self, kind: Kind, before: Json, after: Json, sub: str, manager: str, *, applied: bool = False) -> Json:
        """Write an object that exists. Fields that a write may not change keep their values; a write without a change
        makes no new version.
        """
        after = copied(after)
        for name in ("uid", "creationTimestamp", "generation", "namespace", "name", "deletionTimestamp"):
            if name in before["metadata"]:
                after["metadata"][name] = before["metadata"][name]
            else:
                after["metadata"].pop(name, None)
        if sub == "status":
            after = {**copied(before), "status": after.get("status", {})}
        elif kind.has_status:
            after.pop("status", None)
            after |= {"status": copied(before["status"])} if "status" in before else {}
        after = self._checked(kind, after, before)
        owners = self.owners[before["metadata"]["uid"]]
        if not applied:
            updated(before, after, manager, owners)
        same = {**after, "metadata": {**after["metadata"], "managedFields": None, "resourceVersion": None}}
        old = {**before, "metadata": {**before["metadata"], "managedFields": None, "resourceVersion": None}}
        managed = owners.as_managed_fields()
        if same == old and managed == before["metadata"].get("managedFields"):
            return before
        after["metadata"]["managedFields"] = managed
        if after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        after = self._put(kind.plural, after, "MODIFIED", copied(before))
        if (
            after["metadata"].get("deletionTimestamp")
            and not after["metadata"].get("finalizers")
            and kind.plural != "pods"
        ):
            self.remove(kind.plural, after)
        return after

    def apply(self, kind: Kind, namespace: str, name: str, given: Json, sub: str, manager: str, *, force: bool) -> Json:
        before = self.get(kind.plural, name, namespace)
        if before is None:
            if sub:
                raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
            thing = self.create(kind, namespace, {**given, "metadata": {**given["metadata"], "name": name}}, manager)
            owners = self.owners[thing["metadata"]["uid"]]
            owners.fields = {(manager, "Apply"): {path for path, _ in leaves(given)}}
            thing["metadata"]["managedFields"] = owners.as_managed_fields()
            return thing
        live = {key: value for key, value in before.items() if sub != "status" or key != "spec"}
        try:
            who = f"{manager}/{sub}" if sub else manager
            after = apply(copied(live), given, who, self.owners[before["metadata"]["uid"]], force=force)
        except Conflict as clash:
            raise Refused(409, "Conflict", f"Apply failed with 1 conflict: {clash}") from clash
        return self.change(kind, before, {**before, **after}, sub, manager, applied=True)

    def delete(self, kind: Kind, thing: Json, body: Json) -> Json:
        wanted = body.get("preconditions", {}).get("uid")
        if wanted and wanted != thing["metadata"]["uid"]:
            raise Refused(409, "Conflict", f"the UID in the precondition ({wanted}) does not match")
        if kind.plural == "pods" and thing.get("spec", {}).get("nodeName"):
            grace: int = body.get("gracePeriodSeconds", thing["spec"].get("terminationGracePeriodSeconds", 30))
            if grace and not thing["metadata"].get("deletionTimestamp"):
                marked = copied(thing)
                marked["metadata"] |= {"deletionTimestamp": self.stamp(), "deletionGracePeriodSeconds": grace}
                return self._put("pods", marked, "MODIFIED", thing)
            if grace:
                return thing
        if thing["metadata"].get("finalizers"):
            marked = copied(thing)
            marked["metadata"].setdefault("deletionTimestamp", self.stamp())
            return self._put(kind.plural, marked, "MODIFIED", thing)
        return self.remove(kind.plural, thing)

    def evict(self, pod: Json) -> Json:
        """Evict a pod, as `kubectl drain` asks for: refuse if a disruption budget has no pod to spare; else set the
        condition `DisruptionTarget` and delete the pod.
        """
        labels = pod["metadata"].get("labels", {})
        for budget in self.all("poddisruptionbudgets"):
            chosen = budget["spec"]["selector"]["matchLabels"]
            if chosen.items() <= labels.items() and self._spare(budget["spec"], chosen) < 1:
                raise Refused(
                    429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget."
                )
        said = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        said["lastTransitionTime"] = self.stamp()
        status = {**pod["status"], "conditions": [*pod["status"].get("conditions", ()), said]}
        marked = self.change(self.kinds["pods"], pod, {**pod, "status": status}, "status", "eviction")
        self.delete(self.kinds["pods"], marked, {})
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _spare(self, budget: Json, chosen: Json) -> int:
        """How many pods may be evicted: Ready pods, minus the replicas of their Deployments, plus `maxUnavailable`."""
        scales = [
            each["spec"].get("replicas", 1)
            for each in self.all("deployments")
            if chosen.items() <= each["spec"]["template"]["metadata"].get("labels", {}).items()
        ]
        ready = [
            each
            for each in self.all("pods")
            if chosen.items() <= each["metadata"].get("labels", {}).items()
            and not each["metadata"].get("deletionTimestamp")
            and ("Ready", "True") in {(one["type"], one["status"]) for one in each["status"].get("conditions", ())}
        ]
        spare: int = len(ready) - sum(scales) + budget["maxUnavailable"]
        return spare

    def remove(self, plural: str, thing: Json) -> Json:
        """Remove an object at once, then let the garbage collector remove what it owned."""
        self._put(plural, copied(thing), "DELETED", copied(thing))
        self.collect(thing["metadata"]["uid"])
        return thing

    def collect(self, gone: str = "") -> None:
        """Run the garbage collector: delete objects whose owners are all gone, and remove gone owners from the others.

        `gone`: the uid of an owner; only objects that it owned are checked. Empty: all objects are checked, also those
        made after their owner had gone.
        """
        live = {each["metadata"]["uid"] for objects in self.store.values() for each in objects.values()}
        for plural, objects in list(self.store.items()):
            for each in list(objects.values()):
                owners = each["metadata"].get("ownerReferences", ())
                if not owners or (gone and all(owner["uid"] != gone for owner in owners)):
                    continue
                solid = [owner for owner in owners if owner["uid"] in live]
                if not solid:
                    self.delete(self.kinds[plural], each, {})
                elif len(solid) < len(owners):
                    after = {**each, "metadata": {**each["metadata"], "ownerReferences": solid}}
                    self.change(self.kinds[plural], each, after, "", "garbage-collector")


def labels_fit(thing: Json | None, selector: str) -> bool:
    if thing is None:
        return False
    labels = thing["metadata"].get("labels", {})
    for term in filter(None, selector.split(",")):
        name, is_equal, value = term.partition("=")
        if (labels.get(name) != value.lstrip("=")) if is_equal else name not in labels:
            return False
    return True


def merge_patched(base: Any, patch: Any) -> Any:
    """`base` after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(base) if isinstance(base, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patched(merged.get(name), value)
    return merged


class Wire:
    """The HTTP interface of the server."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server

    def app(self) -> web.Application:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        server = self.server
        if server.away:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=503)
        server.asked.append((request.method, request.path))
        try:
            return await self._answer(request)
        except Refused as refusal:
            return web.json_response(refusal.body(), status=refusal.code)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts = [part for part in request.path.split("/") if part]
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        api_version = parts[1] if parts[0] == "api" else "/".join(parts[1:3])
        if not rest:
            return self._discovery(api_version)
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, sub = (*rest, "", "")[:3]
        kind = self.server.kinds.get(plural)
        if kind is None or kind.api_version != api_version:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if request.method == "GET" and plural in self.server.hidden:
            raise Refused(403, "Forbidden", f"{plural} is forbidden: cannot read resource {plural!r}")
        self._note(request, kind, name, sub)
        if request.method == "GET" and not name:
            if request.query.get("watch") == "true":
                return await self._watch(request, kind, namespace)
            return self._list(request, kind, namespace)
        if request.method == "GET":
            return web.json_response(self._read(kind, namespace, name, sub))
        if self.server.refuse is not None:
            self.server.refuse(request.method, request.path)
        if self.server.hold is not None:
            await self.server.hold(request.path)
        body = json.loads(await request.read() or b"{}")
        before = self.server.get(kind.plural, name, namespace)
        after = self._write(request, kind, namespace, name, sub, body)
        self._note_owners(kind, before, after)
        async with self.server.changed:
            self.server.changed.notify_all()
        return web.json_response(after, status=201 if request.method == "POST" else 200)

    def _note(self, request: web.Request, kind: Kind, name: str, sub: str) -> None:
        group = _group(kind.api_version)
        if request.method == "GET":
            verb = "get" if name else "watch" if request.query.get("watch") == "true" else "list"
        else:
            verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[request.method]
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        self.server.verbs.add((group, resource, verb))
        applies = request.headers.get("Content-Type", "").startswith("application/apply-patch")
        if applies and self.server.get(kind.plural, name) is None:
            self.server.verbs.add((group, resource, "create"))

    def _note_owners(self, kind: Kind, before: Json | None, after: Json) -> None:
        """Note the rights that the admission plugin OwnerReferencesPermissionEnforcement demands.

        A change of an object's owners needs the right to delete the object. `blockOwnerDeletion` needs the right to
        update the owner's finalizers.
        """
        old, new = (each["metadata"].get("ownerReferences", []) if each else [] for each in (before, after))
        if before is not None and old != new:
            self.server.verbs.add((_group(kind.api_version), kind.plural, "delete"))
        for owner in new:
            if owner.get("blockOwnerDeletion") and owner not in old:
                plural = next(each.plural for each in self.server.kinds.values() if each.kind == owner["kind"])
                self.server.verbs.add((_group(owner["apiVersion"]), f"{plural}/finalizers", "update"))

    def _discovery(self, api_version: str) -> web.Response:
        if api_version in self.server.unsure:
            raise Refused(503, "ServiceUnavailable", "the server is currently unable to handle the request")
        known = [kind for kind in self.server.kinds.values() if kind.api_version == api_version]
        if not known:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        resources = [{"name": kind.plural, "kind": kind.kind, "namespaced": True} for kind in known]
        return web.json_response({"kind": "APIResourceList", "groupVersion": api_version, "resources": resources})

    def _list(self, request: web.Request, kind: Kind, namespace: str) -> web.Response:
        selector = request.query.get("labelSelector", "")
        items = [
            {key: value for key, value in each.items() if key not in {"apiVersion", "kind"}}
            for each in self.server.all(kind.plural)
            if (not namespace or each["metadata"].get("namespace") == namespace) and labels_fit(each, selector)
        ]
        metadata = {"resourceVersion": str(self.server.version)}
        return web.json_response(
            {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}
        )

    def _read(self, kind: Kind, namespace: str, name: str, sub: str) -> Json:
        thing = self.server.get(kind.plural, name, namespace)
        if thing is None:
            raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
        return self._scale(thing) if sub == "scale" else thing

    @staticmethod
    def _scale(thing: Json) -> Json:
        status = thing.get("status", {})
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {key: thing["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")},
            "spec": {"replicas": thing["spec"].get("replicas", 0)},
            "status": {"replicas": status.get("replicas", 0), "selector": status.get("selector", "")},
        }

    def _write(self, request: web.Request, kind: Kind, namespace: str, name: str, sub: str, body: Json) -> Json:
        server = self.server
        manager = request.query.get("fieldManager", "test")
        content = request.headers.get("Content-Type", "")
        if sub == "binding":
            pod = self._read(kind, namespace, name, "")
            placed = {**pod, "spec": {**pod["spec"], "nodeName": body["target"]["name"]}}
            return server.change(kind, pod, placed, "", "scheduler")
        if sub == "eviction":
            return server.evict(self._read(kind, namespace, name, ""))
        if request.method == "POST":
            return server.create(kind, namespace, body, manager)
        if request.method == "PATCH" and content.startswith("application/apply-patch"):
            force = request.query.get("force") == "true"
            return server.apply(kind, namespace, name, body, sub, manager, force=force)
        before = server.get(kind.plural, name, namespace)
        if before is None:
            raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
        if request.method == "DELETE":
            return server.delete(kind, before, body)
        said = body.get("metadata", {}).get("resourceVersion")
        if request.method == "PUT" and not body.get("metadata", {}).get("name"):
            raise Refused(400, "BadRequest", f"the name of the object ({name} based on URL) was undeterminable")
        if request.method == "PUT" and kind.schema is not None and not said and sub != "scale":
            raise Refused(422, "Invalid", "metadata.resourceVersion: Invalid value: 0: must be specified for an update")
        if said and said != before["metadata"]["resourceVersion"]:
            raise Refused(
                409, "Conflict", "the object has been modified; please apply your changes to the latest version"
            )
        if sub == "scale":
            after = {**before, "spec": {**before["spec"], "replicas": body["spec"]["replicas"]}}
            return self._scale(server.change(kind, before, after, "", manager))
        if request.method == "PUT":
            return server.change(
                kind, before, {"apiVersion": kind.api_version, "kind": kind.kind, **body}, sub, manager
            )
        return server.change(kind, before, merge_patched(copied(before), body), sub, manager)

    async def _watch(self, request: web.Request, kind: Kind, namespace: str) -> web.StreamResponse:
        server = self.server
        selector = request.query.get("labelSelector", "")
        at = int(request.query.get("resourceVersion") or server.version)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        server.watchers.add(task)
        try:
            while True:
                if at < server.oldest:
                    gone = Refused(410, "Expired", f"too old resource version: {at} ({server.oldest})")
                    await _say(response, "ERROR", gone.body())
                    return response
                at = await self._tell(response, kind, namespace, selector, at)
                async with server.changed:
                    if server.version == at:
                        await asyncio.wait_for(server.changed.wait(), 5.0)
        except TimeoutError:
            bookmark = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"resourceVersion": str(at)}}
            await _say(response, "BOOKMARK", bookmark)
            return response
        except ConnectionError:
            return response
        finally:
            server.watchers.discard(task)

    async def _tell(self, response: web.StreamResponse, kind: Kind, namespace: str, selector: str, at: int) -> int:
        for version, how, plural, thing, before in list(self.server.history):
            if version <= at or plural != kind.plural:
                continue
            if namespace and thing["metadata"].get("namespace") != namespace:
                continue
            fits, fitted = labels_fit(thing, selector), labels_fit(before, selector)
            if how == "DELETED" or (fitted and not fits):
                await _say(response, "DELETED", thing)
            elif fits:
                await _say(response, "MODIFIED" if fitted else "ADDED", thing)
        return self.server.version

    def end_watches(self) -> None:
        """End every watch, as a restart of the server does."""
        for task in list(self.server.watchers):
            task.cancel()


def _group(api_version: str) -> str:
    return api_version.partition("/")[0] if "/" in api_version else ""


async def _say(response: web.StreamResponse, kind: str, thing: Json) -> None:
    await response.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")


@asynccontextmanager
async def serving(now: Callable[[], float]) -> AsyncIterator[tuple[ApiServer, Wire, str]]:
    """A server on a free port: its objects, its HTTP interface and its URL."""
    server = ApiServer(now)
    wire = Wire(server)
    runner = web.AppRunner(wire.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, wire, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        wire.end_watches()
        await runner.cleanup()
