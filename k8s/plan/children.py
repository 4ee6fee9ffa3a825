"""Manifests of all children but instances: routers, registry, file, Services, policies. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from cluster.spec import flags
from cluster.spec.plan import keeps_both_legs
from cluster.spec.tree import tree_of
from cluster.spec.writer import written
from k8s.crd.names import (
    LABEL_CLUSTER,
    LABEL_COUNT,
    LABEL_PART,
    LABEL_POOL,
    LABEL_USERS,
    digest,
    label_value,
    service_name,
    short,
)
from k8s.crd.resource import IGNORED, Resource
from k8s.plan.merge import patched
from k8s.plan.pods import (
    AGENT_PORT,
    ENGINE_PORT,
    FILES,
    GRACE_S,
    INTERNAL,
    KEYS,
    KEYS_FILE,
    Images,
    container_security,
    field_env,
    fleet_secret,
    internal_secret,
    keys_volume,
    labels,
    order_of,
    owned,
    pod_security,
    registry_words,
    stamped,
    users_digest,
    volumes,
)

ROUTER_PORT: Final = 8000
ADMIN_PORT: Final = 8001
REDIS_PORT: Final = 6379

PRE_STOP_S: Final = 5
"""Seconds for which a router that is told to end still takes requests: so long Services may send some."""

ROUTER_MEMORY_MIB: Final = 2048
"""A router's memory limit. A parsed body takes up to ten times its bytes (`Limits.open_bytes_max`): a router refuses or
holds bodies long before its limit, because one that is killed ends all its streams."""
OPEN_BYTES_MAX: Final = (ROUTER_MEMORY_MIB << 20) // 16
UPLOADS_BYTES_MAX: Final = (ROUTER_MEMORY_MIB << 20) // 32

REDIS_MEMORY: Final = "1Gi"  # as the API server writes it: another spelling would look like a change
"""The registry's memory. With connections between peers it holds a copy of an engine's metadata for each other engine:
about 100 KB at tensor parallelism 8. Above three quarters of it Redis refuses writes, and goes on; killed, it would
lose what it holds, get all of it again at once, and be killed again."""


def children(
    resource: Resource,
    images: Images,
    sizes: Mapping[str, int],
    routers: Iterable[Mapping[str, Any]] = (),
    *,
    operator_in: str = "",
) -> tuple[dict[str, Any], ...]:
    """Manifests of all children that are not instances, in the order in which they are applied.

    `sizes`: instances wanted, by pool. `routers`: the routers' pods that exist now. `operator_in`: the
    operator's namespace; empty: the resource's own.
    """
    assert resource.spec is not None
    made = [
        order_of(resource, routers),
        _account(resource),
        _file(resource),
        *(_registry(resource, images) if resource.spec.registry.url is None else ()),
        _router(resource, images),
        *_services(resource),
        *_budgets(resource, sizes),
        *_policies(resource, operator_in),
        *_optional(resource),
    ]
    return tuple(stamped(each) for each in made)


def selector(resource: Resource, part: str) -> dict[str, str]:
    """Labels that select the pods of one part, such as ``router``."""
    return {LABEL_CLUSTER: label_value(resource.name), LABEL_PART: part}


def _account(resource: Resource) -> dict[str, Any]:
    name = short(f"{resource.name}-engines")
    return owned(resource, "v1", "ServiceAccount", name, "account", automountServiceAccountToken=False)


ENGINES_ALONE: Final = frozenset({"min", "max", "start", "env"})
"""Settings of a pool that routers do not read: a change of one restarts no router. Of `engine_args` they read the flags
in `flags.PRICED` alone."""


def file_text(resource: Resource) -> str:
    """The cluster file for routers: the resource's, without settings of Kubernetes and those that only engines read."""
    file: dict[str, Any] = dict(resource.file)
    if "router" in file:
        file["router"] = {key: value for key, value in (file["router"] or {}).items() if key not in IGNORED}
    file["models"] = [_model_for_routers(each) for each in file["models"]]
    return written(tree_of(file), sort_keys=True)


def _restarts(resource: Resource) -> str:
    """Digest of what routers read of their file at the start alone. They follow an edited `slo` by themselves, but not
    the first class, nor the end of the last one.
    """
    rest = {name: value for name, value in resource.file.items() if name != "slo"}
    return digest(
        f"{'with' if resource.file.get('slo') else 'without'} classes\n{file_text(replace(resource, file=rest))}"
    )


def router_drain_s(resource: Resource) -> float:
    """Seconds that a router has to let streams end: `limits.drain_s`, but as long as instances have at least."""
    assert resource.spec is not None
    return max(resource.spec.limits.drain_s, resource.kubernetes.drain_s)


