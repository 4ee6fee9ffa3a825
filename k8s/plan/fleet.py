"""Which instances start, drain, resume and end, so that a model's pools become as wanted. Pure, level-driven.

`moves` goes by the present state and remembers nothing: the same state gives the same moves, so an operator that is
killed after any of them continues. One model is planned at a time, because its pools need each other:

- An instance *counts* while it serves and, if it needs a partner, one of its own family serves, too.
- With room, instances of the wanted revision are added first; an old one leaves once every pool keeps as many counting
  instances as are wanted.
- Without room (no free GPU, or a new pod finds no node), an old one leaves first. A pool may then have one serving
  instance less, down to its floor; a pool at its floor may lack one while an instance of another role serves, which
  runs whole requests meanwhile. Never two pools at once.
- An instance is deleted only after it is drained, if it never served, or when its drain's time is over.
- An instance that drains and is wanted again (a revert) resumes.
- An instance whose pod Kubernetes takes (an eviction, a node on notice) is replaced at once by one of another name: the
  next pod of its own workload would claim the name that the draining agent still has.
- Before anything serves, prefill and decode get GPUs together or give them back after `gang_s`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from cluster.instance import Role
from k8s.crd.names import WORKLOAD_CHARS_MAX, short
from k8s.plan.values import (
    Drain,
    Move,
    Park,
    PlanLimits,
    PlannedObject,
    Remove,
    Resume,
    Start,
    Unpark,
    WantedModel,
    WantedPool,
)

SURGE_SHARE: Final = 0.25
"""Instances above the wanted number while a revision rolls out, as Kubernetes' own Deployments have it."""
RESUME_S: Final = 60.0
"""Seconds after the end of its drain's time in which an instance that is wanted again is still told to resume; after
that it is removed."""


def moves(
    cluster: str,
    model: WantedModel,
    present: Collection[PlannedObject],
    limits: PlanLimits,
    now: float,
    taken: Collection[str] = (),
) -> tuple[Move, ...]:
    """What to do now for one model.

    Args:
        cluster: name of the resource: instances' names begin with it.
        model: the wanted pools.
        present: the model's instances, also those of pools that are no longer wanted.
        limits: free GPUs and times.
        now: Unix time, s.
        taken: names that no new instance may have: of other workloads, and of instances whose pods still end.
    """
    found = sorted(present, key=lambda each: each.name)
    used = {each.name for each in found} | set(taken)
    back = {each.name for each in found if _may_resume(each, limits, now)}
    resumed = tuple(_resumed(model, found, back))
    drained = tuple(_drained(model, found, limits))
    kept, gone = {each.name for each in resumed}, {each.name for each in drained}
    return (  # one move at most for each instance
        *_removed([each for each in found if each.name not in kept], limits, now),
        *(each for each in _parked(model, found, limits, now) if each.name not in gone),
        *resumed,
        *_started(cluster, model, found, limits, used, back),
        *drained,
    )


def instance_name(cluster: str, stem: str, number: int) -> str:
    """Name of an instance and of its workload object, short enough for its pods' names."""
    end = f"-{number}"
    return short(f"{cluster}-{stem}", WORKLOAD_CHARS_MAX - len(end)) + end


# -- going --


def _removed(found: Iterable[PlannedObject], limits: PlanLimits, now: float) -> Iterator[Move]:
    for each in found:
        if each.deleting or each.draining_since is None:
            continue
        if each.drained:
            yield Remove(each.name, "it is drained")
        elif not each.started:
            yield Remove(each.name, "it serves nothing that could be waited for")
        elif now - each.draining_since >= limits.drain_s:
            yield Remove(each.name, f"its drain has taken {limits.drain_s:g} s; its pod's grace period follows")


# -- gangs --


def _parked(
    model: WantedModel, found: Sequence[PlannedObject], limits: PlanLimits, now: float
) -> Iterator[Park | Unpark]:
    """Gang scheduling: instances that hold GPUs give them back if the rest of the smallest fleet finds none in time."""
    current = [each for each in found if not each.leaving]
    parked = [each for each in current if each.parked]
    waiting = [each for each in current if each.unschedulable_since is not None and not each.parked]
    serves = any(each.serving for each in found)
    if parked and (serves or not waiting):
        yield from (Unpark(each.name, "the rest of its fleet has GPUs") for each in parked)
        return
    if serves or len(model.pools) < 2 or not waiting:
        return
    late = [each for each in waiting if now - (each.unschedulable_since or now) >= limits.gang_s]
    holding = [each for each in current if each.scheduled and not each.parked]
    short_of = {each.pool for each in late}
    if late and any(each.pool not in short_of for each in holding) and _gang_missing(model, current):
        because = f"{', '.join(sorted(short_of))} has found no GPUs for {limits.gang_s:g} s, and no pool serves alone"
        yield from (Park(each.name, because) for each in holding)


