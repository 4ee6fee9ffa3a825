"""The rules of a handoff: one joint table for the side that holds blocks and the side that fills its own.

Rule 1: everything that decides which state follows which lives in this file. Rule 2: it does not know which role an
instance plays; one that prefills and decodes keeps entries of both sides. Rule 3: blocks leave the ledger where an
entry enters one of `ENDS`, once, and nowhere else (`kvtransfer.book.Book._end`).

Why the table is safe. Transfers are one-sided: the producer does not see a read begin, the consumer does not see the
producer free, and what is posted cannot be taken back. Hence two halves:

- the *producer* frees a hold only when it is given back, given up, or its lease has ended;
- the *consumer* uses pulled blocks only in CONFIRMED, which is reached from LANDED alone, by the producer's word that
  the hold still stood after the read had ended. A read that overlapped with a free is thereby never used.

And where a transfer may still write into memory (a consumer's own read, a producer's push), that memory leaves
CANCELLING, QUARANTINED or DRAINING only when the transfer is known to be over: it ended, the peer says it stopped, or
the link was cut.

A (state, cause) pair without a row is a no-op for what a peer says, and an `ImpossibleMove` for what our own engine or
endpoint says (`OWN_CAUSES`). `docs/ledger.md` has the drawing, made from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Side(StrEnum):
    """Which end of a handoff an entry is."""

    PRODUCER = "producer"
    """Holds blocks that it computed."""
    CONSUMER = "consumer"
    """Reserves blocks to be filled."""


class State(StrEnum):
    """Where an entry is. WRITING and QUARANTINED exist on both sides."""

    # the producer's hold
    FILLING = "filling"
    """The prompt is being computed; the engine still owns the blocks."""
    OFFERED = "offered"
    """Complete, under its lease, nobody reads it that we know of."""
    READING = "reading"
    """A consumer has claimed it: one-sided reads may be under way."""
    STREAMING = "streaming"
    """Push: written to the consumer layer by layer while it is being computed."""
    WRITTEN = "written"
    """Push: all writes ended well before the engine reported the prompt as computed."""
    DRAINING = "draining"
    """Push that nobody wants any more: writes under way cannot be undone, so neither side may free yet."""
    RELEASED = "released"

    # both
    WRITING = "writing"
    """Push: the producer writes into the consumer's blocks."""
    QUARANTINED = "quarantined"
    """Unwanted, and yet the peer may still touch the blocks."""

    # the consumer's reservation
    WAITING = "waiting"
    """Known, but the engine has no free blocks for it yet; heartbeats keep the hold alive."""
    ALLOCATED = "allocated"
    """It has blocks and the read is ordered; the endpoint has not posted it yet (handshake, pacing)."""
    PULLING = "pulling"
    """Reads are under way."""
    LANDED = "landed"
    """All bytes are here. Not usable: the producer may have freed them meanwhile."""
    CONFIRMED = "confirmed"
    """The hold outlived the read: the blocks are the request's."""
    RESERVED = "reserved"
    """Push: blocks are set aside and the producer was told where they are."""
    CANCELLING = "cancelling"
    """Unwanted, and its reads are still under way."""
    DONE = "done"
    """Push: the producer says that everything was written: the blocks are the request's."""
    FAILED = "failed"
    """Nothing usable came; the request computes its prompt here."""
    CLOSED = "closed"


ENDS = frozenset({State.RELEASED, State.CONFIRMED, State.DONE, State.FAILED, State.CLOSED})
"""Entering one of these ends the entry and its ownership of blocks."""

USABLE = frozenset({State.CONFIRMED, State.DONE})
"""The ends at which the blocks go to the request; at all others they are freed."""


