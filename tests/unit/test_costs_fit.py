"""Fitting: known coefficients come back, none is negative, and the reported error is the actual one."""

from dataclasses import replace

import numpy as np
import pytest

from costs.fit import (
    DecodeRow,
    MixedRow,
    PrefillRow,
    error_of,
    fit_columns,
    fit_decode,
    fit_link,
    fit_mixed,
    fit_prefill,
)
from costs.step import StepCost, decoding, prompt

COST = StepCost(
    floor_ms=7.0,
    start_ms=0.4,
    token_ms=0.0206,
    area_ms=3.96e-7,
    decode_ms=6.38,
    context_ms=4.4e-5,
    request_ms=0.0097,
)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 32768)


def prefill_rows(cost: StepCost) -> list[PrefillRow]:
    works = [prompt(new, cached) for new in LENGTHS for cached in (0, 2048)]
    return [PrefillRow(work.new_tokens, work.area, cost.step_ms(work)) for work in works]


def decode_rows(cost: StepCost) -> list[DecodeRow]:
    works = [decoding(batch, batch * context) for batch in (1, 4, 16, 64, 128, 256) for context in (512, 4096, 16384)]
    return [DecodeRow(work.batch, work.sum_context, cost.step_ms(work)) for work in works]


def test_prefill_comes_back() -> None:
    fit = fit_prefill(prefill_rows(COST), floor_ms=1)
    assert (fit.start_ms, fit.token_ms, fit.area_ms) == pytest.approx((0.4, 0.0206, 3.96e-7), rel=1e-6)
    assert fit.floor_ms == pytest.approx(7.0, rel=1e-4)
    assert fit.error.max < 1e-9 and fit.small_error.max < 1e-4
    assert (fit.error.rows, fit.small_error.rows) == (10, 6)


def test_the_reading_of_prefixes_comes_back() -> None:
    cost = replace(COST, cached_ms=3e-4)
    works = [prompt(new, cached) for new in (16, 64, *LENGTHS) for cached in (0, 512, 4096, 16_384)]
    rows = [PrefillRow(work.new_tokens, work.area, cost.step_ms(work), work.longest_cached) for work in works]
    fit = fit_prefill(rows, floor_ms=1)
    assert (fit.floor_ms, fit.cached_ms) == pytest.approx((7.0, 3e-4), rel=1e-3)
    assert fit.area_ms == pytest.approx(3.96e-7, rel=1e-6)
    assert fit.small_error.max < 1e-3
    blind = fit_prefill([row._replace(longest_cached=0) for row in rows], floor_ms=1)
    assert blind.cached_ms == 0
    assert blind.small_error.mean > 0.05, "the form without the term does not meet these rows"


def test_without_small_rows_the_floor_is_the_one_given() -> None:
    rows = [row for row in prefill_rows(COST) if row.new_tokens >= 1024]
    assert fit_prefill(rows, floor_ms=6.38).floor_ms == 6.38


def test_decode_comes_back() -> None:
    fit = fit_decode(decode_rows(COST))
    assert (fit.decode_ms, fit.context_ms, fit.request_ms) == pytest.approx((6.38, 4.4e-5, 0.0097), rel=1e-6)
    assert (fit.crowd_ms, fit.crowd_from) == (0, 0)


def test_a_bend_is_found_where_there_is_one() -> None:
    bent = StepCost(**{**_values(COST), "crowd_ms": 0.1, "crowd_from": 64.0})
    fit = fit_decode(decode_rows(bent))
    assert (fit.crowd_ms, fit.crowd_from) == pytest.approx((0.1, 64), rel=1e-6)


def test_slower_reading_beside_prompts_comes_back() -> None:
    works = [prompt(new) + decoding(batch, batch * 900) for new in (64, 512, 1500) for batch in (4, 64)]
    rows = [MixedRow(work, COST.step_ms(work) + 0.8 * COST.context_ms * work.sum_context) for work in works]
    factor, error = fit_mixed(rows, COST)
    assert factor == pytest.approx(1.8, rel=1e-9)
    assert error.rows == 6 and error.max < 1e-9
    faster = [MixedRow(work, 0.9 * COST.step_ms(work)) for work in works]
    assert fit_mixed(faster, COST)[0] == 1, "never faster than by itself"
    assert fit_mixed([], COST) == (1.0, error_of(np.array([]), np.array([])))


def _values(cost: StepCost) -> dict[str, float]:
    names = ("floor_ms", "start_ms", "token_ms", "area_ms", "decode_ms", "context_ms", "request_ms")
    return {name: getattr(cost, name) for name in names}


def test_no_slope_is_negative() -> None:
    """Times that fall as the batch grows make no coefficient negative."""
    rows = [DecodeRow(batch, batch * 1000, 20 - batch / 100) for batch in (1, 8, 64, 128, 256, 512)]
    fit = fit_decode(rows)
    assert min(fit.decode_ms, fit.context_ms, fit.request_ms, fit.crowd_ms) >= 0
    assert fit.error.max > 0.05


def test_small_and_large_times_count_alike() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 10.0], [1.0, 1000.0]])
    exact = columns @ np.array([5.0, 1.0])
    off = exact * np.array([1.1, 0.9, 1.0])
    found = columns @ fit_columns(columns, off)
    assert error_of(found, off).max < 0.12, "absolute least squares would be off by half at the small end"


def test_terms_of_any_size() -> None:
    columns = np.array([[1.0, 1e9 * at] for at in range(1, 6)])
    assert fit_columns(columns, columns @ np.array([2.0, 3e-9])) == pytest.approx([2.0, 3e-9], rel=1e-6)


def test_the_reported_error_is_the_actual_one() -> None:
    error = error_of(np.array([11.0, 19.0]), np.array([10.0, 20.0]))
    assert (error.rows, error.mean, error.max) == (2, pytest.approx(0.075), pytest.approx(0.1))
    assert str(error) == "7.5% mean, 10.0% max of 2 rows"
    assert error_of(np.array([]), np.array([])).rows == 0


def test_a_link() -> None:
    sizes = [2.0**power for power in range(11, 27)]
    latency, gb_s, error = fit_link(sizes, [0.02 + size / 25e6 for size in sizes])
    assert (latency, gb_s) == pytest.approx((0.02, 25.0), rel=1e-6)
    assert error.max < 1e-9


@pytest.mark.parametrize("rows", [[], [DecodeRow(1, 1, 1)], [DecodeRow(1, 1, 0)] * 3])
def test_too_little_is_refused(rows: list[DecodeRow]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        fit_decode(rows)
