"""The flow-control queue: which requests are admitted, in which order, and which cannot be served in time any more.
Pure.

The queue holds the requests for which there is no room (`router.scheduler.flow_control.saturation`): tenants in the
order of what they have got of the fleet relative to their share, both stages counted; a tenant's requests by their
deadlines. If not all of them can be in time, the queue gives up those with the most work until the others can. (This is
Moore and Hodgson's rule, which leaves the fewest jobs late on one machine; the fleet counts as one machine, with the
rate that it was seen to have.) A request that is given up is *late*. As its class says, it is served once no request
waits that can be in time, or refused, or held to its class's second promise. A late request is *aged* once `AGING`
times its target has passed since its arrival: aged requests get a part of the fleet's work (`aged_share`) while others
wait that can be in time. Requests without a target are due in `PATIENCE_S`.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

from router.core.values import Wanted
from router.scheduler.flow_control.aged_share import AgedShare
from router.scheduler.flow_control.sizes import GivenUp
from router.scheduler.flow_control.urgency import Urgency
from router.scheduler.flow_control.work_rate import WorkRates

AGING: Final = 5.0
AGING_S_MIN: Final = 10.0
"""The least time from its arrival until a late request is aged, whatever its target."""

PATIENCE_S: Final = 30.0

FAIR_MS: Final = 2000.0
"""How far a tenant may be ahead of the tenant that got least, in milliseconds of work over its share, before its
deadlines stop to count: short bursts do not break the order of deadlines."""

SMALL_OCTAVE: Final = 13
"""Requests that need less memory than 2**13 tokens, prompt and answer together, are alike: an engine's KV cache holds
tens of thousands at least."""


Place = tuple[str | None, str]
"""A model, and the tenant for which its instances are reserved (`Wanted.whose`)."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """One waiting request."""

    request: Any
    kind: Hashable
    tenant: str
    due: float
    """The time, in seconds, by which it is to begin: the end of its target, less `work_ms` and `lead_ms` of `enter`."""
    work_ms: float
    number: int
    tokens: int = 0
    """The tokens of its prompt."""
    whose: str = ""
    """`Wanted.whose`."""
    model: str | None = None
    within: float = 1.0
    """`Promise.lengths_within`."""
    ttft_ms: float = 0.0
    """`Wanted.ttft_ms`."""
    late: bool = False
    """Whether it cannot be in time."""
    aged: bool = False
    aged_at: float = math.inf

    @property
    def work_us(self) -> int:
        """`work_ms` in microseconds: sums of whole numbers come back to what they were."""
        return round(1000.0 * self.work_ms)

    @property
    def promised(self) -> bool:
        """Whether its first token has a target."""
        return self.ttft_ms > 0

    @property
    def urgency(self) -> float:
        """The part of it that a delay of a millisecond makes late; none if it is late in any case."""
        return 1.0 / self.ttft_ms if self.ttft_ms and not self.late else 0.0

    @property
    def waits_for(self) -> Place:
        """Requests of one model that may use the same instances wait for each other."""
        return (self.model, self.whose)

    @property
    def asks(self) -> Hashable:
        """Of waiting requests that are alike in this only the first is asked: the others would get the same reply."""
        return (self.kind, self.late)

    @property
    def key(self) -> tuple[float, int]:
        return (self.due, self.number)

    @property
    def group(self) -> tuple[Hashable, str, bool, bool]:
        """Waiting requests of one group are ordered by their keys."""
        return (self.kind, self.tenant, self.late, self.aged)


class FlowControlQueue:
    """All requests that wait for a place. Returned requests are to ask again.

    A request that is called asks for a place again. If it finds none, it keeps its position and passes the call on to
    the next request that wants something *else*: a request that wants the same would get the same reply. So a call
    costs as many questions as there are kinds of requests, not as there are requests. Without promises, the order is
    first come, first served.

    Long, as each short method is one event of a waiting request, or one question about all of them.
    """

    def __init__(self) -> None:
        self._entries: Final[dict[object, _Waiter]] = {}
        self._groups: Final[dict[tuple[Hashable, str, bool, bool], list[tuple[float, int, _Waiter]]]] = {}
        self._called: Final[dict[object, set[Hashable]]] = {}
        """The requests that ask now, and the kinds that found no place in this round."""
        self._again: Final[set[object]] = set()
        """The called requests after whose success the next request is called, too, until one finds no place."""
        self._number = 0
        self._patient = 0
        self._urgency: Final = Urgency()
        self._work_us: Final[dict[Place, int]] = {}
        """The work of the requests that wait for each place, in microseconds; without those where it is 0."""
        self._given: Final[dict[str, float]] = {}
        """By tenant: the work it has got, divided by its share."""
        self._most = 0.0
        """The largest of these."""
        self._aged: Final = AgedShare()
        self._rates: Final = WorkRates()
        self.given_up: Final = GivenUp()
        """How often prompts of each size were given up."""

    def __len__(self) -> int:
        return len(self._entries)

    # --- entering and leaving -----------------------------------------------------------------------------------------

    def whose(self) -> set[str]:
        """Tenants with queued requests and instances reserved for them; and the tenant without a name, if others are
        queued.
        """
        return {group[0][2].whose for group in self._groups.values()}

    def everybody(self) -> tuple[object, ...]:
        """All queued requests, in no order."""
        return tuple(self._entries)

    def enter(self, request: object, wanted: Wanted, work_ms: float = 0.0, lead_ms: float = 0.0) -> None:
        """Join the queue; a queued request keeps its place unless what it wants has changed.

        Args:
            request: the waiting request, or a hashable identity of it.
            wanted: what the request wants.
            work_ms: an engine's time for its prompt.
            lead_ms: the other time that its first token takes.
        """
        known = self._entries.get(request)
        kind = _kind(wanted)
        if known is not None and (known.kind, known.ttft_ms, known.late) == (kind, wanted.ttft_ms, wanted.late):
            return
        number = known.number if known is not None else self._next()
        tried, again = self._called.get(request), request in self._again
        self._rates.entered(place_of(wanted), wanted.now)
        self._remove(request)
        target_s = wanted.ttft_ms / 1000.0 if wanted.ttft_ms else PATIENCE_S
        due = wanted.arrived + target_s - (work_ms + lead_ms) / 1000.0
        entry = _Waiter(request, kind, wanted.tenant, due, work_ms, number, wanted.prompt_tokens, wanted.whose)
        entry.ttft_ms, entry.model = wanted.ttft_ms, wanted.model
        entry.within = wanted.lengths_within
        if entry.promised:
            entry.aged_at = wanted.arrived + max(AGING_S_MIN, AGING * target_s)
        entry.late = wanted.late
        if not any(tenant == wanted.tenant for _, tenant, _, _ in self._groups):
            self._begins(wanted.tenant)
        self._entries[request] = entry
        self._patient += not entry.promised
        self._insert(entry)
        if tried is not None:  # it was called, and passes the call on if it finds no place
            self._called[request] = tried
        if again:
            self._again.add(request)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _begins(self, tenant: str) -> None:
        """A tenant that had no waiting requests has no claim on that time. If no tenant has any, it is behind the one
        that got most by `FAIR_MS` at most: else one that had been away for weeks would be served alone for as long.
        """
        waiting = {entry.tenant for entry in self._entries.values()}
        least = min((self._given.get(name, 0.0) for name in waiting), default=self._most - FAIR_MS)
        self._given[tenant] = max(self._given.get(tenant, 0.0), least)

    def urgency(self, request: object, wanted: Wanted) -> float:
        """The number of other requests for the same place that a delay of a millisecond is expected to make late."""
        place, own = place_of(wanted), self._entries.get(request)
        total = self._urgency.of(place)
        return total if own is None or own.waits_for != place else max(0.0, total - own.urgency)

    def _insert(self, entry: _Waiter) -> None:
        self._urgency.add(entry.waits_for, entry.urgency)
        self._add_work(entry.waits_for, entry.work_us)
        insort(self._groups.setdefault(entry.group, []), (*entry.key, entry))

    def _remove(self, request: object) -> _Waiter | None:
        entry = self._entries.pop(request, None)
        self._called.pop(request, None)
        self._again.discard(request)
        if entry is not None:
            self._take_out(entry)
            self._rates.left(entry.waits_for)
            self._patient -= not entry.promised
            self._aged.waiting -= entry.aged
        return entry

    def _take_out(self, entry: _Waiter) -> None:
        self._urgency.remove(entry.waits_for, entry.urgency)
        self._add_work(entry.waits_for, -entry.work_us)
        group = self._groups[entry.group]
        del group[bisect_left(group, entry.key, key=lambda each: each[:2])]
        if not group:
            del self._groups[entry.group]

    def _add_work(self, place: Place, work_us: int) -> None:
        total = self._work_us.pop(place, 0) + work_us
        if total:
            self._work_us[place] = total

    def leave(self, request: object, *, placed: bool) -> tuple[object, ...]:
        """The request found its place, or gave up: returns the requests to ask now."""
        tried = self._called.get(request)
        again = request in self._again
        self._remove(request)
        if tried is None or (placed and not again):
            return ()
        return self._call(set() if placed else tried, again=again)

    # --- calling ------------------------------------------------------------------------------------------------------

    def found_none(self, request: object) -> tuple[object, ...]:
        """The called request has found no place: returns the requests to ask now, of another kind."""
        tried, again = self._called.pop(request, None), request in self._again
        self._again.discard(request)
        if tried is None:
            return ()
        entry = self._entries.get(request)
        return self._call(tried if entry is None else tried | {entry.asks}, again=again)

    @property
    def patient(self) -> int:
        """The number of queued requests without a target: they begin wherever credits allow."""
        return self._patient

    def rests(self, request: object) -> None:
        """No instance can take this request now; do not wake the requests behind it."""
        self._called.pop(request, None)
        self._again.discard(request)

    def call_first(self) -> tuple[object, ...]:
        """A place became free: returns the requests to ask."""
        return self._call(set()) if self._groups else ()

    def call_all(self) -> tuple[object, ...]:
        """There may be several places: requests may ask, one after the other, as long as they find places."""
        return self._call(set(), again=True)

    def _call(self, tried: set[Hashable], *, again: bool = False) -> tuple[object, ...]:
        entry = self._first(tried)
        if entry is None:
            return ()
        called = entry.request in self._called
        if called or again:
            self._again.add(entry.request)
        if called:
            return ()
        self._called[entry.request] = tried
        return (entry.request,)

    def _first(self, tried: set[Hashable]) -> _Waiter | None:
        """The next request, of the kinds that may still find a place."""
        heads = [group[0][2] for group in self._groups.values() if group[0][2].asks not in tried]
        if not heads:
            return None
        least = min(self._given.get(entry.tenant, 0.0) for entry in heads)

        def rank(entry: _Waiter) -> tuple[int, bool, float, int]:
            ahead = self._given.get(entry.tenant, 0.0) - least
            return (self._turn(entry), ahead > FAIR_MS, entry.due, entry.number)

        return min(heads, key=rank)

    def _turn(self, entry: _Waiter) -> int:
        """Requests with a smaller number go first."""
        if not entry.aged:
            return 3 if entry.late else 1
        return 0 if self._aged.due(entry.work_ms) else 2

    def yields(self, request: object) -> bool:
        """Whether the request is late and others wait that can be in time: it takes nothing from these, unless it is
        aged and aged ones have not had their part of the work.
        """
        entry = self._entries.get(request)
        if entry is None or not entry.late or self._turn(entry) == 0:
            return False
        return not all(late for _, _, late, _ in self._groups)

    # --- accounting ---------------------------------------------------------------------------------------------------

    def gave(self, tenant: str, work_ms: float) -> None:
        """A tenant's request was placed: add its work, divided by the tenant's share."""
        given = self._given[tenant] = self._given.get(tenant, 0.0) + work_ms
        self._most = max(self._most, given)

    def took(self, wanted: Wanted, work_ms: float) -> None:
        """The fleet has taken this prompt: update the rate, if others wait, and the share of aged requests."""
        self._aged.took(work_ms, late=wanted.late)
        self._rates.took(place_of(wanted), work_ms, wanted.now)

    def drains_s(self, wanted: Wanted, servers: float) -> float:
        """The seconds until all requests that wait for the same instances as this one would be served. `servers`: see
        `hopeless`.
        """
        place = place_of(wanted)
        if not self._rates.waiting(place):
            return 0.0
        return self._work_us.get(place, 0) / 1000.0 / self._rates.of(place, servers)

    def hopeless(self, wanted: Wanted, servers: float) -> list[object]:
        """The requests that cannot be in time any more: they are late from now on. Those with the most work are given
        up first; prompts of sizes that were given up too often (`GivenUp.enough`) come last.

        Args:
            wanted: what one of them wants. Only requests that wait for the same instances are judged.
            servers: the instances that may compute their prompts; of several routers, this one's part of them.
        """
        now, place = wanted.now, place_of(wanted)
        rate = self._rates.of(place, servers)
        waiting = sorted(
            (
                each
                for each in self._entries.values()
                if not each.late and each.aged_at < math.inf and each.waits_for == place
            ),
            key=lambda entry: entry.key,
        )
        largest: list[tuple[bool, float, int, _Waiter]] = []
        ahead_ms, gone = 0.0, []
        for entry in waiting:
            if now > entry.due:
                gone.append(entry)
                continue
            enough = self.given_up.enough(entry.tokens, entry.within)
            heapq.heappush(largest, (enough, -entry.work_ms, entry.number, entry))
            ahead_ms += entry.work_ms
            while largest and now + (ahead_ms - entry.work_ms) / rate > entry.due:
                given_up = heapq.heappop(largest)[3]
                ahead_ms -= given_up.work_ms
                gone.append(given_up)
                if given_up is entry:
                    break
        for entry in gone:
            self._take_out(entry)
            entry.late = True
            self._insert(entry)
            self.given_up.add(entry.tokens, gone=True)
        return [entry.request for entry in gone]

    def age(self, now: float) -> None:
        """Late requests that have waited so long (`AGING`) are aged from now on, the first to come first. They still
        go only to instances that may take late prompts (`SaturationDetector.lanes`).
        """
        for entry in list(self._entries.values()):
            if entry.late and now >= entry.aged_at:
                self._take_out(entry)
                entry.aged, entry.due, entry.aged_at = True, 0.0, math.inf
                self._insert(entry)
                self._aged.waiting += 1


def _kind(wanted: Wanted) -> Hashable:
    """The kind of a request: of one kind only the first is asked at a time. A request with a target for its first token
    waits for more than others do. One that needs much more memory is of another kind: an instance that lacks it may
    have enough for others. Small needs are alike, since each further kind costs a choice whenever a place becomes free.

    Targets for later tokens make no kinds, though a request with a strict one finds fewer instances to answer it: see
    docs/policy.md, "Order".
    """
    octave = max(SMALL_OCTAVE, (wanted.prompt_tokens + int(wanted.output_tokens)).bit_length())
    return (wanted.kind, bool(wanted.ttft_ms), wanted.sheds, octave)


def place_of(wanted: Wanted) -> Place:
    """What the request waits for: requests of one place wait for each other."""
    return (wanted.model, wanted.whose)
