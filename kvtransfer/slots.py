"""Slots: sixteen bytes of the producer's memory that say whether a hold still stands. Pure.

The producer writes a hold's mark into a slot before it computes the first token of the prompt, and clears it before the
blocks can belong to anybody else. The consumer is told slot and mark in the hold's transfer fields, reads the blocks,
and *then* reads the slot: the mark still there means that the blocks were the hold's until after the last of them was
read. Nobody on the producer has to be awake for it, and nothing that the consumer misreads looks like a mark.

A mark is a keyed digest: who has not seen the producer's answer cannot know it, so it also proves, in the consumer's
notice of having read, that the hold was given to its sender.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SLOT_BYTES: Final = 16
SLOTS: Final = 16_384
"""Slots of an engine: its prefill legs that wait, run or are held. 256 KiB; with all taken, prompts are computed on D.
"""
SLOTS_MAX: Final = 1 << 20
"""No table is larger (16 MiB): an index from a peer is checked against it before it becomes an address."""
CLEAR: Final = bytes(SLOT_BYTES)
"""What stands in a slot that vouches for nothing. No mark: a digest of sixteen zero bytes is not going to happen."""

FIELD: Final = "baton_slot"
"""Our key among the transfer fields of P's answer: ``[index, mark in hexadecimal]``."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a hold's mark stands, and which."""

    index: int
    mark: bytes

    @property
    def proof(self) -> str:
        """The mark as it stands in transfer fields and notices."""
        return self.mark.hex()

    def field(self) -> list[Any]:
        """As it stands in transfer fields: JSON."""
        return [self.index, self.proof]


def slot_in(fields: Mapping[str, Any]) -> Slot | None:
    """The slot that transfer fields name; None where there is none, or none that can be read. Never raises."""
    value = fields.get(FIELD)
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    index, proof = value
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < SLOTS_MAX:
        return None
    mark = mark_of(proof)
    return None if mark is None else Slot(index, mark)


def mark_of(proof: object) -> bytes | None:
    """The mark that a text spells, in the one spelling there is."""
    if not isinstance(proof, str) or len(proof) != 2 * SLOT_BYTES or not proof.isascii():
        return None
    try:
        mark = bytes.fromhex(proof)
    except ValueError:
        return None
    return mark if mark.hex() == proof and mark != CLEAR else None


class Slots:
    """Hands the slots of one table out, the longest unused first, each time with another mark."""

    def __init__(self, count: int, key: bytes) -> None:
        """`key`: random, of this life of the engine, 16 to 64 bytes.

        Raises:
            ValueError: a table that cannot be.
        """
        if not 0 < count <= SLOTS_MAX or not 16 <= len(key) <= 64:
            raise ValueError(f"a table has 1 to {SLOTS_MAX} slots, and a key 16 to 64 bytes")
        self._count = count
        self._fresh = 0
        """This one and those after it were never taken: nothing is kept for them."""
        self._back: deque[int] = deque()
        """Those that were given back, in that order."""
        self._key = key
        self._made = 0

    @property
    def free(self) -> int:
        """How many are left."""
        return self._count - self._fresh + len(self._back)

    def take(self, owner: str) -> Slot | None:
        """A slot for a hold; None when all are taken: then nothing vouches for it, and nobody may use its blocks."""
        if self._fresh < self._count:
            index, self._fresh = self._fresh, self._fresh + 1
        elif self._back:
            index = self._back.popleft()
        else:
            return None
        self._made += 1
        said = self._made.to_bytes(8, "big") + owner.encode("utf-8", "surrogatepass")
        return Slot(index, hashlib.blake2b(said, key=self._key, digest_size=SLOT_BYTES).digest())

    def give_back(self, slot: Slot) -> None:
        """It may be taken again: its next mark overwrites this one before anything else of its next owner happens."""
        self._back.append(slot.index)
