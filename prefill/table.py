"""The rules of a hold: who may end it, and in which order its blocks become somebody else's. Pure data.

A hold has two views. The engine's scheduler has one `Leg` for each prefill request that is to leave a hold; it owns the
blocks and frees them. Each rank has one `Lease` for it: the mark in its memory that a consumer reads, the lease, and
whoever has read. The two are told of each other once a step: the engine sends orders, the ranks send reports.

Why it is safe. A consumer reads the blocks, and then the mark; it uses the blocks only where the mark still stood
(`decode.table`). So blocks may belong to another request only after the mark is gone on every rank. Hence:

1. every row that ends a lease does `CLEAR` before `REPORT`;
2. the engine frees a held leg's blocks in `Leg.OVER` alone, and a held leg gets there by `REPORTED` alone, which is
   said once every rank has reported;
3. a leg that is not held has told nobody its mark, so its blocks are free at once.

A pair without a row changes nothing and is counted. docs/handoff.md draws these tables.
"""

from __future__ import annotations

from enum import StrEnum

from kvtransfer.rows import Row, Table


class Leg(StrEnum):
    """Where a prefill leg is, as its engine's scheduler sees it."""

    COMPUTING = "computing"
    """The prompt waits or runs; its blocks are the engine's."""
    UNWANTED = "unwanted"
    """A router gave its name up; the leg runs on and leaves nothing."""
    HELD = "held"
    """The prompt is computed, its answer names the hold, and the blocks are kept."""
    RELEASED = "released"
    """A router gave it up; the ranks are told and have not all reported yet."""
    OVER = "over"
    """Blocks and slot are the engine's again."""


class Lease(StrEnum):
    """Where the same hold is, as one rank sees it."""

    MARKED = "marked"
    """The mark stands; the rank has not heard that the leg has ended."""
    KEPT = "kept"
    """The blocks are held and the lease runs."""
    READ_EARLY = "read early"
    """The consumer was faster than the engine's own word that the blocks are held: reported, and never leased."""
    OVER = "over"
    """The slot is clear; if it was held, that is reported."""


class Cause(StrEnum):
    """What moves a leg or a lease on."""

    # the engine says
    FILLED = "filled"
    """The prompt is computed, and the answer is about to be given."""
    DROPPED = "dropped"
    """The leg has ended and leaves nothing: aborted, given up, or without blocks."""
    # a router says, by the hold's name
    GIVEN_UP = "given up"
    # the ranks say
    REPORTED = "reported"
    """Every rank has ended it."""
    # consumers say, with the mark as proof
    READ = "read"
    """All who were to read have read, or do not want it."""
    WANTED = "wanted"
    """A heartbeat: a consumer still waits for room."""
    # the clock says
    TIME_UP = "time up"
    """The lease has ended."""


class Act(StrEnum):
    """What is done on the way."""

    # at the engine
    OFFER = "offer"
    """The answer names the hold, its slot and its mark; the ranks are told that it is held."""
    DROP = "drop"
    """The ranks are told that nothing is held."""
    RELEASE = "release"
    """The ranks are told to end it."""
    FREE = "free"
    """Blocks and slot go back."""
    # at a rank
    START_LEASE = "start lease"
    EXTEND_LEASE = "extend lease"
    CLEAR = "clear slot"
    REPORT = "report"


LEGS: Table[Leg, Cause, Act] = {
    Leg.COMPUTING: {
        Cause.FILLED: Row(Leg.HELD, (Act.OFFER,)),
        Cause.GIVEN_UP: Row(Leg.UNWANTED),
        Cause.DROPPED: Row(Leg.OVER, (Act.DROP, Act.FREE)),
    },
    Leg.UNWANTED: {
        Cause.DROPPED: Row(Leg.OVER, (Act.DROP, Act.FREE)),
    },
    Leg.HELD: {
        Cause.GIVEN_UP: Row(Leg.RELEASED, (Act.RELEASE,)),
        Cause.REPORTED: Row(Leg.OVER, (Act.FREE,)),
    },
    Leg.RELEASED: {
        Cause.REPORTED: Row(Leg.OVER, (Act.FREE,)),
    },
}
"""At the engine."""

LEASES: Table[Lease, Cause, Act] = {
    Lease.MARKED: {
        Cause.FILLED: Row(Lease.KEPT, (Act.START_LEASE,)),
        Cause.DROPPED: Row(Lease.OVER, (Act.CLEAR,)),
        Cause.READ: Row(Lease.READ_EARLY, (Act.CLEAR, Act.REPORT)),
    },
    Lease.KEPT: {
        Cause.WANTED: Row(Lease.KEPT, (Act.EXTEND_LEASE,)),
        Cause.READ: Row(Lease.OVER, (Act.CLEAR, Act.REPORT)),
        Cause.GIVEN_UP: Row(Lease.OVER, (Act.CLEAR, Act.REPORT)),
        Cause.TIME_UP: Row(Lease.OVER, (Act.CLEAR, Act.REPORT)),
    },
    Lease.READ_EARLY: {
        Cause.FILLED: Row(Lease.OVER),
        Cause.DROPPED: Row(Lease.OVER),
    },
}
"""At each rank."""