def _model_for_routers(model: Mapping[str, Any]) -> dict[str, Any]:
    if not model.get("pools"):
        return dict(model)
    pools = {role: _pool_for_routers(pool) for role, pool in model["pools"].items() if role != "extra"}
    extra = {name: _pool_for_routers(pool) for name, pool in (model["pools"].get("extra") or {}).items()}
    return {**model, "pools": {**pools, **({"extra": extra} if extra else {})}}


def _pool_for_routers(pool: Mapping[str, Any] | None) -> dict[str, Any]:
    kept = {key: value for key, value in (pool or {}).items() if key not in ENGINES_ALONE}
    args = kept.pop("engine_args", None) or {}
    priced = {name: value for name, value in args.items() if flags.normal(name) in flags.PRICED}
    return {**kept, "engine_args": priced} if priced else kept


def _file(resource: Resource) -> dict[str, Any]:
    data = {"baton.yaml": file_text(resource)}
    return owned(resource, "v1", "ConfigMap", short(f"{resource.name}-file"), "file", data=data)


# -- routers --


def _router_container(resource: Resource, images: Images) -> dict[str, Any]:
    assert resource.spec is not None
    # Both families, and loopback, where `kubectl port-forward` arrives. Earlier images go by the last address alone.
    words = ["baton", "router", "--config", f"{FILES}/baton.yaml", "--host", "::", "--host", "0.0.0.0"]  # noqa: S104
    words += ["--port", str(ROUTER_PORT), "--admin-host", "127.0.0.1", "--admin-host", "$(POD_IP)"]
    words += ["--admin-port", str(ADMIN_PORT), "--json"]
    words += _body_bounds(resource)
    words += ["--drain-s", f"{router_drain_s(resource):g}"]
    words += ["--admin-key-file", f"{INTERNAL}/operator-key-digest"]
    if resource.spec.router.admin_key_file is not None:  # the flag replaces the file's setting; older images: last wins
        words += ["--admin-key-file", f"{FILES}/{resource.spec.router.admin_key_file.removeprefix('./')}"]
    words += registry_words(resource, "baton-router")
    words += ["--ticket-keys-file", f"{KEYS}/{KEYS_FILE}"]
    _, mounts = volumes(resource, "baton-router")
    _, keys_mount = keys_volume(fleet_secret(resource))
    ready, memory = _router_probe(resource, "/health"), f"{ROUTER_MEMORY_MIB >> 10}Gi"
    return {
        "name": "router",
        "image": resource.kubernetes.router_image or images.router,
        "command": words,
        "env": [
            field_env("POD_IP", "status.podIP"),
            {"name": "XDG_STATE_HOME", "value": "/state"},
            {"name": "HOME", "value": "/state"},
        ],
        "ports": [
            {"name": "http", "containerPort": ROUTER_PORT},
            {"name": "admin", "containerPort": ADMIN_PORT},
        ],
        "volumeMounts": [*mounts, keys_mount],
        "securityContext": container_security(),
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": memory}},
        "readinessProbe": ready,
        "livenessProbe": _router_alive(),
        "startupProbe": _router_started(resource),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
    }


def _body_bounds(resource: Resource) -> list[str]:
    """Flags with bounds of bodies that fit the pod's memory, where the file leaves them to the router, which would take
    as much as a machine of its own has.
    """
    assert resource.spec is not None
    limits = resource.spec.limits
    words = [] if limits.open_bytes_max else ["--open-bytes-max", str(OPEN_BYTES_MAX)]
    return words + ([] if limits.uploads_bytes_max else ["--uploads-bytes-max", str(UPLOADS_BYTES_MAX)])


def _router_probe(resource: Resource, path: str) -> dict[str, Any]:
    """A probe of the clients' port, which speaks only TLS if the cluster names a certificate. The kubelet does not
    check the certificate.
    """
    assert resource.spec is not None
    get: dict[str, Any] = {"path": path, "port": ROUTER_PORT}
    if resource.spec.router.tls_cert_file is not None:
        get["scheme"] = "HTTPS"
    return {"httpGet": get, "periodSeconds": 2, "timeoutSeconds": 2}


def _router_alive() -> dict[str, Any]:
    """A probe of the admin side, which needs no key for this path, never speaks TLS, and has connections of its own. At
    the clients' port a router whose connections are all taken would refuse the probe, and be killed with its streams.
    """
    get = {"path": "/health", "port": ADMIN_PORT}
    return {"httpGet": get, "periodSeconds": 10, "timeoutSeconds": 2, "failureThreshold": 6}


