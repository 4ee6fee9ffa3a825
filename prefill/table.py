"""The rules of a hold: what may end it, and the order in which its blocks become free for other requests. Pure data.

A hold has two views. The engine's scheduler has one `LegState` for each prefill request that is to leave a hold; the
scheduler owns the blocks and frees them. Each rank has one `RankHold` for the hold: the mark in its memory that a
consumer reads, the lease time, and the readers so far. Once a step the engine sends orders to the ranks, and the ranks
send reports.

Why it is safe. A consumer reads the blocks, and then the mark; it uses the blocks only if the mark still stood
(`decode.table`). So blocks may belong to another request only once the mark is gone on every rank. Hence:

1. every row that ends a lease does `CLEAR` before `REPORT`;
2. the engine frees a held leg's blocks in `LegState.OVER` alone. A held leg gets there by `REPORTED` alone, which comes
   once every rank has reported;
3. the mark of a leg that is not held was never sent to a consumer, so the leg's blocks are free at once.

A pair without a row changes nothing and is counted. docs/handoff.md draws these tables.
"""

from __future__ import annotations

from enum import StrEnum

from kvtransfer.rows import Table, TransitionRow


class LegState(StrEnum):
    """The state of a prefill leg, as its engine's scheduler sees it."""

    COMPUTING = "computing"
    """The prompt waits or runs; the engine owns its blocks."""
    UNWANTED = "unwanted"
    """A router gave up the hold's name; the leg runs on and leaves no hold."""
    HELD = "held"
    """The prompt is computed, its answer names the hold, and the blocks are kept."""
    RELEASED = "released"
    """A router gave the hold up; the ranks are told and have not all reported yet."""
    OVER = "over"
    """The engine has blocks and slot back."""


class RankHold(StrEnum):
    """The state of the same hold, as one rank sees it."""

    MARKED = "marked"
    """The mark stands; the rank has not been told that the leg has ended."""
    KEPT = "kept"
    """The blocks are held and the lease runs."""
    READ_EARLY = "read early"
    """The consumer has read before the rank was told that the blocks are held: reported, and never leased."""
    OVER = "over"
    """The slot is clear; if the leg was held, that is reported."""


class HoldCause(StrEnum):
    """What moves a leg or a lease to another state."""

    # from the engine
    FILLED = "filled"
    """The prompt is computed, and the answer is about to be sent."""
    DROPPED = "dropped"
    """The leg has ended without a hold: aborted, given up, or without blocks."""
    # from a router, by the hold's name
    GIVEN_UP = "given up"
    # from the ranks
    REPORTED = "reported"
    """Every rank has ended the hold."""
    # from consumers, with the mark as proof
    READ = "read"
    """All ranks that were to read have read, or do not want the blocks."""
    WANTED = "wanted"
    """A heartbeat: a consumer still waits for room."""
    # from the clock
    TIME_UP = "time up"
    """The lease has ended."""


class HoldAct(StrEnum):
    """The acts on the way."""

    # at the engine
    OFFER = "offer"
    """The answer names the hold, its slot and its mark; the ranks are told that the leg is held."""
    DROP = "drop"
    """The ranks are told that the leg leaves no hold."""
    RELEASE = "release"
    """The ranks are told to end the hold."""
    FREE = "free"
    """The engine gets blocks and slot back."""
    # at a rank
    START_LEASE = "start lease"
    EXTEND_LEASE = "extend lease"
    CLEAR = "clear slot"
    REPORT = "report"


LEGS: Table[LegState, HoldCause, HoldAct] = {
    LegState.COMPUTING: {
        HoldCause.FILLED: TransitionRow(LegState.HELD, (HoldAct.OFFER,)),
        HoldCause.GIVEN_UP: TransitionRow(LegState.UNWANTED),
        HoldCause.DROPPED: TransitionRow(LegState.OVER, (HoldAct.DROP, HoldAct.FREE)),
    },
    LegState.UNWANTED: {
        HoldCause.DROPPED: TransitionRow(LegState.OVER, (HoldAct.DROP, HoldAct.FREE)),
    },
    LegState.HELD: {
        HoldCause.GIVEN_UP: TransitionRow(LegState.RELEASED, (HoldAct.RELEASE,)),
        HoldCause.REPORTED: TransitionRow(LegState.OVER, (HoldAct.FREE,)),
    },
    LegState.RELEASED: {
        HoldCause.REPORTED: TransitionRow(LegState.OVER, (HoldAct.FREE,)),
    },
}
"""The rows at the engine."""

LEASES: Table[RankHold, HoldCause, HoldAct] = {
    RankHold.MARKED: {
        HoldCause.FILLED: TransitionRow(RankHold.KEPT, (HoldAct.START_LEASE,)),
        HoldCause.DROPPED: TransitionRow(RankHold.OVER, (HoldAct.CLEAR,)),
        HoldCause.READ: TransitionRow(RankHold.READ_EARLY, (HoldAct.CLEAR, HoldAct.REPORT)),
    },
    RankHold.KEPT: {
        HoldCause.WANTED: TransitionRow(RankHold.KEPT, (HoldAct.EXTEND_LEASE,)),
        HoldCause.READ: TransitionRow(RankHold.OVER, (HoldAct.CLEAR, HoldAct.REPORT)),
        HoldCause.GIVEN_UP: TransitionRow(RankHold.OVER, (HoldAct.CLEAR, HoldAct.REPORT)),
        HoldCause.TIME_UP: TransitionRow(RankHold.OVER, (HoldAct.CLEAR, HoldAct.REPORT)),
    },
    RankHold.READ_EARLY: {
        HoldCause.FILLED: TransitionRow(RankHold.OVER),
        HoldCause.DROPPED: TransitionRow(RankHold.OVER),
    },
}
"""The rows at each rank."""
