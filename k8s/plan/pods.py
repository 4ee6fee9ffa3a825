"""The pods of instances and their workload objects: a Deployment of one each. Pure.

GPU counts come from the pool's shape and are kept in a label; they are never read back from resource requests, which a
pool's patch may replace (DRA claims). Every container has the "restricted" profile of Kubernetes' pod security
standards unless a patch changes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.instance import Role
from cluster.registry.layout import users
from cluster.spec import flags
from cluster.spec.plan import stems
from cluster.spec.settings import Model, Pool
from k8s.crd.names import (
    APPLIED,
    FIELD_MANAGER,
    LABEL_CLUSTER,
    LABEL_FAMILY,
    LABEL_GPU,
    LABEL_KEYS,
    LABEL_MANAGED,
    LABEL_MODEL,
    LABEL_PART,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_ROLE,
    READY_GATE,
    digest,
    gpu_label,
    label_value,
    service_name,
    short,
)
from k8s.crd.resource import Resource, secret_key
from k8s.plan.merge import patched

ENGINE_PORT: Final = 8100
AGENT_PORT: Final = 8200
SIDE_CHANNEL_PORT: Final = 5600
FILES: Final = "/etc/baton"
INTERNAL: Final = "/run/baton"
KEYS: Final = "/run/baton-keys"
KEYS_FILE: Final = "tickets"
GRACE_S: Final = 60
"""Seconds after the drain that an engine needs to end after its last stream."""
LINGER_S: Final = 20
"""Seconds for which an instance that is told to end without a drain still takes work. If the whole cluster is deleted
at once (a namespace, `--cascade=foreground`), routers stop taking requests after 5 s: requests admitted by then still
find instances."""
PROBE_S: Final = 10
"""Seconds between two startup or liveness probes of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The operator's images, for resources that name none."""

    engine: str
    router: str
    redis: str


def users_digest(resource: Resource) -> str:
    """Names the list of the registry's users, without their passwords."""
    assert resource.spec is not None
    return digest(users(resource.spec.registry.cluster))


def labels(resource: Resource, part: str) -> dict[str, str]:
    """Labels of every object of one cluster."""
    return {LABEL_MANAGED: FIELD_MANAGER, LABEL_CLUSTER: label_value(resource.name), LABEL_PART: part}


