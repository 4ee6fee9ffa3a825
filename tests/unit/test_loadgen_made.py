"""Made-up load: arrival processes, lengths, prompts, shaping."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from statistics import fmean, pstdev

import numpy as np
import pytest

from loadgen import arrivals, lengths
from loadgen.arrival import Arrival
from loadgen.body import Asking, body_of
from loadgen.made import made
from loadgen.prompts import Fit, fit, prompt_ids, prompt_text, text_of
from loadgen.shaping import COPY_ID, denser, faster, window
from loadgen.summary import summary_of


def gaps_of(times: list[float]) -> list[float]:
    return [later - one for one, later in pairwise([0.0, *times])]


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("process", [arrivals.gamma, arrivals.weibull])
def test_gaps_have_the_mean_and_variation_asked_for(process: object, cv: float) -> None:
    times = list(islice(process(20.0, cv, np.random.default_rng(11)), 60_000))  # type: ignore[operator]
    gaps = gaps_of(times)
    assert fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.08)


def test_poisson_and_constant() -> None:
    gaps = gaps_of(list(islice(arrivals.poisson(20.0, np.random.default_rng(1)), 20_000)))
    assert fmean(gaps) == pytest.approx(0.05, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.0, rel=0.03)
    assert list(islice(arrivals.constant(4.0), 3)) == [0.25, 0.5, 0.75]


def test_weibull_of_cv_1_is_exponential() -> None:
    assert arrivals.weibull_shape(1.0) == pytest.approx(1.0, abs=1e-6)


def test_windows_keep_their_rates() -> None:
    schedule = [
        arrivals.Window(0, 1000, 5.0, "Gamma", 0.3),
        arrivals.Window(1000, 2000, 0.0, "Gamma", 1.0),
        arrivals.Window(2000, 3000, 1.0, "Weibull", 0.7),
    ]
    times = list(arrivals.windows(schedule, np.random.default_rng(4)))
    assert sum(t < 1000 for t in times) == pytest.approx(5000, rel=0.1)
    assert not [t for t in times if 1000 <= t < 2000]
    assert sum(t >= 2000 for t in times) == pytest.approx(1000, rel=0.2)


def test_mixed_clients_add_up() -> None:
    found = list(islice(arrivals.mixed([arrivals.constant(1.0), arrivals.constant(3.0)]), 8))
    assert [at for at, _ in found] == sorted(at for at, _ in found)
    assert sum(which == 1 for _, which in found) == 6


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("512", 512),
        ("uniform:100-200", 150),
        ("lognormal:p50=100,p90=300", 144.4),
        ("lognormal:mean=400,cv=1.5", 400),
    ],
)
def test_lengths(text: str, mean: float) -> None:
    found, rng = lengths.parse(text), np.random.default_rng(2)
    drawn = [found.draw(rng) for _ in range(20_000)]
    assert found.mean() == pytest.approx(mean, rel=0.01)
    assert fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert min(drawn) >= 1


def test_empirical_lengths() -> None:
    found, rng = lengths.empirical([3, 3, 9, 0]), np.random.default_rng(2)
    drawn = [found.draw(rng) for _ in range(4000)]
    assert set(drawn) == {1, 3, 9}
    assert drawn.count(3) / 4000 == pytest.approx(0.5, abs=0.03)
    assert found.mean() == pytest.approx(15 / 4)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "5.5", "99999999999", "many", "uniform:", "uniform:5", "uniform:9-3", "normal:1-2",
     "lognormal:p50=1",
     "lognormal:p50=9,p90=3", "lognormal:p50=x,p90=3", "lognormal:mean=0,cv=1", "lognormal:mean=1,cv=-1",
     "lognormal:mean=nan,cv=1"],
)  # fmt: skip
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        lengths.parse(text)


def test_equal_ids_give_equal_text_and_others_do_not() -> None:
    one = prompt_text(Arrival(0, 200, 1, (1, 2, 3), 64), Fit(4.0), "a")
    two = prompt_text(Arrival(0, 250, 1, (1, 2, 9), 64), Fit(4.0), "b")
    shared = 2 * 64 * 4
    assert one[:shared] == two[:shared]
    assert one[shared : shared + 40] != two[shared : shared + 40]
    assert (len(one), len(two)) == (800, 1000)


def test_own_text_differs_from_the_first_token_on() -> None:
    texts = {prompt_text(Arrival(0, 20, 1), Fit(), f"run {number}")[:30] for number in range(100)}
    assert len(texts) == 100


def test_a_block_longer_than_the_prompt_is_cut() -> None:
    assert len(prompt_text(Arrival(0, 10, 1, (5,), 512), Fit(1.0), "")) == 10
    assert prompt_text(Arrival(0, 0, 1), Fit(1.0, 50.0), "") == " "


def test_token_ids_are_exact_and_shared() -> None:
    one = prompt_ids(Arrival(0, 100, 1, (1, 2), 32), (10, 20), "a")
    two = prompt_ids(Arrival(0, 70, 1, (1, 2), 32), (10, 20), "b")
    assert (len(one), len(two)) == (100, 70)
    assert one[:64] == two[:64]
    assert set(one) <= set(range(10, 20))


def test_fit_is_the_line_through_two_probes() -> None:
    found = fit((200, 60), (1200, 310))
    assert (found.chars_per_token, found.overhead_tokens) == (4.0, 10.0)
    assert found.chars(310) == 1200
    assert fit((200, 60), (1200, 60)) == Fit()


def test_text_is_a_prefix_of_longer_text() -> None:
    assert text_of(b"x", 500).startswith(text_of(b"x", 123))


def test_bodies() -> None:
    arrival = Arrival(0, 10, 0)
    body = json.loads(body_of(arrival, Asking("m", extra={"temperature": 1, "top_k": 4}), 3))
    assert (body["max_tokens"], body["temperature"], body["top_k"], body["ignore_eos"]) == (1, 1, 4, True)
    assert body["stream_options"] == {"include_usage": True}
    chat = json.loads(body_of(arrival, Asking("m", chat=True, ignore_eos=False), 3))
    assert chat["messages"][0]["role"] == "user" and "prompt" not in chat and "ignore_eos" not in chat
    assert len(json.loads(body_of(arrival, Asking("m", vocabulary=(5, 9)), 3))["prompt"]) == 10


def test_made_load_shares_prefixes_by_group() -> None:
    found = list(islice(made(arrivals.constant(1), lengths.FixedLength(100), lengths.FixedLength(9),
                             np.random.default_rng(0), prefix_tokens=80, prefix_groups=2), 50))  # fmt: skip
    assert {each.prefix for each in found} == {(0,), (1,)}
    assert summary_of(found).shared == pytest.approx(48 * 80 / 5000)


def test_shaping() -> None:
    load = [Arrival(float(at), 1, 1, (at,), 1, "s") for at in range(10)]
    assert [each.at_s for each in faster(load, 2)] == [at / 2 for at in range(10)]
    assert [each.at_s for each in window(load, 3, 5)] == [0, 1]
    tripled = list(denser(load, 3, np.random.default_rng(1)))
    assert len(tripled) == 30
    assert {each.session for each in tripled} == {"s", "s#1", "s#2"}
    assert max(each.prefix[0] for each in tripled) >= 2 * COPY_ID
    assert len(list(denser([Arrival(0.1 * at, 1, 1) for at in range(2000)], 0.25, np.random.default_rng(1)))) == (
        pytest.approx(500, rel=0.1)
    )


@pytest.mark.parametrize("count", [0, 1, 2])
def test_summary_of_few(count: int) -> None:
    assert summary_of([Arrival(float(at), 5, 0) for at in range(count)]).requests == count
