"""The form of a step's time, at the places where its branches meet."""

import math
from dataclasses import replace

import pytest

from costs.step import KNEE_TOKENS, ByKind, StepCost, StepKind, StepWork, decoding, kind_of, prompt

COST = StepCost(
    floor_ms=8.0,
    start_ms=1.0,
    token_ms=0.02,
    area_ms=4e-7,
    decode_ms=6.0,
    context_ms=5e-5,
    request_ms=0.01,
    crowd_ms=0.02,
    crowd_from=200,
)
MIXTURE = StepCost(
    floor_ms=4.0,
    start_ms=0.0,
    token_ms=0.005,
    area_ms=4e-7,
    decode_ms=4.0,
    context_ms=5e-5,
    request_ms=0.002,
    experts_ms=20.0,
    expert_miss=0.75,
)


def test_prefill_is_a_line_beyond_the_knee() -> None:
    assert COST.step_ms(prompt(4000)) == pytest.approx(1 + 0.02 * 4000 + 4e-7 * 4000**2)


def test_a_cached_prefix_leaves_its_attention() -> None:
    assert prompt(1000, 3000).area == 4000**2 - 3000**2
    assert COST.step_ms(prompt(1000, 3000)) > COST.step_ms(prompt(1000))
    assert COST.step_ms(prompt(1000, 3000)) < COST.step_ms(prompt(4000))


def test_a_short_chunk_reads_its_long_prefix_in_sequence() -> None:
    cost = replace(COST, cached_ms=1e-3)
    short, wide = prompt(16, 16_000), prompt(2048, 16_000)
    assert cost.step_ms(short) == pytest.approx(cost.matrices_ms(16) + 16.0)
    assert cost.step_ms(wide) == COST.step_ms(wide), "arithmetic takes longer"
    assert cost.step_ms(short + decoding(8, 8000)) == pytest.approx(
        COST.step_ms(short + decoding(8, 8000)) - 4e-7 * short.area + 16.0
    ), "the batch's contexts are read besides"


def test_chunks_of_one_step_are_read_at_the_same_time() -> None:
    cost = replace(COST, cached_ms=1e-3)
    both = prompt(16, 16_000) + prompt(16, 4000)
    assert both.longest_cached == 16_000
    assert cost.step_ms(both) == pytest.approx(cost.matrices_ms(32) + 16.0)
    assert prompt(0, 500).longest_cached == 0, "no chunk, nothing to read"


def test_what_reading_takes_beyond_the_arithmetic() -> None:
    cost = replace(COST, cached_ms=1e-3)
    for work, new, cached in ((prompt(16, 16_000), 16, 16_000), (prompt(2048, 100), 2048, 100)):
        beyond_ms = cost.step_ms(work) - COST.step_ms(work)
        assert cost.beyond_area_ms(new, cached) == pytest.approx(beyond_ms)
    assert COST.beyond_area_ms(16, 16_000) == 0


def test_below_the_knee_prefill_flattens_to_its_floor() -> None:
    assert COST.matrices_ms(1) == pytest.approx(8.0, rel=1e-3)
    assert COST.matrices_ms(KNEE_TOKENS) == pytest.approx(1 + 0.02 * KNEE_TOKENS)
    assert COST.matrices_ms(KNEE_TOKENS - 1) == pytest.approx(COST.matrices_ms(KNEE_TOKENS), rel=2e-3)
    assert 8.0 < COST.matrices_ms(256) < COST.matrices_ms(512)


def test_decode_bends_where_arithmetic_takes_over() -> None:
    assert COST.step_ms(decoding(100, 50_000)) == pytest.approx(6 + 2.5 + 1)
    assert COST.step_ms(decoding(300, 0)) == pytest.approx(6 + 3 + 0.02 * 100)


def test_a_chunk_shares_the_reading_of_the_weights_with_the_batch() -> None:
    """The step takes less than both steps together, and more than either."""
    chunk, batch = prompt(512), decoding(64, 64_000)
    mixed = COST.step_ms(chunk + batch)
    assert max(COST.step_ms(chunk), COST.step_ms(batch)) < mixed < COST.step_ms(chunk) + COST.step_ms(batch)
    assert mixed == pytest.approx(COST.matrices_ms(576) + 0.64 + 4e-7 * 512**2 + 5e-5 * 64_000)


def test_a_mixture_reads_the_experts_that_its_tokens_visit() -> None:
    assert MIXTURE.requests_ms(1) == pytest.approx(4 + 0.002 + 20 * 0.25)
    assert MIXTURE.requests_ms(2) == pytest.approx(4 + 0.004 + 20 * (1 - 0.75**2))
    assert MIXTURE.requests_ms(100) == pytest.approx(4 + 0.2 + 20, rel=1e-6)
    assert MIXTURE.matrices_ms(2048) == pytest.approx(24), "prefill, too, reads all experts"


def test_nothing_to_do_takes_no_time() -> None:
    assert COST.step_ms(StepWork()) == 0


def test_kinds() -> None:
    assert kind_of(prompt(5)) is StepKind.PREFILL
    assert kind_of(decoding(5, 5)) is StepKind.DECODE
    assert kind_of(prompt(5) + decoding(5, 5)) is StepKind.MIXED
    other = COST.scaled(2, 2)
    by = ByKind(prefill=COST, decode=other, mixed=COST)
    assert by.step_ms(decoding(5, 50)) == pytest.approx(2 * COST.step_ms(decoding(5, 50)))
    assert by.step_ms(prompt(5)) == COST.step_ms(prompt(5))


def test_parts_are_scaled_apart() -> None:
    work = prompt(700, 100) + decoding(9, 9000)
    matrices, attention = COST.parts(work)
    assert COST.scaled(3, 5).step_ms(work) == pytest.approx(3 * matrices + 5 * attention)
    reading, work = replace(COST, cached_ms=1e-3), prompt(16, 16_000)
    matrices, attention = reading.parts(work)
    assert attention == 16
    assert reading.scaled(3, 5).step_ms(work) == pytest.approx(3 * matrices + 5 * attention)


@pytest.mark.parametrize(
    "wrong", [{"token_ms": -1.0}, {"cached_ms": -1e-9}, {"floor_ms": math.nan}, {"expert_miss": 1.5}]
)
def test_no_coefficient_is_negative(wrong: dict[str, float]) -> None:
    values = {"floor_ms": 1.0, "start_ms": -1.0, "token_ms": 1.0, "area_ms": 1.0}
    values |= {"decode_ms": 1.0, "context_ms": 1.0, "request_ms": 1.0, **wrong}
    with pytest.raises(AssertionError):
        StepCost(**values)
