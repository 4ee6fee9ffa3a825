"""Early legs: decode requests that arrive before their prompt is computed. Pure.

An early leg names the instance that computes its prompt, and the name of the hold that is to come
(`cluster.wire.EARLY`). It waits in the engine's queue and has no blocks. The rules (`EARLY_ROWS`):

1. it becomes an ordinary pull when its own producer, and no other engine, says that the hold is there;
2. it is computed here if that producer is not known, is lost, or is set aside, and after `WAIT_S_MAX`: no leg waits
   for ever, even if its router is gone. vLLM also computes a leg that wants its prompt's log probabilities, whatever
   its connector says. While one pull tests a producer that was set aside, the leg waits. A leg that
   is computed here is not pinned: if its answer begins with another token than the one of P that the client has, the
   router sends another decode leg (`router.request.reply`);
3. while it waits, no block is reserved for it: a leg that ends is only removed from the list. Where reading early pays
   (`decode.early_reads`), a leg gets its blocks while it waits, and reads those of P that are complete. If such a leg
   ends, or loses its producer, its blocks are free once all its reads have ended;
4. if its producer makes the hold while the prompt is computed here, the producer is told that the hold is not wanted;
5. a leg that its producer tells *late*, after an answer that says that no engine was told, may be replaced by its
   router with a leg that pulls the same hold. So its ranks give the hold back to nobody. The scheduler does so when the
   leg is scheduled: its blocks are then in this engine's prefix cache, and its router's leg finds them there. If the
   leg ends before, the hold is left to the router, which has its name: the router lets another leg pull it, or
   releases it.

The consumer cannot tell whether the producer is still at work. The router can: if the producer fails, it ends the leg
and chooses other instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtransfer.early_notes import Ready
from kvtransfer.rows import Table, TransitionRow

WAIT_S_MAX: Final = 120.0
"""The longest wait of a leg, in seconds. A router gives a leg up much earlier: after half of the client's time."""
ASK_AGAIN_S: Final = 1.0
"""Seconds until a question is asked again: any message can be lost."""
LEGS_MAX: Final = 4096
"""Early legs of one engine; more are computed here."""


class EarlyState(StrEnum):
    """The state of an early leg."""

    WAITING = "waiting"
    READING = "reading"
    """As `WAITING`, but it has blocks, and reads those that its producer has computed."""
    READY = "ready"
    """The producer holds the prompt: the request is a pull from here on (`decode.table.WANTS`)."""
    LATE = "late"
    """As `READY`, but the leg may be replaced by one that pulls the same hold: it is not given back yet."""
    LOCAL = "local"
    """This instance computes its prompt."""
    DECLINED = "declined"
    """This instance computes its prompt, and has told the producer that it does not want the hold."""
    OVER = "over"


class EarlyCause(StrEnum):
    """What moves an early leg to another state."""

    RESERVED = "reserved"
    """The engine has given it blocks, to be filled while its producer computes."""
    TOLD = "told"
    """Its producer says that the hold is there."""
    TOLD_LATE = "told late"
    """As `TOLD`, after the producer's answer, which says that no engine was told."""
    SCHEDULED = "scheduled"
    """The engine computes the leg's first step: its pull is over, or the engine does not wait for one."""
    PRODUCER_LOST = "producer lost"
    """Its producer is not introduced any more, cannot be asked, or is set aside."""
    TIME_UP = "time up"
    FINISHED = "finished"
    """The request is over: aborted, or answered."""


class EarlyAct(StrEnum):
    """The acts on the way."""

    PULL = "pull"
    """The hold's fields become the request's."""
    COMPUTE = "compute"
    ABANDON = "abandon"
    """Begin no more reads. The blocks are given back when those under way have ended."""
    GIVE_BACK = "give back"
    """Tell the producer, with the mark as proof, that it need not hold (as `decode.table.PullAct`)."""


