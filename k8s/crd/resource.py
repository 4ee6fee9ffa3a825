"""A `BatonCluster` read: its cluster file, its section `kubernetes`, and everything that is wrong with both. Pure.

The `spec` without `kubernetes` *is* the cluster file and is read by the same code. Files that it names are keys of one
Secret (``keys/acme`` is the key ``keys.acme``), mounted beside the cluster file at the paths that the spec has.
Kubernetes decides on addresses and ports: those of the file are ignored with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.spec import Problem, Severity, Spec
from cluster.spec.parse import parse_value
from cluster.spec.plan import stems
from cluster.spec.problems import FieldPath, nearest, quoted, shown_path
from cluster.spec.reader import Reader
from cluster.spec.rules import FloorOf, all_pools
from cluster.spec.tree import Malformed, MappingNode, tree_of
from cluster.urls import parted
from k8s.crd.names import NAME_CHARS_MAX, plain_name, short
from k8s.crd.settings import DNS_NAME, Kubernetes
from k8s.crd.templates import template_faults

IGNORED: Final = {
    "host": "pods listen on their own addresses, and the Service is the address of clients",
    "port": "clients reach the Service on port 8000",
    "admin_host": "pods listen on their own addresses",
    "admin_port": "the admin side is on port 8001",
    "processes": "routers are pods of one process each, as many as `kubernetes.routers`",
}
"""Settings of `router` that Kubernetes decides."""

ROUTER_STEM: Final = "router"
"""The part of routers' object names after the cluster's name."""

_SECRET_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One `BatonCluster` as the operator works with it."""

    name: str
    namespace: str
    uid: str
    generation: int
    deleting: bool
    spec: Spec | None
    """None if there is an error."""
    kubernetes: Kubernetes
    problems: tuple[Problem, ...]
    file: Mapping[str, Any]
    """The cluster file: the `spec` without `kubernetes`."""
    order_uid: str = ""
    """UID of the object that keeps the order of a deletion (`k8s.plan.pods.order_of`); empty: it does not exist yet."""

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems because of which the operator does not follow the resource."""
        return tuple(each for each in self.problems if each.severity is Severity.ERROR)

    @property
    def files_secret(self) -> str:
        """Name of the Secret that holds the files."""
        return self.kubernetes.files_secret or short(f"{self.name}-files")

    @property
    def files(self) -> Mapping[str, str]:
        """Every file that the spec names, by its key in the Secret."""
        return {secret_key(path): path for _, path in files_of(self.spec)} if self.spec else {}


def cluster_file(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The cluster file in the `spec` of a resource."""
    return {name: value for name, value in spec.items() if name != "kubernetes"}


def secret_key(path: str) -> str:
    """The key of a Secret for a file: ``keys/acme`` -> ``keys.acme``."""
    return path.removeprefix("./").replace("/", ".")


def files_of(spec: Spec) -> Iterator[tuple[str, str]]:
    """Every file that a cluster names: the field, and the path in it."""
    for name in spec.tenants:
        yield f"tenants.{name}.key_file", spec.key_file(name)
    for section, names in (
        ("registry", ("password_file", "ca_file")),
        ("router", ("admin_key_file", "tls_cert_file", "tls_key_file")),
    ):
        for name in names:
            path = getattr(getattr(spec, section), name)
            if path is not None:
                yield f"{section}.{name}", path


def read_resource(resource: Mapping[str, Any], *, floor_of: FloorOf | None = None) -> Resource:
    """Read a `BatonCluster`. Raises nothing for wrong content: problems are collected."""
    labelled = resource.get("metadata")
    metadata = labelled if isinstance(labelled, Mapping) else {}
    said = resource.get("spec")
    spec_value = said if isinstance(said, Mapping) else {}
    name = str(metadata.get("name") or "")
    where = f"{str(resource.get('kind') or 'BatonCluster').lower()}/{name}"
    file = cluster_file(spec_value)
    parsed = parse_value(file, where, floor_of=floor_of)
    kubernetes, problems = _section(spec_value.get("kubernetes"), where)
    told = [*_nameless(name, where), *parsed.problems, *problems, *_templates(kubernetes, where)]
    if parsed.spec is not None:
        told += _ignored(file, where)
        told += _files(parsed.spec, where)
        told += _password(parsed.spec, where)
        told += _unknown_pools(parsed.spec, kubernetes, where)
        told += _pool_names(parsed.spec, where)
        told += _wide(parsed.spec, kubernetes, where)
    broken = parsed.spec is None or any(each.severity is Severity.ERROR for each in told)
    return Resource(
        name=name,
        namespace=str(metadata.get("namespace") or "default"),
        uid=str(metadata.get("uid") or ""),
        generation=int(metadata.get("generation") or 0),
        deleting=bool(metadata.get("deletionTimestamp")),
        spec=None if broken else parsed.spec,
        kubernetes=kubernetes,
        problems=tuple(told),
        file=file,
    )


def _nameless(name: str, where: str) -> Iterator[Problem]:
    """A file may lack the name. An API server has no resource without one."""
    if not name:
        yield _problem(where, "metadata.name", "is missing", "write a name, such as `metadata: {name: chat}`")


