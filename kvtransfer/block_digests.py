"""Block digests: the connector compares KV blocks with them where memory or wire is not trusted. Pure.

A producer writes the digest of each block of a prompt into a table before it answers the leg. A consumer reads the
digests together with the blocks that it pulls, and compares them with the bytes that arrived.

A digest covers a block's bytes and its *name*: what the bytes were computed for (`names`). Both sides know the
request's prompt, so names do not travel. A block fails the check if a byte is wrong, or if the block belongs to another
prompt, to another place in this prompt, or to an older owner of the same memory. A block that two prompts share has one
name and one digest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

DIGEST_BYTES: Final = 8
"""A wrong block passes the check once in 2^64."""
NAME_BYTES: Final = 16
NONE: Final = bytes(DIGEST_BYTES)
"""The digest entry of a block that the producer did not digest. A real digest is all zeros once in 2^64."""


class Hash(Protocol):
    """The interface of `hashlib`'s hash objects, and of BLAKE3's."""

    def update(self, data: memoryview, /) -> object: ...
    def digest(self, length: int, /) -> bytes: ...


def names(tokens: Sequence[int], block_tokens: int, about: bytes = b"") -> tuple[bytes, ...]:
    """The name of each block of a prompt: the prompt up to the block's last token.

    `about` is what the KV depends on besides token ids; both sides must spell it alike.
    """
    state = hashlib.blake2b(about, digest_size=NAME_BYTES)
    made = []
    for first in range(0, len(tokens), block_tokens):
        state.update(array("q", tokens[first : first + block_tokens]).tobytes())
        made.append(state.copy().digest())
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor's blocks in memory: block n has `parts` pieces of `length` bytes, each `stride` bytes after the one
    before.
    """

    memory: memoryview
    stride: int
    length: int
    parts: int = 1

    def pieces(self, block: int) -> Iterator[memoryview]:
        """The bytes of `block` in this tensor."""
        for part in range(block * self.parts, (block + 1) * self.parts):
            yield self.memory[part * self.stride : part * self.stride + self.length]


class Vouchers:
    """The block digests of one rank: its own, in memory that consumers may read, and those it has read from
    producers.
    """

    def __init__(
        self, offered: memoryview, found: memoryview, regions: Sequence[Region], new: Callable[[bytes], Hash]
    ) -> None:
        """`offered` and `found` have `DIGEST_BYTES` for each block: the digests of our blocks, and those read from a
        producer.

        `new` makes a hash of a name. Both sides must use the same function, and it must release the GIL while it runs.
        """
        self._offered, self._found, self._regions, self._new = offered, found, regions, new

    def vouch(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """As producer: write the digests of these blocks. A block without a name gets no digest."""
        for at, block in enumerate(blocks):
            _put(self._offered, block, self._digest(block, names[at]) if at < len(names) else NONE)

    def forget(self, blocks: Sequence[int]) -> None:
        """As consumer, before the producer's digests are read: clear the entries, so that a read that brings nothing
        finds none.
        """
        for block in blocks:
            _put(self._found, block, NONE)

    def wrong(self, blocks: Sequence[int], names: Sequence[bytes]) -> tuple[int, ...]:
        """As consumer: the positions of those blocks whose bytes do not match their digests."""
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
    """Runs that one read can bring: (first block there, first block here, length), contiguous on both sides."""
    made: list[tuple[int, int, int]] = []
    for there, here in zip(remote, local, strict=True):
        if made and made[-1][0] + made[-1][2] == there and made[-1][1] + made[-1][2] == here:
            made[-1] = (made[-1][0], made[-1][1], made[-1][2] + 1)
        else:
            made.append((there, here, 1))
    return made


class Computing:
    """Prefill legs that are being computed: the blocks of each, until its prompt is computed."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, tuple[bytes, ...]]] = {}
        """The prompt's number of tokens, and the names of its blocks."""
        self._blocks: dict[str, list[int]] = {}

    def begin(self, request: str, tokens: int, names: tuple[bytes, ...]) -> None:
        """A prefill leg has arrived."""
        self._prompts[request] = tokens, names

    def end(self, request: str) -> None:
        """The leg has ended, or its digests are no longer needed."""
        self._prompts.pop(request, None)
        self._blocks.pop(request, None)

    def given(self, request: str, blocks: Sequence[int], *, anew: bool) -> None:
        """A step gives the request these blocks: in addition to its former ones or, if `anew`, as its first or after a
        preemption.
        """
        if request in self._prompts:
            self._blocks[request] = [*(() if anew else self._blocks.get(request, ())), *blocks]

    def step(self, request: str, computed: int) -> tuple[tuple[int, ...], tuple[bytes, ...]] | None:
        """After this step the request has `computed` tokens. Returns its blocks and their names once its prompt is
        computed.
        """
        prompt = self._prompts.get(request)
        if prompt is None or computed < prompt[0]:
            return None
        blocks = tuple(self._blocks.get(request, ())[: len(prompt[1])])
        return blocks, prompt[1]
