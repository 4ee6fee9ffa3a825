"""The twin's form of a prompt: a row of segments, equal where blocks of real ids would be equal.

Ids are cut at the edges of blocks, and each piece is named by a hash of its content. An answer of a mock is recognised
when it comes back in a chat: it follows from the text before it, so no state is needed. Its segment gets the twin's own
name. So the second turn finds the answer's blocks in the prefix cache of the instance that wrote them, as with a real
engine. Every instance computes the same names by itself.

What the client reads follows from the ids alone: neither the size of blocks nor a `cache_salt` changes an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from engine.mock.words import Ids
from engine.twin.tokens import Prompt, Segment, answer_key, key_after, mix, token

_NO_SALT: Final = b""
_LOOK_FIRST: Final = 4
"""Tokens of an answer that are compared before all of it is."""
_WIDTH: Final = 4
"""Bytes of an id."""

_Beginning = tuple[int, str, int, tuple[int, ...]]
"""The beginning of a prompt, up to the end of a piece: the size of blocks, the salt, the key of all ids, the pieces'
lengths.
"""


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
    raws = [piece.astype("<u4").tobytes() for piece in pieces]
    keys, beginnings = _beginnings(raws, block_size, salt)
    names = _Names(block_size, salt)
    for number in range(_go_on(names, beginnings), len(raws)):
        if number % 2 and _is_answer(pieces[number], keys[number]):
            names.answer(len(pieces[number]))
        else:
            names.text(raws[number])
        _KNOWN.add(beginnings[number], names.so_far())
    ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return Prompted(ids, tuple(names.segments), keys[-1] if seed is None else mix(keys[-1], seed), names.key)


def _beginnings(raws: Sequence[bytes], block_size: int, salt: str) -> tuple[list[int], list[_Beginning]]:
    """The keys of all ids before each piece, and before the end; and what names the text up to each piece's end."""
    hasher, lengths = blake2b(digest_size=8), list[int]()
    keys, found = [_key(hasher.digest())], []
    for raw in raws:
        hasher.update(raw)
        keys.append(_key(hasher.digest()))
        lengths.append(len(raw))
        found.append((block_size, salt, keys[-1], tuple(lengths)))
    return keys, found


def _go_on(names: _Names, beginnings: Sequence[_Beginning]) -> int:
    """Go on from the longest beginning that is known; its pieces."""
    for pieces in range(len(beginnings), 0, -1):
        if (known := _KNOWN.get(beginnings[pieces - 1])) is not None:
            names.go_on(known)
            return pieces
    return 0


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


@dataclass(frozen=True, slots=True)
class _SoFar:
    """What `_Names` has after a piece."""

    segments: Prompt
    tokens: int
    key: int


class _Names:
    """Builds the segments of a prompt."""

    def __init__(self, block_size: int, salt: str) -> None:
        self.segments: list[Segment] = []
        self.key = answer_key(())
        """`answer_key` of the segments so far."""
        self._block_size = block_size
        self._salt = blake2b(salt.encode("utf-8", "replace"), digest_size=16).digest() if salt else _NO_SALT
        self._tokens = 0

    def so_far(self) -> _SoFar:
        """What `go_on` takes."""
        return _SoFar(tuple(self.segments), self._tokens, self.key)

    def go_on(self, after: _SoFar) -> None:
        """Begin after these pieces."""
        self.segments, self._tokens, self.key = list(after.segments), after.tokens, after.key

    def text(self, raw: bytes) -> None:
        """Add plain ids of four bytes, cut where blocks end."""
        at, size = 0, len(raw) // _WIDTH
        while at < size:
            count = min(size - at, self._block_size - self._tokens % self._block_size)
            cut = raw[at * _WIDTH : (at + count) * _WIDTH]
            name = blake2b(cut, digest_size=8, key=self._salt).digest()
            self._add(Segment(int.from_bytes(name, "little"), count))
            at += count

    def answer(self, tokens: int) -> None:
        """Add an answer of so many tokens, which the twin gave to the segments so far."""
        if tokens:
            self._add(Segment(self.key, tokens))

    def _add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.key = key_after(self.key, (segment,))
        self._tokens += segment.tokens


class _Known:
    """Beginnings of prompts that came lately: a chat's next turn goes on from one, and so does its other leg."""

    def __init__(self, most: int) -> None:
        """`most`: segments that all of them have together."""
        self._most, self._held = most, 0
        self._by: OrderedDict[_Beginning, _SoFar] = OrderedDict()

    def get(self, beginning: _Beginning) -> _SoFar | None:
        """What is known of it."""
        found = self._by.get(beginning)
        if found is not None:
            self._by.move_to_end(beginning)
        return found

    def add(self, beginning: _Beginning, so_far: _SoFar) -> None:
        """Remember it, and forget those that were not asked for the longest."""
        self._by[beginning] = so_far
        self._held += len(so_far.segments)
        while self._held > self._most:
            self._held -= len(self._by.popitem(last=False)[1].segments)


_KNOWN: Final = _Known(500_000)
"""A segment takes about 100 bytes, and the beginnings of one chat share theirs."""


def _key(digest: bytes) -> int:
    return int.from_bytes(digest, "little")


def _is_answer(piece: Ids, key: int) -> bool:
    """Whether these ids are the answer of a mock under this key, or its beginning."""
    ids: list[int] = piece.tolist()
    first = min(_LOOK_FIRST, len(ids))
    return _follows(ids[:first], key, 0) and _follows(ids[first:], key, first)


def _follows(ids: Iterable[int], key: int, first: int) -> bool:
    return all(one == token(key, first + at) for at, one in enumerate(ids))
