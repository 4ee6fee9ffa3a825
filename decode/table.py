"""The rules of a pull: when blocks that were read may be used, and who is told. Pure data.

A pull has two views. Each rank has one `Reading` for it: the reads of the blocks, then the look at the hold's mark in
the producer's memory. The engine's scheduler has one `Want` for each decode request that names a hold.

Why it is safe. Reads are one-sided: the producer sees none begin and none end, and what is posted cannot be taken back.
The producer clears a hold's slot before the blocks can be another request's (`prefill.table`). Hence:

1. the look is posted only when every read of blocks has ended, and `USED` is reached only from `CONFIRMED`, that is by
   a mark that still stood afterwards on every rank of the producer;
2. a reading ends only when nothing of it is under way any more, so no late byte meets blocks of another request;
3. the producer is told that it may free the blocks only at an end, after the look, and never where the hold has gone.

Whatever else is found, the request computes its prompt itself. A pair without a row changes nothing. docs/handoff.md
draws these tables.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from kvtransfer.rows import Row, Table


class Reading(StrEnum):
    """Where one rank's pull is."""

    READING = "reading"
    SPOILT = "spoilt"
    """A read has failed; others are still under way."""
    LANDED = "landed"
    """All bytes are here; the mark is being looked at. Not usable: the producer may have freed the blocks meanwhile."""
    UNSEEN = "unseen"
    """A mark could not be read; other looks are under way."""
    GONE = "gone"
    """Another mark stands there, or none; other looks are under way."""
    CONFIRMED = "confirmed"
    """The hold outlived the read. Where digests are on, they are compared now."""
    USED = "used"
    """The blocks are the hold's, and the request's from here."""
    FAILED = "failed"
    """Nothing usable came, and the producer need not hold any more."""
    STALE = "stale"
    """The hold had ended: there is nobody to be told."""


class Want(StrEnum):
    """Where a request that names a hold is, as the engine's scheduler sees it."""

    LOCAL = "local"
    """Not pulled: its prompt will be computed here once there is room."""
    PULLING = "pulling"
    SPOILT = "spoilt"
    """One rank cannot use what it has read; others are still reading."""
    OVER = "over"


class Cause(StrEnum):
    """What moves a reading or a want on."""

    # transfers end
    READ_FAILED = "read failed"
    """One read; others may be under way."""
    ALL_READ = "all read"
    """No read is under way any more."""
    LOOK_FAILED = "look failed"
    MARK_GONE = "mark gone"
    ALL_SEEN = "all seen"
    """No look is under way any more."""
    # digests say
    RIGHT = "right"
    """Also where there are none to compare."""
    WRONG = "wrong"
    # the engine says
    ALLOCATED = "allocated"
    """It has room for the request, and nothing is pulled."""
    PULLED = "pulled"
    """It has room for the request, and a pull begins."""
    FINISHED = "finished"
    """The request is over before it had room."""
    # the ranks say
    UNUSABLE = "unusable"
    """One of them cannot use what it has read."""
    ENDED = "ended"
    """Every rank's reading has ended."""


class Act(StrEnum):
    """What is done on the way."""

    LOOK = "look"
    """Read the mark on every rank of the producer that blocks were read from."""
    GIVE_BACK = "give back"
    """Tell the producer, with the mark as proof, that it need not hold any more."""
    USE = "use"
    RECOMPUTE = "recompute"


READINGS: Table[Reading, Cause, Act] = {
    Reading.READING: {
        Cause.READ_FAILED: Row(Reading.SPOILT),
        Cause.ALL_READ: Row(Reading.LANDED, (Act.LOOK,)),
    },
    Reading.SPOILT: {
        Cause.READ_FAILED: Row(Reading.SPOILT),
        Cause.ALL_READ: Row(Reading.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE)),
    },
    Reading.LANDED: {
        Cause.LOOK_FAILED: Row(Reading.UNSEEN),
        Cause.MARK_GONE: Row(Reading.GONE),
        Cause.ALL_SEEN: Row(Reading.CONFIRMED),
    },
    Reading.UNSEEN: {
        Cause.LOOK_FAILED: Row(Reading.UNSEEN),
        Cause.MARK_GONE: Row(Reading.GONE),
        Cause.ALL_SEEN: Row(Reading.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE)),
    },
    Reading.GONE: {
        Cause.LOOK_FAILED: Row(Reading.GONE),
        Cause.MARK_GONE: Row(Reading.GONE),
        Cause.ALL_SEEN: Row(Reading.STALE, (Act.RECOMPUTE,)),
    },
    Reading.CONFIRMED: {
        Cause.RIGHT: Row(Reading.USED, (Act.GIVE_BACK, Act.USE)),
        Cause.WRONG: Row(Reading.FAILED, (Act.GIVE_BACK, Act.RECOMPUTE)),
    },
}
"""At each rank."""

WANTS: Table[Want, Cause, Act] = {
    Want.LOCAL: {
        Cause.ALLOCATED: Row(Want.OVER, (Act.RECOMPUTE,)),
        Cause.PULLED: Row(Want.PULLING),  # it was asked about again, and the way was open this time
        Cause.FINISHED: Row(Want.OVER),
    },
    Want.PULLING: {
        Cause.UNUSABLE: Row(Want.SPOILT),
        Cause.ENDED: Row(Want.OVER, (Act.USE,)),
    },
    Want.SPOILT: {
        Cause.UNUSABLE: Row(Want.SPOILT),
        Cause.ENDED: Row(Want.OVER, (Act.RECOMPUTE,)),
    },
}
"""At the engine."""

BECAUSE: Final = {
    Reading.SPOILT: "a read failed",
    Reading.UNSEEN: "the slot could not be read",
    Reading.GONE: "the hold did not outlive the read",
}
"""Why blocks that are read must not be used."""
