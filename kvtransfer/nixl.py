"""A carrier on NIXL (1.x): RDMA, NVLink, shared memory or TCP, whatever UCX finds between two agents. A shell.

Built on NIXL's bindings and not on its Python class, which hard-codes a progress thread that spins: an idle agent costs
half a core to a whole one that way, and 2 % of one with a thread that looks every millisecond (measured on a 2-core
machine). Without any thread a read over TCP waits for the next call that its *target* makes.

What was measured of NIXL 1.5.1, and what this module does about it:

- Nothing takes a posted transfer back. `releaseXferReq`, `invalidateRemoteMD` and `deregisterMem` answer "success" for
  one that is under way, and the bytes of a peer that was only slow are written into the memory afterwards all the same.
  So a flight is released only when its state says that it has ended, a peer is forgotten only when no flight to it is
  under way, and a state is asked for only while the peer is known: afterwards NIXL answers with an error at once.
- Destroying the agent does end everything (`close`).
- A peer that was killed shows as an error of its flights within milliseconds over TCP.
- Two processes of one machine copy while they post: `post` returns when the bytes are there, and no sooner.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nixl
import numpy as np

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

logger = logging.getLogger("baton.nixl")

PROGRESS_DELAY_US = 1_000
"""How often the progress thread looks, in microseconds."""
BACKEND = "UCX"
METADATA_BYTES_MAX = 1 << 19
NOTES_MAX = 100_000
"""Notifications taken from NIXL in one call beyond this are dropped: a peer must not fill our memory with them."""

_bindings: Any = nixl._bindings  # noqa: SLF001 - the Python class above it has no way to set the delay
_REFUSALS: tuple[type[Exception], ...] = (
    *(each for each in vars(_bindings).values() if isinstance(each, type) and issubclass(each, Exception)),
    CarrierFailed,
    RuntimeError,  # the binding's own: what it could not convert or look up
    TypeError,
    ValueError,
    LookupError,
)
"""All that a call of the bindings may raise."""
_SEGMENTS = {Memory.DRAM: _bindings.DRAM_SEG, Memory.VRAM: _bindings.VRAM_SEG}
_WAYS = {Way.READ: _bindings.NIXL_READ, Way.WRITE: _bindings.NIXL_WRITE}


@dataclass(slots=True)
class _Prepared:
    handle: int
    peer: str | None
    pieces: int
    sizes: tuple[tuple[int, int], ...]
    """Of each grid, how many pieces and how many bytes each."""
    users: int = 0


@dataclass(slots=True)
class _Flight:
    handle: int
    peer: str
    ours: Prepared
    theirs: Prepared
    bytes: int
    began: float
    progress: Progress = Progress.UNDER_WAY


class Nixl:
    """See `Carrier`. `name` must be unique among all agents that ever meet, lives included."""

    ends_writes = False
    """What a peer has posted goes on; and over TCP its writes are not even checked against our registrations."""

    def __init__(
        self, name: str, *, progress_delay_us: int = PROGRESS_DELAY_US, backend_options: dict[str, str] | None = None
    ) -> None:
        """Open an agent.

        Raises:
            CarrierFailed: NIXL or UCX does not work here; the message says what it says.
        """
        self.name = name
        self.traffic = Traffic()
        config = _bindings.nixlAgentConfig()
        config.useProgThread = progress_delay_us > 0
        config.pthrDelay = progress_delay_us
        config.captureTelemetry = True  # the time on the wire, apart from waiting
        config.syncMode = _bindings.NIXL_THREAD_SYNC_NONE
        try:
            self._agent: Any = _bindings.nixlAgent(name, config)
            self._backend: int = self._agent.createBackend(BACKEND, backend_options or {})
        except _REFUSALS as error:
            raise CarrierFailed(f"no NIXL agent: {_words(error)}") from None
        self._registered: list[Any] = []
        self._peers: set[str] = set()
        self._prepared: dict[Prepared, _Prepared] = {}
        self._flights: dict[Flight, _Flight] = {}
        self._numbers = itertools.count(1)

    # --- memory and peers --------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> None:
        for memory in Memory:
            rows = [(each.address, each.length, each.device, "") for each in regions if each.memory is memory]
            if not rows:
                continue
            try:
                described = _bindings.nixlRegDList(_SEGMENTS[memory], rows)
                self._open_agent().registerMem(described, [self._backend])
            except _REFUSALS as error:
                raise CarrierFailed(f"memory could not be registered: {_words(error)}") from None
            self._registered.append(described)

    def metadata(self) -> bytes:
        try:
            found: bytes = self._open_agent().getLocalMD()
        except _REFUSALS as error:
            raise CarrierFailed(f"no metadata: {_words(error)}") from None
        return found

    def introduce(self, metadata: bytes) -> str:
        """See `Carrier`. Give it only bytes that an agent of ours made (`kvtransfer.introduction`): UCX reads them."""
        if not 0 < len(metadata) <= METADATA_BYTES_MAX:
            self.traffic.refused_metadata += 1
            raise CarrierFailed("metadata of an impossible size")
        try:
            said: bytes | str = self._open_agent().loadRemoteMD(metadata)
        except _REFUSALS as error:
            self.traffic.refused_metadata += 1
            raise CarrierFailed(f"metadata was refused: {_words(error)}") from None
        peer = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
        self._peers.add(peer)
        return peer

    def forget(self, peer: str) -> None:
        """See `Carrier`.

        Raises:
            CarrierFailed: a flight to it is under way.
        """
        if any(each.peer == peer and each.progress is Progress.UNDER_WAY for each in self._flights.values()):
            raise CarrierFailed(f"a transfer with {peer} is under way, and cannot be taken back")
        if peer not in self._peers:
            return
        for number in [number for number, each in self._prepared.items() if each.peer == peer]:
            self._drop(number)
        self._peers.discard(peer)
        try:
            self._open_agent().invalidateRemoteMD(peer)
        except _REFUSALS as error:  # it is gone in any case
            logger.debug("%s was not known to NIXL any more: %s", peer, _words(error))

    def prepare(self, peer: str | None, grids: Sequence[Grid], memory: Memory = Memory.DRAM) -> Prepared:
        if not grids or (peer is not None and peer not in self._peers):
            raise CarrierFailed(f"nothing to prepare for {peer}")
        rows = np.array([(g.address, g.piece, g.device, g.stride, g.count) for g in grids], dtype=np.uint64)
        whose = _bindings.NIXL_INIT_AGENT if peer is None else peer
        try:
            handle: int = self._open_agent().prepXferDlist(whose, _SEGMENTS[memory], rows, [self._backend])
        except _REFUSALS as error:
            raise CarrierFailed(f"memory could not be described: {_words(error)}") from None
        number = Prepared(next(self._numbers))
        sizes = tuple((grid.count, grid.piece) for grid in grids)
        self._prepared[number] = _Prepared(handle, peer, sum(count for count, _ in sizes), sizes)
        return number

    def drop(self, prepared: Prepared) -> None:
        found = self._prepared.get(prepared)
        if found is not None and not found.users:
            self._drop(prepared)

    def _drop(self, number: Prepared) -> None:
        try:
            self._open_agent().releasedDlistH(self._prepared.pop(number).handle)
        except _REFUSALS as error:  # a list is only a description
            logger.warning("a prepared list was not given back: %s", _words(error))

    # --- transfers ---------------------------------------------------------------------------------------------------

    def post(
        self, way: Way, ours: Prepared, pieces: Sequence[int], theirs: Prepared, their_pieces: Sequence[int]
    ) -> Flight:
        here, there = self._prepared.get(ours), self._prepared.get(theirs)
        if here is None or there is None or there.peer is None:
            raise CarrierFailed("memory that was not prepared")
        mine, others = _indices(pieces, here), _indices(their_pieces, there)
        if not len(mine) or len(mine) != len(others):
            raise CarrierFailed("nothing, or not as many pieces on both sides")
        agent = self._open_agent()
        try:
            handle: int = agent.makeXferReq(
                _WAYS[way], here.handle, mine, there.handle, others, "", [self._backend], False
            )
        except _REFUSALS as error:
            raise CarrierFailed(f"a transfer was refused: {_words(error)}") from None
        flight = _Flight(handle, there.peer, ours, theirs, _bytes(mine, here), time.monotonic())
        number = Flight(next(self._numbers))
        self._flights[number] = flight
        here.users += 1
        there.users += 1
        self.traffic.posted += 1
        try:
            self._settle(flight, agent.postXferReq(handle, ""))
        except _REFUSALS as error:  # a part of it may be on the wire all the same: its state tells
            logger.debug("posting to %s failed: %s", there.peer, _words(error))
            self.look(number)
        return number

    def look(self, flight: Flight) -> Progress:
        found = self._flights.get(flight)
        if found is None:
            return Progress.FAILED
        if found.progress is Progress.UNDER_WAY:
            try:
                self._settle(found, self._open_agent().getXferStatus(found.handle))
            except _REFUSALS as error:  # the binding raises what UCX says of a transfer that is over
                logger.debug("a transfer with %s failed: %s", found.peer, _words(error))
                self._settle(found, None)
        return found.progress

    def _settle(self, flight: _Flight, status: Any) -> None:
        if status == _bindings.NIXL_IN_PROG:
            return
        flight.progress = Progress.DONE if status == _bindings.NIXL_SUCCESS else Progress.FAILED
        self.traffic.wire_s += self._wire_s(flight)
        if flight.progress is Progress.DONE:
            self.traffic.done += 1
            self.traffic.bytes += flight.bytes
        else:
            self.traffic.failed += 1

    def _wire_s(self, flight: _Flight) -> float:
        """As NIXL timed it; as we did, where it has no word for it."""
        try:
            micros = self._agent.getXferTelemetry(flight.handle).xferDuration
            return float(micros) / 1e6
        except _REFUSALS:  # it has none of a transfer that failed
            return time.monotonic() - flight.began

    def release(self, flight: Flight) -> bool:
        found = self._flights.get(flight)
        if found is None:
            return True
        if found.progress is Progress.UNDER_WAY:
            self.traffic.releases_refused += 1
            return False
        del self._flights[flight]
        for number in found.ours, found.theirs:
            if number in self._prepared:
                self._prepared[number].users -= 1
        try:
            self._open_agent().releaseXferReq(found.handle)
        except _REFUSALS as error:  # it has ended, so nothing but its handle is lost
            logger.warning("a transfer's handle was not given back: %s", _words(error))
        return True

    # --- notifications -----------------------------------------------------------------------------------------------

    def notify(self, peer: str, note: bytes) -> bool:
        try:
            self._open_agent().genNotif(peer, note)  # raises for peers that were not introduced
        except _REFUSALS as error:  # best effort
            logger.debug("a note to %s was not sent: %s", peer, _words(error))
            self.traffic.notes_failed += 1
            return False
        self.traffic.notes_out += 1
        return True

    def notes(self) -> list[tuple[str, bytes]]:
        try:
            came: dict[str, list[bytes]] = self._open_agent().getNotifs({}, [self._backend])
        except _REFUSALS as error:  # the next call may do better
            logger.warning("notifications could not be read: %s", _words(error))
            return []
        found = [(peer, bytes(note)) for peer, notes in came.items() for note in notes]
        self.traffic.notes_in += len(found)
        return found[:NOTES_MAX]

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Carrier`. Destroys the agent: what is under way ends with it."""
        if self._agent is None:
            return
        under_way = [number for number in self._flights if self.look(number) is Progress.UNDER_WAY]
        for number in [number for number in self._flights if number not in under_way]:
            self.release(number)
        if under_way:
            logger.warning("%s is closed with %d transfers under way", self.name, len(under_way))
        else:
            for peer in tuple(self._peers):
                self.forget(peer)
            for prepared in tuple(self._prepared):
                self._drop(prepared)
            for described in self._registered:
                try:
                    self._agent.deregisterMem(described, [self._backend])
                except _REFUSALS as error:  # the agent goes with it
                    logger.warning("memory was not deregistered: %s", _words(error))
        self._agent = None
        self._flights.clear()
        self._prepared.clear()
        self._registered.clear()
        self._peers.clear()

    @property
    def open_things(self) -> int:
        """Flights and prepared lists that were not given back."""
        return len(self._flights) + len(self._prepared)

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise CarrierFailed(f"{self.name} is closed")
        return self._agent


def _indices(pieces: Sequence[int], of: _Prepared) -> Any:
    try:
        found = np.asarray(pieces, dtype=np.int32)
    except (ValueError, TypeError, OverflowError):
        raise CarrierFailed("pieces are numbered") from None
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < of.pieces:
        raise CarrierFailed("a piece that is in no grid")
    return found


def _bytes(pieces: Any, of: _Prepared) -> int:
    if len({size for _, size in of.sizes}) == 1:
        return len(pieces) * of.sizes[0][1]
    ends = np.cumsum([count for count, _ in of.sizes])
    return int(np.array([size for _, size in of.sizes])[np.searchsorted(ends, pieces, side="right")].sum())


def _words(error: BaseException) -> str:
    return f"{type(error).__name__.removeprefix('nixl')}: {error}" if str(error) else type(error).__name__
