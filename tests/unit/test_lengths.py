"""Answer lengths: what the predictor learns, its prior until then, limits, and calibrated quantiles."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from router.predict.answer_lengths import (
    EDGES,
    LENGTH_MAX,
    LEVELS,
    PRIOR_P50,
    PRIOR_P90,
    AnswerLengths,
    Features,
    Predictor,
    cues_of,
)

ASKED = Features("acme", "qwen", "chat", 1000)


def taught(*lengths: int, features: Features = ASKED, **settings: float) -> Predictor:
    predictor = Predictor(**settings)  # type: ignore[arg-type]
    for tokens in lengths:
        predictor.learn(predictor.predict(features), tokens)
    return predictor


def test_cold_start_answers_with_the_prior() -> None:
    found = Predictor().predict(ASKED)
    assert found.quantile(0.5) == pytest.approx(PRIOR_P50, rel=0.03)
    assert found.quantile(0.9) == pytest.approx(PRIOR_P90, rel=0.03)
    assert found.served == tuple(found.quantile(level) for level in LEVELS)


def test_a_constant_length_is_learned_exactly() -> None:
    found = taught(*[7] * 2000).predict(ASKED)
    assert found.served[:2] == (7, 7)
    assert found.mean == pytest.approx(7, abs=0.5)


def test_quantiles_and_mean_of_a_known_distribution() -> None:
    drawn = np.random.default_rng(1).geometric(1 / 300, size=6000)
    found = taught(*drawn.tolist(), rate=0.0).predict(ASKED)
    for level in LEVELS:
        assert found.quantile(level) == pytest.approx(np.quantile(drawn, level), rel=0.1), level
    assert found.mean == pytest.approx(300, rel=0.08)
    assert found.mean_remaining(300) == pytest.approx(300, rel=0.12), "a geometric distribution has no memory"


def test_a_specific_key_is_believed_as_it_is_seen_more_often() -> None:
    predictor = taught(*[1000] * 300, features=ASKED._replace(tenant="other"))
    new = ASKED._replace(tenant="new")
    assert predictor.predict(new).quantile(0.5) == pytest.approx(1000, rel=0.1), "the model's other tenants stand in"
    medians = []
    for _ in range(100):
        predictor.learn(predictor.predict(new), 10)
        medians.append(predictor.predict(new).quantile(0.5))
    assert medians[0] > 900
    predictor.settle()
    assert predictor.predict(new).quantile(0.5) == 10
    assert predictor.predict(ASKED._replace(tenant="other")).quantile(0.5) > 900


def test_prompt_size_and_limit_tell_answers_apart() -> None:
    predictor = Predictor()
    short, long = ASKED._replace(prompt_tokens=100), ASKED._replace(prompt_tokens=9000)
    small = ASKED._replace(max_tokens=2000)
    for _ in range(200):
        for features, tokens in ((short, 20), (long, 700), (small, 1500)):
            predictor.learn(predictor.predict(features), tokens)
    assert [predictor.predict(each).quantile(0.5) for each in (short, long)] == [
        pytest.approx(20, rel=0.1),
        pytest.approx(700, rel=0.1),
    ]
    assert predictor.predict(small).quantile(0.5) == pytest.approx(1500, rel=0.1)


def test_the_limit_holds_and_a_forced_length_is_known() -> None:
    predictor = taught(*[500] * 100)
    limited = predictor.predict(ASKED._replace(max_tokens=64))
    assert limited.served == (64, 64, 64)
    assert limited.mean <= 64
    forced = predictor.predict(ASKED._replace(max_tokens=900, ignore_eos=True))
    assert forced.served == (900, 900, 900)
    assert (forced.mean, forced.mean_remaining(300), forced.mean_remaining(900)) == (900, 600, 0)
    assert predictor.predict(ASKED._replace(min_tokens=800)).quantile(0.01) == 800


@pytest.mark.parametrize(("ignore_eos", "min_tokens"), [(True, 0), (False, 10**9)])
def test_no_limit_makes_a_prediction_longer_than_the_longest_answer(ignore_eos: bool, min_tokens: int) -> None:
    """Such a prediction books memory that no instance has, so its instance would take no other request."""
    asked = ASKED._replace(max_tokens=10**9, min_tokens=min_tokens, ignore_eos=ignore_eos)
    found = Predictor().predict(asked)
    assert found.served == (LENGTH_MAX,) * 3
    assert (found.mean, found.outlook().mean) == (LENGTH_MAX, LENGTH_MAX)
    assert (found.mean_remaining(LENGTH_MAX - 1), found.mean_remaining(LENGTH_MAX)) == (1, 0)


def test_forced_lengths_teach_nothing() -> None:
    predictor = Predictor()
    predictor.learn(predictor.predict(ASKED._replace(max_tokens=10, ignore_eos=True)), 10)
    assert len(predictor) == 0


def test_a_cut_off_answer_counts_as_at_least_its_length() -> None:
    """Every second answer is limited to 200 tokens, where the median is 300; the others show what lies beyond 200."""
    drawn = np.random.default_rng(3).lognormal(math.log(300), 0.7, size=6000).astype(int) + 1
    honest, naive = Predictor(rate=0.0), Predictor(rate=0.0)
    for at, tokens in enumerate(drawn.tolist()):
        limit = 200 if at % 2 else None
        cut_off = limit is not None and tokens > limit
        made = limit if limit is not None and cut_off else tokens
        honest.learn(honest.predict(ASKED), made, cut_off=cut_off)
        naive.learn(naive.predict(ASKED), made)
    assert honest.predict(ASKED).quantile(0.5) == pytest.approx(300, rel=0.06)
    assert naive.predict(ASKED).quantile(0.5) < 240


def test_a_change_is_followed() -> None:
    predictor = taught(*[50] * 3000, memory=500)
    for _ in range(1500):
        predictor.learn(predictor.predict(ASKED), 400)
    assert predictor.predict(ASKED).quantile(0.5) == pytest.approx(400, rel=0.1)


def drifted(rate: float) -> list[float]:
    """By how much each quantile's coverage misses its level, if lengths grow by 0.02 % an answer, 2.2 times in all."""
    draw, predictor, count = np.random.default_rng(5), Predictor(rate=rate), 4000
    covered = np.zeros(len(LEVELS))
    for at in range(count):
        tokens = int(draw.lognormal(math.log(50) + 0.0002 * at, 0.3)) + 1
        found = predictor.predict(ASKED)
        covered += tokens <= np.array(found.served)
        predictor.learn(found, tokens)
    return np.abs(covered / count - LEVELS).tolist()


