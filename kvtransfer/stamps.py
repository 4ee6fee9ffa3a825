"""Confirmation without the producer's attention: a stamp that stands exactly as long as its hold. Pure.

A consumer may use what it has read only if the hold outlived the read. Asking the producer costs an answer, and a
producer that computes a prompt answers between two steps: the decode instance would wait for a foreign forward pass.
So the producer keeps a small table in registered memory, 16 bytes for each hold, and the consumer looks itself:

- The producer writes a hold's stamp before it offers the hold, and wipes it *before* the hold's blocks are freed.
- The consumer posts its read of the stamp only *after* all reads of the blocks have ended.
- The stamp it finds is the one that was offered: then it had not been wiped when the read passed it, so the blocks had
  not been freed, and all reads of blocks had ended before that. Anything else, a torn one too, confirms nothing.

A stamp is a keyed digest (BLAKE2b under a secret of this life) of the transfer and a number that no two holds share:
no other hold, no other life, and nobody without the offer can show the same 16 bytes. docs/handoff.md has the argument.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from cluster.ids import TransferId

STAMP_BYTES = 16
SECRET_BYTES_MIN = 16
WIPED = bytes(STAMP_BYTES)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What an offer says about its stamp: which slot of the producer's table, and what stands there."""

    slot: int
    value: bytes

    def text(self) -> str:
        """For transfer fields: ``SLOT.HEX``."""
        return f"{self.slot}.{self.value.hex()}"


def read_stamp(text: object) -> Stamp | None:
    """A stamp from transfer fields; None for whatever is none. Never raises."""
    if not isinstance(text, str) or not 2 * STAMP_BYTES < len(text) <= 2 * STAMP_BYTES + 10 or not text.isascii():
        return None
    slot, dot, value = text.partition(".")
    if not (dot and slot.isdigit() and len(value) == 2 * STAMP_BYTES and str(int(slot)) == slot):
        return None
    try:
        found = bytes.fromhex(value)
    except ValueError:
        return None
    return Stamp(int(slot), found) if len(found) == STAMP_BYTES and found.hex() == value and found != WIPED else None


def stands(expected: Stamp, found: bytes | bytearray | memoryview) -> bool:
    """Whether the slot, as it was read, says that the hold still stood."""
    return expected.value != WIPED and bytes(found) == expected.value


class StampTable:
    """The producer's table, in `memory` that consumers read one-sidedly.

    `offer` and `wipe` have written to that memory before they return. A slot holds the stamp of one hold, or zeros. A
    table that is full gives no stamp, and consumers ask by message.
    """

    def __init__(self, memory: bytearray | memoryview, secret: bytes) -> None:
        """`secret` is random, new for each life.

        Raises:
            ValueError: memory for no slot, or a secret that is too short.
        """
        if len(memory) < STAMP_BYTES or len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"a table needs {STAMP_BYTES} bytes and a secret of {SECRET_BYTES_MIN}")
        self._memory = memory
        self._secret = secret[:64]
        self._serial = 0
        self._free = list(reversed(range(len(memory) // STAMP_BYTES)))
        self._slots: dict[TransferId, int] = {}
        for slot in self._free:
            self._write(slot, WIPED)

    def __len__(self) -> int:
        """Holds that have a stamp. Without holds it must read zero."""
        return len(self._slots)

    def offer(self, id_: TransferId) -> Stamp | None:
        """Stamp a hold, before it is offered; None where the table is full.

        Raises:
            ValueError: the hold has a stamp.
        """
        if id_ in self._slots:
            raise ValueError(f"{id_} has a stamp")
        if not self._free:
            return None
        slot = self._free.pop()
        self._serial += 1
        data = struct.pack("<QQQ", self._serial, id_.attempt & (1 << 64) - 1, id_.producer_epoch & (1 << 64) - 1)
        name = id_.request.encode("utf-8", "surrogatepass")
        value = hashlib.blake2b(data + name, key=self._secret, digest_size=STAMP_BYTES).digest()
        self._write(slot, value)
        self._slots[id_] = slot
        return Stamp(slot, value)

    def wipe(self, id_: TransferId) -> bool:
        """End a hold's stamp, before its blocks are freed. False: it had none."""
        slot = self._slots.pop(id_, None)
        if slot is None:
            return False
        self._write(slot, WIPED)
        self._free.append(slot)
        return True

    def _write(self, slot: int, value: bytes) -> None:
        self._memory[slot * STAMP_BYTES : (slot + 1) * STAMP_BYTES] = value