class Cause(StrEnum):
    """What moves an entry on: an event, once the ledger has looked at whom and what exactly it is about."""

    # our own engine or endpoint says
    FILLED = "filled"
    WRITES_ENDED = "writes ended"
    WRITES_FAILED = "writes failed"
    ALLOCATED = "allocated"
    READ_STARTED = "read started"
    PART_FAILED = "part failed"
    """One part of a read failed while others are under way."""
    READ_ENDED = "read ended"
    READ_FAILED = "read failed"
    """All parts have ended, one at least badly."""
    # the consumer says
    CLAIMED = "claimed"
    REGISTERED = "registered"
    ASKED = "asked"
    HEARTBEAT = "heartbeat"
    GIVEN_BACK = "given back"
    WITHDRAWN = "withdrawn"
    # the producer says
    REFUSED = "refused"
    ALIVE = "alive"
    GONE = "gone"
    BEGUN = "begun"
    WRITTEN = "written"
    NOT_WRITTEN = "not written"
    # anybody
    ABORTED = "aborted"
    """The router or the own engine gives the handoff up."""
    TIME_UP = "time up"
    """The state's limit; for a filled hold the end of its lease."""
    AGAIN = "again"
    """Time to repeat what the state repeats."""
    PEER_LOST = "peer lost"
    """The other side does not answer, or runs again under a new epoch. It may still touch memory."""
    LINK_ENDED = "link ended"
    """Certain: no transfer to or from that peer is, or will be, under way on the old link."""


OWN_CAUSES = frozenset(
    {
        Cause.FILLED,
        Cause.WRITES_ENDED,
        Cause.WRITES_FAILED,
        Cause.ALLOCATED,
        Cause.READ_STARTED,
        Cause.PART_FAILED,
        Cause.READ_ENDED,
        Cause.READ_FAILED,
    }
)
"""Said by our own process. Where they have no row they are a bug of ours."""


class Act(StrEnum):
    """What a row has done besides changing the state. Freeing is no act: it belongs to `ENDS`."""

    # on the clock
    START_LEASE = "start lease"
    EXTEND_LEASE = "extend lease"
    # orders to our own engine or endpoint
    OFFER = "offer"
    """Leg 1 may be answered with this hold."""
    POST_READ = "post read"
    POST_WRITE = "post write"
    RECOMPUTE = "recompute"
    CUT_LINK = "cut link"
    REPORT = "report"
    # words to the peer
    CLAIM = "claim"
    ASK = "ask to confirm"
    SAY_ALIVE = "say alive"
    BEAT = "heartbeat"
    GIVE_BACK = "give back"
    REGISTER = "register"
    WITHDRAW = "withdraw"
    SAY_BEGUN = "say begun"
    SAY_WRITTEN = "say written"
    SAY_NOT_WRITTEN = "say not written"


class Row(NamedTuple):
    """What follows: the next state, and what is done on the way, in this order."""

    state: State
    acts: tuple[Act, ...] = ()


class ImpossibleMove(RuntimeError):
    """Our own engine or endpoint reported what cannot have happened. Nothing was changed."""


