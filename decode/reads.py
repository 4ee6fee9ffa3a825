"""Follows the reads of pulled blocks to their end, then reads the slot to see whether the hold outlived the reads.

Safety rests on the order. A slot's read is posted only after every block has arrived; the producer clears the slot
before it gives the blocks to another request. So if the mark still stands, it stood when the last block had been read,
and the blocks were the hold's. In every other case the blocks are not used: their request computes its prompt itself.

Only after that read does the consumer tell the producer that its blocks were read. vLLM's own notice goes out with the
read itself, and would let the producer free the blocks and clear the slot before the consumer has looked.

The caller brings everything external: the transport (`NixlAgent`, as NIXL's Python agent), and memory for the contents
of slots. One thread calls `step` again and again; another adds, takes, and asks whether a request is `under_way`. What
passes between the two is appended to a deque or put into a dictionary as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from decode.table import BECAUSE, READINGS, PullAct, PullCause, Reading
from kvtransfer.hold_marks import CLEAR, SLOT_BYTES

_BROKEN: Final = frozenset({BECAUSE[Reading.SPOILT], BECAUSE[Reading.UNSEEN]})
NOT_TOLD = "nixlNotAllowedError"
"""NIXL raises this for a transfer whose peer's metadata was removed; it does not mean that the transfer has ended. A
posted read cannot be taken back (releasing it, forgetting its peer and giving back its memory all succeed, and the
bytes still arrive: `python -m bench.nixl_cut`), so its blocks are never freed. A visible leak is better than another
request's text."""


