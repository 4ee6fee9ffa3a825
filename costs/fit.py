"""Fits the coefficients of `step` to rows of measurements. Pure: rows in, coefficients and their error out.

Least squares on *relative* errors: a step of 5 ms and one of 500 ms count alike, as latency targets do. Slopes are kept
at or above 0, so that no fit can say that more work takes less time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from costs.step import KNEE_TOKENS, StepCost, StepWork

Array = npt.NDArray[np.float64]

TERMS_MAX = 6
"""Columns `fit_columns` takes: it tries every subset of them, 63 at most."""

CROWDS = (0, 8, 16, 32, 48, 64, 96, 128)
"""Batch sizes where the decode line may bend upwards; 0 = no bend."""

BEND_GAIN = 0.8
"""A bend is kept if it takes at least a fifth off the squared error: rows are few, and a bend always fits better."""


EXACT = 1e-12
"""A squared error that is only rounding: no bend is looked for."""


ROUNDS = 12
"""How often the floor and the reading of prefixes are fitted in turn: the last time changes neither in five digits."""


TINY = 1e-100
"""Smaller than any column of measurements; its square would underflow."""


class PrefillRow(NamedTuple):
    """One measured prefill step of `new_tokens` tokens over Σ(L² − p²) = `area` token pairs."""

    new_tokens: float
    area: float
    ms: float
    longest_cached: float = 0.0
    """Tokens cached before the chunk; of several prompts in the step, of the one with the most."""


class DecodeRow(NamedTuple):
    """One measured decode step."""

    batch: float
    sum_context: float
    ms: float


class MixedRow(NamedTuple):
    """One measured step that computes prompts and makes tokens for others."""

    work: StepWork
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far a fit is off, as shares of the measured times."""

    rows: int
    mean: float
    max: float

    def __str__(self) -> str:
        return f"{self.mean:.1%} mean, {self.max:.1%} max of {self.rows} rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFit:
    """Prefill's coefficients; `small_error` is the error below the knee, where the floor was fitted."""

    floor_ms: float
    start_ms: float
    token_ms: float
    area_ms: float
    cached_ms: float
    """`StepCost.cached_ms`; 0 without chunks below the knee that have a cached prefix."""
    error: FitError
    small_error: FitError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """Decode's coefficients."""

    decode_ms: float
    context_ms: float
    request_ms: float
    crowd_ms: float
    crowd_from: float
    experts_ms: float
    """Reading every routed expert once; 0 for a dense model."""
    error: FitError


def fit_columns(columns: Array, measured: Array, *, free: Iterable[int] = ()) -> Array:
    """The weights x that minimise Σ((columns·x − measured)/measured)², none negative but those in `free`.

    `columns` is rows × terms. The optimum under x ≥ 0 is the unconstrained one of some subset of the terms; with few
    terms all subsets are tried, which is exact and has no tolerance to choose.
    """
    terms = columns.shape[1]
    assert 1 <= terms <= TERMS_MAX and columns.shape[0] == len(measured)
    assert (measured > 0).all(), "a step takes time"
    scaled = columns / measured[:, None]
    norms = np.sqrt((scaled**2).sum(axis=0))
    norms = np.where(norms > TINY, norms, np.inf)  # a column of zeros, or next to it, has no weight
    scaled = scaled / norms  # terms differ by 10¹²: without this lstsq drops the small ones
    best, best_loss = np.zeros(terms), float(len(measured))
    unsigned = set(free)
    for size in range(1, terms + 1):
        for subset in itertools.combinations(range(terms), size):
            found = np.linalg.lstsq(scaled[:, subset], np.ones(len(measured)), rcond=None)[0]
            if any(value < 0 for value, term in zip(found, subset, strict=True) if term not in unsigned):
                continue
            loss = float(((scaled[:, subset] @ found - 1) ** 2).sum())
            if loss < best_loss * (1 - 1e-9):
                best, best_loss = np.zeros(terms), loss
                best[list(subset)] = found
    return np.asarray(best / norms)


def error_of(predicted: Array, measured: Array) -> FitError:
    """Mean and largest relative error."""
    if not len(measured):
        return FitError(rows=0, mean=0.0, max=0.0)
    off = np.abs(predicted - measured) / measured
    return FitError(rows=len(measured), mean=float(off.mean()), max=float(off.max()))


def fit_prefill(
    rows: Sequence[PrefillRow], *, floor_ms: float, experts_ms: float = 0.0, miss: float = 1.0
) -> PrefillFit:
    """Fit prefill's line to the rows at and beyond the knee, then the floor and the reading of prefixes to the rest.

    Args:
        rows: measured prefill steps.
        floor_ms: used if no row lies below the knee: the decode step's constant, which reads the same weights.
        experts_ms: reading every routed expert of a mixture once, as `fit_decode` has found it.
        miss: probability that one token does not visit a given expert; 1 for a dense model.
    """
    table = np.array(rows, dtype=np.float64)
    tokens, area, measured, _ = table.T
    large = tokens >= KNEE_TOKENS
    assert large.sum() >= 3, "three coefficients need three rows beyond the knee"
    columns = np.stack([np.ones(len(rows)), tokens, area], axis=1)
    # The line's start is an extrapolation, never a time of its own: at few tokens the floor holds instead.
    start, token, per_area = fit_columns(columns[large], measured[large], free=[0])
    predicted = columns @ np.array([start, token, per_area])
    small, per_cached = ~large, 0.0
    if small.any():
        below = _Below(table[small], (start, token, per_area), experts_ms, miss)
        floor_ms, per_cached = below.fit()
        predicted[small] = below.predicted(floor_ms, per_cached)
    return PrefillFit(
        floor_ms=floor_ms,
        start_ms=float(start),
        token_ms=float(token),
        area_ms=float(per_area),
        cached_ms=float(per_cached),
        error=error_of(predicted[large], measured[large]),
        small_error=error_of(predicted[small], measured[small]),
    )


