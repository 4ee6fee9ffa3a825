"""Hold marks: sixteen bytes in a slot of the producer's memory say whether a hold still stands. Pure.

The producer writes a hold's mark into a slot before it computes the first token of the prompt, and clears the slot
before the blocks can belong to another request. The consumer learns slot and mark from the hold's transfer fields,
reads the blocks, and *then* reads the slot. If the mark is still there, the blocks belonged to the hold until the last
of them was read. No code of the producer has to run for this check, and no misread bytes look like a mark.

A mark is a keyed digest: a program that has not seen the producer's answer cannot know it. So the mark also proves, in
the consumer's notice of having read, that the hold was given to the sender of the notice.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SLOT_BYTES: Final = 16
SLOTS: Final = 16_384
"""Slots of an engine: one for each prefill leg that waits, runs or is held. 256 KiB. If all are taken, D computes the
prompts."""
SLOTS_MAX: Final = 1 << 20
"""The largest table (16 MiB). A slot index from a peer is checked against this before it becomes an address."""
CLEAR: Final = bytes(SLOT_BYTES)
"""The content of a slot without a hold. It is never a mark: no digest of sixteen zero bytes will occur."""

FIELD: Final = "baton_slot"
"""Baton's key among the transfer fields of P's answer: ``[index, mark in hexadecimal]``."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot of a hold, and the mark in it."""

    index: int
    mark: bytes

    @property
    def proof(self) -> str:
        """The mark as text, as transfer fields and notices spell it."""
        return self.mark.hex()

    def field(self) -> list[Any]:
        """Slot and mark as JSON, for the transfer fields."""
        return [self.index, self.proof]


def slot_in(fields: Mapping[str, Any]) -> Slot | None:
    """The slot that transfer fields name; None if they name none, or none that is readable. Never raises."""
    value = fields.get(FIELD)
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    index, proof = value
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < SLOTS_MAX:
        return None
    mark = mark_of(proof)
    return None if mark is None else Slot(index, mark)


def mark_of(proof: object) -> bytes | None:
    """The mark that a text spells; None for any other spelling than the canonical one."""
    if not isinstance(proof, str) or len(proof) != 2 * SLOT_BYTES or not proof.isascii():
        return None
    try:
        mark = bytes.fromhex(proof)
    except ValueError:
        return None
    return mark if mark.hex() == proof and mark != CLEAR else None


class Slots:
    """Hands out the slots of one table, the longest unused first, each time with a new mark."""

    def __init__(self, count: int, key: bytes) -> None:
        """`key`: random bytes, new for each start of the engine, 16 to 64 of them.

        Raises:
            ValueError: the table's size or the key's length is out of range.
        """
        if not 0 < count <= SLOTS_MAX or not 16 <= len(key) <= 64:
            raise ValueError(f"a table has 1 to {SLOTS_MAX} slots, and a key 16 to 64 bytes")
        self._count = count
        self._fresh = 0
        """This slot and those after it were never taken; nothing is stored for them."""
        self._back: deque[int] = deque()
        """Slots that were given back, in that order."""
        self._key = key
        self._made = 0

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self._count - self._fresh + len(self._back)

    def take(self, owner: str) -> Slot | None:
        """A slot for a hold. None if all are taken: then no mark can confirm the hold, and no consumer may use its
        blocks.
        """
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
        """Make the slot available again: its next mark overwrites this one before its next owner does anything else."""
        self._back.append(slot.index)
