"""Makes a resource's status: counts, conditions and reasons. Pure; made anew each time, so it may be deleted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from cluster.instance import Role
from cluster.spec.plan import stems
from cluster.spec.problems import Problem, nearest, quoted
from k8s.plan.children import selector
from k8s.plan.deployed import no_router, stuck, unfinished
from k8s.plan.fleet import counting
from k8s.plan.observe import REPLICA_FAILURE, ObservedCluster, condition
from k8s.plan.plan import Desired, Look, look
from k8s.plan.values import Action, PlannedObject, WantedModel, WantedPool

Json = Mapping[str, Any]
ERRORS_TOLD = 5
"""Most problems of a spec that a condition repeats; each of them is also an event."""
MESSAGE_MAX = 2000
"""Characters of a condition's message about refusals."""


class Fact(NamedTuple):
    """A condition without its times."""

    kind: str
    """The condition's type, such as ``Degraded``."""
    holds: bool | None
    """None: Unknown."""
    reason: str
    message: str


def status(
    desired: Desired,
    observed: ObservedCluster,
    actions: Iterable[Action],
    now: float,
    last: Json,
    *,
    attainment: float | None = None,
) -> dict[str, Any]:
    """The status of a `BatonCluster`. `last`: its present status; unchanged conditions keep their transition times."""
    resource = desired.resource
    if resource.spec is None:
        told = [_told(each) for each in resource.errors[:ERRORS_TOLD]]
        facts = [
            Fact("Degraded", True, "InvalidSpec", "; ".join(told)),
            Fact("Progressing", False, "InvalidSpec", "the spec is not followed; what runs goes on running"),
            Fact("Paused", resource.kubernetes.paused, "Spec", "by kubernetes.paused"),
        ]
        kept = {key: value for key, value in last.items() if key != "conditions"}
        stay = [each for each in last.get("conditions", ()) if each["type"] in {"Available", "Scaling"}]
        conditions = [*stay, *_dated(facts, last, resource.generation, now)]
        return {**kept, "observedGeneration": resource.generation, "conditions": conditions, "because": told[0]}
    seen = look(desired, observed)
    todo = tuple(actions)
    facts = [
        _available(seen, resource.uid),
        _progressing(seen, todo, resource.uid),
        _degraded(seen, desired, observed, now),
        _scaling(seen, observed),
    ]
    facts.append(Fact("Paused", resource.kubernetes.paused, "Spec", "by kubernetes.paused"))
    updated = [
        each
        for each in seen.instances
        for pool in _pools(seen)
        if (each.pool, each.revision) == (pool.stem, pool.revision)
    ]
    said = {
        "observedGeneration": resource.generation,
        "model": ",".join(model.api_name for model in resource.spec.models),
        **{role.value: _sizes(seen, role) for role in Role if _sizes(seen, role)},
        "revision": f"{len(updated)}/{len(seen.instances)}",
        "because": _because(todo, last, facts),
        "pools": {pool.stem: _pool(model, pool, seen) for model in seen.models for pool in model.pools},
        "conditions": _dated(facts, last, resource.generation, now),
    }
    return said if attainment is None else {**said, "attainment": f"{attainment * 100:.1f} %"}


def _told(problem: Problem) -> str:
    value = f" ({problem.value})" if problem.value else ""
    return f"{problem.field or 'spec'}: {problem.message}{value} → {problem.fix}"


def _pools(seen: Look) -> list[WantedPool]:
    return [pool for model in seen.models for pool in model.pools]


def _of(seen: Look, pool: WantedPool) -> list[PlannedObject]:
    return [each for each in seen.instances if each.pool == pool.stem]


def _sizes(seen: Look, role: Role) -> str:
    pools = [pool for pool in _pools(seen) if pool.role is role]
    ready = sum(each.serving for pool in pools for each in _of(seen, pool))
    return f"{ready}/{sum(pool.count for pool in pools)}" if pools else ""


def _pool(model: WantedModel, pool: WantedPool, seen: Look) -> dict[str, Any]:
    ours = _of(seen, pool)
    return {
        "role": pool.role.value,
        "desired": pool.count,
        "ready": counting(model, ours if len(model.pools) < 2 else seen.instances, pool.stem),
        "updated": sum(each.revision == pool.revision for each in ours),
        "draining": sum(each.leaving for each in ours),
        "gpus": sum(each.gpus for each in ours),
        "revision": pool.revision,
        "because": pool.because,
    }