class _Below:
    """Rows below the knee. The line beyond it is fitted already; the floor and the reading of prefixes are left."""

    def __init__(self, table: Array, line: tuple[float, float, float], experts_ms: float, miss: float) -> None:
        start, token, self.per_area = line
        tokens, area, self.measured, self.cached = table.T
        self.knee = start + token * KNEE_TOKENS
        self.part = (tokens / KNEE_TOKENS) ** 2
        self.arithmetic = self.per_area * area
        self.experts, self.read = experts_ms, experts_ms * (1 - miss**tokens)

    def predicted(self, floor: float, per_cached: float) -> Array:
        """Milliseconds of each row."""
        top = max(self.knee, floor + self.experts)
        square = (floor + self.read) ** 2 + (top**2 - (floor + self.experts) ** 2) * self.part
        return np.asarray(np.sqrt(square) + np.maximum(self.arithmetic, per_cached * self.cached))

    def fit(self) -> tuple[float, float]:
        """The floor and the reading of one cached token, in ms; each in turn with the other as found before."""
        floor, per_cached = self._floor(0.0), 0.0
        for _ in range(ROUNDS if self.cached.any() else 0):
            per_cached = self._per_cached(floor)
            floor = self._floor(per_cached)
        return floor, per_cached

    def _floor(self, per_cached: float) -> float:
        return _least(lambda floor: self._loss(floor, per_cached), 0.0, self.knee)

    def _per_cached(self, floor: float) -> float:
        """At the knee arithmetic takes longer than reading: rows beyond it are fitted without this term."""
        return _least(lambda each: self._loss(floor, each), 0.0, 2 * self.per_area * KNEE_TOKENS)

    def _loss(self, floor: float, per_cached: float) -> float:
        return float((((self.predicted(floor, per_cached) / self.measured) - 1) ** 2).sum())


def _least(loss: Callable[[float], float], low: float, high: float) -> float:
    """The argument with the least `loss`: a scan of 1,000 points (`loss` need not be convex), refined twice."""
    for _ in range(3):
        points = np.linspace(low, high, 1001)
        at = int(np.argmin([loss(float(point)) for point in points]))
        low, high = float(points[max(0, at - 1)]), float(points[min(1000, at + 1)])
    return (low + high) / 2


def fit_decode(rows: Sequence[DecodeRow], *, miss: float = 1.0) -> DecodeFit:
    """Fit decode's line, bent upwards at some batch size if that fits clearly better.

    `miss`: probability that one token does not visit a given expert of a mixture; 1 for a dense model.
    """
    batch, context, measured = np.array(rows, dtype=np.float64).T
    assert len(rows) >= 3, "three coefficients need three rows"
    chosen: tuple[float, int, Array] | None = None
    for bend in CROWDS:
        if bend and (bend >= batch.max() or len(rows) < 6 or (chosen and chosen[0] < EXACT)):
            continue
        columns = [np.ones(len(rows)), context, batch] + ([1 - miss**batch] if miss < 1 else [])
        columns += [np.maximum(0.0, batch - bend)] if bend else []
        stacked = np.stack(columns, axis=1)
        found = fit_columns(stacked, measured)
        loss = float((((stacked @ found) / measured - 1) ** 2).sum())
        if chosen is None or loss < chosen[0] * (BEND_GAIN if chosen[1] == 0 else 1):
            chosen = loss, bend, found
    assert chosen is not None
    _, bend, found = chosen
    decode, per_context, request, *rest = found
    experts = rest.pop(0) if miss < 1 else 0.0
    crowd = rest.pop(0) if rest else 0.0
    predicted = decode + per_context * context + request * batch + crowd * np.maximum(0.0, batch - bend)
    predicted += experts * (1 - miss**batch)
    return DecodeFit(
        decode_ms=float(decode),
        context_ms=float(per_context),
        request_ms=float(request),
        crowd_ms=float(crowd),
        crowd_from=float(bend),
        experts_ms=float(experts),
        error=error_of(predicted, measured),
    )


def fit_mixed(rows: Sequence[MixedRow], cost: StepCost) -> tuple[float, FitError]:
    """How many times longer reading the decoding requests' KV takes beside prompts than in a step of its own.

    One unknown, by least squares on relative errors, everything else as in `cost`; never below 1.
    """
    measured = np.array([row.ms for row in rows], dtype=np.float64)
    reading = np.array([cost.context_ms * row.work.sum_context for row in rows], dtype=np.float64)
    rest = np.array([cost.step_ms(row.work) for row in rows], dtype=np.float64) - reading
    part, left = reading / measured, 1 - rest / measured
    square = float((part**2).sum())
    factor = max(1.0, float((part * left).sum()) / square) if square else 1.0
    return factor, error_of(rest + factor * reading, measured)


def fit_link(sizes_bytes: Sequence[float], measured_ms: Sequence[float]) -> tuple[float, float, FitError]:
    """Latency in ms and bandwidth in GB/s of a link, from messages of several sizes: ms = latency + bytes/bandwidth."""
    sizes, measured = np.array(sizes_bytes, dtype=np.float64), np.array(measured_ms, dtype=np.float64)
    columns = np.stack([np.ones(len(sizes)), sizes], axis=1)
    latency, per_byte = fit_columns(columns, measured)
    assert per_byte > 0, "larger messages take longer"
    return float(latency), float(1e-6 / per_byte), error_of(columns @ np.array([latency, per_byte]), measured)
