"""Requests to Kubernetes' API, over connections of the official client. A shell.

`kubernetes.aio` loads the configuration (in a pod, from a kubeconfig) and does authentication and TLS. Lists, watches,
server-side apply and Leases are ours, because its informer caches no custom resource and its LeaseLock blocks
(docs/decisions/0010-kubernetes.md).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from cluster.errors import BatonError, UsageError
from k8s.crd.names import FIELD_MANAGER

Json = dict[str, Any]

PLURALS: Final[Mapping[str, str]] = {
    "BatonCluster": "batonclusters",
    "BatonPool": "batonpools",
    "ConfigMap": "configmaps",
    "Deployment": "deployments",
    "Event": "events",
    "HTTPRoute": "httproutes",
    "Lease": "leases",
    "NetworkPolicy": "networkpolicies",
    "Pod": "pods",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PodMonitor": "podmonitors",
    "Secret": "secrets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
}
REQUEST_S: Final = 30.0
"""Longest time of one request, in seconds."""
WATCH_S: Final = 290
"""Seconds after which the server ends a watch; the next one continues where it ended."""
LINE_BYTES_MAX: Final = 8 << 20
"""Most bytes of one event of a watch."""


class ApiFailed(BatonError):
    """The API server refused a request. `status`: HTTP status; `reason`: Kubernetes' reason, such as ``Conflict``."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class ApiAway(BatonError):
    """The API server cannot be reached."""