def _available(seen: Look, uid: str) -> Fact:
    if because := no_router(seen, uid):
        return Fact("Available", False, "NoRouter", because)
    for model in seen.models:
        for pool in model.pools:
            ready = counting(model, seen.instances, pool.stem)
            if ready < pool.floor:
                message = f"{pool.stem}: {ready} of at least {pool.floor} instances serve"
                return Fact("Available", False, "BelowMinimum", message)
    return Fact("Available", True, "AtLeastMinimum", "every pool has its minimum")


def _progressing(seen: Look, todo: tuple[Action, ...], uid: str) -> Fact:
    waiting = []
    for pool in _pools(seen):
        ours = _of(seen, pool)
        there = sum(each.serving and each.revision == pool.revision for each in ours)
        if there < pool.count or len(ours) > pool.count:
            waiting.append(f"{pool.stem}: {there} of {pool.count}")
    waiting += unfinished(seen, uid)
    if waiting or todo:
        return Fact("Progressing", True, "Following", "; ".join(waiting) or todo[0].because)
    return Fact("Progressing", False, "AsWanted", "every instance is as the resource wants it")


def obstacle(seen: Look, desired: Desired) -> Fact | None:
    """Why a plan lacks actions that the resource asks for, and the fix; None: it lacks none."""
    if seen.keys_lost:
        message = (
            "the Secret with the fleet's ticket keys is gone; what runs goes on, nothing can start: put it back, or "
            "set kubernetes.ticket_keys to another name, which restarts every instance"
        )
        return Fact("Degraded", True, "KeysLost", message)
    if seen.missing_kinds:
        return Fact("Degraded", True, "KindMissing", _missing_kinds(seen.missing_kinds, desired.hidden))
    if seen.foreign:
        kind, name = seen.foreign[0]
        message = f"{kind} {name} is there and is not this resource's: rename or delete one of the two"
        return Fact("Degraded", True, "NameTaken", message)
    return None


def _degraded(seen: Look, desired: Desired, observed: ObservedCluster, now: float) -> Fact:
    if (fact := obstacle(seen, desired)) is not None:
        return fact
    if observed.refused:
        return Fact(
            "Degraded", True, "Refused", f"the API server refuses to {'; '.join(observed.refused[:3])}"[:MESSAGE_MAX]
        )
    if refused := _pods_refused(seen):
        return Fact("Degraded", True, "PodsRefused", refused[:MESSAGE_MAX])
    homeless = [each.name for each in seen.instances if each.unschedulable_since is not None and not each.leaving]
    if homeless:
        return Fact("Degraded", True, "NoGPUs", f"no node has room for {', '.join(homeless[:3])}")
    if down := stuck(seen, desired.resource.uid, now):
        return Fact("Degraded", True, "PodsDown", f"{down}; look at its pods"[:MESSAGE_MAX])
    if slow := _slow(seen, desired, now):
        return Fact("Degraded", True, "SlowStart", slow)
    warnings = [each for each in desired.resource.problems if each.severity.value == "warning"]
    told = f"{len(warnings)} warnings, see events" if warnings else "nothing is wrong"
    return Fact("Degraded", False, "Healthy", told)


def _missing_kinds(missing: Iterable[str], hidden: Collection[str]) -> str:
    unknown = ", ".join(each for each in missing if each not in hidden)
    unlisted = ", ".join(each for each in missing if each in hidden)
    told = (
        f"the API server does not know {unknown}: install or leave out" if unknown else "",
        f"the operator cannot list {unlisted}: give its Role the right, or leave out" if unlisted else "",
    )
    return "; ".join(each for each in told if each)


SLOW_TIMES: Final = 2.0
SLOW_S: Final = 120.0
"""The status names an engine that loads for longer than this many seconds and than `SLOW_TIMES` the longest time of its
pool. Only its startup probe ends it, after `start_s`."""


def _slow(seen: Look, desired: Desired, now: float) -> str:
    """The instance that has been loading for too long compared with its pool, the slowest of several; empty: none."""
    late = []
    for each in seen.instances:
        known = [one.loaded_s for one in seen.instances if one.pool == each.pool and one.loaded_s is not None]
        if each.loading_since is not None and known and not each.leaving:
            took = now - each.loading_since
            if took > max(SLOW_S, SLOW_TIMES * max(known)):
                late.append((took, each.name, max(known)))
    if not late:
        return ""
    took, name, usual = max(late)
    given_up = f"it is restarted after {desired.resource.kubernetes.start_s:g} s (kubernetes.start_s)"
    return f"{name} has been loading for {took:.0f} s, others of its pool took at most {usual:.0f} s; {given_up}"


