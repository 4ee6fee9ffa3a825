"""Defaults, canonical forms and validation of built-in kinds, for the fields that Baton's objects have.

From "API conventions", `pkg/apis/*/defaults.go` and `validation.go` of Kubernetes 1.36. What is not checked stands in
docs/decisions/0010-kubernetes.md.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from support.k8s_json import copied

Json = dict[str, Any]

LIST_KEYS: dict[str, tuple[str, ...]] = {
    "conditions": ("type",),
    "containers": ("name",),
    "env": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Lists whose entries server-side apply identifies by keys, and these keys (the schema's list-map-keys). All other
lists are atomic."""

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
QUALIFIED = rf"({SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
SUFFIXES = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi")


def list_keys(name: Any, items: list[Any]) -> tuple[str, ...] | None:
    """The keys of the entries of the list in the field `name`; None: the list is atomic."""
    if name == "ports":  # a container's or a Service's; a NetworkPolicy's have neither key
        if any("containerPort" in each for each in items):
            return ("containerPort", "protocol")
        return ("port", "protocol") if any("name" in each or "targetPort" in each for each in items) else None
    return LIST_KEYS.get(name)


def quantity(text: Any) -> str:
    """A quantity as `resource.Quantity` writes it: ``1000m`` -> ``1``, ``2`` -> ``2``, ``1024Mi`` -> ``1Gi``."""
    found = re.fullmatch(r"([0-9.]+)(Ki|Mi|Gi|Ti|Pi|[numkMGTP]?)", str(text))
    assert found, f"no quantity: {text!r}"
    number, suffix = Decimal(found[1]), found[2]
    if suffix in BINARY:
        value = number * 1024 ** (BINARY.index(suffix) + 1)
        for power in range(len(BINARY), 0, -1):
            if value % 1024**power == 0:
                return f"{int(value // 1024**power)}{BINARY[power - 1]}"
        return str(int(value))
    value = number.scaleb(SUFFIXES[suffix])
    for name, power in sorted(SUFFIXES.items(), key=lambda each: -each[1]):
        scaled = value.scaleb(-power)
        if scaled == scaled.to_integral_value() and scaled:
            return f"{int(scaled)}{name}"
    return "0"


def put(thing: Json, **defaults: Any) -> None:
    for name, value in defaults.items():
        thing.setdefault(name, copied(value))


def canonical(kind: str, thing: Json) -> Json:
    """The object with defaults, and with values in the server's own form. Changes `thing` in place."""
    spec = thing.get("spec")
    if isinstance(spec, dict):
        if kind == "Deployment":
            _deployment(spec)
        elif kind == "Pod":
            _pod(spec)
        elif kind == "Service":
            _service(spec)
        elif kind == "NetworkPolicy":
            for rule in spec.get("ingress", ()):
                for port in rule.get("ports", ()):
                    put(port, protocol="TCP")
    if kind == "Secret":
        put(thing, type="Opaque")
    return thing


def _deployment(spec: Json) -> None:
    put(spec, replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600, strategy={"type": "RollingUpdate"})
    if spec["strategy"].get("type") == "RollingUpdate":
        put(spec["strategy"], rollingUpdate={"maxUnavailable": "25%", "maxSurge": "25%"})
    template = spec.get("template", {})
    template.setdefault("metadata", {})
    if "spec" in template:
        _pod(template["spec"])


def _pod(spec: Json) -> None:
    put(spec, restartPolicy="Always", dnsPolicy="ClusterFirst", schedulerName="default-scheduler", securityContext={})
    put(spec, terminationGracePeriodSeconds=30)
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if not spec.get(name, True):
            del spec[name]  # `omitempty`
    if "serviceAccountName" in spec:
        put(spec, serviceAccount=spec["serviceAccountName"])
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        _container(container)
    for volume in spec.get("volumes", ()):
        for source in ("secret", "configMap", "projected"):
            if source in volume:
                put(volume[source], defaultMode=0o644)


