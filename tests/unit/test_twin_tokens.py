"""Digests of the twin's KV blocks, and the tokens of prompts and answers."""

import pytest

from engine.twin.tokens import Segment, Text, answer_key, mix, prompt_of, token

PROMPT = (Segment(1, 10), Segment(2, 7))


def test_numbers_are_the_same_on_every_machine() -> None:
    assert mix(1, 2, 3) == mix(1, 2, 3) < 1 << 64
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0), mix()}) == 5
    assert [token(mix(1), index) for index in range(3)] == [28268, 22292, 6668]


def test_prompts_with_the_same_beginning_share_its_blocks() -> None:
    one, other = Text(PROMPT, 0, 4), Text((Segment(1, 10), Segment(3, 7)), 0, 4)
    assert [one.chain(block) == other.chain(block) for block in range(4)] == [True, True, False, False]
    assert one.chain(-1) == other.chain(-1)


def test_a_block_depends_on_all_before_it() -> None:
    one, other = Text(PROMPT, 0, 4), Text((Segment(9, 4), Segment(1, 6, first=4), Segment(2, 7)), 0, 4)
    assert all(one.chain(block) != other.chain(block) for block in range(4))


def test_a_partly_filled_block_has_another_digest() -> None:
    one = Text(PROMPT, 0, 4)
    assert len({one.digest(4, end) for end in (17, 18, 19, 20)}) == 4
    assert one.digest(4, 20) == one.digest(4, 99) == one.chain(4)


def test_an_answer_can_be_part_of_the_next_prompt() -> None:
    first = Text(PROMPT, 5, 4)
    second = Text((*PROMPT, Segment(answer_key(PROMPT, 5), 8), Segment(4, 3)), 0, 4)
    assert [first.chain(block) == second.chain(block) for block in range(7)] == [True] * 6 + [False]


@pytest.mark.parametrize("other", [(Segment(1, 10), Segment(2, 8)), (Segment(1, 17),), (Segment(2, 7), Segment(1, 10))])
def test_different_prompts_have_different_answers(other: tuple[Segment, ...]) -> None:
    assert answer_key(PROMPT) != answer_key(other)
    assert answer_key(PROMPT, 1) != answer_key(PROMPT)


def test_a_prompt_of_token_ids() -> None:
    one, other = prompt_of([1, 2, 3, 4, 5, 6, 7], 4), prompt_of([1, 2, 3, 4, 5, 6], 4)
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert Text(one, 0, 4).prompt_tokens == 7


def test_a_row_of_digests_equals_the_single_digests() -> None:
    text = Text((Segment(1, 10), Segment(2, 3), Segment(3, 1), Segment(4, 30, first=2)), 7, 4)
    assert text.chains(0, 20) == [text.chain(block) for block in range(20)]
    assert text.chains(5, 9) == [text.digest(block, 99) for block in range(5, 9)]
    assert len(set(text.chains(0, 20))) == 20


def test_a_segment_may_be_cut_anywhere() -> None:
    one, other = Text((Segment(1, 23),), 0, 4), Text((Segment(1, 9), Segment(1, 14, first=9)), 0, 4)
    assert one.chains(0, 5) == other.chains(0, 5)
    assert one.digest(5, 23) == other.digest(5, 23)
