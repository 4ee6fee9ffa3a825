"""What moves bytes between two endpoints: the one face that NIXL (`kvtransfer.nixl`) and loopback share.

Memory is described by *grids*: equal pieces at equal distances, one grid for each KV tensor, or for each slice of it
that two differently sharded engines share. Lists of grids are prepared once for each peer; a transfer then names pieces
by their place in the list, so that a prompt of thousands of blocks costs thousands of small numbers and no more.

What callers may rely on, and what not:

- `look` tells the truth about a flight: once it says DONE or FAILED, the flight touches no memory any more. Until then
  it does, whatever else was called: no carrier can take back what is posted. NIXL 1.5 over TCP goes on writing into the
  reader's memory after its transfer was released, its peer forgotten and its memory deregistered, each of which it
  answers with success. So `release` refuses a flight that is still under way.
- A notification may be lost, come twice, or come late; it is never cut. Who sent it, the carrier does not vouch for.
- No method raises anything but `CarrierFailed`, whatever a peer's bytes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

Prepared = NewType("Prepared", int)
"""A list of grids, as the carrier knows it."""

Flight = NewType("Flight", int)
"""One transfer that was posted."""


class CarrierFailed(Exception):
    """The carrier could not do it; nothing was begun and nothing is kept of it."""


class Memory(StrEnum):
    """Where memory is."""

    DRAM = "dram"
    VRAM = "vram"


class Way(StrEnum):
    """Which way a transfer goes, seen from who posts it."""

    READ = "read"
    WRITE = "write"


class Progress(StrEnum):
    """What became of a transfer so far."""

    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Grid:
    """`count` pieces of `piece` bytes, the first at `address`, each `stride` bytes after the one before."""

    address: int
    piece: int
    stride: int
    count: int
    device: int = 0
    """The GPU's number; 0 for host memory."""


@dataclass(frozen=True, slots=True)
class Region:
    """A span of memory to be registered."""

    address: int
    length: int
    device: int = 0
    memory: Memory = Memory.DRAM


@dataclass(slots=True)
class Traffic:
    """What a carrier has moved since its start. Seconds are of flights, so they overlap."""

    posted: int = 0
    done: int = 0
    failed: int = 0
    bytes: int = 0
    wire_s: float = 0.0
    """From posting until the carrier saw the end, as the carrier itself measured it."""
    notes_out: int = 0
    notes_in: int = 0
    notes_failed: int = 0
    refused_metadata: int = 0
    releases_refused: int = 0
    """Calls to `release` for flights still under way: a bug of the caller's, and harmless."""


class Carrier(Protocol):
    """One agent that moves bytes. Not safe for use from several threads at once."""

    name: str
    """Unique in the fleet, and for each life of an instance."""

    ends_writes: bool
    """Whether `forget` keeps the peer's writes out of our memory from then on."""

    traffic: Traffic

    def register(self, regions: Sequence[Region]) -> None:
        """Let transfers touch this memory. All of an agent's memory, before `metadata` is asked for."""

    def metadata(self) -> bytes:
        """What a peer needs to reach our memory."""

    def introduce(self, metadata: bytes) -> str:
        """Learn a peer from its metadata; its name."""

    def forget(self, peer: str) -> None:
        """Unlearn a peer. Only where no flight to it is under way. Unknown peers are no fault."""

    def prepare(self, peer: str | None, grids: Sequence[Grid], memory: Memory = Memory.DRAM) -> Prepared:
        """Prepare a list of grids, ours (None) or a peer's. Its pieces are numbered through, grid by grid."""

    def drop(self, prepared: Prepared) -> None:
        """Unprepare. Not while a flight uses it."""

    def post(
        self, way: Way, ours: Prepared, pieces: Sequence[int], theirs: Prepared, their_pieces: Sequence[int]
    ) -> Flight:
        """Begin moving pieces, each to or from its counterpart. May move them all before it returns."""

    def look(self, flight: Flight) -> Progress:
        """How far it is."""

    def release(self, flight: Flight) -> bool:
        """Forget a flight that has ended. False, and nothing changes, while it is under way."""

    def notify(self, peer: str, note: bytes) -> bool:
        """Send a few bytes, best effort. False: they will certainly not come."""

    def notes(self) -> list[tuple[str, bytes]]:
        """What came since the last call, with the name that the sender gives itself."""

    def close(self) -> None:
        """Give everything back, flights under way included: memory is not touched once this returns."""
