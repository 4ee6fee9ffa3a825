"""Text and token ids without a model: every four bytes are a token.

A token of an answer is a word of exactly four bytes: a space and three of 32 characters. So an answer's text gives back
its ids, and a client can check both. Any other four bytes of UTF-8 are a token whose id is a hash of them. Equal
beginnings of texts have equal beginnings of ids, up to the group of four that holds their first difference.

    0 .. 31,999          words, what answers are made of          32,000    end of text, end of a message
    32,001 .. 32,007     beginnings of messages, by role          32,768 .. 131,071    any other four bytes
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.twin.tokens import VOCABULARY

Ids = NDArray[np.uint32]
"""Token ids."""

BYTES_PER_TOKEN: Final = 4
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz012345"
END: Final = 32_000
ROLES: Final = {"system": 32_001, "developer": 32_002, "user": 32_003, "assistant": 32_004, "tool": 32_005}
OTHER_ROLE: Final = 32_006
TOOLS: Final = 32_007
"""Begins the list of tools."""
FIRST_TEXT: Final = 32_768
ALL_IDS: Final = 131_072
"""Ids from here on do not exist."""
assert VOCABULARY <= END

_PLACE: Final = np.full(256, -1, np.int32)
_PLACE[[ord(letter) for letter in LETTERS]] = range(32)


@cache
def words() -> tuple[bytes, ...]:
    """The text of each token that answers are made of, by id; none needs an escape in JSON."""
    triples = (f" {LETTERS[i >> 10]}{LETTERS[i >> 5 & 31]}{LETTERS[i & 31]}" for i in range(VOCABULARY))
    return tuple(word.encode() for word in triples)


_REMEMBERED: Final = 16_384
"""Characters up to which a text's ids are remembered: a chat brings its messages again with each turn, on both legs."""


def tokenize(text: str) -> Ids:
    """The ids of a text, read only. A character that UTF-8 cannot encode (half a surrogate pair in JSON) is a question
    mark.
    """
    return _remembered(text) if len(text) <= _REMEMBERED else _tokenize(text)


@lru_cache(maxsize=2048)
def _remembered(text: str) -> Ids:
    return _tokenize(text)


def _tokenize(text: str) -> Ids:
    raw = text.encode("utf-8", "replace")
    raw += bytes(-len(raw) % BYTES_PER_TOKEN)
    groups = np.frombuffer(raw, np.uint8).reshape(-1, BYTES_PER_TOKEN)
    places = _PLACE[groups[:, 1:]]
    ids = (places[:, 0] << 10) | (places[:, 1] << 5) | places[:, 2]
    is_word = (groups[:, 0] == 0x20) & (places >= 0).all(axis=1) & (ids < VOCABULARY)
    hashed = (np.frombuffer(raw, "<u4") * np.uint32(2_654_435_761)) >> np.uint32(8)  # Knuth's multiplicative hash
    found = np.where(is_word, ids, FIRST_TEXT + hashed % (ALL_IDS - FIRST_TEXT)).astype(np.uint32)
    found.flags.writeable = False
    return found


def text_of(ids: Iterable[int]) -> str:
    """The text of ids. An id that is no word shows as its number; the end of text shows as nothing."""
    known = words()
    return "".join(_shown(known, token) for token in ids)


def _shown(known: tuple[bytes, ...], token: int) -> str:
    if token < VOCABULARY:
        return known[token].decode()
    return "" if token == END else f"<{token}>"