_PRODUCER = {
    State.FILLING: {
        Cause.FILLED: Row(State.OFFERED, (Act.START_LEASE, Act.OFFER)),
        Cause.REGISTERED: Row(State.STREAMING, (Act.POST_WRITE, Act.SAY_BEGUN)),
        Cause.GIVEN_BACK: Row(State.RELEASED),
        Cause.WITHDRAWN: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.ABORTED: Row(State.RELEASED),
        Cause.TIME_UP: Row(State.RELEASED, (Act.REPORT,)),
    },
    State.OFFERED: {
        Cause.CLAIMED: Row(State.READING, (Act.EXTEND_LEASE,)),
        Cause.REGISTERED: Row(State.WRITING, (Act.EXTEND_LEASE, Act.POST_WRITE, Act.SAY_BEGUN)),
        Cause.HEARTBEAT: Row(State.OFFERED, (Act.EXTEND_LEASE,)),
        Cause.GIVEN_BACK: Row(State.RELEASED),
        Cause.WITHDRAWN: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.ABORTED: Row(State.RELEASED),
        Cause.TIME_UP: Row(State.RELEASED, (Act.REPORT,)),
    },
    State.READING: {
        # A reader that is lost may be well: the lease decides. A newer ticket names another one; reads harm nobody.
        Cause.CLAIMED: Row(State.READING, (Act.EXTEND_LEASE,)),
        Cause.ASKED: Row(State.READING, (Act.EXTEND_LEASE, Act.SAY_ALIVE)),
        Cause.HEARTBEAT: Row(State.READING, (Act.EXTEND_LEASE,)),
        Cause.GIVEN_BACK: Row(State.RELEASED),
        Cause.ABORTED: Row(State.QUARANTINED, (Act.REPORT,)),
        Cause.TIME_UP: Row(State.RELEASED, (Act.REPORT,)),
    },
    State.QUARANTINED: {  # its lease is not extended any more
        Cause.ASKED: Row(State.QUARANTINED, (Act.SAY_ALIVE,)),
        Cause.GIVEN_BACK: Row(State.RELEASED),
        Cause.LINK_ENDED: Row(State.RELEASED),
        Cause.TIME_UP: Row(State.RELEASED, (Act.REPORT,)),
    },
    State.STREAMING: {
        Cause.FILLED: Row(State.WRITING, (Act.START_LEASE,)),
        Cause.WRITES_ENDED: Row(State.WRITTEN),
        Cause.WRITES_FAILED: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.WITHDRAWN: Row(State.DRAINING),
        Cause.ABORTED: Row(State.DRAINING),
        Cause.PEER_LOST: Row(State.DRAINING),
        Cause.LINK_ENDED: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.TIME_UP: Row(State.DRAINING, (Act.REPORT,)),
    },
    State.WRITING: {
        Cause.WRITES_ENDED: Row(State.RELEASED, (Act.SAY_WRITTEN,)),
        Cause.WRITES_FAILED: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.WITHDRAWN: Row(State.DRAINING),
        Cause.ABORTED: Row(State.DRAINING),
        Cause.PEER_LOST: Row(State.DRAINING),
        Cause.LINK_ENDED: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.TIME_UP: Row(State.DRAINING, (Act.REPORT,)),
    },
    State.WRITTEN: {
        Cause.FILLED: Row(State.RELEASED, (Act.SAY_WRITTEN,)),
        Cause.WITHDRAWN: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.ABORTED: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.PEER_LOST: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.LINK_ENDED: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.TIME_UP: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN, Act.REPORT)),
    },
    State.DRAINING: {
        Cause.FILLED: Row(State.DRAINING),
        Cause.WRITES_ENDED: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.WRITES_FAILED: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.LINK_ENDED: Row(State.RELEASED, (Act.SAY_NOT_WRITTEN,)),
        Cause.TIME_UP: Row(State.DRAINING, (Act.CUT_LINK, Act.REPORT)),
    },
}

