"""`plan(desired, observed, limits, now) -> actions`: all actions that one cluster needs now. Pure, level-driven."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.instance import Role
from cluster.spec.plan import stems
from cluster.spec.settings import Model, Pool
from k8s.crd.names import APPLIED, LABEL_COUNT, LABEL_PART, LABEL_USERS, digest, gpu_type
from k8s.crd.resource import Resource
from k8s.plan.children import budget_name, children
from k8s.plan.fleet import moves
from k8s.plan.keys import KeySecrets, are_lost, is_before_key, key_actions, key_secrets, may_start
from k8s.plan.merge import contains, view
from k8s.plan.observe import INSTANCE, WORKLOAD, ObservedCluster, gate_of, instances, is_ours, pods_by_instance
from k8s.plan.pods import (
    Images,
    family_of,
    fleet_secret,
    internal_secret,
    order_name,
    revision_of,
    template,
    users_digest,
    workload,
)
from k8s.plan.readiness import gate
from k8s.plan.values import (
    Action,
    Admit,
    Apply,
    Delete,
    Drain,
    Generate,
    Move,
    Park,
    PlanLimits,
    PlannedObject,
    Remove,
    RenewUsers,
    Resume,
    Start,
    Unpark,
    WantedModel,
    WantedPool,
)

Json = Mapping[str, Any]
Key = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """A resource, and what the operator adds to it."""

    resource: Resource
    images: Images
    kinds: frozenset[str] = frozenset({"PodMonitor", "HTTPRoute"})
    """Kinds of other operators that the API server knows and lets be listed."""
    hidden: frozenset[str] = frozenset()
    """Such kinds that it knows and that the operator may not list."""
    operator_in: str = ""
    """The namespace of the operator's own pod; empty: the resource's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The desired and the observed state together: plan and status are both made from it."""

    models: tuple[WantedModel, ...]
    instances: tuple[PlannedObject, ...]
    pools: Mapping[str, tuple[Model, Role, Pool]]
    live: Mapping[Key, Json]
    accepted: Mapping[Key, Json] = field(default_factory=dict)
    """As `ObservedCluster.accepted`."""
    foreign: tuple[Key, ...] = ()
    """Objects that have a wanted name and are not ours."""
    missing_kinds: tuple[str, ...] = ()
    """Kinds of other operators that are needed and cannot be used."""
    keys: KeySecrets = field(default_factory=lambda: KeySecrets(fleet=None, of_instances={}))
    keys_lost: bool = False
    """Whether the fleet's ticket keys are gone: no instance can start until they are back, or others are asked for."""
    scaled: Mapping[str, str] = field(default_factory=dict)
    """By pool, what decides on its size: ``BatonPool`` or ``controller``. A pool that is not named: neither."""


def with_order(desired: Desired, observed: ObservedCluster) -> Desired:
    """`desired` with the UID of the object that keeps the order of a deletion, if that object exists and is ours."""
    resource = desired.resource
    found = (each for each in observed.objects if each["kind"] == "ConfigMap" and is_ours(each, resource.uid))
    live = next((each for each in found if each["metadata"]["name"] == order_name(resource)), None)
    return replace(desired, resource=replace(resource, order_uid=live["metadata"].get("uid", "") if live else ""))


def look(desired: Desired, observed: ObservedCluster) -> Look:
    """Bring both states together. The resource must have no errors."""
    resource = desired.resource
    assert resource.spec is not None
    live = {(each["kind"], each["metadata"]["name"]): each for each in observed.objects}
    keys = key_secrets(resource, observed)
    there = tuple(_with_keys(instances(observed, resource.uid, _types(resource)), observed, keys))
    pools = stems(resource.spec)
    by_model: dict[str, list[WantedPool]] = {}
    for stem, (model, role, pool) in pools.items():
        wanted = _wanted(desired, stem, model, role, pool, observed)
        by_model.setdefault(digest(model.api_name), []).append(wanted)
    models = tuple(WantedModel(key=key, pools=tuple(each)) for key, each in by_model.items())
    sizes = sizes_of(models)
    scaled = dict.fromkeys(observed.advised, "controller") | dict.fromkeys(observed.external, "BatonPool")
    secrets = [("Secret", name) for name in (internal_secret(resource), fleet_secret(resource))]
    names = [
        *secrets,
        *(_key(each) for each in children(resource, desired.images, sizes, operator_in=desired.operator_in)),
    ]
    return Look(
        models=models,
        instances=there,
        pools=pools,
        live=live,
        accepted=observed.accepted,
        foreign=tuple(key for key in names if key in live and not is_ours(live[key], resource.uid)),
        missing_kinds=missing_kinds(desired),
        keys=keys,
        keys_lost=are_lost(resource, keys),
        scaled={stem: decider for stem, decider in scaled.items() if stem in pools},
    )


