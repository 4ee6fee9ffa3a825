"""Histograms that cost a tenth of `prometheus_client`'s own, for values observed a dozen times per request. A shell.

One thread observes and is scraped, so there is nothing to lock. An observation is an entry in a list (the library's
take 2.5 µs with their labels, measured on CPython 3.11); a list that is full, or is to be read, is counted all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router.core.arrays import Floats
from router.core.timing_parts import Sum, Timing

_OWN_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025)
"""Buckets of parts begin lower than others, as the router's own parts are fractions of a millisecond."""


def _nothing() -> None:
    """The default of `settle`: all requests are counted at once."""


FRESH_MAX: Final = 256
"""The number of values with one set of labels that may wait to be counted."""


class Histograms(Collector):
    """One metric with labels."""

    def __init__(
        self, name: str, told: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name: Final = name
        self._told: Final = told
        self._labels: Final = tuple(labels)
        self._bounds: Final = list(bounds)
        self._fresh: Final[dict[tuple[str, ...], list[float]]] = {}
        self._counts: Final[dict[tuple[str, ...], NDArray[np.int64]]] = {}
        self._sums: Final[dict[tuple[str, ...], float]] = {}
        registry.register(self)

    def fresh(self, labels: tuple[str, ...]) -> list[float]:
        """The values with these labels that are not counted yet. A caller that adds some must call `count` now and
        then.
        """
        found = self._fresh.get(labels)
        if found is None:
            found = self._fresh[labels] = []
            self._counts[labels] = np.zeros(len(self._bounds) + 1, dtype=np.int64)
            self._sums[labels] = 0.0
        return found

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        """Add one value."""
        fresh = self._fresh.get(labels)
        if fresh is None:
            fresh = self.fresh(labels)
        fresh.append(value)
        if len(fresh) >= FRESH_MAX:
            self.count()

    def count(self) -> None:
        """Count all waiting values."""
        for labels, fresh in self._fresh.items():
            if fresh:
                counts = self._counts[labels]
                counts += np.bincount(np.searchsorted(self._bounds, fresh), minlength=len(counts))
                self._sums[labels] = sum(fresh, self._sums[labels])
                fresh.clear()

    def observe_all(self, labels: tuple[str, ...], values: Floats) -> None:
        """Add many values with the same labels, and count them now."""
        self.fresh(labels)
        counts = self._counts[labels]
        counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(counts))
        self._sums[labels] += float(values.sum())

    def sums(self) -> dict[tuple[str, ...], float]:
        """The sums of all values, by labels."""
        self.count()
        return dict(self._sums)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """What Prometheus reads."""
        family = HistogramMetricFamily(self._name, self._told, labels=self._labels)
        limits = [*map(floatToGoString, self._bounds), "+Inf"]
        self.count()
        for labels, counts in self._counts.items():
            buckets = list(zip(limits, accumulate(counts.tolist()), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family


class Counts(Collector):
    """One counter metric with labels, as cheap as `Histograms`."""

    def __init__(self, name: str, told: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name: Final = name
        self._told: Final = told
        self._labels: Final = tuple(labels)
        self._counts: Final[dict[tuple[str, ...], int]] = {}
        registry.register(self)

    def add(self, labels: tuple[str, ...], more: int = 1) -> None:
        """Add `more`. With 0, the labels are exported from now on."""
        self._counts[labels] = self._counts.get(labels, 0) + more

    def collect(self) -> Iterable[CounterMetricFamily]:
        """What Prometheus reads."""
        family = CounterMetricFamily(self._name, self._told, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Times(Collector):
    """Where the time of served requests went."""

    def __init__(self, registry: CollectorRegistry, bounds: Sequence[float]) -> None:
        self.settle: Callable[[], None] = _nothing
        """Called before any reading, so that requests which are counted some time after their end are included."""
        registry.register(self)  # registered first, so that it is collected first

        def one(name: str, told: str, *labels: str, more: Sequence[float] = ()) -> Histograms:
            return Histograms(f"baton_{name}_seconds", told, (*labels, "way"), (*more, *bounds), registry)

        self._ttft: Final = one("ttft", "Arrival to the first token's way out; streams.")
        self._made: Final = one("first_made", "Arrival to when the first token was there to give: a handoff's is P's.")
        self._tt2t: Final = one("tt2t", "First token's way out to the second's; streams.")
        told = "Parts of a sum (ttft, tt2t, answer) that there were, its residual among them."
        self._parts: Final = one("part", told, "sum", "part", more=_OWN_SECONDS)
        self._by_part: Final[dict[tuple[str, str], dict[str, list[float]]]] = {}
        """By sum and way, then by part."""

    def collect(self) -> Iterable[Metric]:
        """Returns no metric of its own, but makes the metrics collected after it complete."""
        self.settle()
        return ()

    def parts_of_ttft(self) -> dict[str, float]:
        """Seconds that went into each part of first tokens' times, since the process began."""
        self.settle()
        found: dict[str, float] = {}
        for (name, part, _), seconds in self._parts.sums().items():
            if name == "ttft":
                found[part] = found.get(part, 0.0) + seconds
        return found

    def observe(self, timing: Timing) -> None:
        """Count the times of one request."""
        way = timing.way
        if timing.first_made_s is not None:
            self._made.observe((way,), timing.first_made_s)
        if timing.ttft is not None:
            self._ttft.observe((way,), timing.ttft.total_s)
            self._observe_parts("ttft", timing.ttft, way)
        if timing.tt2t is not None:
            self._tt2t.observe((way,), timing.tt2t.total_s)
            self._observe_parts("tt2t", timing.tt2t, way)
        if timing.answer is not None:
            self._observe_parts("answer", timing.answer, way)

    def observe_all(self, way: str, columns: Mapping[tuple[str, str], Floats]) -> None:
        """Count many requests of one way: seconds by sum and part, as `observe` takes them from a `Timing`."""
        totals = {"made": self._made, "ttft": self._ttft, "tt2t": self._tt2t}
        for (name, part), seconds in columns.items():
            if part:
                there = seconds if part == "residual" else seconds[seconds != 0]
                if len(there):
                    self._parts.observe_all((name, part, way), there)
            elif name:
                totals[name].observe_all((way,), seconds)

    def _observe_parts(self, name: str, each: Sum, way: str) -> None:
        found = self._by_part.get((name, way))
        if found is None:
            found = self._by_part[name, way] = {}
        for part, seconds in each.parts.items():
            if seconds:
                fresh = found.get(part)
                if fresh is None:
                    fresh = found[part] = self._parts.fresh((name, part, way))
                fresh.append(seconds)
        self._parts.observe((name, "residual", way), each.residual_s)  # also counts, once there are enough
