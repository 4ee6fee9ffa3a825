"""Inspects an API server for `baton k8s`: a cluster's present state, and what the operator lacks. A shell."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from k8s.crd import crds
from k8s.crd.names import API_VERSION, LABEL_CLUSTER, LABEL_PART, label_value
from k8s.operator.client import ApiAway, ApiClient, ApiFailed
from k8s.operator.kinds import OPTIONAL
from k8s.operator.watched import WATCHED
from k8s.plan import ObservedCluster, external_sizes
from k8s.plan.rights import RIGHTS


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of one check."""

    what: str
    good: bool
    detail: str
    optional: bool = False


async def observed_now(
    client: ApiClient, namespace: str, name: str
) -> tuple[dict[str, Any] | None, ObservedCluster, frozenset[str], float]:
    """A cluster's resource (None: there is none), its children, the known optional kinds, and Unix time.

    Raises:
        ApiFailed: the server refused a request.
        ApiAway: it cannot be reached.
    """
    live = await client.get(API_VERSION, "BatonCluster", namespace, name)
    kinds = await client.kinds(tuple(OPTIONAL.values()))
    selector = f"{LABEL_CLUSTER}={label_value(name)}"
    objects: list[dict[str, Any]] = []
    pods: list[dict[str, Any]] = []
    wanted = (*WATCHED, *((OPTIONAL[kind], kind) for kind in sorted(kinds & OPTIONAL.keys())))
    for api_version, kind in wanted:
        said = await client.list(api_version, kind, namespace, selector)
        items = [{"apiVersion": api_version, "kind": kind, **each} for each in said.get("items") or ()]
        (pods if kind == "Pod" else objects).extend(items)
    by_part = {
        part: tuple(each for each in pods if each["metadata"].get("labels", {}).get(LABEL_PART) == part)
        for part in ("instance", "router")
    }
    named = [
        each
        for each in (await client.list(API_VERSION, "BatonPool", namespace)).get("items") or ()
        if each.get("spec", {}).get("cluster") == name
    ]
    now = time.time()  # noqa: TID251 - drains are marked in Unix time
    observed = ObservedCluster(
        objects=tuple(objects),
        pods=by_part["instance"],
        routers=by_part["router"],
        external=external_sizes(named),
    )
    return live, observed, kinds, now


async def checks(client: ApiClient, namespace: str) -> AsyncIterator[Inspection]:
    """Check everything that the operator needs, and the optional kinds that it can use."""
    try:
        version = await client.request("GET", "/version")
        yield Inspection("API server", good=True, detail=str(version.get("gitVersion", "answers")))
    except (ApiFailed, ApiAway) as error:
        yield Inspection("API server", good=False, detail=f"{error}; check --kubeconfig")
        return
    for crd in crds():
        yield await _definition(client, crd)
    optional = {api.partition("/")[0]: (api, kind) for kind, api in OPTIONAL.items()}
    for (group, resource), verbs in sorted(RIGHTS.items()):
        if group not in optional:
            yield await _right(client, namespace, group, resource, verbs)
    for group, (api, kind) in optional.items():
        known = await _kind(client, api, kind)
        yield known
        for (of, resource), verbs in sorted(RIGHTS.items()):
            if known.good and of == group:
                yield replace(await _right(client, namespace, group, resource, verbs), optional=True)


async def _kind(client: ApiClient, api: str, kind: str) -> Inspection:
    try:
        known = kind in await client.kinds([api])
    except (ApiFailed, ApiAway) as error:
        return Inspection(kind, good=False, detail=str(error), optional=True)
    detail = "known" if known else "not installed; only needed where a resource asks for it"
    return Inspection(kind, good=known, detail=detail, optional=True)


async def _definition(client: ApiClient, crd: dict[str, Any]) -> Inspection:
    name = crd["metadata"]["name"]
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
    try:
        live = await client.request("GET", path)
    except ApiFailed as refusal:
        fix = "kubectl apply --server-side -f k8s/manifests/crds"
        return Inspection(name, good=False, detail=f"{refusal}; {fix}")
    wanted = crd["spec"]["versions"][0]
    served = {each["name"]: each for each in live.get("spec", {}).get("versions", ())}
    lacks = _spec_fields(wanted) - _spec_fields(served.get(wanted["name"], {}))
    names = ", ".join(sorted(lacks))
    detail = f"lacks {names}: an older definition; apply k8s/manifests/crds" if lacks else f"serves {', '.join(served)}"
    return Inspection(name, good=not lacks, detail=detail)


def _spec_fields(version: dict[str, Any]) -> set[str]:
    schema = version.get("schema", {}).get("openAPIV3Schema", {})
    return set(schema.get("properties", {}).get("spec", {}).get("properties", {}))


async def _right(client: ApiClient, namespace: str, group: str, resource: str, verbs: tuple[str, ...]) -> Inspection:
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    name, _, sub = resource.partition("/")
    missing = []
    for verb in verbs:
        asked = {"namespace": namespace, "group": group, "resource": name, "subresource": sub, "verb": verb}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        try:
            said = await client.request("POST", path, body={**body, "spec": {"resourceAttributes": asked}})
        except ApiFailed as refusal:
            return Inspection(f"may use {resource}", good=False, detail=str(refusal))
        if not said.get("status", {}).get("allowed"):
            missing.append(verb)
    detail = f"may not {', '.join(missing)}: apply k8s/manifests/operator.yaml" if missing else ", ".join(verbs)
    return Inspection(f"may use {resource}", good=not missing, detail=detail)