def _types(resource: Resource) -> dict[str, str]:
    """The GPU types of a resource, by their form in a label."""
    if resource.spec is None:
        return {}
    named = {pool.gpu for _, _, pool in stems(resource.spec).values() if pool.gpu}
    return {gpu_type(each): each for each in (*resource.spec.hardware, *named)}


def _with_keys(found: Iterable[PlannedObject], observed: ObservedCluster, keys: KeySecrets) -> Iterator[PlannedObject]:
    """The instances. One whose pod has not read the key that is coming in gets another revision, so it is rolled."""
    pods = pods_by_instance(observed.pods)
    for each in found:
        is_old = each.name in pods and is_before_key(pods[each.name], keys.fleet)
        yield replace(each, revision=f"{each.revision} with earlier keys") if is_old else each


def sizes_of(models: tuple[WantedModel, ...]) -> dict[str, int]:
    """Instances wanted, by pool."""
    return {pool.stem: pool.count for model in models for pool in model.pools}


def _wanted(
    desired: Desired,
    stem: str,
    model: Model,
    role: Role,
    pool: Pool,
    observed: ObservedCluster,
) -> WantedPool:
    count, because = _count(desired.resource, stem, pool, observed)
    return WantedPool(
        stem=stem,
        role=role,
        count=count,
        floor=min(pool.min, count),
        revision=revision_of(template(desired.resource, stem, model, role, pool, desired.images)),
        family=family_of(desired.resource, model, desired.images),
        gpu=pool.gpu or "",
        gpus=pool.shape.gpus,
        because=because,
    )


def _count(resource: Resource, stem: str, pool: Pool, observed: ObservedCluster) -> tuple[int, str]:
    """How many instances a pool should have, and why. If nothing decides: as many as before, within its bounds."""
    if stem in observed.external:
        said = observed.external[stem]
        count = max(pool.min, said if pool.max is None else min(said, pool.at_most))
        return count, f"the BatonPool says {said}" + ("" if count == said else f", within {pool.min} to {pool.at_most}")
    if stem in observed.advised:
        count = min(max(observed.advised[stem], pool.min), pool.at_most)
        reason = observed.reasons.get(stem, "")
        return count, f"the goodput controller says {observed.advised[stem]}" + (f": {reason}" if reason else "")
    if pool.min >= pool.at_most:  # nothing may resize it (`baton.scaling.wants_scaling`)
        return pool.at_start, f"the resource says {pool.at_start}"
    noted = _noted(resource, stem, observed)
    if noted is not None:
        return min(max(noted, pool.min), pool.at_most), "as many as before: nothing says otherwise"
    return min(max(pool.at_start, pool.min), pool.at_most), f"starts with {pool.at_start}"


def _noted(resource: Resource, stem: str, observed: ObservedCluster) -> int | None:
    """The pool's last size, by the label of its disruption budget, if that is ours; None: unknown."""
    name = budget_name(resource.name, stem)
    budgets = (each for each in observed.objects if each["kind"] == "PodDisruptionBudget")
    for each in budgets:
        if each["metadata"]["name"] == name and is_ours(each, resource.uid):
            text = each["metadata"].get("labels", {}).get(LABEL_COUNT, "")
            return int(text) if text.isdecimal() else None
    return None


def missing_kinds(desired: Desired) -> tuple[str, ...]:
    """Kinds of other operators that the resource asks for and that cannot be used."""
    if desired.resource.spec is None:
        return ()
    settings = desired.resource.kubernetes
    wanted = {"HTTPRoute": settings.http_route is not None, "PodMonitor": settings.pod_monitor}
    return tuple(kind for kind, is_wanted in wanted.items() if is_wanted and kind not in desired.kinds)


def _key(manifest: Json) -> Key:
    return manifest["kind"], manifest["metadata"]["name"]