def _section(value: object, where: str) -> tuple[Kubernetes, list[Problem]]:
    reader = Reader(where)
    if value is None:
        return Kubernetes(), []
    try:
        node = tree_of(value)
    except Malformed as fault:
        return Kubernetes(), [_problem(where, "kubernetes", fault.message, fault.fix)]
    reader.read(MappingNode(node.mark))  # sets the reader's root; problems of the empty file are dropped
    reader.problems.clear()
    section = reader.section(Kubernetes, node, ("kubernetes",))
    return section, reader.problems


def _problem(
    where: str, field: str, message: str, fix: str, value: str = "", severity: Severity = Severity.ERROR
) -> Problem:
    return Problem(file=where, line=1, column=1, field=field, value=value, message=message, fix=fix, severity=severity)


def _ignored(file: Mapping[str, Any], where: str) -> Iterator[Problem]:
    router = file.get("router") or {}
    for name, because in IGNORED.items():
        if name in router:
            value, message = str(router[name]), f"has no effect on Kubernetes: {because}"
            yield _problem(where, f"router.{name}", message, "leave it out", value, Severity.WARNING)


def _files(spec: Spec, where: str) -> Iterator[Problem]:
    """Files that cannot be in a Secret, and files that would have the same key in it."""
    keys: dict[str, str] = {}
    for field, path in files_of(spec):
        parts = path.removeprefix("./").split("/")
        key = secret_key(path)
        if path.startswith(("/", "~")) or ".." in parts or not _SECRET_KEY.fullmatch(key):
            fix = "write a relative path of letters, digits, `-`, `_` and `.`, such as `keys/acme`"
            yield _problem(where, field, "is outside the Secret that holds the files", fix, path)
        elif keys.setdefault(key, path) != path:
            message = f"is one key of the Secret with `{keys[key]}`: `{key}`"
            yield _problem(where, field, message, "give one of the two another name", path)


def _password(spec: Spec, where: str) -> Iterator[Problem]:
    """A password in the registry's address: commands of pods and a ConfigMap, which is no Secret, have the address."""
    url = spec.registry.url
    if url is not None and parted(url)[1]:
        message = "a password: on Kubernetes all who may read pods or ConfigMaps have it"
        fix = (
            "take it out of the address and write `password_file: keys/registry`, with the Secret's key `keys.registry`"
        )
        yield _problem(where, "registry.url", message, fix, "***")


def _pool_names(spec: Spec, where: str) -> Iterator[Problem]:
    """Extra pools whose names are too long for a label, are no names for `kubernetes.pools` and a `BatonPool`, or are
    that of the routers, whose disruption budget's name they would have.
    """
    fields = (
        (f"models[{number}].pools.extra.{name}", model, name)
        for number, model in enumerate(spec.models)
        for name in model.pools.extra
    )
    by_pool = {id(pool): stem for stem, (_, _, pool) in stems(spec).items()}
    for field, model, name in fields:
        stem = by_pool[id(model.pools.extra[name])]
        if len(stem) > NAME_CHARS_MAX:
            message = f"is called `{stem}` on Kubernetes, {len(stem)} characters; a label holds {NAME_CHARS_MAX}"
            yield _problem(where, field, message, f"shorten the name by {len(stem) - NAME_CHARS_MAX}", name)
        elif not DNS_NAME.fullmatch(stem):
            message = f"is called `{stem}` on Kubernetes, where a pool's name has lowercase letters, digits and dashes"
            plain = plain_name(name)
            fix = f"write `{f'{plain}-extra' if plain in model.pools.every() else plain}`"
            yield _problem(where, field, message, fix, name)
        elif stem == ROUTER_STEM:
            yield _problem(
                where, field, "has the name of the routers on Kubernetes", "give the pool another name", name
            )


def _wide(spec: Spec, kubernetes: Kubernetes, where: str) -> Iterator[Problem]:
    """Pools whose instances have more GPUs than a node. Such an instance would need an engine process on each node that
    knows its rank, and no pod here starts one.
    """
    most = kubernetes.node_gpus
    for path, _, pool in all_pools(spec):
        if pool.shape.gpus > most:
            message = f"an instance does not span several nodes on Kubernetes, and a node has {most} GPUs"
            fix = f"choose a shape of at most {most}, or write in `kubernetes.node_gpus` how many your nodes have"
            yield _problem(where, shown_path((*path, "shape")), message, fix, f"{pool.shape.gpus} GPUs")


def _templates(kubernetes: Kubernetes, where: str) -> Iterator[Problem]:
    """What is wrong with the patches of pods: a plan that merged them could not be made."""
    patches: list[tuple[FieldPath, Mapping[str, Any], str]] = [
        (("kubernetes", "pools", name, "pod_template"), pool.pod_template, "engine")
        for name, pool in kubernetes.pools.items()
    ]
    for path, patch, container in (*patches, (("kubernetes", "router_template"), kubernetes.router_template, "router")):
        for fault in template_faults(patch, container):
            yield _problem(where, shown_path((*path, *fault.path)), fault.message, fault.fix, fault.value)


def _unknown_pools(spec: Spec, kubernetes: Kubernetes, where: str) -> Iterator[Problem]:
    known = stems(spec)
    for name in kubernetes.pools:
        if name not in known:
            near = nearest(name, known)
            fix = f"did you mean `{near}`?" if near else f"write one of {quoted(known)}"
            yield _problem(where, f"kubernetes.pools.{name}", "is no pool of this cluster", fix)
