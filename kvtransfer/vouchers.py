"""Digests of KV blocks by their numbers: what our connector checks where memory or wire is not trusted. Pure.

A producer writes the digest of each block of a prompt into a table, before it answers the leg. A consumer reads the
digests of the blocks it pulls as it reads the blocks, and compares them with what has come.

A digest is over a block's bytes and over its *name*: what its bytes were computed for (`names`). Both sides know a
request's prompt, so names do not travel. A block of another prompt, in another place of this one, of an older tenant of
the same memory, or with a wrong byte does not pass; a block that two prompts share has one name and one digest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

DIGEST_BYTES: Final = 8
"""A wrong block passes once in 2^64."""
NAME_BYTES: Final = 16
NONE: Final = bytes(DIGEST_BYTES)
"""What is read of a block that nobody vouched for: no digest is all zeros, but for one in 2^64."""


class Hash(Protocol):
    """As `hashlib`'s objects are, and BLAKE3's."""

    def update(self, data: memoryview, /) -> object: ...
    def digest(self, length: int, /) -> bytes: ...


def names(tokens: Sequence[int], block_tokens: int, about: bytes = b"") -> tuple[bytes, ...]:
    """What each block of a prompt is computed for: the prompt up to the block's last token.

    `about` is what its KV depends on beside token ids, spelled alike on both sides.
    """
    state = hashlib.blake2b(about, digest_size=NAME_BYTES)
    made = []
    for first in range(0, len(tokens), block_tokens):
        state.update(array("q", tokens[first : first + block_tokens]).tobytes())
        made.append(state.copy().digest())
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor's blocks in memory: block n takes `parts` pieces of `length` bytes, a `stride` apart."""

    memory: memoryview
    stride: int
    length: int
    parts: int = 1

    def pieces(self, block: int) -> Iterator[memoryview]:
        """A block's bytes in this tensor."""
        for part in range(block * self.parts, (block + 1) * self.parts):
            yield self.memory[part * self.stride : part * self.stride + self.length]


class Vouchers:
    """The digests of one rank's blocks, in memory that others may read, and those of others as they arrive here."""

    def __init__(
        self, offered: memoryview, found: memoryview, regions: Sequence[Region], new: Callable[[bytes], Hash]
    ) -> None:
        """`offered` and `found` have `DIGEST_BYTES` for each block: what we vouch for, and what others did.

        `new` makes a hash of a name. It must be the same on both sides, and let go of Python's lock meanwhile.
        """
        self._offered, self._found, self._regions, self._new = offered, found, regions, new

    def vouch(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """As P: these blocks are this now. A block without a name is vouched for by nobody."""
        for at, block in enumerate(blocks):
            _put(self._offered, block, self._digest(block, names[at]) if at < len(names) else NONE)

    def forget(self, blocks: Sequence[int]) -> None:
        """As D, before others' digests are read: a read that brings nothing finds nothing."""
        for block in blocks:
            _put(self._found, block, NONE)

    def wrong(self, blocks: Sequence[int], names: Sequence[bytes]) -> tuple[int, ...]:
        """As D: which of these blocks, by their place among them, are not what was vouched for."""
        return tuple(
            at
            for at, block in enumerate(blocks)
            if at >= len(names) or self._digest(block, names[at]) != _at(self._found, block)
        )

    def _digest(self, block: int, name: bytes) -> bytes:
        state = self._new(name)
        for region in self._regions:
            for piece in region.pieces(block):
                state.update(piece)
        return state.digest(DIGEST_BYTES)


def _put(table: memoryview, block: int, digest: bytes) -> None:
    table[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] = digest


def _at(table: memoryview, block: int) -> bytes:
    return bytes(table[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES])


def runs(remote: Sequence[int], local: Sequence[int]) -> list[tuple[int, int, int]]:
    """Blocks there and here, as first ones and how many follow each other in both: what one read can bring."""
    made: list[tuple[int, int, int]] = []
    for there, here in zip(remote, local, strict=True):
        if made and made[-1][0] + made[-1][2] == there and made[-1][1] + made[-1][2] == here:
            made[-1] = (made[-1][0], made[-1][1], made[-1][2] + 1)
        else:
            made.append((there, here, 1))
    return made


class Computing:
    """Prefill legs that are being computed: which blocks each has been given, until its prompt is done."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, tuple[bytes, ...]]] = {}
        """How many tokens, and the names of its blocks."""
        self._blocks: dict[str, list[int]] = {}

    def open(self, request: str, tokens: int, names: tuple[bytes, ...]) -> None:
        """A leg has come."""
        self._prompts[request] = tokens, names

    def end(self, request: str) -> None:
        """It has ended, or is of no interest any more."""
        self._prompts.pop(request, None)
        self._blocks.pop(request, None)

    def given(self, request: str, blocks: Sequence[int], *, anew: bool) -> None:
        """A step gives it blocks: beside those it has, or `anew`: its first ones, or those after a preemption."""
        if request in self._prompts:
            self._blocks[request] = [*(() if anew else self._blocks.get(request, ())), *blocks]

    def step(self, request: str, computed: int) -> tuple[tuple[int, ...], tuple[bytes, ...]] | None:
        """After this step it has so many tokens computed. Its blocks and their names, once its prompt is done."""
        prompt = self._prompts.get(request)
        if prompt is None or computed < prompt[0]:
            return None
        blocks = tuple(self._blocks.get(request, ())[: len(prompt[1])])
        return blocks, prompt[1]
