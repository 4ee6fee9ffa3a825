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


def of(names: Sequence[int], cached: int, each: float = EACH) -> Beginnings:
    return Beginnings(names, cached, each, LENGTHS[-1] * each)


def test_a_beginning_counts_once_as_long_as_one_answer_holds_it() -> None:
    here, names = SharedBeginnings(), beginnings(range(12))
    first, second = of(names, 0), of(names, len(names))
    assert here.add(first) == 0.0
    assert here.add(second) == 12 * EACH
    assert here.among(names, len(names), EACH, 12 * EACH) == 12 * EACH
    assert here.drop(first) == 12 * EACH, "the second one still holds it all"
    assert here.drop(second) == 0.0
    assert here.among(names, len(names), EACH, 12 * EACH) == 0.0


def test_what_an_engine_has_not_cached_is_not_shared() -> None:
    """Two equal prompts at the same time are computed twice, and engines without a prefix cache share nothing."""
    here, names = SharedBeginnings(), beginnings(range(12))
    first, second = of(names, 0), of(names, 2)
    here.add(first)
    assert here.add(second) == 2 * EACH
    assert here.among(names, 0, EACH, 12 * EACH) == 0.0
    assert here.drop(first) == 2 * EACH and here.drop(second) == 0.0


Step = tuple[int, int, int, int, float]
"""The text, its chunks, those in the cache, the answer that ends, and the tokens of a chunk."""
steps = st.tuples(
    st.integers(0, 3), st.integers(1, 40), st.integers(0, 40), st.integers(0, 9), st.sampled_from([80.0, EACH, 387.0])
)


@given(st.lists(steps, max_size=40))
def test_what_all_need_is_what_each_brought_less_what_it_found(steps: list[Step]) -> None:
    """Answers with beginnings of four texts come and go, and each counts its chunks by its own estimate. What they need
    is never less than their private parts and all different beginnings, never more than the sum, and nothing at the
    end.
    """
    here, there, total = SharedBeginnings(), list[Beginnings](), 0.0
    for text, chunks, cached, which, each in steps:
        if which < 4 and there:
            one = there.pop(which % len(there))
            total += here.drop(one) - tokens_of(one)
        else:
            one = of(beginnings([1000 * text + at for at in range(chunks)]), lengths_within(cached), each)
            there.append(one)
            found = here.among(one.names, one.cached, one.chunk_tokens, one.prompt_tokens)
            assert here.add(one) == pytest.approx(found), "what was expected of it is what it brings less"
            total += tokens_of(one) - found
        alone = [private(one) for one in there]
        assert min(alone, default=0.0) >= -1e-6
        counted = sum(map(between, {name for one in there for name in one.held}))
        assert sum(alone) + counted * 80.0 - 1e-6 <= total <= sum(alone) + counted * 387.0 + 1e-6
        assert sum(map(between, {name for one in there for name in one.names})) * 80.0 <= total + 1e-6
        if len({each for *_, each in steps}) == 1:
            assert total <= sum(map(tokens_of, there)) + 1e-6
    for one in there:
        total += here.drop(one) - tokens_of(one)
    assert total == pytest.approx(0.0)
    assert here.among(beginnings(range(40)), 40, EACH, 40 * EACH) == 0.0


def between(name: int) -> int:
    """The chunks between the next shorter beginning's end and this one's."""
    at = LENGTHS.index(name % 1000 + 1)
    return LENGTHS[at] - (LENGTHS[at - 1] if at else 0)


def tokens_of(one: Beginnings) -> float:
    return LENGTHS[len(one.names) - 1] * one.chunk_tokens


def private(one: Beginnings) -> float:
    """The tokens of its prompt that no other answer shares."""
    return tokens_of(one) - sum(map(between, one.held)) * one.chunk_tokens


def answer(prompt: int, names: tuple[int, ...], cached: int, each: float = EACH) -> InflightRequest:
    made = InflightRequest(
        prompt_tokens=prompt, mean_tokens=100.0, short_tokens=50.0, middle_tokens=50.0, variance=0.0, tpot_ms=math.inf
    )
    made.beginnings = Beginnings(names, cached, each, prompt)
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


def test_a_dense_text_before_sparse_ones_takes_nothing_from_them() -> None:
    """Tokens of a chunk are a mean over the whole prompt. The beginning counted by the first answer's estimate, and
    each later answer took that off its own prompt: a full engine seemed to be empty.
    """
    here = InflightLoad()
    here.reach(1)
    here.know(0, MAKE)
    dense = answer(27 * 387, beginnings(range(27)), 0, 387.0)
    sparse = [answer(14 * 206, beginnings((*range(13), 100 + each)), 12, 206.0) for each in range(20)]
    here.answer_placed(dense, 0, 1.0)
    for each in sparse:
        here.answer_placed(each, 0, 1.0)
    alone = 206 * 2 + 100  # of 14 chunks 12 count as shared
    assert here.rows[0].kv_mean == pytest.approx(27 * 387 + 100 + 20 * alone)
    here.answer_over(dense, 2.0)
    assert here.rows[0].kv_mean == pytest.approx(12 * 387 + 20 * alone)
    for count, each in enumerate(sparse[:-1]):
        here.answer_over(each, 2.0)
        assert here.rows[0].kv_mean == pytest.approx(12 * 387 + (19 - count) * alone)
    here.answer_over(sparse[-1], 2.0)
    assert here.rows[0].kv_mean == 0.0


def test_chunks_have_no_more_tokens_than_the_prompt() -> None:
    """The last block of a trace's prompt may be shorter than the others."""
    here = InflightLoad()
    here.reach(1)
    here.know(0, MAKE)
    for number in range(20):
        here.answer_placed(answer(600, (1, 2), 2 if number else 0, 512.0), 0, 1.0)
    assert here.rows[0].kv_mean == pytest.approx(600 + 20 * 100)
    assert here.rows[0].shared.among((1, 2, 3), 1, 512.0, 600) == 512.0