def _gang_missing(model: WantedModel, current: Sequence[PlannedObject]) -> bool:
    """Whether a pool has fewer placed instances than its floor, or than one."""
    return any(
        sum(each.scheduled for each in current if each.pool == pool.stem) < max(1, min(pool.floor, pool.count))
        for pool in model.pools
        if pool.count
    )


# -- coming --


def _wanted_ones(pool: WantedPool, found: Iterable[PlannedObject]) -> list[PlannedObject]:
    """Instances of the wanted revision that stay."""
    return [
        each
        for each in found
        if each.pool == pool.stem and each.revision == pool.revision and not each.leaving and not each.disrupted
    ]


def _resumed(model: WantedModel, found: Sequence[PlannedObject], may_resume: Collection[str]) -> Iterator[Resume]:
    for pool in model.pools:
        missing = pool.count - len(_wanted_ones(pool, found))
        back = [each for each in found if _is_current(each, pool) and each.name in may_resume]
        back.sort(key=lambda each: (not each.ready, each.name))
        for each in back[: max(0, missing)]:
            yield Resume(each.name, "its revision is wanted again")


def _is_current(instance: PlannedObject, pool: WantedPool) -> bool:
    return instance.pool == pool.stem and instance.revision == pool.revision


def _may_resume(instance: PlannedObject, limits: PlanLimits, now: float) -> bool:
    """Whether an instance that is wanted again may end its drain. If its agent was not reached within `RESUME_S` after
    the drain's time, another instance takes its place.
    """
    if instance.deleting or instance.disrupted or instance.draining_since is None:
        return False
    return instance.started and not instance.drained and now - instance.draining_since < limits.drain_s + RESUME_S