EARLY_ROWS: Table[EarlyState, EarlyCause, EarlyAct] = {
    EarlyState.WAITING: {
        EarlyCause.RESERVED: TransitionRow(EarlyState.READING),
        EarlyCause.TOLD: TransitionRow(EarlyState.READY, (EarlyAct.PULL,)),
        EarlyCause.TOLD_LATE: TransitionRow(EarlyState.LATE, (EarlyAct.PULL,)),
        EarlyCause.PRODUCER_LOST: TransitionRow(EarlyState.LOCAL, (EarlyAct.COMPUTE,)),
        EarlyCause.TIME_UP: TransitionRow(EarlyState.LOCAL, (EarlyAct.COMPUTE,)),
        EarlyCause.SCHEDULED: TransitionRow(EarlyState.LOCAL, (EarlyAct.COMPUTE,)),
        EarlyCause.FINISHED: TransitionRow(EarlyState.OVER),
    },
    EarlyState.READING: {
        EarlyCause.TOLD: TransitionRow(EarlyState.READY, (EarlyAct.PULL,)),
        EarlyCause.TOLD_LATE: TransitionRow(EarlyState.LATE, (EarlyAct.PULL,)),
        EarlyCause.PRODUCER_LOST: TransitionRow(EarlyState.LOCAL, (EarlyAct.COMPUTE, EarlyAct.ABANDON)),
        EarlyCause.TIME_UP: TransitionRow(EarlyState.LOCAL, (EarlyAct.COMPUTE, EarlyAct.ABANDON)),
        EarlyCause.FINISHED: TransitionRow(EarlyState.OVER, (EarlyAct.ABANDON,)),
    },
    EarlyState.READY: {EarlyCause.FINISHED: TransitionRow(EarlyState.OVER)},
    EarlyState.LATE: {
        EarlyCause.SCHEDULED: TransitionRow(EarlyState.READY, (EarlyAct.GIVE_BACK,)),
        EarlyCause.FINISHED: TransitionRow(EarlyState.OVER),
    },
    EarlyState.LOCAL: {
        EarlyCause.TOLD: TransitionRow(EarlyState.DECLINED, (EarlyAct.GIVE_BACK,)),
        EarlyCause.TOLD_LATE: TransitionRow(EarlyState.DECLINED, (EarlyAct.GIVE_BACK,)),
        EarlyCause.FINISHED: TransitionRow(EarlyState.OVER),
    },
    EarlyState.DECLINED: {EarlyCause.FINISHED: TransitionRow(EarlyState.OVER)},
}
"""The rows. A pair without a row changes nothing: what comes twice or late is counted."""

_WAITS: Final = frozenset({EarlyState.WAITING, EarlyState.READING})

_UNTOLD: Final = frozenset(state for state, rows in EARLY_ROWS.items() if EarlyCause.TOLD in rows)
"""The states in which a leg's producer may still say that the hold is there."""


@dataclass(slots=True)
class _Leg:
    name: str
    engine: str
    until: float
    ask_at: float
    state: EarlyState = EarlyState.WAITING
    ready: Ready | None = None


