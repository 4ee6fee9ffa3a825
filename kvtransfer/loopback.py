"""A carrier in memory, on virtual time: for tests, and for the simulator where it wants real bytes. Pure.

`Loopbacks` is the wire between any number of carriers of one process. A seeded script delays, loses, doubles and
reorders what is sent over it; bytes of a transfer are copied a few at a time between its beginning and its end, each
range at a moment of its own, so that memory which is freed and used again in between shows. Nothing moves but in
`advance`.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtransfer.carrier import (
    CarrierFailed,
    Flight,
    Grid,
    Memory,
    Prepared,
    Progress,
    Region,
    Traffic,
    Way,
)

Chance = Callable[[], float]
"""The next number of a seeded generator, from 0 to below 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How bad the wire is. Shares are of notifications or of transfers."""

    delay_s: float = 0.0001
    """Shortest delay of anything."""
    jitter_s: float = 0.0
    """Added at random, so that things overtake each other."""
    lost: float = 0.0
    doubled: float = 0.0
    failing: float = 0.0
    """Transfers that end badly, with some of their bytes moved."""
    bytes_per_s: float = 10e9
    copies: int = 4
    """In how many pieces a transfer's bytes are copied, at different moments."""


@dataclass(slots=True)
class _Flight:
    way: Way
    ours: list[tuple[int, int]]
    theirs: list[tuple[int, int]]
    peer: Loopback
    keys: int
    progress: Progress = Progress.UNDER_WAY
    began: float = 0.0
    bytes: int = 0


@dataclass(slots=True)
class _Prepared:
    peer: str | None
    life: int
    keys: int
    grids: tuple[Grid, ...]


class Loopbacks:
    """The wire. `chance` decides what the weather allows."""

    def __init__(self, chance: Chance, weather: Weather | None = None) -> None:
        self.chance: Final = chance
        self.weather = weather or Weather()
        self.now = 0.0
        self.stopped: set[str] = set()
        """Carriers that answer nothing and whose memory nobody can read: transfers with them stay under way."""
        self._carriers: dict[str, Loopback] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lives = itertools.count(1)

    def open(self, name: str, memory: bytearray | memoryview, address: int = 0) -> Loopback:
        """A carrier whose memory begins at `address`. A name again is another life: the former is dead."""
        old = self._carriers.get(name)
        if old is not None:
            old.close()
        carrier = Loopback(self, name, next(self._lives), memoryview(memory), address)
        self._carriers[name] = carrier
        return carrier

    def find(self, name: str, life: int) -> Loopback | None:
        """One life of a carrier, while it lives."""
        found = self._carriers.get(name)
        return found if found is not None and found.life == life and not found.closed else None

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Do this when time has come so far."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), do))

    def advance(self, now: float) -> None:
        """Let everything happen that is due by `now`, in order."""
        while self._agenda and self._agenda[0][0] <= now:
            when, _, do = heapq.heappop(self._agenda)
            self.now = max(self.now, when)
            do()
        self.now = max(self.now, now)

    def next_wakeup(self) -> float | None:
        """When the next thing happens."""
        return self._agenda[0][0] if self._agenda else None


