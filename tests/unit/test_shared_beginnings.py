"""Beginnings of prompts that answers share in one instance's KV cache: each counts once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.predict.inflight_load import InflightLoad
from router.predict.inflight_request import InflightRequest
from router.predict.shared_beginnings import LENGTHS, Beginnings, SharedBeginnings, beginnings, lengths_within
from router.predict.step_model import make_of

EACH = 256.0
"""Tokens of a chunk."""
MAKE = make_of(costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("H100"), profiles=shipped.profiles()))


def test_beginnings_are_told_apart_in_few_lengths() -> None:
    assert LENGTHS[:13] == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20)
    assert all(one < two for one, two in itertools.pairwise(LENGTHS))
    names = tuple(range(100, 111))
    assert beginnings(names) == (*range(100, 108), 109)
    assert beginnings(()) == ()
    assert [lengths_within(each) for each in (0, 1, 9, 11)] == [0, 1, 8, 9]


def of(names: Sequence[int], cached: int) -> Beginnings:
    return Beginnings(names, cached, EACH)


def test_a_beginning_counts_once_as_long_as_one_answer_holds_it() -> None:
    here, names = SharedBeginnings(), beginnings(range(12))
    first, second = of(names, 0), of(names, len(names))
    assert here.add(first) == 0.0
    assert here.add(second) == 12 * EACH
    assert here.among(names, len(names)) == 12 * EACH
    assert here.drop(first) == 12 * EACH, "the second one still holds it all"
    assert here.drop(second) == 0.0
    assert here.among(names, len(names)) == 0.0


def test_what_an_engine_has_not_cached_is_not_shared() -> None:
    """Two equal prompts at the same time are computed twice, and engines without a prefix cache share nothing."""
    here, names = SharedBeginnings(), beginnings(range(12))
    first, second = of(names, 0), of(names, 2)
    here.add(first)
    assert here.add(second) == 2 * EACH
    assert here.among(names, 0) == 0.0
    assert here.drop(first) == 2 * EACH and here.drop(second) == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 40), st.integers(0, 9)), max_size=40))
def test_what_all_need_is_what_each_brought_less_what_it_found(steps: list[tuple[int, int, int, int]]) -> None:
    """Answers with beginnings of four texts come and go. What they need is never less than all different beginnings,
    never more than the sum, and nothing at the end.
    """
    here, there, total = SharedBeginnings(), [], 0.0
    for text, chunks, cached, which in steps:
        if which < 4 and there:
            one = there.pop(which % len(there))
            total += here.drop(one) - tokens_of(one)
        else:
            one = of(beginnings([1000 * text + each for each in range(chunks)]), lengths_within(cached))
            there.append(one)
            total += tokens_of(one) - here.add(one)
        different = {name for each in there for name in each.names}
        assert sum(map(between, different)) <= total + 1e-6
        assert total <= sum(map(tokens_of, there)) + 1e-6
    for one in there:
        total += here.drop(one) - tokens_of(one)
    assert total == pytest.approx(0.0)


def between(name: int) -> float:
    """The tokens between the next shorter beginning's end and this one's."""
    at = LENGTHS.index(name % 1000 + 1)
    return (LENGTHS[at] - (LENGTHS[at - 1] if at else 0)) * EACH


def tokens_of(one: Beginnings) -> float:
    return LENGTHS[len(one.names) - 1] * EACH


def answer(prompt: int, names: tuple[int, ...], cached: int) -> InflightRequest:
    made = InflightRequest(
        prompt_tokens=prompt, mean_tokens=100.0, short_tokens=50.0, middle_tokens=50.0, variance=0.0, tpot_ms=math.inf
    )
    made.beginnings = of(names, cached)
    return made


def test_a_hundred_answers_with_one_system_prompt_need_it_once() -> None:
    """Each counted whole: requests waited in the router while the engine's KV cache was almost empty."""
    here = InflightLoad()
    here.reach(1)
    here.know(0, MAKE)
    names = beginnings(range(12))
    answers = [answer(3172, names, len(names) if number else 0) for number in range(100)]
    for each in answers:
        here.answer_placed(each, 0, 1.0)
    assert here.rows[0].kv_mean == pytest.approx(3072 + 100 * (100 + 100.0))
    for number, each in enumerate(answers[:-1]):
        here.answer_over(each, 2.0)
        assert here.rows[0].kv_mean == pytest.approx(3072 + (99 - number) * 200.0)
    here.answer_over(answers[-1], 2.0)
    assert here.rows[0].kv_mean == 0.0 and here.rows[0].kv_free == math.inf