def _router_started(resource: Resource) -> dict[str, Any]:
    """A startup probe: a router joins the Service once it knows a whole fleet, so a new router refuses no request that
    an old one would serve. It is no readiness probe: while one role is replaced, the other serves whole requests.

    A fleet that may have no instance for a leg has no whole fleet to wait for: the router joins once it has read the
    registry, which it does before it listens. The first request, which starts an instance, needs a router.
    """
    assert resource.spec is not None
    path = "/ready" if keeps_both_legs(resource.spec) else "/health"
    return {**_router_probe(resource, path), "failureThreshold": math.ceil(resource.kubernetes.start_s / 2)}


def _router(resource: Resource, images: Images) -> dict[str, Any]:
    assert resource.spec is not None
    chosen = selector(resource, "router")
    given, _ = volumes(resource, "baton-router")
    keys, _ = keys_volume(fleet_secret(resource))
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": chosen},
    }
    pod = {
        "metadata": {
            "labels": labels(resource, "router"),
            "annotations": {"serving.baton.dev/file": _restarts(resource)},
        },
        "spec": {
            "serviceAccountName": short(f"{resource.name}-engines"),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": PRE_STOP_S + math.ceil(router_drain_s(resource)) + GRACE_S,
            "securityContext": pod_security(),
            "topologySpreadConstraints": [spread],
            "containers": [_router_container(resource, images)],
            "volumes": [*given, keys],
        },
    }
    body = {
        "progressDeadlineSeconds": math.ceil(resource.kubernetes.start_s) + GRACE_S,
        "replicas": resource.kubernetes.routers,
        "selector": {"matchLabels": chosen},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": patched(pod, resource.kubernetes.router_template),
    }
    return owned(resource, "apps/v1", "Deployment", short(f"{resource.name}-router", 46), "router", spec=body)


def _services(resource: Resource) -> Iterator[dict[str, Any]]:
    chosen = selector(resource, "router")
    port = {"name": "http", "port": ROUTER_PORT, "targetPort": "http", "protocol": "TCP"}
    body = {"selector": chosen, "ports": [port], "type": "ClusterIP"}
    yield owned(resource, "v1", "Service", service_name(resource.name), "router", spec=body)


# -- registry --


def _registry(resource: Resource, images: Images) -> Iterator[dict[str, Any]]:
    name, chosen = short(f"{resource.name}-registry", 46), selector(resource, "registry")
    image = resource.kubernetes.redis_image or images.redis
    command = ["redis-server", "--port", str(REDIS_PORT), "--aclfile", f"{INTERNAL}/users.acl", "--save", ""]
    probe = {"tcpSocket": {"port": REDIS_PORT}, "periodSeconds": 5, "timeoutSeconds": 2}
    container = {
        "name": "redis",
        "image": image,
        "command": [*command, "--appendonly", "no", "--dir", "/state", "--maxmemory", "768mb"],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "volumeMounts": [
            {"name": "internal", "mountPath": INTERNAL, "readOnly": True},
            {"name": "state", "mountPath": "/state"},
        ],
        "securityContext": container_security(),
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": REDIS_MEMORY}},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 6},
    }
    items = [{"key": "users.acl", "path": "users.acl"}]
    secret = {"secretName": internal_secret(resource), "items": items, "defaultMode": 0o440}
    pod = {
        "metadata": {"labels": {**labels(resource, "registry"), LABEL_USERS: users_digest(resource)}},
        "spec": {
            "serviceAccountName": short(f"{resource.name}-engines"),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            "containers": [container],
            "volumes": [{"name": "internal", "secret": secret}, {"name": "state", "emptyDir": {}}],
        },
    }
    strategy = {"type": "Recreate"}
    body = {"replicas": 1, "selector": {"matchLabels": chosen}, "strategy": strategy, "template": pod}
    yield owned(resource, "apps/v1", "Deployment", name, "registry", outlives=True, spec=body)
    port = {"name": "redis", "port": REDIS_PORT, "targetPort": "redis", "protocol": "TCP"}
    service = {"selector": chosen, "ports": [port], "type": "ClusterIP"}
    name = service_name(f"{resource.name}-registry")
    yield owned(resource, "v1", "Service", name, "registry", outlives=True, spec=service)


# -- disruption, network --


def budget_name(cluster: str, stem: str) -> str:
    """Name of a pool's disruption budget."""
    return short(f"{cluster}-{stem}")