class NixlAgent(Protocol):
    """The methods needed of a NIXL agent; any of them may raise. `check_xfer_state`: ``PROC`` while the transfer is
    under way, ``DONE`` once all bytes have arrived, else a failure. `transfer` posts a prepared transfer.
    """

    def check_xfer_state(self, handle: Any) -> str: ...
    def get_xfer_telemetry(self, handle: Any) -> Any: ...
    def release_xfer_handle(self, handle: Any) -> None: ...
    def send_notif(self, agent_name: str, notif_msg: bytes) -> None: ...
    def transfer(self, handle: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class RankSource:
    """One rank of the producer that blocks are read from."""

    agent: str
    slot_address: int
    note: bytes
    """The notice that tells this rank of the finished read."""


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a pull ended. No transfer of it is under way any more."""

    because: str
    """Why the blocks must not be used; empty: they may be."""
    telemetry: tuple[Any, ...] = ()
    notes_lost: int = 0

    @property
    def good(self) -> bool:
        """Whether the blocks are the hold's."""
        return not self.because

    @property
    def broken(self) -> bool:
        """Whether the transport failed, and not the hold."""
        return self.because in _BROKEN


class PullAtRank:
    """One pull at one rank, following the rows of `decode.table.READINGS`. It performs no transfer itself."""

    __slots__ = ("acts", "because", "mark", "state")

    def __init__(self, mark: bytes) -> None:
        """`mark`: what has to stand in the hold's slot after the last read."""
        self.mark = mark
        self.state = Reading.READING
        self.because = ""
        """Why the blocks must not be used; empty: no objection so far."""
        self.acts: tuple[PullAct, ...] = ()
        """The acts due since the last cause that changed the state."""

    def tell(self, cause: PullCause, because: str = "") -> None:
        """Take a cause. `because`: what is wrong with the blocks."""
        rows = READINGS.get(self.state)
        row = None if rows is None else rows.get(cause)
        if row is not None:
            self.state, self.acts = row
            self.because = because or BECAUSE.get(row.state, self.because)

    def saw(self, said: bytes) -> None:
        """Take the content of one rank's slot of the hold."""
        if said != self.mark:
            self.tell(PullCause.MARK_GONE)

    def compared(self, because: str) -> None:
        """Take the digests' result: why the blocks are not the held ones; empty: they are, or no digests are kept."""
        self.tell(PullCause.WRONG if because else PullCause.RIGHT, because)


@dataclass(slots=True)
class _Posted:
    """A pull and the transfers posted for it."""

    pull: PullAtRank
    handles: list[Any]
    sources: Sequence[RankSource]
    beside: list[Any]
    """Reads of other memory than blocks. They are followed to their end like the others."""
    wrong: Callable[[], str] | None
    """Why the bytes that arrived are not the held ones; empty: they are."""
    tells: bool = True
    """Whether the producer is notified at the end."""
    looks: list[tuple[Any, int]] | None = None
    """Reads of slots, each with the place its content arrives at; None: there was no room for them yet."""
    telemetry: list[Any] = field(default_factory=list)


class Landings:
    """Places in registered memory for the contents of slots."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self._memory = memory
        self._address = address
        self._free = list(range(len(memory) // SLOT_BYTES))

    def take(self, count: int) -> list[int] | None:
        """Cleared places; None: too few are free."""
        if len(self._free) < count:
            return None
        places = [self._free.pop() for _ in range(count)]
        for place in places:
            self._memory[place * SLOT_BYTES : (place + 1) * SLOT_BYTES] = CLEAR
        return places

    def address(self, place: int) -> int:
        """The memory address of a place."""
        return self._address + place * SLOT_BYTES

    def said(self, place: int) -> bytes:
        """The content of a place: a copy of `SLOT_BYTES` bytes."""
        return bytes(self._memory[place * SLOT_BYTES : (place + 1) * SLOT_BYTES])

    def give_back(self, place: int) -> None:
        """The place is free: no transfer writes into it any more."""
        self._free.append(place)


def try_to_read(agent: NixlAgent, look: Callable[[], Any], wait: Callable[[], None], times: int) -> bool:
    """Whether one slot of a producer can be read, polled at most `times` times with a `wait` between. Never raises.

    A read that does not end may still write: use its place for no other read.
    """
    try:
        handle = look()
        agent.transfer(handle)
        for _ in range(times):
            state = agent.check_xfer_state(handle)
            if state != "PROC":
                agent.release_xfer_handle(handle)
                return state == "DONE"
            wait()
    except Exception:  # noqa: BLE001 - NIXL raises classes of its own, some from C++
        return False
    return False


class Reads:
    """All pulls of one rank that are under way, by request."""

    def __init__(self, agent: NixlAgent, landings: Landings, look: Callable[[str, int, int], Any]) -> None:
        """`look` prepares the read of a slot: of an agent, from an address there, to an address here. It may raise."""
        self._agent = agent
        self._landings = landings
        self._look = look
        self._arrived: deque[tuple[str, _Posted]] = deque()
        self._pulls: dict[str, _Posted] = {}
        """Used by `step` alone."""
        self._outcomes: dict[str, PullOutcome] = {}
        self.ended_total = 0
        """The number of pulls that have ended since the start. `step` counts it."""
        self._known: set[str] = set()
        """Used by `add` and `take` alone."""

    def add(
        self,
        request: str,
        handles: Sequence[Any],
        sources: Sequence[RankSource],
        mark: bytes,
        *,
        beside: Sequence[Any] = (),
        wrong: Callable[[], str] | None = None,
        tells: bool = True,
    ) -> None:
        """Reads were posted. Each is followed to its end, whatever becomes of the request.

        `beside` are reads of other memory than blocks. `wrong` is called last, once the hold is confirmed: it returns
        why the blocks must not be used, or an empty text. It runs in the thread of `step`, and may be slow. If not
        `tells`, the producer gets no notice at the end: the engine's scheduler gives the hold back (`decode.early`).
        """
        assert request not in self._known, request
        self._known.add(request)
        posted = _Posted(PullAtRank(mark), list(handles), sources, list(beside), wrong, tells)
        self._arrived.append((request, posted))

    def under_way(self, request: str) -> bool:
        """Whether the pull was added and not yet taken."""
        return request in self._known

    def take(self, request: str) -> PullOutcome | None:
        """The outcome of a pull that has ended, once; None: it has not ended, or was taken."""
        outcome = self._outcomes.pop(request, None)
        if outcome is not None:
            self._known.discard(request)
        return outcome

    @property
    def ended(self) -> bool:
        """Whether a pull has ended and was not taken. May be asked from any thread."""
        return bool(self._outcomes)

    def __len__(self) -> int:
        return len(self._arrived) + len(self._pulls)

    def step(self) -> int:
        """Look at every pull once. Returns the number of pulls left; while it is above 0, call again soon."""
        while self._arrived:
            request, posted = self._arrived.popleft()
            self._pulls[request] = posted
        for request, posted in list(self._pulls.items()):
            if self._advance(posted):
                self._outcomes[request] = self._end(posted)
                self.ended_total += 1
                del self._pulls[request]
        return len(self)

    def _advance(self, posted: _Posted) -> bool:
        """Whether no transfer of the pull is under way any more, and none is left to begin."""
        posted.handles = [handle for handle in posted.handles if not self._ended(posted, handle, told=True)]
        posted.beside = [handle for handle in posted.beside if not self._ended(posted, handle, told=False)]
        if posted.handles or posted.beside:
            return False
        pull = posted.pull
        pull.tell(PullCause.ALL_READ)
        if pull.state is Reading.LANDED and posted.looks is None and not self._begin_to_look(posted):
            return False
        posted.looks = [each for each in posted.looks or () if not self._looked(posted, *each)]
        return not posted.looks

    def _ended(self, posted: _Posted, handle: Any, *, told: bool) -> bool:
        """Whether a read has ended and its handle is released. A handle that cannot be released may still write."""
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                return False
            if state == "DONE":
                posted.telemetry += [self._agent.get_xfer_telemetry(handle)] if told else []
            else:
                posted.pull.tell(PullCause.READ_FAILED)
        except Exception as error:  # noqa: BLE001 - NIXL raises classes of its own, some from C++
            posted.pull.tell(PullCause.READ_FAILED)
            if type(error).__name__ == NOT_TOLD:
                return False
        return self._released(handle)

    def _released(self, handle: Any) -> bool:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:  # noqa: BLE001 - as above
            return False
        return True

    def _begin_to_look(self, posted: _Posted) -> bool:
        """Post the reads of the slots. False: there is no room for their contents yet."""
        places = self._landings.take(len(posted.sources))
        if places is None:
            return False
        posted.looks = []
        for source, place in zip(posted.sources, places, strict=True):
            try:
                handle = self._look(source.agent, source.slot_address, self._landings.address(place))
            except Exception:  # noqa: BLE001 - as above
                self._landings.give_back(place)
                posted.pull.tell(PullCause.LOOK_FAILED)
                continue
            posted.looks.append((handle, place))
            try:
                self._agent.transfer(handle)
            except Exception:  # noqa: BLE001 - as above
                posted.pull.tell(PullCause.LOOK_FAILED)
        return True

    def _looked(self, posted: _Posted, handle: Any, place: int) -> bool:
        """Whether a slot's read has ended; if so, its content is taken."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception:  # noqa: BLE001 - as above
            state = "ERR"
        if state == "PROC":
            return False
        said = self._landings.said(place)
        if not self._released(handle):
            posted.pull.tell(PullCause.LOOK_FAILED)
            return False  # it may still write into the place
        self._landings.give_back(place)
        if state == "DONE":
            posted.pull.saw(said)
        else:
            posted.pull.tell(PullCause.LOOK_FAILED)
        return True

    def _end(self, posted: _Posted) -> PullOutcome:
        """No transfer of the pull is under way: say whether its blocks may be used, and notify the producer."""
        pull = posted.pull
        pull.tell(PullCause.ALL_SEEN)
        if pull.state is Reading.CONFIRMED:
            pull.compared("" if posted.wrong is None else _checked(posted.wrong))
        told = posted.sources if posted.tells and PullAct.GIVE_BACK in pull.acts else ()
        lost = sum(not self._told(source) for source in told)
        return PullOutcome(pull.because, tuple(posted.telemetry), lost)

    def _told(self, source: RankSource) -> bool:
        try:
            self._agent.send_notif(source.agent, notif_msg=source.note)
        except Exception:  # noqa: BLE001 - as above
            return False
        return True


def _checked(wrong: Callable[[], str]) -> str:
    try:
        return wrong()
    except Exception as error:  # noqa: BLE001 - what could not be checked is not used, and the thread goes on
        return f"the blocks could not be checked ({type(error).__name__})"