def _container(container: Json) -> None:
    tag = container.get("image", "").rpartition(":")[2]
    put(container, imagePullPolicy="Always" if tag in {"", "latest"} else "IfNotPresent", resources={})
    put(container, terminationMessagePath="/dev/termination-log", terminationMessagePolicy="File")
    for asked in container["resources"].values():
        for name, value in asked.items() if isinstance(asked, dict) else ():
            asked[name] = quantity(value)
    limits = container["resources"].get("limits")
    if limits:
        container["resources"]["requests"] = {**limits, **container["resources"].get("requests", {})}
    for each in container.get("env", ()):
        if each.get("value") == "":
            del each["value"]  # `omitempty`
        if "fieldRef" in each.get("valueFrom", {}):
            put(each["valueFrom"]["fieldRef"], apiVersion="v1")
    for port in container.get("ports", ()):
        put(port, protocol="TCP")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if name in container:
            put(container[name], timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
            if "httpGet" in container[name]:
                put(container[name]["httpGet"], scheme="HTTP", path="/")


def _service(spec: Json) -> None:
    put(spec, type="ClusterIP", sessionAffinity="None", internalTrafficPolicy="Cluster", ipFamilyPolicy="SingleStack")
    put(spec, clusterIP="10.96.0.9", clusterIPs=["10.96.0.9"], ipFamilies=["IPv4"])
    for port in spec.get("ports", ()):
        put(port, protocol="TCP", targetPort=port.get("port"))


# -- validation --


def faults(kind: str, thing: Json, before: Json | None) -> list[str]:
    """Why a server refuses the object: lines of ``field: why``."""
    return [*_metadata(kind, thing["metadata"]), *_of_kind(kind, thing, before)]


def _metadata(kind: str, metadata: Json) -> Iterator[str]:
    form = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?" if kind == "Service" else SUBDOMAIN
    if not re.fullmatch(form, metadata["name"]) or len(metadata["name"]) > 253:
        yield f"metadata.name: Invalid value: {metadata['name']!r}"
    yield from _labels(metadata.get("labels", {}), "metadata.labels")
    for name in metadata.get("annotations", {}):
        if not re.fullmatch(QUALIFIED.replace("[a-z0-9]", "[A-Za-z0-9]"), name):
            yield f"metadata.annotations: Invalid value: {name!r}"
    owners = metadata.get("ownerReferences", ())
    if any(not each.get(name) for each in owners for name in ("uid", "name", "kind", "apiVersion")):
        yield "metadata.ownerReferences: must not be empty"
    if sum(bool(each.get("controller")) for each in owners) > 1:
        yield "metadata.ownerReferences: Only one reference can have Controller set to true"
    for each in metadata.get("finalizers", ()):
        if not re.fullmatch(QUALIFIED, each):
            yield f"metadata.finalizers: Invalid value: {each!r}"


def _labels(labels: Json, field: str) -> Iterator[str]:
    for name, value in labels.items():
        if not re.fullmatch(QUALIFIED, name):
            yield f"{field}: Invalid value: {name!r}"
        if not isinstance(value, str) or not re.fullmatch(VALUE, value):
            yield f"{field}: Invalid value: {value!r}"


def _of_kind(kind: str, thing: Json, before: Json | None) -> Iterator[str]:
    spec = thing.get("spec", {})
    if kind == "Deployment":
        chosen, template = spec.get("selector", {}).get("matchLabels"), spec.get("template", {})
        if not chosen:
            yield "spec.selector: Required value"
        elif not chosen.items() <= template.get("metadata", {}).get("labels", {}).items():
            yield "spec.template.metadata.labels: `selector` does not match template `labels`"
        if before is not None and before["spec"].get("selector") != spec.get("selector"):
            yield "spec.selector: field is immutable"
        yield from _labels(template.get("metadata", {}).get("labels", {}), "spec.template.metadata.labels")
        yield from _pod_faults(template.get("spec", {}), "spec.template.spec")
        if spec["progressDeadlineSeconds"] <= spec.get("minReadySeconds", 0):
            yield "spec.progressDeadlineSeconds: must be greater than minReadySeconds"
    elif kind == "Pod":
        yield from _pod_faults(spec, "spec")
    elif kind == "Service":
        if not spec.get("ports"):
            yield "spec.ports: Required value"
        yield from _unique((each.get("name", "") for each in spec.get("ports", ())), "spec.ports.name")
        yield from _unique(((each["port"], each["protocol"]) for each in spec.get("ports", ())), "spec.ports")
    elif kind == "Secret":
        for name, value in thing.get("data", {}).items():
            b64decode(value, validate=True)
            if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", name):
                yield f"data[{name}]: Invalid value"
    elif kind == "Lease" and spec.get("leaseDurationSeconds", 1) <= 0:
        yield "spec.leaseDurationSeconds: must be greater than 0"
    elif kind == "Event" and thing["involvedObject"].get("namespace") != thing["metadata"]["namespace"]:
        yield "involvedObject.namespace: does not match event.namespace"


def _pod_faults(spec: Json, field: str) -> Iterator[str]:
    if not spec.get("containers"):
        yield f"{field}.containers: Required value"
    volumes = [each["name"] for each in spec.get("volumes", ())]
    yield from _unique(volumes, f"{field}.volumes.name")
    for volume in spec.get("volumes", ()):
        if len(volume) != 2:
            yield f"{field}.volumes: {volume['name']}: must specify exactly one volume type"
        if not re.fullmatch(LABEL, volume["name"]):
            yield f"{field}.volumes.name: Invalid value: {volume['name']!r}"
    yield from _unique((each["name"] for each in spec.get("containers", ())), f"{field}.containers.name")
    for container in spec.get("containers", ()):
        if not container.get("image"):
            yield f"{field}.containers.image: Required value"
        mounts = container.get("volumeMounts", ())
        yield from _unique((each["mountPath"] for each in mounts), f"{field}.containers.volumeMounts.mountPath")
        yield from (f"volumeMounts.name: Not found: {each['name']!r}" for each in mounts if each["name"] not in volumes)
        ports = container.get("ports", ())
        yield from _unique((each["name"] for each in ports if "name" in each), f"{field}.containers.ports.name")
        yield from _resources(container.get("resources", {}), field)


def _resources(resources: Json, field: str) -> Iterator[str]:
    """Check extended resources (GPUs): a whole number, and requests equal limits."""
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for name in {*limits, *requests}:
        if "/" in name and (limits.get(name) != requests.get(name) or not str(limits.get(name)).isdecimal()):
            yield f"{field}.containers.resources: {name}: must be an integer, and requests equal limits"


def _unique(values: Any, field: str) -> Iterator[str]:
    seen: set[Any] = set()
    for each in values:
        if each in seen:
            yield f"{field}: Duplicate value: {each!r}"
        seen.add(each)
