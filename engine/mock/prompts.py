"""The twin's form of a prompt: a row of segments, equal where blocks of real ids would be equal.

Ids are cut at the edges of blocks, and each piece is named by a hash of its content. An answer of a mock is recognised
when it comes back in a chat: it follows from the text before it, so no state is needed. Its segment gets the twin's own
name. So the second turn finds the answer's blocks in the prefix cache of the instance that wrote them, as with a real
engine. Every instance computes the same names by itself.

What the client reads follows from the ids alone: neither the size of blocks nor a `cache_salt` changes an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from engine.mock.words import Ids
from engine.twin.tokens import Prompt, Segment, answer_key, mix, token

_NO_SALT: Final = b""
_LOOK_FIRST: Final = 4
"""Tokens of an answer that are compared before all of it is."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """One prompt: its ids, and its form for the twin."""

    ids: Ids
    segments: Prompt
    key: int
    """Determines the prompt's right answer, as the client reads it."""
    right: int
    """The twin's key of the right answer. A share of a run with another key means that wrong KV was read."""


def prompted(pieces: Sequence[Ids], block_size: int, *, salt: str = "", seed: int | None = None) -> Prompted:
    """A prompt from its pieces. Every second piece is the assistant's, and may be an answer of a mock.

    A prompt that is no chat is one piece. `salt`: the request's ``cache_salt``.
    """
    names = _Names(block_size, salt)
    told = bytearray()
    for number, piece in enumerate(pieces):
        before = bytes(told)
        if number % 2 and _is_answer(piece, _key(before)):
            names.answer(len(piece))
        else:
            names.text(piece)
        told += piece.astype("<u4").tobytes()
    segments = tuple(names.segments)
    key = _key(bytes(told))
    ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return Prompted(ids, segments, key if seed is None else mix(key, seed), answer_key(segments))


def said_tokens(prompt: Prompted, key: int, first: int, count: int, pinned: int | None = None) -> list[int]:
    """The tokens of an answer from its `first` on, for a share of a run under `key`.

    `pinned` is the token with which the answer must begin. If it is not the answer's own, all that follows changes, as
    in a model.
    """
    source = prompt.key if key == prompt.right else mix(prompt.key, key)
    if pinned is not None and pinned != token(prompt.key, 0):
        source = mix(source, pinned)
    said = [token(source, index) for index in range(first, first + count)]
    if pinned is not None and first == 0 and said:
        said[0] = pinned
    return said


class _Names:
    """Builds the segments of a prompt."""

    def __init__(self, block_size: int, salt: str) -> None:
        self.segments: list[Segment] = []
        self._block_size = block_size
        self._salt = blake2b(salt.encode("utf-8", "replace"), digest_size=16).digest() if salt else _NO_SALT
        self._tokens = 0

    def text(self, ids: Ids) -> None:
        """Add plain ids, cut where blocks end."""
        raw, width = ids.astype("<u4").tobytes(), ids.itemsize
        at, size = 0, len(ids)
        while at < size:
            count = min(size - at, self._block_size - self._tokens % self._block_size)
            cut = raw[at * width : (at + count) * width]
            name = blake2b(cut, digest_size=8, key=self._salt).digest()
            self.segments.append(Segment(int.from_bytes(name, "little"), count))
            at += count
            self._tokens += count

    def answer(self, tokens: int) -> None:
        """Add an answer of so many tokens, which the twin gave to the segments so far."""
        if tokens:
            self.segments.append(Segment(answer_key(tuple(self.segments)), tokens))
            self._tokens += tokens


def _key(raw: bytes) -> int:
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")


def _is_answer(piece: Ids, key: int) -> bool:
    """Whether these ids are the answer of a mock under this key, or its beginning."""
    ids: list[int] = piece.tolist()
    first = min(_LOOK_FIRST, len(ids))
    return _follows(ids[:first], key, 0) and _follows(ids[first:], key, first)


def _follows(ids: Iterable[int], key: int, first: int) -> bool:
    return all(one == token(key, first + at) for at, one in enumerate(ids))
