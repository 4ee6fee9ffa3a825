"""Online correction: it converges, follows drift, and no single sample swings it."""

import math
import random

import pytest

from costs.correction import (
    FACTOR_MAX,
    FACTOR_MIN,
    UNCORRECTED,
    USUAL_MIN,
    VARIANCE_MAX,
    Correction,
    Corrections,
    update,
)
from costs.step import ByKind, StepCost, StepKind, StepWork, decoding, prompt

COST = StepCost(
    floor_ms=7.0,
    start_ms=0.4,
    token_ms=0.02,
    area_ms=4e-7,
    decode_ms=6.4,
    context_ms=4.4e-5,
    request_ms=0.01,
)
PLAIN = ByKind(prefill=COST, decode=COST, mixed=COST)


def works(chance: random.Random, count: int) -> list[StepWork]:
    batches = [chance.randint(1, 128) for _ in range(count)]
    return [decoding(batch, batch * chance.randint(50, 12_000)) for batch in batches]


def learn(state: Correction, truth: tuple[float, float], chance: random.Random, count: int) -> Correction:
    """Steps that truly take `truth` times their parts, with 3 % of noise."""
    for work in works(chance, count):
        parts = COST.parts(work)
        observed = (truth[0] * parts[0] + truth[1] * parts[1]) * chance.gauss(1, 0.03)
        state = update(state, parts, observed)
    return state


@pytest.mark.parametrize("truth", [(1.3, 1.0), (0.8, 1.6), (1.0, 1.0), (2.5, 2.0), (0.5, 0.7)])
def test_it_converges_on_both_factors(truth: tuple[float, float]) -> None:
    state = learn(Correction(), truth, random.Random(1), 300)
    assert state.factors == pytest.approx(truth, rel=0.06)
    assert state.samples == 300


def test_it_follows_drift() -> None:
    """A step becomes half as long again, for good: most of it is learned in 30 steps, all of it in 100."""
    chance = random.Random(2)
    before = learn(Correction(), (1.0, 1.0), chance, 200)
    soon = learn(before, (1.5, 1.5), chance, 30)
    later = learn(soon, (1.5, 1.5), chance, 70)
    work = COST.parts(decoding(32, 64_000))
    predicted = [sum(f * p for f, p in zip(state.factors, work, strict=True)) for state in (before, soon, later)]
    assert predicted[0] == pytest.approx(sum(work), rel=0.03)
    assert predicted[1] >= 1.35 * sum(work)
    assert predicted[2] == pytest.approx(1.5 * sum(work), rel=0.04)


@pytest.mark.parametrize("seen", [0, 5, 200])
def test_a_cold_sample_does_not_swing_it(seen: int) -> None:
    """The first step after a start captures graphs and takes 50 times as long."""
    warm = learn(Correction(), (1.0, 1.0), random.Random(3), seen)
    parts = COST.parts(decoding(8, 8000))
    cold = update(warm, parts, 50 * sum(parts))
    assert cold.clipped == warm.clipped + 1
    moved = sum(f * p for f, p in zip(cold.factors, parts, strict=True)) / sum(parts)
    assert moved == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("seen", [0, 200])
def test_a_cold_start_is_forgotten_as_soon_as_it_is_over(seen: int) -> None:
    """Seven cold steps in a row move little; a long cold stretch is learned, and unlearned within 60 steps."""
    warm = learn(Correction(), (1.0, 1.0), random.Random(5), seen)
    parts = COST.parts(decoding(8, 8000))
    cold = warm
    for at in range(40):
        cold = update(cold, parts, 20 * sum(parts))
        if at == 6:
            assert cold.factors == pytest.approx((1.0, 1.0), abs=0.4)
    again = learn(cold, (1.0, 1.0), random.Random(6), 60)
    predicted = sum(factor * part for factor, part in zip(again.factors, parts, strict=True))
    assert predicted == pytest.approx(sum(parts), rel=0.25)


def test_a_run_of_outliers_in_a_hundred_does_little() -> None:
    chance, state = random.Random(4), Correction()
    for at in range(500):
        state = learn(state, (1.2, 1.2), chance, 1) if at % 20 else update(state, COST.parts(decoding(8, 8000)), 900.0)
    assert state.factors == pytest.approx((1.2, 1.2), rel=0.12)


def test_factors_stay_in_their_bounds() -> None:
    parts = COST.parts(decoding(8, 80_000))
    slow = fast = Correction()
    for _ in range(2000):
        slow, fast = update(slow, parts, 1e6), update(fast, parts, 1e-6)
    assert max(slow.factors) <= FACTOR_MAX and min(fast.factors) >= FACTOR_MIN


@pytest.mark.parametrize("observed", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_not_learned_from(observed: float) -> None:
    state = Correction()
    assert update(state, (5.0, 1.0), observed) is state
    assert update(state, (0.0, 0.0), 5.0) is state


def test_what_is_never_seen_does_not_become_ever_more_uncertain() -> None:
    """Thousands of steps without context say nothing of attention, and must not make its factor jumpy."""
    state = Correction()
    for _ in range(5000):
        state = update(state, (7.0, 0.0), 7.7)
    assert state.factors == pytest.approx((1.1, 1.0), rel=1e-3)
    assert state.variance[2] <= VARIANCE_MAX * (1 + 1e-9)
    assert state.usual == USUAL_MIN
    once = update(state, (7.0, 7.0), 14.7)
    assert once.factors[1] == pytest.approx(1.0, abs=0.05)


def test_kinds_are_learned_apart() -> None:
    learned = UNCORRECTED
    for _ in range(200):
        learned = learned.observe(PLAIN, decoding(16, 16_000), 2 * COST.step_ms(decoding(16, 16_000)))
        learned = learned.observe(PLAIN, prompt(2000), COST.step_ms(prompt(2000)))
    now = learned.apply(PLAIN)
    assert now.of(StepKind.DECODE).step_ms(decoding(16, 16_000)) == pytest.approx(
        2 * COST.step_ms(decoding(16, 16_000)), rel=0.05
    )
    assert now.of(StepKind.PREFILL).step_ms(prompt(2000)) == pytest.approx(COST.step_ms(prompt(2000)), rel=0.01)
    assert now.of(StepKind.MIXED) is COST, "never seen, never touched"
    assert learned.samples == 400
    mixed = Corrections().observe(PLAIN, prompt(5) + decoding(1, 5), 9.0)
    assert mixed.of(StepKind.MIXED).samples == mixed.samples == 1


def test_it_says_what_it_learned() -> None:
    assert "from 300 steps" in str(learn(Correction(), (1.3, 1.0), random.Random(1), 300))