def owned(
    resource: Resource, api_version: str, kind: str, name: str, part: str, *, outlives: bool = False, **body: Any
) -> dict[str, Any]:
    """An object of the cluster: labelled, and deleted with it.

    `outlives`: it is deleted only after the last router's pod is gone (`order_of`).
    """
    owner = {
        "apiVersion": "serving.baton.dev/v1alpha1",
        "kind": "BatonCluster",
        "name": resource.name,
        "uid": resource.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    order = {"apiVersion": "v1", "kind": "ConfigMap", "name": order_name(resource), "uid": resource.order_uid}
    metadata = {
        "name": name,
        "namespace": resource.namespace,
        "labels": labels(resource, part),
        "ownerReferences": [owner, order] if outlives else [owner],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def order_name(resource: Resource) -> str:
    """Name of the ConfigMap by which the garbage collector keeps the order of a deletion."""
    return short(f"{resource.name}-order")


def order_of(resource: Resource, routers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A ConfigMap that exists as long as the cluster or one of its routers' pods, because they all own it.

    It owns instances and the registry, together with the cluster: when the cluster is deleted, its routers end first,
    while instances still serve their legs. The garbage collector needs no operator for that.
    """
    made = owned(resource, "v1", "ConfigMap", order_name(resource), "order", data={"what": "keeps routers first"})
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "name": each["metadata"]["name"], "uid": each["metadata"]["uid"]}
        for each in sorted(routers, key=lambda pod: str(pod["metadata"]["name"]))
    ]
    made["metadata"]["ownerReferences"] += pods
    return made


def stamped(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its own digest as an annotation, so that a field which is no longer wanted is noticed, too.

    Owners are left out of the digest: their UIDs are compared with the live object's.
    """
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "ownerReferences"}
    mark = digest(json.dumps({**manifest, "metadata": metadata}, sort_keys=True))
    annotations = {**manifest["metadata"].get("annotations", {}), APPLIED: mark}
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}


def container_security() -> dict[str, Any]:
    """The security context of a container under the restricted profile."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def pod_security() -> dict[str, Any]:
    """The security context of a pod under the restricted profile."""
    return {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def internal_secret(resource: Resource) -> str:
    """Name of the Secret with what the operator makes itself: the registry's passwords, the operator's key."""
    return short(f"{resource.name}-internal")


def fleet_secret(resource: Resource) -> str:
    """Name of the Secret with the fleet's ticket keys, which only routers mount."""
    return short(f"{resource.name}-ticket-keys")


def instance_secret(instance: str) -> str:
    """Name of the Secret with the keys of one instance, which only its pods mount."""
    return f"{instance}-keys"


def keys_volume(secret: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The volume of a key Secret and its mount, read-only."""
    volume = {"name": "keys", "secret": {"secretName": secret, "defaultMode": 0o440}}
    return volume, {"name": "keys", "mountPath": KEYS, "readOnly": True}


def registry_url(resource: Resource, user: str) -> str:
    """URL of the cluster's registry for a user of it; the resource's own URL if it has one."""
    assert resource.spec is not None
    said = resource.spec.registry.url
    if said is not None:
        return said
    return f"redis://{user}@{service_name(f'{resource.name}-registry')}.{resource.namespace}.svc:6379"


def literal(words: Iterable[str]) -> list[str]:
    """Words of the user's for a container's `command`: there Kubernetes makes ``$`` of ``$$``, and the variable's value
    of ``$(NAME)``.
    """
    return [each.replace("$", "$$") for each in words]


def registry_words(resource: Resource, user: str) -> list[str]:
    """The flags of an agent or a router for the registry."""
    assert resource.spec is not None
    registry = resource.spec.registry
    words = literal(["--registry", registry_url(resource, user), "--cluster", registry.cluster])
    if registry.url is None:
        return [*words, "--registry-password-file", f"{INTERNAL}/{user}-password"]
    if registry.password_file:
        words += ["--registry-password-file", f"{FILES}/{registry.password_file}"]
    if registry.ca_file:
        words += ["--registry-ca-file", f"{FILES}/{registry.ca_file}"]
    return words


def volumes(resource: Resource, user: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts of routers and engines: the cluster file, the files it names that the pod reads, and the
    internal Secret. Routers read all files, and engines those of the registry: so engines see no tenant's key and no
    certificate's, and a new tenant changes no engine's template.

    `user`: user of the registry; a pod gets only this user's password from the internal Secret.
    """
    assert resource.spec is not None
    registry = resource.spec.registry
    engines = {secret_key(path): path for path in (registry.password_file, registry.ca_file) if path}
    files = resource.files if user == "baton-router" else engines
    own = ["operator-key-digest", *((f"{user}-password",) if registry.url is None else ())]
    internal = {
        "secretName": internal_secret(resource),
        "items": [{"key": key, "path": key} for key in own],
        "defaultMode": 0o440,
    }
    items = [{"key": key, "path": path.removeprefix("./")} for key, path in sorted(files.items())]
    sources: list[dict[str, Any]] = [{"configMap": {"name": short(f"{resource.name}-file")}}]
    if items:
        sources.append({"secret": {"name": resource.files_secret, "items": items}})
    given: list[dict[str, Any]] = [
        {"name": "files", "projected": {"sources": sources, "defaultMode": 0o440}},
        {"name": "internal", "secret": internal},
        {"name": "state", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "files", "mountPath": FILES, "readOnly": True},
        {"name": "internal", "mountPath": INTERNAL, "readOnly": True},
        {"name": "state", "mountPath": "/state"},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - an emptyDir of the pod's own
    ]
    return given, mounts


def field_env(name: str, path: str) -> dict[str, Any]:
    """An environment variable with a field of the pod itself."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _words(resource: Resource, model: Model, role: Role, pool: Pool, family: str) -> list[str]:
    """The container's command line. The instance's name is a variable, so the template does not depend on it."""
    assert resource.spec is not None
    settings = resource.kubernetes
    transfer = resource.spec.transfer
    words = ["baton", "engine", *literal([model.name]), "--role", role.value, "--name", "$(BATON_INSTANCE)"]
    words += ["--engine", settings.engine.value] if settings.engine.value != "vllm" else []
    words += ["--host", "$(POD_IP)", "--port", str(ENGINE_PORT)]
    words += ["--side-channel-port", str(SIDE_CHANNEL_PORT), "--agent-host", "$(POD_IP)"]
    words += ["--agent-port", str(AGENT_PORT), "--admin-key-file", f"{INTERNAL}/operator-key-digest"]
    words += ["--ticket-keys-file", f"{KEYS}/{KEYS_FILE}"]
    words += ["--weights", family, "--node", "$(NODE_NAME)", "--drain-s", f"{settings.drain_s:g}"]
    words += ["--linger-s", str(LINGER_S)]
    words += ["--start-timeout", f"{settings.start_s:g}", "--transfer", transfer.connector.value, "--json"]
    words += ["--served-model-name", *literal([model.served_name])] if model.served_name else []
    words += ["--kv-lease", str(transfer.lease_s)] if transfer.lease_s else []
    words += ["--digests"] if transfer.digests else []
    words += [] if transfer.peers else ["--no-peers"]
    words += literal(flags.tier_words(resource.spec.kv)) if settings.engine.value == "vllm" else []
    words += ["--flips"] if pool.flips else []
    for tenant in model.tenants:
        words += ["--tenant", *literal([tenant])]
    for name, value in pool.env.items():
        words += ["--env", *literal([f"{name}={value}"])]
    words += registry_words(resource, "baton-agent")
    engine = literal([*flags.shape_flags(pool.shape), *flags.words(pool.engine_args)])
    return [*words, "--", *engine] if engine else words


def _probes(start_s: float) -> dict[str, Any]:
    health = {"httpGet": {"path": "/health", "port": AGENT_PORT}, "periodSeconds": PROBE_S, "timeoutSeconds": 5}
    ready = {"httpGet": {"path": "/ready", "port": AGENT_PORT}, "periodSeconds": 2, "timeoutSeconds": 2}
    started = {**ready, "periodSeconds": PROBE_S, "failureThreshold": math.ceil(start_s / PROBE_S)}
    return {
        "startupProbe": started,
        "readinessProbe": {**ready, "failureThreshold": 3},
        "livenessProbe": {**health, "failureThreshold": 6},
    }


def _resources(resource: Resource, pool: Pool) -> dict[str, Any]:
    settings = resource.kubernetes
    asked: dict[str, str] = {}
    if settings.engine.value == "vllm":
        asked[settings.gpu_resource] = str(pool.shape.gpus)
    if settings.rdma_resource:
        asked[settings.rdma_resource] = "1"
    return {"limits": asked, "requests": asked} if asked else {}


def _near(resource: Resource, role: Role) -> dict[str, Any]:
    """A preference to place prefill near decode, and decode near prefill, within `rack_topology`."""
    both = {LABEL_CLUSTER: label_value(resource.name), LABEL_PART: "instance"}
    other = {Role.PREFILL: "decode", Role.DECODE: "prefill"}.get(role)
    if other is None:
        return {}
    term = {
        "labelSelector": {"matchLabels": {**both, LABEL_ROLE: other}},
        "topologyKey": resource.kubernetes.rack_topology,
    }
    preferred = {"weight": 100, "podAffinityTerm": term}
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}}


def template(resource: Resource, stem: str, model: Model, role: Role, pool: Pool, images: Images) -> dict[str, Any]:
    """The pod of one pool, without an instance's name. Its digest is the pool's revision."""
    settings = resource.kubernetes
    given, mounts = volumes(resource, "baton-agent")
    given.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - an emptyDir in memory
    container: dict[str, Any] = {
        "name": "engine",
        "image": settings.image or images.engine,
        "command": _words(resource, model, role, pool, family_of(resource, model, images)),
        "env": [
            field_env("POD_IP", "status.podIP"),
            field_env("NODE_NAME", "spec.nodeName"),
            {"name": "XDG_STATE_HOME", "value": "/state"},
            {"name": "HOME", "value": "/state"},
        ],
        "ports": [{"name": "http", "containerPort": ENGINE_PORT}, {"name": "agent", "containerPort": AGENT_PORT}],
        "volumeMounts": mounts,
        "securityContext": container_security(),
        "resources": _resources(resource, pool),
        **_probes(settings.start_s),
    }
    if settings.env_secret:
        container["envFrom"] = [{"secretRef": {"name": settings.env_secret}}]
    spec = {
        "serviceAccountName": short(f"{resource.name}-engines"),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": LINGER_S + math.ceil(settings.drain_s) + GRACE_S,
        "readinessGates": [{"conditionType": READY_GATE}],
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": given,
        **_near(resource, role),
    }
    said = settings.pools.get(stem)
    pod: dict[str, Any] = patched(
        {"metadata": {"labels": {LABEL_KEYS: settings.ticket_keys}}, "spec": spec}, said.pod_template if said else {}
    )
    gate, gates = {"conditionType": READY_GATE}, pod["spec"].get("readinessGates", [])
    if gate not in gates:  # a patch replaces the list
        pod["spec"]["readinessGates"] = [*gates, gate]
    return pod


def family_of(resource: Resource, model: Model, images: Images) -> str:
    """Digest of what both sides of a hand-over must share: weights, flags that change answers, engine, KV-cache format.
    Agents announce it as their weights.
    """
    assert resource.spec is not None
    same = {
        name: {flag: value for flag, value in pool.engine_args.items() if _is_shared(flag)}
        for name, (_, pool) in model.pools.every().items()
    }
    by_pool = _engine_images(resource, model, images)
    image = by_pool if len({*by_pool.values()}) > 1 else next(iter(by_pool.values()))
    connector = resource.spec.transfer.connector.value
    return digest(json.dumps([model.name, image, connector, same], sort_keys=True))


def _engine_images(resource: Resource, model: Model, images: Images) -> dict[str, str]:
    """The engines' image in each pool of a model: a pool's patch may name another one."""
    assert resource.spec is not None
    found = {}
    for stem, (its, _, _) in stems(resource.spec).items():
        if its is model:
            said = resource.kubernetes.pools.get(stem)
            patch = ((said.pod_template if said else {}).get("spec") or {}).get("containers") or ()
            named = (each.get("image") for each in patch if each["name"] == "engine")
            found[stem] = str(next(named, None) or resource.kubernetes.image or images.engine)
    return found


def _is_shared(name: str) -> bool:
    return flags.normal(name) in {*flags.SAME_ON_BOTH_SIDES, *flags.SAME_ANSWERS, "block-size"}


def workload(
    resource: Resource, *, stem: str, model: Model, role: Role, pool: Pool, name: str, images: Images
) -> dict[str, Any]:
    """The workload object of one instance."""
    pod = template(resource, stem, model, role, pool, images)
    revision = revision_of(pod)
    chosen = {
        LABEL_POOL: stem,
        LABEL_ROLE: role.value,
        LABEL_REVISION: revision,
        LABEL_FAMILY: family_of(resource, model, images),
        LABEL_MODEL: digest(model.api_name),
        LABEL_GPU: gpu_label(pool.gpu, pool.shape.gpus),
    }
    own = {"serving.baton.dev/instance": name}
    instance = {"name": "BATON_INSTANCE", "value": name}
    pod = patched(pod, {"metadata": {"labels": {**labels(resource, "instance"), **chosen, **own}}})
    volume, mount = keys_volume(instance_secret(name))
    pod["spec"]["volumes"] = [*pod["spec"]["volumes"], volume]
    for each in pod["spec"]["containers"]:
        if each["name"] == "engine":
            each["env"] = [instance, *each["env"]]
            each["volumeMounts"] = [*each["volumeMounts"], mount]
    body = {"selector": {"matchLabels": own}, "strategy": {"type": "Recreate"}, "template": pod}
    body["revisionHistoryLimit"] = 0
    body["progressDeadlineSeconds"] = math.ceil(resource.kubernetes.start_s) + GRACE_S
    manifest = owned(resource, "apps/v1", "Deployment", name, "instance", outlives=True, spec=body)
    manifest["metadata"]["labels"] |= {**chosen, **own}
    return stamped(manifest)


def revision_of(pod: Mapping[str, Any]) -> str:
    """A pool's revision: the digest of its pods' template."""
    return digest(json.dumps(pod, sort_keys=True))