def _started(
    cluster: str,
    model: WantedModel,
    found: Sequence[PlannedObject],
    limits: PlanLimits,
    taken: set[str],
    may_resume: Collection[str],
) -> Iterator[Move]:
    free = dict(limits.free_gpus)
    for pool in model.pools:
        ours = [each for each in found if each.pool == pool.stem]
        new = _wanted_ones(pool, found)
        coming_back = sum(_is_current(each, pool) and each.name in may_resume for each in ours)
        missing = pool.count - len(new) - coming_back
        room = pool.count + _surge(pool) - sum(each.holds_gpus for each in ours)
        if room <= 0 and _stands_still(model, found):
            room = 1
        if len(ours) > len(new) and pool.gpu in free:  # a rollout: only what is free may be added
            room = min(room, max(pool.count - len(ours), free[pool.gpu] // max(1, pool.gpus)))
        count = max(0, min(missing, room))
        for name in _free_names(cluster, pool.stem, count, taken):
            taken.add(name)
            if pool.gpu in free:
                free[pool.gpu] -= pool.gpus
            yield Start(pool.stem, name, pool.because or f"{pool.count} are wanted, {len(new)} are there")


def _stands_still(model: WantedModel, found: Sequence[PlannedObject]) -> bool:
    """Whether a rollout is stuck: no instance starts or leaves. The last instances of two old families may keep each
    other in service; only one more instance of the wanted revision lets one of them go.
    """
    wanted = [each for pool in model.pools for each in _wanted_ones(pool, found)]
    return not any(each.leaving for each in found) and all(each.serving for each in wanted)


def _surge(pool: WantedPool) -> int:
    return max(1, math.ceil(pool.count * SURGE_SHARE))


def _free_names(cluster: str, stem: str, count: int, taken: set[str]) -> Iterator[str]:
    number = 0
    while count > 0:
        name = instance_name(cluster, stem, number)
        number += 1
        if name not in taken:
            count -= 1
            yield name


# -- leaving --


def _drained(model: WantedModel, found: Sequence[PlannedObject], limits: PlanLimits) -> Iterator[Drain]:
    """Drains of old and superfluous instances, one after the other, as long as the remaining ones are enough."""
    by_stem = {pool.stem: pool for pool in model.pools}
    left = [each for each in found if not each.leaving]
    updated = {stem: len(_wanted_ones(pool, found)) for stem, pool in by_stem.items()}
    for each in sorted(_too_many(model, found), key=lambda one: (one.serving, updated.get(one.pool, 0), one.name)):
        rest = [other for other in left if other.name != each.name]
        if not each.serving or _enough(model, left, rest, each, limits):
            left = rest
            yield Drain(each.name, _why(each, by_stem.get(each.pool)))


def _why(instance: PlannedObject, pool: WantedPool | None) -> str:
    if pool is None:
        return "its pool is gone from the resource"
    if instance.disrupted:
        return "its pod is being taken: another instance comes under another name, while this one ends its streams"
    if instance.revision != pool.revision:
        return f"revision {instance.revision} gives way to {pool.revision}"
    return pool.because or f"{pool.count} are wanted"


def _too_many(model: WantedModel, found: Sequence[PlannedObject]) -> Iterator[PlannedObject]:
    stems = {pool.stem for pool in model.pools}
    yield from (each for each in found if each.pool not in stems and not each.leaving)
    for pool in model.pools:
        new = _wanted_ones(pool, found)
        old = [each for each in found if each.pool == pool.stem and not each.leaving and each not in new]
        yield from old
        new.sort(key=lambda each: (each.serving, each.healthy, each.scheduled, -_number(each.name)))
        yield from new[: max(0, len(new) - pool.count)]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdecimal() else 0


def counting(model: WantedModel, left: Collection[PlannedObject], stem: str) -> int:
    """Instances of a pool that serve and, if roles are apart, have a partner of their family that serves."""
    serving = [each for each in left if each.serving]
    return sum(each.pool == stem and _has_partner(model, each, serving) for each in serving)


def _has_partner(model: WantedModel, instance: PlannedObject, serving: Iterable[PlannedObject]) -> bool:
    others = any(pool.count and pool.role is not instance.role for pool in model.pools)
    if instance.role is Role.BOTH or not others:
        return True
    return any(other.family == instance.family and other.role is not instance.role for other in serving)


def is_tight(pool: WantedPool, found: Iterable[PlannedObject], limits: PlanLimits) -> bool:
    """Whether a pool has no room for one more instance."""
    ours = [each for each in found if each.pool == pool.stem]
    if any(each.unschedulable_since is not None and not each.leaving for each in ours):
        return True
    return limits.free_gpus.get(pool.gpu, pool.gpus) < pool.gpus


def _enough(
    model: WantedModel,
    left: Sequence[PlannedObject],
    rest: Sequence[PlannedObject],
    gone: PlannedObject,
    limits: PlanLimits,
) -> bool:
    """Whether `gone`, which serves, may leave."""
    pool = next((each for each in model.pools if each.stem == gone.pool), None)
    tight = any(is_tight(each, left, limits) for each in model.pools)  # without room, others lack partners
    if pool is None and tight:
        return any(each.serving for each in rest)
    if pool is None:
        return all(counting(model, rest, each.stem) >= max(each.floor, min(1, each.count)) for each in model.pools)
    if gone.revision == pool.revision or not tight:
        return _serving(rest, pool.stem) >= min(pool.count, _serving(left, pool.stem)) and all(
            counting(model, rest, each.stem) >= min(_keep(each, gone), counting(model, left, each.stem))
            for each in model.pools
        )
    return _enough_in_place(model, left, rest, pool)


def _keep(pool: WantedPool, gone: PlannedObject) -> int:
    """How many instances of a pool must go on counting: all that are wanted; its floor if only another pool shrinks."""
    return pool.count if pool.stem == gone.pool or gone.revision != pool.revision else pool.floor


def _enough_in_place(
    model: WantedModel, left: Sequence[PlannedObject], rest: Sequence[PlannedObject], pool: WantedPool
) -> bool:
    """Whether an instance may leave without room: at most one pool may be one below its floor, and one must serve."""
    if not any(each.serving for each in rest):
        return False
    after = _serving(rest, pool.stem)
    lacking, before = _lacking(model, rest), _lacking(model, left)
    if after >= max(pool.count - 1, pool.floor):
        return lacking <= max(1, before)
    return after >= pool.floor - 1 and lacking <= 1 and pool.count == pool.floor


def _serving(left: Iterable[PlannedObject], stem: str) -> int:
    return sum(each.serving and each.pool == stem for each in left)


def _lacking(model: WantedModel, left: Collection[PlannedObject]) -> int:
    """Serving instances that all pools together lack of their floors."""
    return sum(max(0, pool.floor - _serving(left, pool.stem)) for pool in model.pools)