def path_of(api_version: str, kind: str, namespace: str, name: str = "", sub: str = "") -> str:
    """``apps/v1 Deployment llm chat-router`` -> ``/apis/apps/v1/namespaces/llm/deployments/chat-router``."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    parts = [root, *(("namespaces", namespace) if namespace else ()), PLURALS[kind]]
    return "/".join([*parts, *((name,) if name else ()), *((sub,) if sub else ())])


class ApiClient:
    """Requests to one API server."""

    def __init__(self, api: Any) -> None:
        """`api`: a `kubernetes.aio.client.ApiClient`."""
        self._api = api

    @staticmethod
    async def open(kubeconfig: str | None = None, host: str | None = None) -> ApiClient:
        """Connect as a pod does, else by a kubeconfig, else to `host` without credentials (tests).

        Raises:
            UsageError: the client is not installed, or there is no configuration.
        """
        try:
            from kubernetes.aio import client, config  # noqa: PLC0415 - an optional extra, and slow to import
        except ImportError as error:
            raise UsageError("the kubernetes client is missing; install it: pip install 'baton-serve[k8s]'") from error
        settings = client.Configuration()
        if host is not None:
            settings.host = host
            return ApiClient(client.ApiClient(settings))
        try:
            if kubeconfig is None and config.incluster_config.SERVICE_HOST_ENV_NAME in _environment():
                config.load_incluster_config(client_configuration=settings)
            else:
                _there(kubeconfig)
                await config.load_kube_config(config_file=kubeconfig, client_configuration=settings)
        except (config.ConfigException, OSError) as error:
            raise UsageError(f"--kubeconfig: {error}; name a kubeconfig, or run in a pod") from error
        return ApiClient(client.ApiClient(settings))

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def _send(
        self, method: str, path: str, query: Mapping[str, object], body: object, content: str, timeout_s: float
    ) -> Any:
        import aiohttp  # noqa: PLC0415

        full = f"{path}?{urlencode(query)}" if query else path
        words = await self._api.param_serialize(
            method,
            full,
            header_params={"Content-Type": content, "Accept": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            return await self._api.call_api(*words, _request_timeout=timeout_s, _preload_content=False)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiAway(f"{method} {path}: {str(error) or type(error).__name__}") from error

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: object = None,
        content: str = "application/json",
    ) -> Json:
        """One request and its answer.

        Raises:
            ApiFailed: the server refused it.
            ApiAway: it cannot be reached.
        """
        import aiohttp  # noqa: PLC0415

        answer = await self._send(method, path, query or {}, body, content, REQUEST_S)
        try:
            data = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiAway(f"{method} {path}: {str(error) or type(error).__name__}") from error
        said = _decoded(data)
        if answer.status >= 300:
            raise ApiFailed(answer.status, str(said.get("reason", "")), str(said.get("message", ""))[:1000])
        return said

    async def list(self, api_version: str, kind: str, namespace: str, selector: str = "") -> Json:
        """All objects of a kind, with all their fields, at one resourceVersion. Raises as `request`."""
        query = {"labelSelector": selector} if selector else {}
        return await self.request("GET", path_of(api_version, kind, namespace), query=query)

    async def named(self, api_version: str, kind: str, namespace: str, name: str) -> Json | None:
        """One object, by a list with its name, for kinds that the Role may list and not read; None: none."""
        query = {"fieldSelector": f"metadata.name={name}"}
        said = await self.request("GET", path_of(api_version, kind, namespace), query=query)
        return next((each for each in said.get("items") or () if each["metadata"]["name"] == name), None)

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Json | None:
        """One object; None if there is none."""
        try:
            return await self.request("GET", path_of(api_version, kind, namespace, name))
        except ApiFailed as refusal:
            if refusal.status == 404:
                return None
            raise

    async def apply(self, manifest: Mapping[str, Any], *, sub: str = "") -> Json:
        """Server-side apply under our field manager. It takes over our fields from any other manager."""
        metadata = manifest["metadata"]
        path = path_of(manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"], sub)
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self.request("PATCH", path, query=query, body=manifest, content="application/apply-patch+yaml")

    async def merge(
        self, api_version: str, kind: str, namespace: str, name: str, patch: Mapping[str, Any], *, sub: str = ""
    ) -> Json:
        """A merge patch under a second field manager of ours, so that a later apply does not remove its fields."""
        path = path_of(api_version, kind, namespace, name, sub)
        query = {"fieldManager": f"{FIELD_MANAGER}-phase"}
        return await self.request("PATCH", path, query=query, body=patch, content="application/merge-patch+json")

    async def create(self, thing: Mapping[str, Any]) -> Json:
        """Create an object. A name that is taken is refused with 409."""
        path = path_of(thing["apiVersion"], thing["kind"], thing["metadata"]["namespace"])
        return await self.request("POST", path, query={"fieldManager": FIELD_MANAGER}, body=thing)

    async def replace(self, thing: Mapping[str, Any]) -> Json:
        """Replace the whole object, if its resourceVersion is still the given one; else 409."""
        metadata = thing["metadata"]
        path = path_of(thing["apiVersion"], thing["kind"], metadata["namespace"], metadata["name"])
        return await self.request("PUT", path, query={"fieldManager": FIELD_MANAGER}, body=thing)

    async def delete(self, api_version: str, kind: str, namespace: str, name: str, uid: str = "") -> None:
        """Delete an object in the background, with `uid` only the one with this UID. A missing object is no error."""
        body: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self.request("DELETE", path_of(api_version, kind, namespace, name), body=body)
        except ApiFailed as refusal:
            if refusal.status not in {404, 409}:
                raise

    async def watch(
        self, api_version: str, kind: str, namespace: str, version: str, selector: str = ""
    ) -> AsyncIterator[Json]:
        """Changes since `version`, with bookmarks, until the server ends the watch.

        Raises:
            ApiFailed: 410 where `version` is too old; the list has to be read again.
            ApiAway: the connection is lost.
        """
        import aiohttp  # noqa: PLC0415

        query: Json = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": WATCH_S}
        query |= {"resourceVersion": version} | ({"labelSelector": selector} if selector else {})
        path = path_of(api_version, kind, namespace)
        answer = await self._send("GET", path, query, None, "application/json", WATCH_S + 30)
        try:
            if answer.status >= 300:
                said = _decoded(await answer.read())
                raise ApiFailed(answer.status, str(said.get("reason", "")), str(said.get("message", "")))
            async for line in _lines(answer.response.content):
                yield _event(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiAway(f"watch of {kind}: {str(error) or type(error).__name__}") from error
        finally:
            answer.response.close()

    async def kinds(self, group_versions: Sequence[str]) -> frozenset[str]:
        """Kinds that the API server knows in these groups.

        Raises:
            ApiFailed: it refuses to answer for one of the groups.
            ApiAway: it cannot be reached.
        """
        found: set[str] = set()
        for each in group_versions:
            try:
                said = await self.request("GET", f"/apis/{each}")
            except ApiFailed as refusal:
                if refusal.status != 404:
                    raise
                continue
            found |= {str(one.get("kind")) for one in said.get("resources", ()) if "/" not in str(one.get("name"))}
        return frozenset(found)


def _environment() -> Mapping[str, str]:
    import os  # noqa: PLC0415

    return os.environ


def _there(kubeconfig: str | None) -> None:
    """Check that a kubeconfig exists: the client's own message for a missing one is several lines long.

    Raises:
        UsageError: none of the named files exists.
    """
    named = kubeconfig or _environment().get("KUBECONFIG") or "~/.kube/config"
    if not any(Path(each).expanduser().exists() for each in named.split(":") if each):
        raise UsageError(f"--kubeconfig: there is no file {named}; name a kubeconfig, or run in a pod")


async def _lines(content: Any) -> AsyncIterator[bytes]:
    """Whole lines up to `LINE_BYTES_MAX`; aiohttp's own lines end at the limit of its buffer."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise ApiFailed(500, "TooLarge", f"an event of more than {LINE_BYTES_MAX} bytes")
        for line in whole:
            if line:
                yield line


def _event(line: bytes) -> Json:
    event = _decoded(line)
    if event.get("type") == "ERROR":
        status = event.get("object") or {}
        raise ApiFailed(int(status.get("code") or 500), str(status.get("reason", "")), str(status.get("message", "")))
    return event


def _decoded(data: bytes) -> Json:
    try:
        said = json.loads(data) if data else {}
    except ValueError:
        return {"message": data[:200].decode("utf-8", "replace")}
    return said if isinstance(said, dict) else {"message": str(said)[:200]}
