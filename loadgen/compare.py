"""Compares two saved results: differences with intervals, and reasons why the two cannot be compared. Pure.

Requests of one load are no independent draws: neighbours waited in one queue. So the bootstrap draws stretches of
neighbouring requests, not single ones, with circular blocks of 2·n^(1/3) requests (D. N. Politis and J. P. Romano, *A
circular block-resampling procedure for stationary data*, 1992; the exponent is that of P. Hall, J. L. Horowitz and
B.-Y. Jing, *On blocking rules for the bootstrap with dependent data*, Biometrika 82, 1995). If both results are of the
same requests, the same stretches are drawn from both: the difference is then the server's, not the luck of the draw.
Intervals are the bootstrap's own percentiles, at a level that holds for all rows of the table together (Bonferroni).

No interval here contains how much another run of the same load would differ. To see that, run the load again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.record import INTERRUPTED, Record
from loadgen.report import Targets, met

_Floats = NDArray[np.float64]

DRAWS: Final = 2000
"""Resamples of each bootstrap."""
CONFIDENCE: Final = 0.95
"""Confidence of all rows together."""

LEAST: Final = 20
"""Fewest requests on each side: with fewer, no interval is given."""

LATER_S: Final = 0.001
"""Two results are of one load if their requests' moments differ by less, in seconds: records round their times."""

CELLS: Final = 1_000_000
"""Numbers in memory at a time: larger results are drawn in parts."""

Statistic = Callable[[_Floats], _Floats]
"""A statistic of each row of a matrix; NaN stands for a request that lacks the quantity."""


class QuantityDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of both results."""

    name: str
    unit: str
    a: float | None
    b: float | None
    change: float | None
    """b − a."""
    low: float | None = None
    high: float | None = None
    """Interval of the change."""
    better_when: str = "lower"

    @property
    def verdict(self) -> str:
        """better, worse, or `same` if the interval holds 0; empty without an interval."""
        if self.low is None or self.high is None:
            return ""
        if self.low <= 0 <= self.high:
            return "same"
        return "better" if (self.high < 0) == (self.better_when == "lower") else "worse"


class LoadComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The whole comparison, as `--json` prints it."""

    requests_a: int
    requests_b: int
    paired: bool
    """Whether both results are of the same requests at the same moments."""
    unlike: tuple[str, ...]
    """Why the two cannot be compared: the loads differ, and so may cause any difference."""
    differences: tuple[QuantityDifference, ...]
    confidence: float = CONFIDENCE

    @property
    def worse(self) -> tuple[str, ...]:
        """The quantities that are worse in b beyond their interval."""
        return tuple(each.name for each in self.differences if each.verdict == "worse")


def compare(a: Sequence[Record], b: Sequence[Record], targets: Targets, seed: int = 0) -> LoadComparison:
    """The changes from a to b. Requests that the sender cut are left out of both."""
    a, b = _kept(a), _kept(b)
    unlike = tuple(_unlike(a, b))
    paired = not unlike and _same(a, b)
    rows = [each for each in _ROWS if each[0] != "attainment" or targets.any]
    edge = (1 - CONFIDENCE) / (2 * len(rows))
    differences = []
    for at, (name, unit, of, statistic, better_when) in enumerate(rows):
        found = [np.array([of(record, targets) for record in records], dtype=np.float64) for records in (a, b)]
        rng = np.random.default_rng([seed, at])
        differences.append(_difference(name, unit, better_when, found, statistic, edge, rng, paired=paired))
    return LoadComparison(
        requests_a=len(a), requests_b=len(b), paired=paired, unlike=unlike, differences=tuple(differences)
    )


def _kept(records: Sequence[Record]) -> list[Record]:
    return sorted((each for each in records if each.error != INTERRUPTED), key=lambda each: (each.at_s, each.request))


def _unlike(a: Sequence[Record], b: Sequence[Record]) -> list[str]:
    """Reasons why these two are different loads."""
    found = []
    if not a or not b:
        return ["one of them holds no request that ended"]
    if any(each.closed_loop for each in a) != any(each.closed_loop for each in b):
        found.append("one is of an open loop, the other of a closed one")
    rates = [_rate(each) for each in (a, b)]
    if rates[0] and rates[1] and not 0.95 <= rates[1] / rates[0] <= 1 / 0.95:
        found.append(f"other rates: {rates[0]:.4g} and {rates[1]:.4g} requests per second")
    for name in ("input", "output"):
        means = [float(np.mean([getattr(record, f"{name}_tokens") for record in records])) for records in (a, b)]
        if abs(means[1] - means[0]) > 0.05 * max(means):
            found.append(f"other {name} lengths: {means[0]:.1f} and {means[1]:.1f} tokens on average")
    if len(a) != len(b):
        found.append(f"other numbers of requests: {len(a)} and {len(b)}")
    elif not found and not _same(a, b):
        found.append("other requests or moments (another seed?): same kind of load, not the same load")
    held = [sum(record.held_back for record in records) for records in (a, b)]
    if any(held):
        found.append(f"--max-concurrency held back {held[0]} and {held[1]} requests")
    return found


def _rate(records: Sequence[Record]) -> float | None:
    span_s = records[-1].at_s - records[0].at_s
    return (len(records) - 1) / span_s if span_s > 0 else None


