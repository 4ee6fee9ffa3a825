"""Rolling statistics: the last five minutes of a router in slots of five seconds, for `/ui`. Pure.

Prometheus keeps the history of a fleet; this serves operators who look now, also without a Prometheus server. All of it
is sums and counts, so that several routers' figures add up to the fleet's: `together`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log
from typing import Any, Final

SLOT_S: Final = 5.0
SLOTS: Final = 60
"""Five minutes."""

NOW_SLOTS: Final = 6
"""What the page calls *now*: half a minute. With less, a burst of a few requests would look like the state of the
fleet."""

GROWTH: Final = 1.1
"""The ratio of neighbouring buckets: percentiles are right within 5 %."""

_LEAST: Final = 1e-4
"""Seconds; shorter times share one bucket."""

_PER_LOG: Final = 1 / log(GROWTH)
_FIRST: Final = ceil(log(_LEAST) * _PER_LOG)

KINDS: Final = ("ttft", "tt2t", "tpot")

Json = dict[str, Any]


@dataclass(slots=True)
class _Slot:
    number: int
    outcomes: dict[str, int] = field(default_factory=dict)
    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By class and result, with `late_ttft` and `late_tpot` beside them."""
    values: dict[str, dict[int, int]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    """Counts by kind and bucket."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    """Sums by kind."""
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds by part of TTFT."""
    line: int = 0
    """Requests in the queue, summed over the looks."""
    looks: int = 0

    def count(self, kind: str, values: Sequence[float]) -> None:
        """Add values of one kind."""
        counts = self.values[kind]
        for number, count in Counter(map(bucket, values)).items():
            counts[number] = counts.get(number, 0) + count
        self.seconds[kind] = sum(values, self.seconds[kind])


class RollingStatistics:
    """The statistics of one router. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._slots: Final[deque[_Slot]] = deque(maxlen=SLOTS)
        self._parts: dict[str, float] = {}
        self.settle: Callable[[], None] = _nothing
        """Called before any reading, so that requests which are counted some time after their end are included."""

    def _at(self, now: float) -> _Slot:
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_Slot(number))
        return self._slots[-1]

    # --- events -------------------------------------------------------------------------------------------------------

    def ended(self, now: float, outcome: str) -> None:
        """A request is over."""
        outcomes = self._at(now).outcomes
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    def served(
        self, now: float, ttft_s: Sequence[float], tt2t_s: Sequence[float], tpot_s: Sequence[float], count: int = 1
    ) -> None:
        """`count` served requests are over, with these times."""
        slot = self._at(now)
        slot.outcomes["served"] = slot.outcomes.get("served", 0) + count
        for kind, values in (("ttft", ttft_s), ("tt2t", tt2t_s), ("tpot", tpot_s)):
            slot.count(kind, values)

    def judged(self, now: float, slo_class: str, result: str, *, late_ttft: bool, late_tpot: bool) -> None:
        """A request of a class is over: whether its promise was kept, and which target was missed."""
        results = self._at(now).results
        results[slo_class, result] += 1
        results[slo_class, "late_ttft"] += late_ttft
        results[slo_class, "late_tpot"] += late_tpot

    def look(self, now: float, waiting: int, parts: Mapping[str, float]) -> None:
        """Take the figures of one second.

        Args:
            now: monotonic seconds.
            waiting: the number of queued requests.
            parts: the seconds that first tokens spent, by part, since the process began.
        """
        slot = self._at(now)
        slot.line += waiting
        slot.looks += 1
        for name, seconds in parts.items():
            more = seconds - self._parts.get(name, 0.0)
            if more > 0:
                slot.waits[name] = slot.waits.get(name, 0.0) + more
        self._parts = dict(parts)

    # --- readings -----------------------------------------------------------------------------------------------------

    def told(self, now: float) -> Json:
        """All figures, for `together`."""
        self.settle()
        last = int(now // SLOT_S)
        kept = [slot for slot in self._slots if last - slot.number < SLOTS]
        return {
            "now": _window([slot for slot in kept if last - slot.number < NOW_SLOTS]),
            "now_s": (NOW_SLOTS - 1) * SLOT_S + now % SLOT_S,  # the last slot is not over yet
            "five_minutes": _window(kept),
            "history": _history(kept, last),
        }


def _nothing() -> None:
    """The default of `settle`: all requests are counted at once."""


def bucket(seconds: float) -> int:
    """The number of a duration's bucket."""
    return ceil(log(seconds) * _PER_LOG) if seconds > _LEAST else _FIRST


def percentile(buckets: Mapping[str, int], share: float) -> float | None:
    """The duration in seconds below which this share lies; None without values."""
    left = share * sum(buckets.values())
    for number in sorted(buckets, key=int):
        left -= buckets[number]
        if left <= 1e-9:
            return float(GROWTH ** (int(number) - 0.5))
    return None


def _window(slots: Iterable[_Slot]) -> Json:
    outcomes: Counter[str] = Counter()
    results: dict[str, Counter[str]] = {}
    values: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    waits: dict[str, float] = {}
    line = looks = 0
    for slot in slots:
        outcomes.update(slot.outcomes)
        for (name, result), count in slot.results.items():
            results.setdefault(name, Counter())[result] += count
        for kind, counts in slot.values.items():
            values[kind].update({str(number): count for number, count in counts.items()})
        for part, seconds in slot.waits.items():
            waits[part] = waits.get(part, 0.0) + seconds
        line, looks = line + slot.line, looks + slot.looks
    return {
        "outcomes": dict(outcomes),
        "results": {name: dict(counts) for name, counts in results.items()},
        "values": {kind: dict(counts) for kind, counts in values.items()},
        "waits": waits,
        "line": line / looks if looks else 0.0,
    }


def _history(slots: Iterable[_Slot], last: int) -> list[Json]:
    """The slots, the oldest first; zeros where nothing happened."""
    by_number = {slot.number: slot for slot in slots}
    told = []
    for number in range(last - SLOTS + 1, last + 1):
        slot = by_number.get(number) or _Slot(number)
        means = {f"{kind}_s": slot.seconds[kind] for kind in KINDS}
        counts = {f"{kind}_n": sum(slot.values[kind].values()) for kind in KINDS}
        line = slot.line / slot.looks if slot.looks else 0.0
        told.append({"ended": sum(slot.outcomes.values()), "line": line, **means, **counts})
    return told


def together(told: Iterable[Json]) -> Json:
    """Several routers' figures as one: numbers are summed by name, lists entry by entry from their ends, where the
    newest slots are.
    """
    found: Json = {}
    for each in told:
        found = _sum(found, each)
    return found


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            **one,
            **{name: _sum(one[name], value) if name in one else value for name, value in other.items()},
        }
    if isinstance(one, list) and isinstance(other, list):
        older = one[: max(0, len(one) - len(other))] or other[: max(0, len(other) - len(one))]
        newest = min(len(one), len(other))
        return older + [_sum(a, b) for a, b in zip(one[len(one) - newest :], other[len(other) - newest :], strict=True)]
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return one
