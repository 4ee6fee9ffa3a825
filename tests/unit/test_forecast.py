"""Forecasters: sharp where the load is steady, quick after a step, and only used where they beat the last value."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from goodput.counters import Between, Counters
from goodput.forecast import UNSCORED, WIDEST, Forecast, Forecasting
from goodput.forecasters import FADES_S, Forecaster, History, last_value, period_of, short_trend
from goodput.observation import ClassCounts, RouterCounts
from goodput.sketch import Counting, sketch_of
from goodput.stretches import Stretch, steady_lengths, steady_rate
from goodput.traffic import Series, Traffic


def history(rates: list[float], seed: int = 1) -> History:
    counts = np.random.default_rng(seed).poisson(np.array(rates) * 5.0).astype(float)
    coarse = counts[: len(counts) // 12 * 12].reshape(-1, 12).sum(axis=1)
    return History.of(counts, 5.0, coarse, 60.0)


def test_a_level_uses_all_of_a_steady_load_and_little_after_a_step() -> None:
    assert last_value(history([2.0] * 700), 0.0) == pytest.approx(2.0, rel=0.06)
    assert last_value(history([1.0] * 700 + [4.0] * 12), 0.0) == pytest.approx(4.0, rel=0.3)


def test_a_burst_of_ten_seconds_is_no_change_and_a_slow_slope_is_one() -> None:
    """Of so few arrivals, the burst is 5.5 standard deviations by the normal distribution, and only 4 in truth."""
    counts = np.full(720, 2.0)
    counts[-2:] = 7.0
    assert steady_rate(counts, 5.0, 1.0) == Stretch(3600.0, pytest.approx(0.4028, abs=1e-4), whole=True)
    slope = steady_rate(np.linspace(2.0, 6.0, 720), 5.0, 1.0)
    assert slope is not None
    assert not slope.whole
    assert slope.seconds < 2400


def test_lengths_change_by_their_logarithms() -> None:
    def told(buckets: list[float]) -> Stretch | None:
        ones, values = np.full(len(buckets), 10.0), np.array(buckets)
        return steady_lengths(ones, 10 * values, 10 * (values**2 + 4.0), 5.0)

    same, changed = told([50.0] * 400), told([50.0] * 300 + [53.0] * 100)
    assert same is not None
    assert same.whole
    assert changed is not None
    assert not changed.whole
    assert changed.seconds == pytest.approx(500.0, rel=0.35)


def test_noise_is_no_trend_and_a_trend_fades() -> None:
    steady = history([2.0] * 60, seed=3)
    assert short_trend(steady, 300.0) == pytest.approx(2.0, rel=0.35)
    rising = history([0.05 * at for at in range(120)])
    near, far = short_trend(rising, 60.0), short_trend(rising, 3600.0)
    assert near is not None and far is not None
    assert near > 5.5
    assert far < near + 0.01 * FADES_S


def test_a_period_is_found_and_none_in_noise() -> None:
    minutes = np.arange(120)
    wave = 100 + 80 * np.sin(2 * math.pi * minutes / 40)
    assert period_of(wave, 60.0) == pytest.approx(2400.0, abs=60)
    assert period_of(np.random.default_rng(1).poisson(100.0, 120).astype(float), 60.0) is None


def run(rate: Callable[[float], float], seconds: float, horizon_s: float) -> tuple[list[str], list[float]]:
    """The forecaster used at each look, and its upper forecast over the rate that came."""
    rng, traffic, forecasting = np.random.default_rng(1), Traffic(), Forecasting()
    used, ratios, now = [], [], 0.0
    while now < seconds:
        now += 5.0
        counts = ClassCounts(arrivals=int(rng.poisson(rate(now) * 5)))
        traffic.add(Between(seconds=5.0, classes={"": counts}, waiting=0, oldest_wait_s=0.0), now)
        found = forecasting.forecast(forecasting.look(traffic, now, horizon_s), horizon_s)
        if found is not None and now > 900:
            used.append(found.who)
            ratios.append(found.upper / rate(now + horizon_s))
    return used, ratios


def test_a_steady_load_is_forecast_by_its_level() -> None:
    used, ratios = run(lambda _: 2.0, 3600, 120.0)
    assert used.count("last value") > 0.8 * len(used)
    assert 0.95 < float(np.mean(ratios)) < 1.12


def test_after_one_cycle_the_season_is_known() -> None:
    used, ratios = run(lambda at: 6 - 5 * math.cos(2 * math.pi * at / 1800), 5400, 240.0)
    assert used[len(used) // 2 :].count("seasonal") > 0.3 * len(used) / 2
    assert float(np.quantile(ratios[len(ratios) // 2 :], 0.1)) > 0.7


def rising(forecasters: dict[str, Forecaster]) -> Forecast:
    """The forecast for a load that has risen for half an hour."""
    traffic, forecasting = Traffic(), Forecasting(forecasters=forecasters)
    found = None
    for look in range(1, 361):
        counts = ClassCounts(arrivals=10 + look)
        traffic.add(Between(seconds=5.0, classes={"": counts}, waiting=0, oldest_wait_s=0.0), 5.0 * look)
        found = forecasting.forecast(forecasting.look(traffic, 5.0 * look, 120.0), 120.0)
    assert found is not None
    return found


def off_by(factor: float) -> Forecaster:
    """A forecaster that knows the rise, and errs by a factor."""
    return lambda history, horizon_s: factor * (history.counts[-1] / history.bin_s + horizon_s / 25)


def test_of_several_that_beat_the_last_value_the_median_is_used_and_a_season_alone() -> None:
    known = {"last value": last_value, "low": off_by(0.97), "right": off_by(1.0), "high": off_by(1.004)}
    told = rising(known)
    assert told.mean == pytest.approx(370 / 5 + 120 / 25)
    assert told.who in ("low", "right", "high")
    assert "median with" in told.because
    season = rising({**known, "low": off_by(1.002), "seasonal": off_by(0.97)})
    assert (season.who, season.mean) == ("seasonal", pytest.approx(0.97 * (370 / 5 + 120 / 25)))


def widened(at_s: float) -> float:
    """The upper forecast over the mean one, `at_s` seconds after a load has tripled at once. A start takes 2 min."""
    traffic, forecasting, found = Traffic(), Forecasting(), None
    for look in range(1, round((1800 + at_s) / 5) + 1):
        counts = ClassCounts(arrivals=10 if look <= 360 else 30)
        traffic.add(Between(seconds=5.0, classes={"": counts}, waiting=0, oldest_wait_s=0.0), 5.0 * look)
        found = forecasting.forecast(forecasting.look(traffic, 5.0 * look, 120.0), 120.0)
    assert found is not None
    return found.upper / found.mean


def test_a_step_widens_the_forecasts_after_it_only_until_they_are_scored() -> None:
    assert widened(0.0) < 1.02
    assert widened(150.0) == pytest.approx(1 + WIDEST)
    assert widened(300.0) < 1.02


def test_a_forecaster_without_scores_errs_widely_only_where_the_level_has_changed() -> None:
    def told(change: bool) -> float:
        traffic, forecasting, found = Traffic(), Forecasting(), None
        for look in range(1, 37):
            counts = ClassCounts(arrivals=30 if change and look > 24 else 10)
            traffic.add(Between(seconds=5.0, classes={"": counts}, waiting=0, oldest_wait_s=0.0), 5.0 * look)
            found = forecasting.forecast(forecasting.look(traffic, 5.0 * look, 300.0), 300.0)
        assert found is not None
        return found.upper / found.mean

    assert told(change=False) == pytest.approx(1 + UNSCORED)
    assert told(change=True) == pytest.approx(1 + WIDEST)


def test_a_late_look_is_spread_over_its_bins() -> None:
    series = Series(5.0, 100)
    series.add(0.0, 5.0, 10)
    series.add(5.0, 25.0, 40)
    assert series.counts().tolist() == [10, 10, 10, 10]


def test_sketches_subtract() -> None:
    counting = Counting()
    for each in (10, 100, 1000):
        counting.add(each)
    before = counting.state()
    counting.add(5000)
    since = counting.state().since(before)
    assert (since.count, since.mean) == (1, 5000)
    values, shares = sketch_of([100] * 50 + [300] * 50).lengths()
    assert float(values @ shares) == pytest.approx(200)


def published(router: str, life: str, at_s: float, arrivals: int) -> RouterCounts:
    classes = {"": ClassCounts(arrivals=arrivals)}
    return RouterCounts(router=router, life=life, at_s=at_s, classes=classes, waiting=0, oldest_wait_s=0.0)


def test_routers_add_up_and_restart() -> None:
    counters = Counters()
    assert counters.see([published("a", "1", 0.0, 500), published("b", "1", 0.0, 100)], 0.0) is None
    found = counters.see([published("a", "2", 5.0, 7), published("b", "1", 5.0, 110)], 5.0)
    assert found is not None
    assert found.classes[""].arrivals == 17
    assert counters.see([published("a", "2", 40.0, 9), published("b", "1", 5.0, 110)], 40.0) is None
    assert counters.silent == "router b was last heard 35 s ago"
    later = counters.see([published("a", "2", 60.0, 9), published("b", "1", 60.0, 200)], 60.0)
    assert later is not None
    assert (later.classes[""].arrivals, later.seconds) == (92, 55.0)