def _budgets(resource: Resource, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    routers = {"maxUnavailable": 1, "selector": {"matchLabels": selector(resource, "router")}}
    yield owned(resource, "policy/v1", "PodDisruptionBudget", short(f"{resource.name}-router"), "router", spec=routers)
    for stem, size in sizes.items():
        chosen = {**selector(resource, "instance"), LABEL_POOL: stem}
        body = {"maxUnavailable": 1, "selector": {"matchLabels": chosen}, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
        name = budget_name(resource.name, stem)
        made = owned(resource, "policy/v1", "PodDisruptionBudget", name, "budget", spec=body)
        made["metadata"]["labels"][LABEL_COUNT] = str(size)
        yield made


def _from(resource: Resource, *parts: str) -> list[dict[str, Any]]:
    return [{"podSelector": {"matchLabels": selector(resource, part)}} for part in parts]


def _operator(resource: Resource, operator_in: str) -> dict[str, Any]:
    """The operator's pods, in its own namespace alone: a label can be given to any pod of any other one."""
    pods = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "baton-operator"}}}
    if operator_in in {"", resource.namespace}:
        return pods
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_in}}, **pods}


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]


_ALL_BUT_THE_AGENTS: Final = [
    {"protocol": "TCP", "port": 1, "endPort": AGENT_PORT - 1},
    {"protocol": "TCP", "port": AGENT_PORT + 1, "endPort": 65535},
    {"protocol": "UDP"},
]


def _policies(resource: Resource, operator_in: str) -> Iterator[dict[str, Any]]:
    """Network policies: programs of the cluster reach the registry and engines; routers and the operator reach agents.

    Instances reach each other at every port but the agent's: connectors listen on ports of their own choice.
    """
    assert resource.spec is not None
    inside, operator = _from(resource, "router", "instance"), _operator(resource, operator_in)
    rules: dict[str, list[dict[str, Any]]] = {
        "instance": [
            {"from": _from(resource, "instance"), "ports": _ALL_BUT_THE_AGENTS},
            {"from": _from(resource, "router"), "ports": _tcp(ENGINE_PORT, AGENT_PORT)},
            {"from": [operator], "ports": _tcp(AGENT_PORT)},
        ],
        "router": [
            {"ports": _tcp(ROUTER_PORT)},
            {"from": [*_from(resource, "router"), operator], "ports": _tcp(ADMIN_PORT)},
        ],
    }
    prometheus = resource.kubernetes.prometheus_namespace
    if prometheus:
        scraper = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": prometheus}}}]
        rules["instance"].append({"from": scraper, "ports": _tcp(AGENT_PORT)})
        rules["router"].append({"from": scraper, "ports": _tcp(ADMIN_PORT)})
    if resource.spec.registry.url is None:
        rules["registry"] = [{"from": [*inside, operator], "ports": _tcp(REDIS_PORT)}]
    for part, ingress in rules.items():
        chosen = {"matchLabels": selector(resource, part)}
        body = {"podSelector": chosen, "policyTypes": ["Ingress"], "ingress": ingress}
        name = short(f"{resource.name}-{part}")
        made = owned(resource, "networking.k8s.io/v1", "NetworkPolicy", name, "network", outlives=True, spec=body)
        yield made


# -- objects for other operators --


def _optional(resource: Resource) -> Iterator[dict[str, Any]]:
    settings = resource.kubernetes
    if settings.pod_monitor:
        wanted = {"matchLabels": {LABEL_CLUSTER: label_value(resource.name)}}
        key = {"type": "Bearer", "credentials": {"name": internal_secret(resource), "key": "operator-key"}}
        name = f"baton-{resource.namespace}/{resource.name}"  # deploy/prometheus/alerts.yml: one job a cluster
        job = {"action": "replace", "targetLabel": "job", "replacement": name}
        each = {"path": "/metrics", "honorLabels": True, "authorization": key, "relabelings": [job]}
        points = [{"port": port, **each} for port in ("admin", "agent")]
        body: dict[str, Any] = {"selector": wanted, "podMetricsEndpoints": points}
        yield owned(resource, "monitoring.coreos.com/v1", "PodMonitor", short(resource.name), "monitor", spec=body)
    if settings.http_route:
        backend = {"name": service_name(resource.name), "port": ROUTER_PORT}
        body = {"parentRefs": [{"name": settings.http_route.gateway}], "rules": [{"backendRefs": [backend]}]}
        if settings.http_route.hostnames:
            body["hostnames"] = list(settings.http_route.hostnames)
        yield owned(resource, "gateway.networking.k8s.io/v1", "HTTPRoute", short(resource.name), "route", spec=body)