def limits_of(desired: Desired, observed: ObservedCluster) -> PlanLimits:
    """The limits in the resource itself: times, and the GPUs of `hardware` that no instance has."""
    settings, spec = desired.resource.kubernetes, desired.resource.spec
    free = {name: each.count for name, each in spec.hardware.items() if each.count is not None} if spec else {}
    for each in instances(observed, desired.resource.uid, _types(desired.resource)):
        if each.gpu in free and each.holds_gpus:
            free[each.gpu] -= each.gpus
    return PlanLimits(drain_s=settings.drain_s, gang_s=settings.gang_s, free_gpus=free)


def plan(desired: Desired, observed: ObservedCluster, limits: PlanLimits, now: float) -> tuple[Action, ...]:
    """The actions that are needed now. Empty for a resource that is paused, deleted, wrong, or as it should be.

    Args:
        desired: the resource, read, and the operator's own settings.
        observed: children, pods, and what agents and routers report.
        limits: free GPUs and times.
        now: Unix time, s.
    """
    resource = desired.resource
    if resource.spec is None or resource.kubernetes.paused or resource.deleting:
        return ()
    desired = with_order(desired, observed)
    seen = look(desired, observed)
    if any(kind == "Secret" for kind, _ in seen.foreign):
        return ()  # pods would mount a Secret of another resource, mostly of a deleted one that had this name
    done = {each.name for each in seen.instances if each.deleting}
    todo: tuple[Action, ...] = (*_models(desired, observed, seen, limits, now), *_gone_models(seen, limits, now))
    if not may_start(resource, seen.keys, now):
        todo = tuple(each for each in todo if not isinstance(each, Apply) or _key(each.manifest) in seen.live)
    starting = {each.manifest["metadata"]["name"] for each in todo if isinstance(each, Apply)}
    named = starting | ({each.name for each in seen.instances} - done)
    return (
        *_secrets(desired, seen),
        *key_actions(resource, observed, seen.keys, named, limits, now),
        *_children(desired, seen, observed),
        *todo,
        *_unheard(observed, seen, {each.name for each in todo if isinstance(each, Resume)}),
        *_gates(observed, seen),
    )


def _secrets(desired: Desired, seen: Look) -> Iterator[Action]:
    name = internal_secret(desired.resource)
    if ("Secret", name) not in seen.live:
        yield Generate(name, "the registry's passwords and the operator's key are not there")
    elif seen.live["Secret", name]["metadata"].get("labels", {}).get(LABEL_USERS) != users_digest(desired.resource):
        yield RenewUsers(name, "the registry's users have other rights, or other keys, than this version gives them")


def _children(desired: Desired, seen: Look, observed: ObservedCluster) -> Iterator[Action]:
    sizes, operator_in = sizes_of(seen.models), desired.operator_in
    made = children(desired.resource, desired.images, sizes, observed.routers, operator_in=operator_in)
    wanted = {_key(each): each for each in made}
    for key, manifest in wanted.items():
        if manifest["kind"] not in seen.missing_kinds and key not in seen.foreign:
            yield from _repaired(manifest, seen, key)
    keep = {*wanted, ("Secret", internal_secret(desired.resource)), *(("Secret", name) for name in seen.keys.names)}
    for key, thing in sorted(seen.live.items()):
        part = thing["metadata"].get("labels", {}).get(LABEL_PART)
        if key not in keep and part != "instance" and is_ours(thing, desired.resource.uid) and not _leaving(thing):
            yield _deleted(thing, "nothing wants it any more")


def _leaving(thing: Json) -> bool:
    return bool(thing["metadata"].get("deletionTimestamp"))


def _repaired(manifest: Json, seen: Look, key: Key) -> Iterator[Action]:
    """Apply an object that is missing, that should be different now, or that someone has changed.

    An object that the server keeps in a form of its own since the last apply is left: it would be applied forever.
    """
    live = seen.live.get(key)
    if live is None:
        yield Apply(manifest, "it is not there")
    elif _leaving(live):
        return
    elif live["metadata"].get("annotations", {}).get(APPLIED) != manifest["metadata"]["annotations"][APPLIED]:
        yield Apply(manifest, "something else is wanted now")
    elif not contains(live, manifest) and view(live, manifest) != seen.accepted.get(key):
        yield Apply(manifest, "it is not as it was applied")


