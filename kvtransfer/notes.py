"""The notices that a consumer's connector sends to a producer's. Pure; the parser is total.

They are vLLM's own (`nixl/pull_worker.py`) with a proof added: ``REQUEST:CONSUMERS:PROOF`` once blocks were read or are
not wanted, ``HB:REQUEST,REQUEST`` while they are wanted. Without the proof, any program that reaches the transport
could free blocks that are being read. It could also end the engine, by freeing the blocks of a request that still runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtransfer.hold_marks import mark_of

NOTE_BYTES_MAX: Final = 1 << 20
"""A heartbeat for 10,000 requests has 500,000 bytes."""
CONSUMERS_MAX: Final = 1024
"""The most ranks of one consumer that may read from one rank of a producer: at most the consumer's tensor
parallelism."""

_BEAT: Final = "HB:"


@dataclass(frozen=True, slots=True)
class ReadNote:
    """One of `consumers` ranks has read the request's blocks, or does not want them."""

    request: str
    consumers: int
    mark: bytes | None
    """The hold's mark, as the consumer claims it."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A consumer still wants these requests' blocks."""

    requests: tuple[str, ...]


def with_proof(note: bytes, proof: str) -> bytes:
    """vLLM's notice of having read, with the proof that the hold was given to this consumer."""
    return note + b":" + proof.encode()


def parse(raw: object) -> ReadNote | Beat | None:
    """The content of a notice; None: an unknown notice. Never raises."""
    if not isinstance(raw, bytes) or len(raw) > NOTE_BYTES_MAX:
        return None
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    if text.startswith(_BEAT):
        return Beat(tuple(name for name in text[len(_BEAT) :].split(",") if name))
    request, _, consumers = text.rpartition(":")
    mark = mark_of(consumers)
    if mark is not None:
        request, _, consumers = request.rpartition(":")
    if not request or not consumers.isascii() or not consumers.isdecimal() or len(consumers) > 4:
        return None
    return ReadNote(request, int(consumers), mark) if 0 < int(consumers) <= CONSUMERS_MAX else None
