"""Which pool is the bottleneck, as a sentence with its reasons. Pure.

The verdict follows the waiting requests. Engines report how many requests wait in them, and how many of these wait for
a pull; the router knows the requests in its own queue, and which place each lacks. By Little's law, the number of
waiting requests divided by the rate at which requests end is the time each waits. The pool with the most waiting
requests is the bottleneck, if at least a tenth of its requests wait. Two corrections apply, both because a request has
its place on D before P begins:

- Requests that P still computes take places of D, so requests in the queue for D then really wait for P. Of the
  requests queued for decode, only the share counts as decode's that D's engines really have of the requests with a
  place there.
- A full D leaves holds on P. If P's KV is nearly full while requests wait at D, P's queue counts as D's.

Before all that: a router process that gets no processor time makes every request wait, and its figures mean little.

If no request waits, but promises are not kept, the verdict follows the target that was missed more often. If no request
waits and no target is missed, there is no bottleneck, and the sentence says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

QUEUE_MIN: Final = 1.0
"""The mean number of waiting requests that counts as a queue: one now and then is chance."""

QUEUE_SHARE: Final = 0.1
"""The share of a pool's requests that must wait: a smaller share is batch forming, not a lack of instances."""

ALIKE: Final = 0.6
"""A second queue of this share of the first one's length is named beside it."""

KV_FULL: Final = 0.9
"""The share of P's KV in use from which new prompts find no room."""

LATE_S: Final = 0.2
"""A process that is so late with all its work has no free core; requests wait in it, whatever the pools look like."""

AT_PREFILL: Final = ("queue_p", "prefill", "prefill_leg", "queue", "whole_leg")
"""The parts of a first token's time at the instance that computes the prompt (`router.telemetry.timing`)."""

MISSED_SHARE: Final = 0.05
"""The share of a window's promises that must miss one target for it to count if no request waits."""


class Where(StrEnum):
    """What makes requests wait."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """Prefill and decode alike; or the instances of role both."""
    HANDOFF = "handoff"
    ROUTER = "router"
    """The routers' own processes do not keep up."""
    NOWHERE = "nowhere"
    IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSeen:
    """One pool: means over the last half minute."""

    instances: int = 0
    """Ready instances."""
    running: float = 0.0
    """Requests in engines' batches."""
    waiting: float = 0.0
    """Requests that wait in engines, without pulls."""
    pulling: float = 0.0
    """Requests that wait in engines for their pull."""
    in_line: float = 0.0
    """Requests in routers' queues for a place there."""
    places: float = 0.0
    """Legs of all routers there."""
    limit: int | None = None
    """Legs that may be there; None: unknown."""
    kv_usage: float = 0.0
    """Share of KV blocks in use, mean of instances."""

    @property
    def there(self) -> float:
        """Requests that engines have."""
        return self.running + self.waiting + self.pulling


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsSeen:
    """The inputs of the verdict."""

    prefill: PoolSeen
    decode: PoolSeen
    both: PoolSeen = PoolSeen()
    rate: float = 0.0
    """Requests that ended, per second."""
    late_s: float = 0.0
    """The delay of the most delayed router process."""
    judged: int = 0
    """Requests with a promise that ended."""
    late_ttft: int = 0
    late_tpot: int = 0
    """Those of them that missed this target."""
    ttft_parts: Mapping[str, float] = field(default_factory=dict)
    """Where first tokens' time went (`router.telemetry.timing`), in any unit."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The verdict."""

    where: Where
    sentence: str
    because: tuple[str, ...]
    """The figures it is based on."""

    def as_json(self) -> dict[str, Any]:
        return {"where": self.where.value, "sentence": self.sentence, "because": list(self.because)}


def bottleneck(seen: PoolsSeen) -> Bottleneck:
    """What makes requests wait."""
    missing = _missing(seen)
    if missing is not None:
        return missing
    waiting = _waiting(seen)
    because = _because(seen, waiting)
    if seen.late_s >= LATE_S:
        late = f"a router gets to its work {_seconds(seen.late_s)} late on average"
        what = f"The routers are the bottleneck: {late}. Give them cores of their own, or start more of them."
        return Bottleneck(Where.ROUTER, what, because)
    busiest = max(waiting, key=lambda each: waiting[each])
    if _is_queue(waiting[busiest], seen, busiest):
        return _queue(seen, waiting, busiest, because)
    if seen.judged and max(seen.late_ttft, seen.late_tpot) >= MISSED_SHARE * seen.judged:
        return _missed(seen, because)
    if seen.rate == 0 and seen.prefill.there + seen.decode.there + seen.both.there == 0:
        return Bottleneck(Where.IDLE, "No bottleneck: the fleet is idle.", because)
    return Bottleneck(Where.NOWHERE, "No bottleneck: hardly anything waits, in engines or in the queue.", because)


def _missing(seen: PoolsSeen) -> Bottleneck | None:
    """The verdict if a leg has no ready instance; None if both have one."""
    in_line = seen.prefill.in_line + seen.decode.in_line
    for where, pool in ((Where.PREFILL, seen.prefill), (Where.DECODE, seen.decode)):
        if not pool.instances and not seen.both.instances:
            waits = f"; {in_line:.0f} requests wait in the queue" if in_line >= QUEUE_MIN else ""
            alone = "" if where is Where.PREFILL and not waits else ", so nothing is handed over"
            return Bottleneck(where, f"There is no ready {where.value} instance{alone}{waits}.", _because(seen, {}))
    return None