def _deleted(thing: Json, because: str) -> Delete:
    metadata = thing["metadata"]
    return Delete(thing["apiVersion"], thing["kind"], metadata["name"], metadata.get("uid", ""), because)


def _models(
    desired: Desired, observed: ObservedCluster, seen: Look, limits: PlanLimits, now: float
) -> Iterator[Action]:
    """Moves of each model. The name of an instance is taken while a pod of it still ends its streams: agents use it."""
    ending = {str(pod["metadata"].get("labels", {}).get(INSTANCE, "")) for pod in observed.pods}
    taken = ending | {name for kind, name in seen.live if kind == WORKLOAD}
    for model in seen.models:
        present = [each for each in seen.instances if each.model == model.key]
        moving = moves(desired.resource.name, model, present, limits, now, taken)
        for move in moving:
            yield from _carried(desired, seen, move)
        yield from _current(desired, seen, model, present)
        yield from _rescaled(seen, present, {move.name for move in moving})


def _carried(desired: Desired, seen: Look, move: Move) -> Iterator[Action]:
    """A move as an action on API objects."""
    if isinstance(move, Start):
        model, role, pool = seen.pools[move.pool]
        manifest = workload(
            desired.resource, stem=move.pool, model=model, role=role, pool=pool, name=move.name, images=desired.images
        )
        if manifest["kind"] not in seen.missing_kinds:
            yield Apply(manifest, move.because)
    elif isinstance(move, Remove):
        yield _deleted(_workload_of(seen, move.name), move.because)
    else:
        yield move


def _workload_of(seen: Look, name: str) -> Json:
    return seen.live[WORKLOAD, name]


def _current(desired: Desired, seen: Look, model: WantedModel, present: list[PlannedObject]) -> Iterator[Action]:
    """Apply workloads of the wanted revision that someone has changed."""
    revisions = {pool.stem: pool.revision for pool in model.pools}
    for each in present:
        if not each.deleting and revisions.get(each.pool) == each.revision:
            owner, role, pool = seen.pools[each.pool]
            manifest = workload(
                desired.resource,
                stem=each.pool,
                model=owner,
                role=role,
                pool=pool,
                name=each.name,
                images=desired.images,
            )
            yield from _repaired(manifest, seen, _key(manifest))


def _rescaled(seen: Look, present: Iterable[PlannedObject], moving: Collection[str]) -> Iterator[Park | Unpark]:
    """Undo changes of a workload's replicas. No manifest has this field, because parking changes it."""
    for each in present:
        wanted = 0 if each.parked else 1
        replicas = _workload_of(seen, each.name)["spec"].get("replicas", 1)
        if replicas != wanted and not each.leaving and each.name not in moving:
            because = f"its workload has {replicas} replicas, not {wanted}"
            yield Park(each.name, because) if each.parked else Unpark(each.name, because)


def _gone_models(seen: Look, limits: PlanLimits, now: float) -> Iterator[Action]:
    """Drains and deletions of instances whose model the resource no longer names."""
    wanted = {model.key for model in seen.models}
    gone = [each for each in seen.instances if each.model not in wanted]
    for move in moves("", WantedModel(key="", pools=()), gone, limits, now):
        if isinstance(move, Remove):
            yield _deleted(_workload_of(seen, move.name), move.because)
        elif isinstance(move, Drain):
            yield Drain(move.name, "its model is gone from the resource")


def _unheard(observed: ObservedCluster, seen: Look, resumed: Collection[str]) -> Iterator[Action]:
    """Drains that are marked and that did not reach the agent: its pod was just starting, or the call was lost.

    Not of `resumed` instances: this plan removes their marks, and a drain after that would have none.
    """
    for each in seen.instances:
        if each.draining_since is None or each.deleting or each.name in resumed:
            continue
        if each.started and each.name in observed.working:
            yield Drain(each.name, "its agent takes work and has not heard that it drains")


def _gates(observed: ObservedCluster, seen: Look) -> Iterator[Action]:
    """Readiness gates that may open. An open gate stays open until its pod ends."""
    pods = pods_by_instance(observed.pods)
    for each in seen.instances:
        pod = pods.get(each.name)
        if pod is not None and not gate_of(pod) and not each.leaving:
            may, because = gate(each, seen.instances, observed.known)
            if may:
                yield Admit(pod["metadata"]["name"], because)