class EarlyLegs:
    """The early legs of one engine, by its request ids. `now` in seconds times `unit`."""

    def __init__(self, unit: float = 1.0) -> None:
        """`unit`: ticks of the caller's clock in a second."""
        self._unit: Final = unit
        self._legs: Final[dict[str, _Leg]] = {}
        self._named: Final[dict[str, list[str]]] = {}
        self._given_back: list[tuple[str, Ready]] = []
        self._abandoned: list[str] = []
        self.waiting = 0
        """The number of legs that wait."""
        self.untold = 0
        """The number of legs that may still hear that the hold is there: legs that wait, and legs that are computed
        here and must give the hold back. A leg without a known producer is not counted."""
        self.counts: Final[Counter[str]] = Counter()

    def __contains__(self, request: str) -> bool:
        return request in self._legs

    def opened(self, request: str, name: str, engine: str, now: float) -> None:
        """An early leg has arrived. `engine`: the present life of its producer; empty: none that can be asked."""
        if request in self._legs:
            return
        leg = _Leg(name, engine, now + WAIT_S_MAX * self._unit, now)
        lost = not engine or len(self._legs) >= LEGS_MAX
        self._legs[request] = leg
        self._named.setdefault(name, []).append(request)
        self.waiting += 1
        self.untold += bool(engine)
        self.counts["early legs"] += 1
        if lost:
            self._move(request, leg, EarlyCause.PRODUCER_LOST)

    def due(self, now: float) -> list[tuple[str, str]]:
        """The questions to ask now: the producer's engine id, and the name of the hold."""
        asks = []
        for request, leg in list(self._legs.items()) if self.waiting else ():
            if leg.state is EarlyState.READING and now >= leg.until:  # no engine asks whether it waits
                self._move(request, leg, EarlyCause.TIME_UP)
            if leg.state in _WAITS and now >= leg.ask_at:
                leg.ask_at = now + ASK_AGAIN_S * self._unit
                asks.append((leg.engine, leg.name))
        return asks

    def told(self, engine: str, ready: Ready) -> list[str]:
        """An engine says that a hold is there: returns the legs that may pull it now."""
        moved = []
        for request in list(self._named.get(ready.name, ())):
            leg = self._legs[request]
            own = leg.engine == engine and ready.fields.get("remote_engine_id") == engine
            if own and self._move(request, leg, EarlyCause.TOLD_LATE if ready.late else EarlyCause.TOLD, ready):
                moved.append(request)
        self.counts["early notices ignored"] += not moved
        return [request for request in moved if self._legs[request].ready is not None]

    def waiting_for(self, engine: str, name: str) -> list[str]:
        """The legs that wait for this hold of this engine."""
        legs = [(request, self._legs[request]) for request in self._named.get(name, ())]
        return [request for request, leg in legs if leg.state in _WAITS and leg.engine == engine]

    def engine(self, request: str) -> str:
        """The producer of a leg; empty: it has none, or is no early leg."""
        leg = self._legs.get(request)
        return "" if leg is None else leg.engine

    def reserved(self, request: str) -> bool:
        """The engine has given a request blocks. Returns whether it is an early leg that waits."""
        leg = self._legs.get(request)
        return leg is not None and self._move(request, leg, EarlyCause.RESERVED)

    def take_abandoned(self) -> list[str]:
        """The legs that are not to read any more, once each."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def keeps(self, request: str) -> bool:
        """Whether the request's ranks must not give its hold back."""
        leg = self._legs.get(request)
        return leg is not None and leg.state is EarlyState.LATE

    def scheduled(self, request: str) -> None:
        """The engine computes the request's first step."""
        leg = self._legs.get(request)
        if leg is not None:
            self._move(request, leg, EarlyCause.SCHEDULED, leg.ready)

    def take_given_back(self) -> list[tuple[str, Ready]]:
        """The requests whose producers are to be told that the hold is not wanted any more, once each: they are
        computed here although their hold is there now, or they were told late and have their blocks.
        """
        given_back, self._given_back = self._given_back, []
        return given_back

    def waits(self, request: str, now: float) -> bool:
        """Whether the request is an early leg that still waits for its producer's notice."""
        leg = self._legs.get(request)
        if leg is None:
            return False
        if leg.state is EarlyState.WAITING and now >= leg.until:
            self._move(request, leg, EarlyCause.TIME_UP)
        return leg.state is EarlyState.WAITING

    def ready(self, request: str) -> Ready | None:
        """The producer's notice about the hold; None: there is no notice yet, or the request is no early leg."""
        leg = self._legs.get(request)
        return None if leg is None else leg.ready

    def lost(self, is_lost: Callable[[str], bool]) -> None:
        """The legs of producers that are lost (gone, or set aside) are computed here."""
        for request, leg in list(self._legs.items()) if self.waiting else ():
            if leg.state in _WAITS and is_lost(leg.engine):
                self._move(request, leg, EarlyCause.PRODUCER_LOST)

    def finished(self, request: str) -> None:
        """The request is over."""
        leg = self._legs.get(request)
        if leg is not None:
            self._move(request, leg, EarlyCause.FINISHED)

    def _move(self, request: str, leg: _Leg, cause: EarlyCause, ready: Ready | None = None) -> bool:
        row = EARLY_ROWS[leg.state].get(cause)
        if row is None:
            return False
        self.waiting += (row.state in _WAITS) - (leg.state in _WAITS)
        if leg.engine:
            self.untold += (row.state in _UNTOLD) - (leg.state in _UNTOLD)
        leg.state = row.state
        if EarlyAct.ABANDON in row.acts:
            self._abandoned.append(request)
        if EarlyAct.COMPUTE in row.acts:
            self.counts["early legs computed here"] += 1
        if EarlyAct.PULL in row.acts:
            self.counts["early legs told"] += 1
            leg.ready = ready
        if EarlyAct.GIVE_BACK in row.acts and ready is not None:
            self.counts["early holds declined"] += row.state is EarlyState.DECLINED
            self._given_back.append((request, ready))
        if row.state is EarlyState.OVER:
            del self._legs[request]
            same = self._named[leg.name]
            same.remove(request)
            if not same:
                del self._named[leg.name]
        return True