def test_calibration_mends_what_drift_breaks() -> None:
    """Histograms of the past lag behind; calibrated quantiles keep their coverage."""
    calibrated, raw = drifted(0.02), drifted(0.0)
    assert max(calibrated) < 0.02
    assert min(raw[:2]) > 0.1


def test_late_answers_do_not_make_calibration_swing() -> None:
    """Two thousand answers are always under way. The predicted median stays near the true one, 300 tokens."""
    draw = np.random.default_rng(6)
    predictor, waiting, medians = Predictor(), [], []
    for _ in range(12_000):
        found = predictor.predict(ASKED)
        medians.append(found.served[0])
        waiting.append((found, int(draw.lognormal(math.log(300), 1.0)) + 1))
        if len(waiting) > 2000:
            predictor.learn(*waiting.pop(0))
    assert 240 < min(medians[5000:]) <= max(medians[5000:]) < 380


def test_quantiles_do_not_cross_however_they_are_shifted() -> None:
    below = Predictor().predict(ASKED)._below
    found = AnswerLengths(ASKED, below, (3.0, -3.0, -4.0))
    assert found.served == tuple(sorted(found.served))
    quantiles = [found.quantile(at / 200) for at in range(1, 200)]
    assert quantiles == sorted(quantiles)


def test_cut_off_answers_do_not_change_calibration() -> None:
    predictor = taught(100)
    predictor.settle()
    before = predictor._scopes["acme", "qwen"].shifts
    for _ in range(50):
        predictor.learn(predictor.predict(ASKED), 50_000, cut_off=True)
    predictor.settle()
    assert any(before) and predictor._scopes["acme", "qwen"].shifts == before


def test_weights_that_grow_for_ever_stay_finite() -> None:
    """Weights grow e-fold with every `memory` answers: after 88 times `memory` a float32 would overflow."""
    found = taught(*[9] * 2000, *[30] * 1000, memory=30).predict(ASKED)
    assert found.served[0] == 30


def test_a_length_that_was_last_seen_long_ago_does_not_spoil_predictions() -> None:
    """After 710 times `memory` answers the weight of a length is too small to divide by. An answer that was cut off at
    such a length made every tenant's distribution NaN, for good: each answer was predicted to be the longest.
    """
    predictor = Predictor(memory=2.0, rate=0.0, credibility=0.01)
    asked = predictor.predict(ASKED)
    for tokens in (LENGTH_MAX, *[30] * 1050):
        predictor.learn(asked, tokens)
    predictor.learn(asked, 90_000, cut_off=True)
    for _ in range(60):
        predictor.learn(asked, 30)
    predictor.settle()
    found = predictor.predict(ASKED)
    assert found.served[0] < 40
    assert found.mean < 200


def test_mean_remaining_ends_with_the_answer() -> None:
    found = taught(*[100] * 500).predict(ASKED._replace(max_tokens=300))
    assert found.mean_remaining(0) == pytest.approx(found.mean)
    assert found.mean_remaining(60) < found.mean
    assert 1 <= found.mean_remaining(250) <= 50
    assert found.mean_remaining(300) == 0
    assert Predictor().predict(ASKED).mean_remaining(LENGTH_MAX + 5) == 0


def test_edges_are_whole_and_no_bin_is_wide() -> None:
    assert all(edge == int(edge) for edge in EDGES)
    assert EDGES[0] == 1
    assert EDGES[-1] > LENGTH_MAX
    assert all(b - a == 1 or (b - 1) / a <= 1.12 for a, b in pairwise(EDGES))


def test_cues_of_bodies() -> None:
    ask = {"messages": [{"role": "user", "content": "Say it in one word: why?"}]}
    plain = {"messages": [{"role": "user", "content": "Tell me more, please now"}]}
    assert cues_of(ask) != cues_of(plain)
    assert cues_of({**plain, "tools": [{}]}) != cues_of({**plain, "response_format": {"type": "json_object"}})
    assert cues_of({"prompt": "```py\n"}) != cues_of({"prompt": "pyyyyyyy"})
    long = {"prompt": "word " * 4000}
    assert cues_of(long) > cues_of({"prompt": "word"})
    for odd in ({}, {"messages": []}, {"messages": [3]}, {"messages": [{"content": [{}]}]}, {"prompt": [1, 2]}):
        assert cues_of(odd) == 0