_CONSUMER = {
    State.WAITING: {
        Cause.ALLOCATED: Row(State.ALLOCATED, (Act.CLAIM, Act.POST_READ)),
        Cause.ABORTED: Row(State.CLOSED, (Act.GIVE_BACK,)),
        Cause.PEER_LOST: Row(State.FAILED, (Act.RECOMPUTE,)),
        Cause.AGAIN: Row(State.WAITING, (Act.BEAT,)),
        Cause.TIME_UP: Row(State.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE)),
    },
    State.ALLOCATED: {
        Cause.READ_STARTED: Row(State.PULLING),
        Cause.REFUSED: Row(State.CANCELLING, (Act.RECOMPUTE,)),
        Cause.ABORTED: Row(State.CANCELLING),
        Cause.PEER_LOST: Row(State.CANCELLING, (Act.RECOMPUTE,)),
        Cause.LINK_ENDED: Row(State.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE)),
        Cause.AGAIN: Row(State.ALLOCATED, (Act.BEAT,)),
        Cause.TIME_UP: Row(State.CANCELLING, (Act.RECOMPUTE, Act.REPORT)),
    },
    State.PULLING: {
        Cause.READ_ENDED: Row(State.LANDED, (Act.ASK,)),
        Cause.READ_FAILED: Row(State.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE)),
        Cause.PART_FAILED: Row(State.CANCELLING, (Act.RECOMPUTE,)),
        Cause.REFUSED: Row(State.CANCELLING, (Act.RECOMPUTE,)),
        Cause.ABORTED: Row(State.CANCELLING),
        Cause.PEER_LOST: Row(State.CANCELLING, (Act.RECOMPUTE,)),
        Cause.LINK_ENDED: Row(State.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE)),
        Cause.AGAIN: Row(State.PULLING, (Act.BEAT,)),
        Cause.TIME_UP: Row(State.CANCELLING, (Act.RECOMPUTE, Act.REPORT)),
    },
    State.CANCELLING: {
        Cause.READ_STARTED: Row(State.CANCELLING),
        Cause.PART_FAILED: Row(State.CANCELLING),
        Cause.READ_ENDED: Row(State.CLOSED, (Act.GIVE_BACK,)),
        Cause.READ_FAILED: Row(State.CLOSED, (Act.GIVE_BACK,)),
        Cause.LINK_ENDED: Row(State.CLOSED, (Act.GIVE_BACK,)),
        Cause.TIME_UP: Row(State.CANCELLING, (Act.CUT_LINK, Act.REPORT)),
    },
    State.LANDED: {
        Cause.ALIVE: Row(State.CONFIRMED, (Act.GIVE_BACK,)),
        Cause.GONE: Row(State.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE)),
        Cause.ABORTED: Row(State.CLOSED, (Act.GIVE_BACK,)),
        Cause.PEER_LOST: Row(State.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE)),
        Cause.AGAIN: Row(State.LANDED, (Act.ASK,)),
        Cause.TIME_UP: Row(State.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE, Act.REPORT)),
    },
    State.RESERVED: {
        Cause.BEGUN: Row(State.WRITING),
        Cause.WRITTEN: Row(State.DONE),
        Cause.NOT_WRITTEN: Row(State.FAILED, (Act.RECOMPUTE,)),
        Cause.ABORTED: Row(State.QUARANTINED, (Act.WITHDRAW,)),
        Cause.PEER_LOST: Row(State.QUARANTINED, (Act.WITHDRAW, Act.RECOMPUTE)),
        Cause.LINK_ENDED: Row(State.FAILED, (Act.WITHDRAW, Act.RECOMPUTE)),
        Cause.AGAIN: Row(State.RESERVED, (Act.REGISTER,)),
        Cause.TIME_UP: Row(State.QUARANTINED, (Act.WITHDRAW, Act.RECOMPUTE, Act.REPORT)),
    },
    State.WRITING: {
        Cause.WRITTEN: Row(State.DONE),
        Cause.NOT_WRITTEN: Row(State.FAILED, (Act.RECOMPUTE,)),
        Cause.ABORTED: Row(State.QUARANTINED, (Act.WITHDRAW,)),
        Cause.PEER_LOST: Row(State.QUARANTINED, (Act.WITHDRAW, Act.RECOMPUTE)),
        Cause.LINK_ENDED: Row(State.FAILED, (Act.WITHDRAW, Act.RECOMPUTE)),
        Cause.TIME_UP: Row(State.QUARANTINED, (Act.WITHDRAW, Act.RECOMPUTE, Act.REPORT)),
    },
    State.QUARANTINED: {
        Cause.WRITTEN: Row(State.CLOSED),
        Cause.NOT_WRITTEN: Row(State.CLOSED),
        Cause.LINK_ENDED: Row(State.CLOSED),
        Cause.AGAIN: Row(State.QUARANTINED, (Act.WITHDRAW,)),
        Cause.TIME_UP: Row(State.QUARANTINED, (Act.CUT_LINK, Act.REPORT)),
    },
}

TABLE: Mapping[Side, Mapping[State, Mapping[Cause, Row]]] = {Side.PRODUCER: _PRODUCER, Side.CONSUMER: _CONSUMER}
"""Every move there is."""

FIRST: Mapping[Side, Mapping[State, tuple[Act, ...]]] = {
    Side.PRODUCER: {State.FILLING: ()},
    Side.CONSUMER: {State.WAITING: (Act.BEAT,), State.RESERVED: (Act.REGISTER,)},
}
"""Where entries begin (holds; pulled and pushed reservations), and what is done at once."""
