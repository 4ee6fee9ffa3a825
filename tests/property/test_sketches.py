"""Sketches equal a simple numpy version that handles one key after the other, to the last bit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.predict.answer_lengths import EDGES, LENGTH_MAX, AnswerLengths, Features, Predictor
from router.predict.sketches import Sketches, between

BINS = (1.0, 2.0, 3.0, 5.0, 9.0, 17.0, 33.0, 65.0)
PRIOR = [4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 0.5]


class Plain:
    """The same distributions as `Sketches`, each key by itself."""

    def __init__(self, keys_max: int, memory: float) -> None:
        self.keys_max, self.growth = keys_max, 1.0 / (1.0 - 1.0 / memory)
        self.rows: dict[Hashable, tuple[np.ndarray, list[float]]] = {}
        self.prior = np.array([0.0, *(each / sum(PRIOR) for each in PRIOR)])

    def add(self, keys: Sequence[Hashable], value: float, *, at_least: bool) -> None:
        at = min(max(bisect_right(BINS, value), 1), len(BINS) - 1)
        for key in keys:
            known = self.rows.pop(key, None)
            if known is None:
                if len(self.rows) >= self.keys_max:
                    del self.rows[next(iter(self.rows))]
                known = np.zeros(len(BINS)), [0.0, 1.0]
            self.rows[key] = known
            mass, weights = known
            weights[1] *= self.growth
            weights[0] += weights[1]
            seen = sum(mass[at:].tolist())
            if at_least and seen > 0:
                mass[at:] *= 1.0 + weights[1] / seen
            else:
                mass[at] += weights[1]
            if weights[1] > 2.0**20:
                mass /= weights[1]
                weights[:] = weights[0] / weights[1], 1.0

    def mixed(self, keys: Sequence[Hashable], credibility: float) -> list[float]:
        rows, rest = [], 1.0
        for key in reversed(keys):
            if key in self.rows:
                mass, (total, unit) = self.rows[key]
                part = rest / (total + credibility * unit)
                rows.append(part * mass)
                rest = part * credibility * unit
        density = rest * self.prior
        for row in rows:
            density += row
        whole = density.cumsum()
        return list(whole / whole[-1])


keys = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)


@given(
    st.lists(st.tuples(keys, st.floats(0.5, 80.0), st.booleans()), max_size=40),
    st.integers(1, 6),
    st.sampled_from([2.0, 5.0, 100.0]),
    keys,
)
def test_many_keys_at_once_equal_one_key_after_the_other(
    seen: list[tuple[list[int], float, bool]], keys_max: int, memory: float, asked: list[int]
) -> None:
    found, plain = Sketches(BINS, PRIOR, keys_max=keys_max, memory=memory), Plain(keys_max, memory)
    for names, value, at_least in seen:
        found.add(names, value, at_least=at_least)
        plain.add(names, value, at_least=at_least)
    assert len(found) == len(plain.rows) <= keys_max
    assert found.mixed(asked, 8.0) == plain.mixed(asked, 8.0)


@given(
    st.lists(st.floats(-10, 10), min_size=2, max_size=12, unique=True).map(sorted),
    st.floats(-12, 12),
    st.data(),
)
def test_interpolation_equals_numpys(places: list[float], at: float, data: st.DataObject) -> None:
    heights = data.draw(st.lists(st.floats(-10, 10), min_size=len(places), max_size=len(places)))
    asked = data.draw(st.sampled_from([at, *places]))
    assert between(asked, places, heights) == float(np.interp(asked, places, heights))


@given(
    st.lists(st.tuples(st.integers(1, 3 * LENGTH_MAX), st.booleans()), max_size=30),
    st.one_of(st.none(), st.integers(1, 2 * LENGTH_MAX)),
    st.integers(0, LENGTH_MAX),
)
def test_the_mean_remaining_length_equals_a_sum_over_all_bins(
    seen: list[tuple[int, bool]], limit: int | None, made: int
) -> None:
    """The mean remaining length of an answer, computed by numpy over all bins at once."""
    asked = Features("acme", "qwen", "", 100, limit)
    predictor = Predictor()
    for tokens, cut_off in seen:
        predictor.learn(predictor.predict(asked), tokens, cut_off=cut_off)
    found = predictor.predict(asked)
    assert found.mean_remaining(made) == remaining(found, min(limit or LENGTH_MAX, LENGTH_MAX), made)


def remaining(found: AnswerLengths, cap: int, made: int) -> float:
    if made >= cap:
        return 0.0
    if made < 1:
        return 1 - made + remaining(found, cap, 1)
    edges, below = np.array(EDGES), np.array(found._below)
    sums = np.diff(edges) * (1.0 - below[:-1]) - (below[1:] - below[:-1]) * (np.diff(edges) - 1) / 2
    left = np.concatenate([[0.0], np.cumsum(sums)])

    def area(upto: int) -> float:
        at = min(max(bisect_right(EDGES, upto) - 1, 0), len(EDGES) - 2)
        inside, wide = upto - EDGES[at], EDGES[at + 1] - EDGES[at]
        low, high = float(below[at]), float(below[at + 1])
        return float(left[at]) + inside * (1.0 - low) - (high - low) * inside * (inside - 1) / (2 * wide)

    reach = 1.0 - float(np.interp(made + 1, edges, below))
    if reach <= 0:
        return 1.0
    return min(max((area(cap + 1) - area(made + 1)) / reach, 1.0), cap - made)
