from __future__ import annotations

import numpy as np
import pytest

from engine.mock import prompts
from engine.mock.prompts import Prompted, prompted, said_tokens
from engine.mock.words import Ids
from engine.twin.tokens import Segment, Text, answer_key, length, mix, token

BLOCK = 16


def ids(*values: int) -> Ids:
    return np.array(values, np.uint32)


def digests(prompt: Prompted, tokens: int, seed: int = 0) -> list[int]:
    """The digests of the first full blocks of a prompt and its answer."""
    text = Text(prompt.segments, seed, BLOCK)
    return [text.chain(block) for block in range(tokens // BLOCK)]


def test_equal_beginnings_have_equal_blocks() -> None:
    one = prompted([ids(*range(40))], BLOCK)
    other = prompted([ids(*range(33), *range(100, 120))], BLOCK)
    assert length(one.segments) == len(one.ids) == 40
    assert digests(one, 32) == digests(other, 32)
    assert digests(one, 48)[2:] != digests(other, 48)[2:]
    assert one.key != other.key


def test_salt_separates_blocks_and_changes_no_answer() -> None:
    plain, salted = prompted([ids(*range(40))], BLOCK), prompted([ids(*range(40))], BLOCK, salt="mine")
    assert digests(plain, 32) != digests(salted, 32)
    assert said_tokens(plain, plain.right, 0, 9) == said_tokens(salted, salted.right, 0, 9)


def test_block_size_changes_no_answer() -> None:
    small, large = prompted([ids(*range(300))], BLOCK), prompted([ids(*range(300))], 128)
    assert said_tokens(small, small.right, 0, 9) == said_tokens(large, large.right, 0, 9)


def test_wrong_blocks_give_a_wrong_answer() -> None:
    prompt = prompted([ids(1, 2, 3)], BLOCK)
    right = said_tokens(prompt, prompt.right, 0, 20)
    assert said_tokens(prompt, mix(prompt.right, 77), 0, 20) != right
    assert said_tokens(prompt, prompt.right, 5, 3) == right[5:8]


def test_a_pinned_first_token_is_said_and_changes_what_follows() -> None:
    prompt = prompted([ids(1, 2, 3)], BLOCK)
    right = said_tokens(prompt, prompt.right, 0, 20)
    assert said_tokens(prompt, prompt.right, 0, 20, right[0]) == right
    other = said_tokens(prompt, prompt.right, 0, 20, 7)
    assert other[0] == 7
    assert other[1:] != right[1:]
    assert said_tokens(prompt, prompt.right, 3, 5, 7) == other[3:8]
    wrong = said_tokens(prompt, mix(prompt.right, 77), 0, 20, right[0])
    assert wrong[0] == right[0]
    assert wrong[1:] != right[1:]


def test_other_seeds_are_other_answers() -> None:
    plain, seeded = prompted([ids(1, 2)], BLOCK), prompted([ids(1, 2)], BLOCK, seed=1)
    assert said_tokens(plain, plain.right, 0, 9) != said_tokens(seeded, seeded.right, 0, 9)
    text = ids(*range(2 * BLOCK))
    of_plain = digests(prompted([text], BLOCK), 2 * BLOCK)
    assert len(of_plain) == 2
    assert of_plain == digests(prompted([text], BLOCK, seed=1), 2 * BLOCK), "a seed changes no block of the prompt"


def test_the_key_of_a_right_answer_is_the_twins() -> None:
    prompt = prompted([ids(*range(20))], BLOCK)
    assert prompt.right == Text(prompt.segments, 0, BLOCK).key == answer_key(prompt.segments)


def test_an_answer_in_the_next_prompt_has_the_blocks_it_was_written_to() -> None:
    first = ids(*range(27))
    asked = prompted([first], BLOCK)
    said = ids(*said_tokens(asked, asked.right, 0, 50))
    again = prompted([first, said, ids(7, 8, 9)], BLOCK)
    assert digests(again, 64) == digests(asked, 64), "prompt and answer, 77 tokens in all"
    changed = said.copy()
    changed[40] += 1
    other = prompted([first, changed, ids(7, 8, 9)], BLOCK)
    assert digests(other, 16) == digests(asked, 16)
    assert digests(other, 64)[1:] != digests(asked, 64)[1:]
    assert token(asked.key, 0) == said[0]


def test_a_known_beginning_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ids(*range(500, 540)), ids(*range(700, 733))
    turn = prompted([first], BLOCK)
    answer = ids(*said_tokens(turn, turn.right, 0, 21))
    chats = ([first], [first, answer, second], [first, second, second], [first, answer[:7], second])
    seen = [prompted(chat, BLOCK) for chat in chats]
    again = [prompted(chat, BLOCK) for chat in chats]
    fresh = []
    for chat in chats:
        monkeypatch.setattr(prompts, "_KNOWN", prompts._Known(500_000))
        fresh.append(prompted(chat, BLOCK))
    for one, two, three in zip(seen, again, fresh, strict=True):
        assert (one.segments, one.key, one.right) == (two.segments, two.key, two.right)
        assert (one.segments, one.key, one.right) == (three.segments, three.key, three.right)
        assert one.right == answer_key(one.segments)


def test_equal_ids_cut_elsewhere_are_another_chat() -> None:
    """Only a piece of the assistant's may be an answer: the same ids in one piece are plain text."""
    first = ids(*range(500, 540))
    turn = prompted([first], BLOCK)
    answer = ids(*said_tokens(turn, turn.right, 0, 20))
    apart, whole = prompted([first, answer], BLOCK), prompted([np.concatenate([first, answer])], BLOCK)
    assert apart.key == whole.key
    assert apart.segments != whole.segments


def test_beginnings_are_forgotten_by_their_segments() -> None:
    known = prompts._Known(10)
    for number in range(4):
        known.add((16, "", number, (1,)), prompts._SoFar((Segment(1, 1),) * 4, 4, 0))
        known.get((16, "", 0, (1,)))
    assert known.get((16, "", 0, (1,))) is not None
    assert known.get((16, "", 1, (1,))) is None
    assert known.get((16, "", 3, (1,))) is not None