class Loopback:
    """See `Carrier`. Made by `Loopbacks.open`."""

    ends_writes = True

    def __init__(self, wire: Loopbacks, name: str, life: int, memory: memoryview, address: int) -> None:
        self.name = name
        self.life = life
        self.traffic = Traffic()
        self.closed = False
        self._wire = wire
        self._memory = memory
        self._address = address
        self._regions: list[Region] = []
        self._peers: dict[str, tuple[int, int]] = {}
        """Life of each peer, and the generation of its memory's keys that we have."""
        self._generation = 1
        self._revoked: dict[str, int] = {}
        """Who was forgotten, and with keys up to which generation it may not write here any more."""
        self._prepared: dict[Prepared, _Prepared] = {}
        self._flights: dict[Flight, _Flight] = {}
        self._inbox: list[tuple[str, bytes]] = []
        self._numbers = itertools.count(1)

    # --- memory and peers --------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            if not 0 <= region.address - self._address <= len(self._memory) - region.length:
                raise CarrierFailed(f"{region} is not in the memory of {self.name}")
        self._regions += regions

    def metadata(self) -> bytes:
        return json.dumps({"loopback": self.name, "life": self.life, "keys": self._generation}).encode()

    def introduce(self, metadata: bytes) -> str:
        try:
            said = json.loads(metadata)
            name, life, keys = said["loopback"], said["life"], said["keys"]
        except (ValueError, TypeError, KeyError, RecursionError):
            self.traffic.refused_metadata += 1
            raise CarrierFailed("no metadata of a loopback") from None
        if not isinstance(name, str) or not isinstance(life, int) or not isinstance(keys, int):
            self.traffic.refused_metadata += 1
            raise CarrierFailed("no metadata of a loopback")
        self._peers[name] = life, keys
        return name

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._revoked[peer] = self._generation
        self._generation += 1

    def admits(self, writer: str, keys: int) -> bool:
        """Whether keys of this generation still let this writer in: it was not forgotten since it got them."""
        return keys > self._revoked.get(writer, 0)

    def prepare(self, peer: str | None, grids: Sequence[Grid], memory: Memory = Memory.DRAM) -> Prepared:
        if peer is not None and peer not in self._peers:
            raise CarrierFailed(f"{peer} was not introduced")
        if not grids:
            raise CarrierFailed("a list of no grids")
        number = Prepared(next(self._numbers))
        life, keys = self._peers[peer] if peer is not None else (0, 0)
        self._prepared[number] = _Prepared(peer, life, keys, tuple(grids))
        return number

    def drop(self, prepared: Prepared) -> None:
        self._prepared.pop(prepared, None)

    # --- transfers ---------------------------------------------------------------------------------------------------

    def post(
        self, way: Way, ours: Prepared, pieces: Sequence[int], theirs: Prepared, their_pieces: Sequence[int]
    ) -> Flight:
        here, there = self._prepared.get(ours), self._prepared.get(theirs)
        if self.closed or here is None or there is None or there.peer is None or len(pieces) != len(their_pieces):
            raise CarrierFailed("nothing that could be posted")
        if self._peers.get(there.peer) != (there.life, there.keys):
            raise CarrierFailed(f"{there.peer} was forgotten")
        mine = [_range(here.grids, piece) for piece in pieces]
        others = [_range(there.grids, piece) for piece in their_pieces]
        if not mine or any(a[1] != b[1] for a, b in zip(mine, others, strict=True)):
            raise CarrierFailed("pieces that are not the same on both sides")
        peer = self._wire.find(there.peer, there.life)
        number = Flight(next(self._numbers))
        self.traffic.posted += 1
        if peer is None:
            self._flights[number] = _Flight(way, mine, others, self, there.keys, Progress.FAILED)
            self.traffic.failed += 1
            return number
        flight = _Flight(way, mine, others, peer, there.keys, began=self._wire.now, bytes=sum(size for _, size in mine))
        self._flights[number] = flight
        self._schedule(flight)
        return number

    def _schedule(self, flight: _Flight) -> None:
        """Copies at moments of their own, then the end."""
        weather, chance = self._wire.weather, self._wire.chance
        lasts = weather.delay_s + weather.jitter_s * chance() + flight.bytes / weather.bytes_per_s
        failing = chance() < weather.failing
        pieces = max(1, min(weather.copies, len(flight.ours)))
        moments = sorted(lasts * chance() for _ in range(pieces))
        for number, moment in enumerate(moments):
            if failing and number:
                break
            some = range(number, len(flight.ours), pieces)
            self._wire.later(moment, lambda some=some: self._copy(flight, some))  # type: ignore[misc]
        self._wire.later(lasts, lambda: self._end(flight, ok=not failing))

    def _copy(self, flight: _Flight, some: range) -> None:
        if flight.progress is not Progress.UNDER_WAY or not self._reaches(flight):
            return
        for number in some:
            (here, size), (there, _) = flight.ours[number], flight.theirs[number]
            mine, theirs = self.window(here, size), flight.peer.window(there, size)
            if mine is None or theirs is None:
                continue
            if flight.way is Way.READ:
                mine[:] = theirs
            else:
                theirs[:] = mine

    def _end(self, flight: _Flight, *, ok: bool) -> None:
        if flight.progress is not Progress.UNDER_WAY:
            return
        if flight.peer.name in self._wire.stopped and not flight.peer.closed:
            self._wire.later(self._wire.weather.delay_s * 10, lambda: self._end(flight, ok=ok))
            return
        ok = ok and self._reaches(flight)
        flight.progress = Progress.DONE if ok else Progress.FAILED
        self.traffic.wire_s += self._wire.now - flight.began
        if ok:
            self.traffic.done += 1
            self.traffic.bytes += flight.bytes
        else:
            self.traffic.failed += 1

    def _reaches(self, flight: _Flight) -> bool:
        """Whether bytes can go: both live, and who is written to knows who writes."""
        peer = flight.peer
        if self.closed or peer.closed or peer.name in self._wire.stopped:
            return False
        return flight.way is Way.READ or peer.admits(self.name, flight.keys)

    def window(self, address: int, size: int) -> memoryview | None:
        """Registered memory; None where it is not."""
        for region in self._regions:
            if region.address <= address and address + size <= region.address + region.length:
                at = address - self._address
                return self._memory[at : at + size]
        return None

    def look(self, flight: Flight) -> Progress:
        found = self._flights.get(flight)
        return found.progress if found is not None else Progress.FAILED

    def release(self, flight: Flight) -> bool:
        found = self._flights.get(flight)
        if found is not None and found.progress is Progress.UNDER_WAY:
            self.traffic.releases_refused += 1
            return False
        self._flights.pop(flight, None)
        return True

    # --- notifications -----------------------------------------------------------------------------------------------

    def notify(self, peer: str, note: bytes) -> bool:
        life, _ = self._peers.get(peer, (None, 0))
        if self.closed or life is None:
            self.traffic.notes_failed += 1
            return False
        self.traffic.notes_out += 1
        weather, chance = self._wire.weather, self._wire.chance
        for _ in range((chance() >= weather.lost) + (chance() < weather.doubled)):
            delay = weather.delay_s + weather.jitter_s * chance()
            self._wire.later(delay, lambda: self._arrive(peer, life, note))
        return True

    def _arrive(self, peer: str, life: int, note: bytes) -> None:
        found = self._wire.find(peer, life)
        if found is not None and not self.closed:
            found._inbox.append((self.name, bytes(note)))  # noqa: SLF001 - of the same class

    def notes(self) -> list[tuple[str, bytes]]:
        if self.name in self._wire.stopped:
            return []
        came, self._inbox = self._inbox, []
        self.traffic.notes_in += len(came)
        return came

    def close(self) -> None:
        self.closed = True
        self._flights.clear()
        self._prepared.clear()
        self._peers.clear()

    @property
    def open_things(self) -> int:
        """Flights and prepared lists that were not given back."""
        return len(self._flights) + len(self._prepared)


def _range(grids: Sequence[Grid], piece: int) -> tuple[int, int]:
    for grid in grids:
        if 0 <= piece < grid.count:
            return grid.address + piece * grid.stride, grid.piece
        piece -= grid.count
    raise CarrierFailed("a piece that is in no grid")