def _same(a: Sequence[Record], b: Sequence[Record]) -> bool:
    """Whether both results are of the same requests at the same moments."""
    if a and a[0].closed_loop:
        return False
    return len(a) == len(b) and all(
        abs(one.at_s - other.at_s) < LATER_S
        and (one.input_tokens, one.output_tokens, one.prefix, one.slo_class)
        == (other.input_tokens, other.output_tokens, other.prefix, other.slo_class)
        for one, other in zip(a, b, strict=True)
    )


def _difference(
    name: str,
    unit: str,
    better_when: str,
    found: Sequence[_Floats],
    statistic: Statistic,
    edge: float,
    rng: np.random.Generator,
    *,
    paired: bool,
) -> QuantityDifference:
    a, b = (_of(statistic, values) for values in found)
    change = None if a is None or b is None else b - a
    low = high = None
    if change is not None and min(int((~np.isnan(values)).sum()) for values in found) >= LEAST:
        draws = _draws(found, statistic, rng, paired=paired)
        if len(draws):
            low, high = (float(each) for each in np.quantile(draws, (edge, 1 - edge)))
    return QuantityDifference(
        name=name, unit=unit, a=a, b=b, change=change, low=low, high=high, better_when=better_when
    )


def _of(statistic: Statistic, values: _Floats) -> float | None:
    found = float(statistic(values[None, :])[0]) if len(values) else math.nan
    return None if math.isnan(found) else found


def _draws(found: Sequence[_Floats], statistic: Statistic, rng: np.random.Generator, *, paired: bool) -> _Floats:
    """Changes of resampled loads, without those in which no request was answered."""
    longest = max(len(values) for values in found)
    at_once = max(1, min(DRAWS, CELLS // longest))
    changes = []
    for done in range(0, DRAWS, at_once):
        count = min(at_once, DRAWS - done)
        first = _block_draws(count, len(found[0]), rng)
        second = first if paired else _block_draws(count, len(found[1]), rng)
        changes.append(statistic(found[1][second]) - statistic(found[0][first]))
    told: _Floats = np.concatenate(changes)
    there: _Floats = told[~np.isnan(told)]
    return there


def _block_draws(draws: int, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Positions of resamples, one a row: blocks of neighbours. The last position's next neighbour is the first."""
    length = min(count, math.ceil(2 * count ** (1 / 3)))
    starts = rng.integers(count, size=(draws, math.ceil(count / length)))
    blocks = (starts[:, :, None] + np.arange(length)[None, None, :]).reshape(draws, -1)
    return np.asarray(blocks[:, :count] % count, dtype=np.intp)


def _ms(seconds: float | None, record: Record) -> float:
    return math.nan if seconds is None or record.error is not None else seconds * 1000


def _ttft(record: Record, _: Targets) -> float:
    return _ms(record.ttft_s, record)


def _tt2t(record: Record, _: Targets) -> float:
    return _ms(record.tt2t_s, record)


def _tpot(record: Record, _: Targets) -> float:
    return _ms(record.tpot_s, record)


def _e2e(record: Record, _: Targets) -> float:
    return _ms(record.e2e_s, record)


def _met(record: Record, targets: Targets) -> float:
    return float(met(record, targets))


def _answered(record: Record, _: Targets) -> float:
    return float(record.error is None)


def _mean(values: _Floats) -> _Floats:
    """Mean of each row's values without NaNs; NaN for a row without any."""
    there = ~np.isnan(values)
    count = there.sum(axis=1)
    total = np.where(there, values, 0.0).sum(axis=1)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan), dtype=np.float64)


def _percentile(share: float) -> Statistic:
    """Percentile of each row's values without NaNs, interpolated linearly; NaN for a row without any."""

    def of(values: _Floats) -> _Floats:
        ordered = np.sort(values, axis=1)  # NaNs come last
        count = (~np.isnan(values)).sum(axis=1)
        place = np.maximum(count - 1, 0) * (share / 100)
        low = np.floor(place).astype(np.intp)
        high = np.minimum(low + 1, np.maximum(count - 1, 0))
        rows = np.arange(len(values))
        found = ordered[rows, low] + (place - low) * (ordered[rows, high] - ordered[rows, low])
        return np.asarray(np.where(count > 0, found, np.nan), dtype=np.float64)

    return of


_ROWS: Final[tuple[tuple[str, str, Callable[[Record, Targets], float], Statistic, str], ...]] = (
    ("TTFT mean", "ms", _ttft, _mean, "lower"),
    ("TTFT p50", "ms", _ttft, _percentile(50), "lower"),
    ("TTFT p99", "ms", _ttft, _percentile(99), "lower"),
    ("TT2T mean", "ms", _tt2t, _mean, "lower"),
    ("TPOT mean", "ms", _tpot, _mean, "lower"),
    ("TPOT p99", "ms", _tpot, _percentile(99), "lower"),
    ("E2E mean", "ms", _e2e, _mean, "lower"),
    ("E2E p99", "ms", _e2e, _percentile(99), "lower"),
    ("answered", "share", _answered, _mean, "higher"),
    ("attainment", "share", _met, _mean, "higher"),
)
