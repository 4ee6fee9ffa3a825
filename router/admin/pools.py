"""Pools and instances over the last half minute: means of one look a second. Pure.

Engines' reports are the same to every router of a fleet; legs in flight and queued requests are each router's own, and
are summed (`together_pools`). The place that a queued request lacks follows from the same columns and the same
saturation check (flow control) that choices use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Load, Role
from router.admin.bottleneck import PoolSeen
from router.core.values import Wanted
from router.fleet.columns import InstanceView
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.prices import prices_of
from router.telemetry.rolling import SLOT_S, SLOTS

LOOK_S: Final = 1.0
"""The time between two looks: as often as engines report."""

LOOKS: Final = 30
"""The number of looks that the means cover."""

SILENT_S: Final = 5.0
"""An engine without a new report for this time counts as making no tokens."""

FULL: Final = 0.95
MOST_KEPT: Final = 0.998
"""A batch is called full from this share of the largest batch seen; the largest decays by this factor a look, by half
in six minutes."""

ASKED_MAX: Final = 16
"""The number of queued requests that are examined; the others are taken to lack the same places."""


_ROLES: Final = tuple(role.value for role in Role)
_WAITED_FOR: Final = (*_ROLES, "handoff")


@dataclass(slots=True)
class _Sums:
    """The sums over one pool's ready instances at one moment."""

    instances: int = 0
    running: int = 0
    waiting: int = 0
    pulling: int = 0
    kv_usage: float = 0.0
    places: int = 0
    in_line: float = 0.0


@dataclass(slots=True)
class _WaitingSlot:
    """Waiting requests in one slot of the history, summed over its looks."""

    number: int
    looks: int = 0
    engines: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_WAITED_FOR, 0.0))
    in_line: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_ROLES, 0.0))

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """These sums over the looks."""
        return {name: round(value / max(1, self.looks), 2) for name, value in sums.items()}


@dataclass(frozen=True, slots=True)
class _Tokens:
    at: float
    epoch: int
    load: Load