def _pods_refused(seen: Look) -> str:
    """The API server's message about the first workload whose pods it refuses; empty: there is none."""
    for (kind, name), thing in sorted(seen.live.items()):
        said = condition(thing, REPLICA_FAILURE)
        if kind == "Deployment" and said.get("status") == "True" and not thing["metadata"].get("deletionTimestamp"):
            return f"{name}: {said.get('message', 'its pods are refused')}"
    return ""


def _scaling(seen: Look, observed: ObservedCluster) -> Fact:
    external = sorted(stem for stem, decider in seen.scaled.items() if decider == "BatonPool")
    if external:
        advice = f": {observed.advice}" if observed.advice else ""
        message = f"BatonPools decide on {', '.join(external)}; Baton's controller only advises{advice}"
        return Fact("Scaling", False, "ScalingExternal", message)
    if seen.scaled or observed.scales:
        return Fact("Scaling", True, "Controller", "Baton's controller decides within min and max")
    if observed.advice:
        return Fact("Scaling", False, "NotSized", observed.advice)
    return Fact("Scaling", False, "Fixed", "nothing resizes the pools")


def _because(todo: tuple[Action, ...], last: Json, facts: list[Fact]) -> str:
    if todo:
        return todo[0].because
    return next(
        (fact.message for fact in facts if fact.kind == "Degraded" and fact.holds), str(last.get("because") or "")
    )


def _dated(facts: Iterable[Fact], last: Json, generation: int, now: float) -> list[dict[str, Any]]:
    stamp = datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    dated = []
    for fact in facts:
        value = "Unknown" if fact.holds is None else str(bool(fact.holds))
        before = condition({"status": last}, fact.kind)
        since = before.get("lastTransitionTime") if before.get("status") == value else None
        dated.append(
            {
                "type": fact.kind,
                "status": value,
                "reason": fact.reason,
                "message": fact.message,
                "observedGeneration": generation,
                "lastTransitionTime": since or stamp,
            }
        )
    return dated


def misnamed(desired: Desired | None, cluster: str, stem: str) -> str:
    """What is wrong with the names in a `BatonPool`; empty: nothing. `desired`: None if there is no such cluster."""
    if desired is None:
        return f"there is no BatonCluster {cluster!r} in this namespace"
    assert desired.resource.spec is not None
    known = stems(desired.resource.spec)
    if stem in known:
        return ""
    near = nearest(stem, known)
    fix = f"did you mean {near!r}?" if near else f"write one of {quoted(known)}"
    return f"spec.pool: {stem!r} is no pool of {cluster}; {fix}; make another BatonPool, because names cannot change"


def deciding(pools: Iterable[Json]) -> dict[str, Json]:
    """By pool, the `BatonPool` object that decides on its size: the oldest one for this pool."""
    living = (each for each in pools if not each["metadata"].get("deletionTimestamp"))
    oldest_last = sorted(living, key=lambda each: _age(each["metadata"]), reverse=True)
    return {str(each["spec"]["pool"]): each for each in oldest_last}


def external_sizes(pools: Iterable[Json]) -> dict[str, int]:
    """By pool, the size that its BatonPool wants."""
    return {stem: int(each["spec"]["replicas"]) for stem, each in deciding(pools).items()}


def _age(metadata: Json) -> tuple[str, str]:
    return str(metadata.get("creationTimestamp", "")), str(metadata["name"])


def stray_status(because: str, now: float, last: Json, generation: int, reason: str = "NotFound") -> dict[str, Any]:
    """The status of a `BatonPool` without effect: it names no existing pool, or another BatonPool decides."""
    facts = [Fact("Degraded", True, reason, because)]
    return {"observedGeneration": generation, "conditions": _dated(facts, last, generation, now)}


def pool_status(
    desired: Desired, observed: ObservedCluster, stem: str, generation: int, now: float = 0.0, last: Json | None = None
) -> dict[str, Any]:
    """The status of a `BatonPool`, for its scale subresource. `now`, `last`: as in `status`."""
    seen = look(desired, observed)
    ours = [each for each in seen.instances if each.pool == stem]
    labels = {**selector(desired.resource, "instance"), "serving.baton.dev/pool": stem}
    return {
        "observedGeneration": generation,
        "replicas": sum(not each.leaving for each in ours),
        "readyReplicas": sum(each.serving for each in ours),
        "selector": ",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        "conditions": _dated([Fact("Degraded", False, "Found", f"it sizes {stem}")], last or {}, generation, now),
    }