def _waiting(seen: PoolsSeen) -> dict[Where, float]:
    """The number of requests that wait for each pool, with the two corrections."""
    prefill, decode = seen.prefill, seen.decode
    for_prefill, for_decode = prefill.waiting + prefill.in_line, decode.waiting
    own = min(1.0, decode.there / decode.places) if decode.places >= 1 else 1.0
    for_decode += decode.in_line * own
    for_prefill += decode.in_line * (1 - own)
    if prefill.kv_usage >= KV_FULL and for_decode >= QUEUE_MIN:
        for_decode, for_prefill = for_decode + for_prefill, 0.0
    return {
        Where.DECODE: for_decode,
        Where.PREFILL: for_prefill,
        Where.HANDOFF: decode.pulling,
        Where.BOTH: seen.both.waiting + seen.both.in_line + seen.both.pulling,
    }


def _is_queue(waiting: float, seen: PoolsSeen, where: Where) -> bool:
    pool = _pool(seen, where)
    return waiting >= QUEUE_MIN and waiting >= QUEUE_SHARE * (pool.running + waiting)


def _pool(seen: PoolsSeen, where: Where) -> PoolSeen:
    pools = {Where.PREFILL: seen.prefill, Where.BOTH: seen.both}
    return pools.get(where, seen.decode)


def _queue(seen: PoolsSeen, waiting: Mapping[Where, float], where: Where, because: tuple[str, ...]) -> Bottleneck:
    count = waiting[where]
    each = f", about {_seconds(count / seen.rate)} each" if seen.rate > 0 else ", and none has ended"
    held = f"{count:.0f} {'requests wait' if count >= 1.5 else 'request waits'} for it on average{each}"
    others = {Where.PREFILL: Where.DECODE, Where.DECODE: Where.PREFILL}
    other = others.get(where)
    if where is Where.HANDOFF:
        sentence = f"The hand-over is the bottleneck: {held}, while decode has room for them."
        return Bottleneck(where, f"{sentence} Look at the network between the pools, or hand over less.", because)
    if where is Where.BOTH:
        return Bottleneck(where, f"The instances that run both legs are the bottleneck: {held}.", because)
    assert other is not None
    if waiting[other] >= ALIKE * count and _is_queue(waiting[other], seen, other):
        counts = f"{count:.0f} requests wait for {where.value}, {waiting[other]:.0f} for {other.value}"
        return Bottleneck(Where.BOTH, f"Both pools are short: {counts}.", because)
    beside = f"{waiting[other]:.0f} for {other.value}" if waiting[other] >= 0.5 else f"none for {other.value}"
    sentence = f"{where.value.capitalize()} is the bottleneck: {held}; {beside}."
    return Bottleneck(where, f"{sentence} {_advice(where)}", because)


def _advice(where: Where) -> str:
    other = "decode" if where is Where.PREFILL else "prefill"
    return f"More {where.value} instances would help, more {other} instances would not."


def _missed(seen: PoolsSeen, because: tuple[str, ...]) -> Bottleneck:
    if seen.late_tpot >= seen.late_ttft:
        what = f"no request waits, but {seen.late_tpot} of {seen.judged} requests missed their time per token"
        said = f"Decode is the bottleneck: {what}: its steps are too slow. {_advice(Where.DECODE)}"
        return Bottleneck(Where.DECODE, said, because)
    what = f"no request waits, but {seen.late_ttft} of {seen.judged} requests missed their first token's target"
    whole, there = sum(seen.ttft_parts.values()), sum(seen.ttft_parts.get(part, 0.0) for part in AT_PREFILL)
    if whole and there < whole / 2:
        most = max(seen.ttft_parts, key=lambda part: seen.ttft_parts[part])
        said = f"No pool is the bottleneck: {what}, and most of its time went elsewhere, the largest part is {most}."
        return Bottleneck(Where.NOWHERE, said, because)
    return Bottleneck(Where.PREFILL, f"Prefill is the bottleneck: {what}: prompts take too long there.", because)


def _because(seen: PoolsSeen, waiting: Mapping[Where, float]) -> tuple[str, ...]:
    lines = []
    for name, pool in (("prefill", seen.prefill), ("decode", seen.decode), ("both", seen.both)):
        if name == "both" and not pool.instances:
            continue
        places = "" if pool.limit is None else f" of {pool.limit}"
        plural = "instance" if pool.instances == 1 else "instances"
        engines = f"{pool.running:.1f} running, {pool.waiting:.1f} waiting in engines"
        lines.append(
            f"{name}: {pool.instances} ready {plural}, {engines}, {pool.in_line:.1f} in the queue for it, "
            f"{pool.places:.0f}{places} places taken, KV {pool.kv_usage:.0%}"
        )
    if seen.decode.pulling >= 0.05:
        lines.append(f"hand-over: {seen.decode.pulling:.1f} requests wait at decode for their blocks")
    if waiting and waiting[Where.PREFILL] > seen.prefill.waiting + seen.prefill.in_line + 0.05:
        lines.append("requests in the queue for decode wait for prefill: prompts under way hold the places of decode")
    if waiting and waiting[Where.DECODE] > seen.decode.waiting + seen.decode.in_line + 0.05:
        lines.append("prefill's memory is full of holds that decode has not pulled: its queue counts as decode's")
    if seen.late_s >= LATE_S / 10:
        lines.append(f"routers: the latest gets to its work {_seconds(seen.late_s)} late")
    lines.append(f"{seen.rate:.1f} requests end a second")
    return tuple(lines)


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
