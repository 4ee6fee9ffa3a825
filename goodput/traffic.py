"""Arrivals as a series over time, and lengths of recent requests, from what routers counted. Pure.

There are two series of arrivals: fine bins for levels and steps, and coarse bins of eight days for daily patterns. Fine
bins of the lengths' logarithms show whether lengths have changed. The counts of a late look cover several bins and are
spread over them evenly, because the times of its requests are unknown.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import numpy as np

from goodput.counters import Between
from goodput.observation import ClassCounts
from goodput.sizing import RecentLengths
from goodput.sketch import EMPTY, Sketch
from goodput.stretches import Floats, Stretch, steady_lengths

FINE_S: Final = 5.0
"""Seconds of a fine bin."""
FINE_BINS: Final = 1440
"""Two hours."""
COARSE_S: Final = 60.0
"""Seconds of a coarse bin."""
COARSE_BINS: Final = 11_520
"""Eight days: a week, and a day to compare it with."""

SAMPLE: Final = 400
"""Requests whose lengths represent the present load: enough for a 95th percentile within a bucket or two."""
SAMPLE_S: Final = 120.0
"""Least seconds whose lengths count, however many they are: a burst of one kind does not represent the load."""
SAMPLE_MAX_S: Final = 3600.0
"""Seconds after which lengths no longer count, however few there are."""


class Series:
    """Counts in bins of equal length. Only the newest bins are kept."""

    def __init__(self, bin_s: float, bins_max: int) -> None:
        self.bin_s: Final = bin_s
        self._max: Final = bins_max
        self._counts: Final[deque[float]] = deque(maxlen=bins_max)
        self._first: int | None = None
        """Number of the first bin that was ever counted; bin n is [n, n + 1) · bin_s."""
        self._last = 0
        self._open = 0.0
        """Count of the last bin so far: it is not closed yet."""

    def add(self, from_s: float, to_s: float, count: float) -> None:
        """Spread `count` evenly over the time between `from_s`, the end of the last call, and `to_s`, in seconds."""
        if self._first is None:
            self._first = self._last = math.floor(from_s / self.bin_s)
        at_s, rate = from_s, count / (to_s - from_s)
        while at_s < to_s - 1e-9:
            number = math.floor(at_s / self.bin_s + 1e-9)
            while self._last < number:
                self._counts.append(self._open)
                self._open, self._last = 0.0, self._last + 1
            end_s = min(to_s, (number + 1) * self.bin_s)
            self._open += rate * (end_s - at_s)
            at_s = end_s
        if to_s >= (self._last + 1) * self.bin_s - 1e-9:
            self._counts.append(self._open)
            self._open, self._last = 0.0, self._last + 1

    def counts(self) -> Floats:
        """Counts of all closed bins, oldest first, without the very first bin, which may have begun in its middle."""
        listed = list(self._counts)
        whole = self._first is not None and self._last - self._first > len(listed)
        return np.array(listed if whole else listed[1:])

    @property
    def end_s(self) -> float:
        """When the newest closed bin ended."""
        return self._last * self.bin_s


class Traffic:
    """Arrivals over time, and lengths of recent requests."""

    def __init__(self) -> None:
        self.fine: Final = Series(FINE_S, FINE_BINS)
        self.coarse: Final = Series(COARSE_S, COARSE_BINS)
        self._prompts: Final = _Logs()
        self._answers: Final = _Logs()
        self._recent: Final[deque[tuple[float, dict[str, ClassCounts]]]] = deque()
        self._arrivals = 0
        """Arrivals in `_recent`."""
        self.counted = 0
        """Arrivals since this controller began."""

    def add(self, between: Between, now: float) -> None:
        """Fold in what came since the last look. `now`: seconds of the controller's clock."""
        arrivals = sum(each.arrivals for each in between.classes.values())
        for series in (self.fine, self.coarse):
            series.add(now - between.seconds, now, arrivals)
        self._prompts.add(now - between.seconds, now, [each.prompts for each in between.classes.values()])
        self._answers.add(now - between.seconds, now, [each.answers for each in between.classes.values()])
        self._recent.append((now, between.classes))
        self._arrivals += arrivals
        self.counted += arrivals
        while self._recent and self._is_old(*self._recent[0], now):
            self._arrivals -= sum(each.arrivals for each in self._recent.popleft()[1].values())

    def _is_old(self, at_s: float, classes: dict[str, ClassCounts], now: float) -> bool:
        left = self._arrivals - sum(each.arrivals for each in classes.values())
        return now - at_s > SAMPLE_MAX_S or (now - at_s > SAMPLE_S and left >= SAMPLE)

    def lengths_steady_s(self) -> float:
        """Seconds for which neither prompts nor answers have changed significantly; infinite: no change is known."""
        found = [each.steady() for each in (self._prompts, self._answers)]
        return min((each.seconds for each in found if each is not None and not each.whole), default=math.inf)

    def newest(self, count: int) -> Sketch:
        """Prompt lengths of the newest `count` arrivals or somewhat more: waiting prompts are among them."""
        found = EMPTY
        for _, classes in reversed(self._recent):
            if found.count >= count:
                break
            for each in classes.values():
                found += each.prompts
        return found

    def lengths(self) -> dict[str, RecentLengths]:
        """Lengths of recent requests, by class."""
        prompts, answers = dict[str, dict[int, int]](), dict[str, dict[int, int]]()
        sums: dict[str, list[float]] = {}
        for _, classes in self._recent:
            for name, counts in classes.items():
                _fold(prompts.setdefault(name, {}), counts.prompts)
                _fold(answers.setdefault(name, {}), counts.answers)
                row = sums.setdefault(name, [0.0] * 5)
                for at, value in enumerate(
                    (
                        counts.prompts.tokens,
                        counts.answers.tokens,
                        counts.cached_tokens,
                        counts.computed_tokens,
                        counts.arrivals,
                    )
                ):
                    row[at] += value
        return {name: self._of(prompts[name], answers[name], row) for name, row in sorted(sums.items())}

    def _of(self, prompts: dict[int, int], answers: dict[int, int], sums: list[float]) -> RecentLengths:
        seen = sums[2] + sums[3]
        return RecentLengths(
            prompts=Sketch(prompts, sums[0]),
            answers=Sketch(answers, sums[1]),
            cached=sums[2] / seen if seen else 0.0,
            share=sums[4] / self._arrivals if self._arrivals else 0.0,
        )


class _Logs:
    """Logarithms of lengths over time, in buckets of sketches: how many, their sum, and their sum of squares."""

    def __init__(self) -> None:
        self._powers: Final = tuple(Series(FINE_S, FINE_BINS) for _ in range(3))

    def add(self, from_s: float, to_s: float, sketches: list[Sketch]) -> None:
        for power, series in enumerate(self._powers):
            told = sum(count * bucket**power for each in sketches for bucket, count in each.counts.items())
            series.add(from_s, to_s, told)

    def steady(self) -> Stretch | None:
        counts, sums, squares = (series.counts() for series in self._powers)
        return steady_lengths(counts, sums, squares, FINE_S)


def _fold(into: dict[int, int], more: Sketch) -> None:
    for bucket, count in more.counts.items():
        into[bucket] = into.get(bucket, 0) + count