class Looks:
    """What one router has seen of the pools."""

    def __init__(self) -> None:
        self._looks: Final[deque[dict[Role, _Sums]]] = deque(maxlen=LOOKS)
        self._tokens: Final[dict[InstanceId, deque[_Tokens]]] = {}
        self._looked_at: float | None = None
        self._late: Final[deque[float]] = deque(maxlen=LOOKS)
        self._most: Final[dict[InstanceId, float]] = {}
        """The largest number of requests that an engine was seen to run at once."""
        self._slots: Final[deque[_WaitingSlot]] = deque(maxlen=SLOTS)

    def look(self, scheduler: Scheduler, now: float) -> None:
        """Look at the pools, once a second. The delay of the call shows how late this process gets to its work."""
        if self._looked_at is not None:
            self._late.append(max(0.0, now - self._looked_at - LOOK_S))
        self._looked_at = now
        fleet = scheduler.view.all()
        pools = {role: _Sums() for role in Role}
        for seen in fleet:
            self._count_tokens(seen, now)
            at = pools[seen.role]
            at.places += seen.inflight
            if seen.ready:
                load, pulling = seen.load, self._pulling(seen)
                at.instances += 1
                at.running += load.running
                at.waiting += load.waiting - pulling
                at.pulling += pulling
                at.kv_usage += load.kv_usage
        for role, lacking in lacks(scheduler, now).items():
            pools[Role(role)].in_line = lacking
        self._looks.append(pools)
        self._count_waiting(pools, now)
        for gone in self._tokens.keys() - fleet.by_id.keys():
            del self._tokens[gone]
            self._most.pop(gone, None)

    @property
    def late_s(self) -> float:
        """The mean delay of this process's work, in seconds."""
        return sum(self._late) / len(self._late) if self._late else 0.0

    def _pulling(self, seen: InstanceView) -> int:
        """How many of the engine's waiting requests wait for their blocks alone.

        Engines count a finished pull as a pull until its request joins a batch. So if an engine runs as many requests
        as it was ever seen to run, its batch is full, and all waiting requests wait for that.
        """
        load = seen.load
        most = self._most[seen.id] = max(float(load.running), self._most.get(seen.id, 0.0) * MOST_KEPT)
        full = load.running >= FULL * most and load.running > 0
        return 0 if full else min(load.deferred, load.waiting)

    def _count_waiting(self, pools: Mapping[Role, _Sums], now: float) -> None:
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_WaitingSlot(number))
        at = self._slots[-1]
        at.looks += 1
        for role, sums in pools.items():
            at.engines[role.value] += sums.waiting
            at.in_line[role.value] += sums.in_line
        at.engines["handoff"] += pools[Role.DECODE].pulling

    def history(self, now: float) -> list[dict[str, float]]:
        """The numbers of requests that wait in engines over five minutes, means by slot, the oldest first."""
        return [slot.means(slot.engines) for slot in self._by_time(now)]

    def history_in_line(self, now: float) -> list[dict[str, float]]:
        """The numbers of this router's queued requests by the pool that they lack a place in, in the same slots."""
        return [slot.means(slot.in_line) for slot in self._by_time(now)]

    def _by_time(self, now: float) -> list[_WaitingSlot]:
        by_number, last = {slot.number: slot for slot in self._slots}, int(now // SLOT_S)
        return [by_number.get(number) or _WaitingSlot(number) for number in range(last - SLOTS + 1, last + 1)]

    def _count_tokens(self, seen: InstanceView, now: float) -> None:
        kept = self._tokens.setdefault(seen.id, deque(maxlen=LOOKS))
        epoch, load = seen.instance.epoch, seen.load
        if kept and (kept[-1].epoch != epoch or kept[-1].load.generation_tokens > load.generation_tokens):
            kept.clear()  # another life: its counters start from zero
        if not kept or kept[-1].load is not load:
            kept.append(_Tokens(now, epoch, load))

    def rates(self, instance: InstanceId, now: float) -> tuple[float, float]:
        """Prompt tokens computed there and generated tokens, per second; zeros without a fresh report."""
        kept = [each for each in self._tokens.get(instance, ()) if now - each.at <= LOOKS * LOOK_S]
        if len(kept) < 2 or kept[-1].at <= kept[0].at or now - kept[-1].at > SILENT_S:
            return 0.0, 0.0
        first, last, seconds = kept[0].load, kept[-1].load, kept[-1].at - kept[0].at
        generated = last.generation_tokens - first.generation_tokens
        return max(0.0, (_own_prompts(last) - _own_prompts(first)) / seconds), generated / seconds

    def told(self, fleet: FleetSnapshot) -> dict[str, Any]:
        """The means by role, as `together_pools` takes them."""
        count = max(1, len(self._looks))
        told: dict[str, Any] = {}
        for role in Role:
            at = [look[role] for look in self._looks]
            instances = sum(each.instances for each in at)
            ready = [seen.credits for seen in fleet if seen.role is role and seen.ready]
            known = [each for each in ready if each is not None]
            told[role.value] = {
                "instances": len(ready),
                "running": sum(each.running for each in at) / count,
                "waiting": sum(each.waiting for each in at) / count,
                "pulling": sum(each.pulling for each in at) / count,
                "kv_usage": sum(each.kv_usage for each in at) / instances if instances else 0.0,
                "limit": sum(known) if ready and len(known) == len(ready) else None,
                "in_line": sum(each.in_line for each in at) / count,
                "places": sum(each.places for each in at) / count,
            }
        return told


def _own_prompts(load: Load) -> int:
    """Prompt tokens without those whose KV came from another engine."""
    return load.prompt_tokens - load.external_kv_tokens


def lacks(scheduler: Scheduler, now: float) -> dict[str, float]:
    """The number of queued requests that lack a place, by pool. A request that lacks both counts as half a request for
    each.

    Keys are roles; if there are only instances of role both, all requests lack these.
    """
    waiting = len(scheduler.line)
    if not waiting:
        return {}
    found: dict[str, float] = {}
    asked = [
        context for context in islice(scheduler.line.everybody(), ASKED_MAX) if isinstance(context, SchedulingContext)
    ]
    for context in asked:
        for role, part in _lacks(scheduler, context, now).items():
            found[role] = found.get(role, 0.0) + part
    return {role: part * waiting / len(asked) for role, part in found.items()}


def _lacks(scheduler: Scheduler, context: SchedulingContext, now: float) -> Mapping[str, float]:
    fleet, wanted = scheduler.view.all(), context.wanted
    ready = fleet.ready_for(wanted)
    if not len(ready.prefills) or not len(ready.decodes):
        return {"decode" if len(ready.prefills) else "prefill": 1.0}
    if len(ready.of.get(Role.BOTH, ())) == len(ready.any):
        return {"both": 1.0}
    prompt, answer = _room(scheduler, fleet, context, now)
    if prompt == answer:  # it lacks both; or it would find both now, and its next call is under way
        return {"prefill": 0.5, "decode": 0.5}
    return {"decode": 1.0} if prompt else {"prefill": 1.0}


def _room(scheduler: Scheduler, fleet: FleetSnapshot, context: SchedulingContext, now: float) -> tuple[bool, bool]:
    """Whether there is a place for the request's prompt, and one for its answer."""
    ready, routers = fleet.ready_for(context.wanted), scheduler.view.routers
    if scheduler.admission is None or not context.promise.ttft_ms:
        free = fleet.columns.inflight < fleet.columns.limits(routers)
        return bool(free[ready.prefills].any()), bool(free[ready.decodes].any())
    prices = prices_of(fleet, _asking(scheduler, context, now))
    return (
        any(prices.open_at(row) for row in ready.prefills.tolist()),
        any(prices.answers_at(row) for row in ready.decodes.tolist()),
    )


def _asking(scheduler: Scheduler, context: SchedulingContext, now: float) -> Wanted:
    promise = context.promise
    return replace(
        context.wanted,
        routers=scheduler.view.routers,
        ttft_ms=promise.ttft_ms,
        tpot_ms=promise.tpot_ms,
        late=context.late,
        now=now,
        scoring=scheduler.scoring,
    )


def together_pools(own: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> dict[str, PoolSeen]:
    """The pools by role: this router's engine figures, with the legs and queues of all routers."""
    told = list(others)
    found: dict[str, PoolSeen] = {}
    for role, mine in own.items():
        all_ = [mine, *(each[role] for each in told if role in each)]
        summed = {name: sum(float(each[name]) for each in all_) for name in ("in_line", "places")}
        found[role] = PoolSeen(**{**mine, **summed})
    return found
