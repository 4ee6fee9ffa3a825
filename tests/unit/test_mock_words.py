from __future__ import annotations

import pytest

from engine.mock.words import ALL_IDS, END, FIRST_TEXT, text_of, tokenize, words
from engine.twin.tokens import VOCABULARY


def test_every_word_is_four_bytes_and_no_two_are_equal() -> None:
    assert len(set(words())) == VOCABULARY
    assert {len(word) for word in words()} == {4}
    assert not any(byte in word for word in words() for byte in (b'"', b"\\"))


def test_an_answers_text_gives_back_its_ids() -> None:
    ids = list(range(0, VOCABULARY, 7))
    assert tokenize(text_of(ids)).tolist() == ids
    assert text_of([5, END]) == text_of([5])
    assert text_of([FIRST_TEXT]) == f"<{FIRST_TEXT}>"


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("é", 1), ("🙂🙂", 2), ("x" * 2048, 512)]
)
def test_four_bytes_are_a_token(text: str, count: int) -> None:
    ids = tokenize(text)
    assert len(ids) == count
    assert all(FIRST_TEXT <= token < ALL_IDS for token in ids.tolist())


def test_equal_beginnings_have_equal_ids() -> None:
    one, other = tokenize("the same beginning, and then this"), tokenize("the same beginning, and then that")
    assert one[:7].tolist() == other[:7].tolist()
    assert one.tolist() != other.tolist()


def test_broken_text_is_no_error() -> None:
    assert len(tokenize("\ud800abc")) == 1
