"""A short digest of every block, for where memory or wire is not trusted: off unless an engine asks for it. Pure.

It covers the block's bytes in every tensor and its place in the prompt, so corrupt, stale and missing bytes show, and
right blocks in the wrong order too. It is no MAC: who can choose bytes can choose digests with them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence

DIGEST_BYTES = 8
"""A wrong block passes once in 2^64."""

Pieces = Callable[[int], Iterable[bytes | bytearray | memoryview]]
"""A block's bytes, tensor by tensor, always in the same order."""


def digests(blocks: Sequence[int], pieces: Pieces, first: int = 0) -> bytes:
    """The digests of these blocks, which are the prompt's from its `first` on, one after the other."""
    return b"".join(_digest(first + at, pieces(block)) for at, block in enumerate(blocks))


def wrong(offered: bytes, blocks: Sequence[int], pieces: Pieces, first: int = 0) -> tuple[int, ...]:
    """Which of these blocks, by their place in the prompt, are not what was offered.

    `offered` are the digests of the prompt's blocks from the very first on; a block without one is wrong.
    """
    found = []
    for place, block in enumerate(blocks, first):
        expected = offered[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
        if _digest(place, pieces(block)) != expected:
            found.append(place)
    return tuple(found)


def _digest(place: int, pieces: Iterable[bytes | bytearray | memoryview]) -> bytes:
    state = hashlib.blake2b(struct.pack("<Q", place), digest_size=DIGEST_BYTES)
    for piece in pieces:
        state.update(piece)
    return state.digest()
