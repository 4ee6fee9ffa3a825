"""Seals of the notes that routers send each other through the registry, made with the fleet's ticket keys. Pure.

Any program that reaches the registry can send notes there. A sealed note is one line, ``KEY.MAC`` for each key of its
sender, and the note. A seal proves that a holder of the fleet's keys wrote the note. It does not prove that the note is
new: the note's number (`router.core.load_notes.LoadNote`), which only grows, shows that.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from typing import Final

from kvtransfer.ticket import SigningKey

SEAL_BYTES_MAX: Final = 1024
"""The longest line of keys and MACs: `kvtransfer.keys.KEYS_MAX` keys need less. Of a longer line no more is read."""

_DOMAIN: Final = b"baton-router-note\x00"
"""Separates these MACs from MACs made with the same key for another purpose."""


def sealed(note: bytes, keys: Collection[SigningKey]) -> bytes:
    """The note with its seal; without keys the seal is empty and proves nothing."""
    return " ".join(f"{key.id}.{_mac(key, note)}" for key in keys).encode() + b"\n" + note


def unsealed(payload: bytes, keys: Collection[SigningKey]) -> tuple[bytes, bool]:
    """The note in a sealed one, and whether one of these keys proves it. Never raises."""
    seal = payload[:SEAL_BYTES_MAX].partition(b"\n")[0]
    note = payload[len(seal) + 1 :]
    said = dict(word.partition(".")[::2] for word in seal.decode(errors="replace").split(" "))
    proven = False
    for key in keys:
        if key.id in said:
            proven |= hmac.compare_digest(_mac(key, note).encode(), said[key.id].encode())
    return note, proven


def _mac(key: SigningKey, note: bytes) -> str:
    return hmac.digest(key.secret, _DOMAIN + note, hashlib.sha256).hex()
