"""The rules of a pull: when blocks that were read may be used, and what the producer is told. Pure data.

A pull has two views. Each rank has one `Reading` for it: the reads of the blocks, then the look at the hold's mark in
the producer's memory. The engine's scheduler has one `Want` for each decode request that names a hold.

Why it is safe. Reads are one-sided: the producer sees neither their begin nor their end, and a posted read cannot be
taken back. The producer clears a hold's slot before the blocks can belong to another request (`prefill.table`). Hence:

1. the look is posted only when every read of blocks has ended, and `USED` is reached only from `CONFIRMED`, that is, by
   a mark that still stood afterwards on every rank of the producer;
2. a reading ends only when no read of it is under way any more, so no late byte reaches the blocks of another request;
3. the producer is told that it may free the blocks only at the end, after the look, and never if the hold has gone.

In every other case the request computes its prompt itself. A pair without a row changes nothing. docs/handoff.md draws
these tables.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from kvtransfer.rows import Table, TransitionRow


class Reading(StrEnum):
    """The state of one rank's pull."""

    READING = "reading"
    SPOILT = "spoilt"
    """A read has failed; others are still under way."""
    LANDED = "landed"
    """All bytes have arrived; the mark is being read. Not usable: the producer may have freed the blocks meanwhile."""
    UNSEEN = "unseen"
    """A mark could not be read; other looks are under way."""
    GONE = "gone"
    """Another mark stands in a slot, or none; other looks are under way."""
    CONFIRMED = "confirmed"
    """The hold outlived the read. Where digests are on, they are compared now."""
    USED = "used"
    """The blocks are the hold's, and belong to the request from now on."""
    FAILED = "failed"
    """No usable blocks arrived, and the producer need not hold any longer."""
    STALE = "stale"
    """The hold had ended, so the producer needs no notice."""


class Want(StrEnum):
    """The state of a request that names a hold, as the engine's scheduler sees it."""

    LOCAL = "local"
    """Not pulled: this instance computes the prompt once there is room."""
    PULLING = "pulling"
    SPOILT = "spoilt"
    """One rank cannot use what it has read; others are still reading."""
    OVER = "over"


class PullCause(StrEnum):
    """What moves a reading or a want to another state."""

    # from the transfers
    READ_FAILED = "read failed"
    """One read failed; others may be under way."""
    ALL_READ = "all read"
    """No read of blocks is under way any more."""
    LOOK_FAILED = "look failed"
    MARK_GONE = "mark gone"
    ALL_SEEN = "all seen"
    """No read of a mark is under way any more."""
    # from the digests
    RIGHT = "right"
    """The digests match, or none are kept."""
    WRONG = "wrong"
    # from the engine
    ALLOCATED = "allocated"
    """The engine has room for the request, and pulls nothing."""
    PULLED = "pulled"
    """The engine has room for the request, and begins a pull."""
    FINISHED = "finished"
    """The request ended before the engine had room for it."""
    # from the ranks
    UNUSABLE = "unusable"
    """A rank cannot use what it has read."""
    ENDED = "ended"
    """Every rank's reading has ended."""


class PullAct(StrEnum):
    """The acts on the way."""

    LOOK = "look"
    """Read the mark on every rank of the producer that blocks were read from."""
    GIVE_BACK = "give back"
    """Tell the producer, with the mark as proof, that it need not hold any longer."""
    USE = "use"
    RECOMPUTE = "recompute"


READINGS: Table[Reading, PullCause, PullAct] = {
    Reading.READING: {
        PullCause.READ_FAILED: TransitionRow(Reading.SPOILT),
        PullCause.ALL_READ: TransitionRow(Reading.LANDED, (PullAct.LOOK,)),
    },
    Reading.SPOILT: {
        PullCause.READ_FAILED: TransitionRow(Reading.SPOILT),
        PullCause.ALL_READ: TransitionRow(Reading.FAILED, (PullAct.GIVE_BACK, PullAct.RECOMPUTE)),
    },
    Reading.LANDED: {
        PullCause.LOOK_FAILED: TransitionRow(Reading.UNSEEN),
        PullCause.MARK_GONE: TransitionRow(Reading.GONE),
        PullCause.ALL_SEEN: TransitionRow(Reading.CONFIRMED),
    },
    Reading.UNSEEN: {
        PullCause.LOOK_FAILED: TransitionRow(Reading.UNSEEN),
        PullCause.MARK_GONE: TransitionRow(Reading.GONE),
        PullCause.ALL_SEEN: TransitionRow(Reading.FAILED, (PullAct.GIVE_BACK, PullAct.RECOMPUTE)),
    },
    Reading.GONE: {
        PullCause.LOOK_FAILED: TransitionRow(Reading.GONE),
        PullCause.MARK_GONE: TransitionRow(Reading.GONE),
        PullCause.ALL_SEEN: TransitionRow(Reading.STALE, (PullAct.RECOMPUTE,)),
    },
    Reading.CONFIRMED: {
        PullCause.RIGHT: TransitionRow(Reading.USED, (PullAct.GIVE_BACK, PullAct.USE)),
        PullCause.WRONG: TransitionRow(Reading.FAILED, (PullAct.GIVE_BACK, PullAct.RECOMPUTE)),
    },
}
"""The rows at each rank."""

WANTS: Table[Want, PullCause, PullAct] = {
    Want.LOCAL: {
        PullCause.ALLOCATED: TransitionRow(Want.OVER, (PullAct.RECOMPUTE,)),
        PullCause.PULLED: TransitionRow(
            Want.PULLING
        ),  # the engine asked again, and the producer could be pulled from this time
        PullCause.FINISHED: TransitionRow(Want.OVER),
    },
    Want.PULLING: {
        PullCause.UNUSABLE: TransitionRow(Want.SPOILT),
        PullCause.ENDED: TransitionRow(Want.OVER, (PullAct.USE,)),
    },
    Want.SPOILT: {
        PullCause.UNUSABLE: TransitionRow(Want.SPOILT),
        PullCause.ENDED: TransitionRow(Want.OVER, (PullAct.RECOMPUTE,)),
    },
}
"""The rows at the engine."""

BECAUSE: Final = {
    Reading.SPOILT: "a read failed",
    Reading.UNSEEN: "the slot could not be read",
    Reading.GONE: "the hold did not outlive the read",
}
"""Why blocks that were read must not be used."""
