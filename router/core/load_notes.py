"""What routers of one fleet tell each other of their load in flight. Pure.

A note holds states, not changes: a state that is told twice does no harm, and one that was lost is told again with all
others (`LoadNote.wants`). Bytes from a peer are read strictly: numbers in range, lists and names bounded.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

import msgspec

TELL_S: Final = 0.01
"""Seconds between two notes of a router, up to four routers (docs/policy.md, "Several routers")."""

NOTES_MAX: Final = 400.0
"""Notes of all routers together in a second. Each router reads all; the more routers, the fewer notes of each."""

ALIVE_S: Final = 0.5
"""Seconds between two notes of a router that has nothing to tell: they are empty."""

STATES_MAX: Final = 100
"""States in one note. With the most chunks in each, the note stays below `NOTE_BYTES_MAX`."""

CHUNKS_MAX: Final = 1024
"""The number of a prompt's chunks that are named: 1 MB, about 256k tokens. Text beyond matches nothing."""

NOTE_BYTES_MAX: Final = 1 << 20
"""A longer note is not read."""

_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Length = Annotated[float, msgspec.Meta(ge=1, le=1e12)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Answers = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
_Chunks = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=CHUNKS_MAX)]
_Numbers = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=100_000)]


class PromptState(IntEnum):
    """What has become of a prompt that was placed."""

    NONE = 0
    """No prompt is placed."""
    WAITS = 1
    """It is not computed yet."""
    DONE = 2
    """It is computed."""
    PRESUMED = 3
    """It counts as computed, although no engine has said when."""
    DROPPED = 4
    """It will not be computed there."""


class BookingState(msgspec.Struct, array_like=True, frozen=True):
    """One request's bookings at its router. Ages are in milliseconds, from the event until the note was written."""

    number: _Count
    """The number of the booking; its router counts them."""
    prefill: _Name
    """The instance that its prompt was placed on; empty: none, or it has left."""
    prompt: PromptState
    plain_ms: _Amount
    """The time of the prompt by the costs alone."""
    prompt_ms: _Amount
    """The predicted time of the prompt there."""
    stall_ms: _Amount
    """The part of that time for which it keeps answers there waiting."""
    placed_ago_ms: _Amount
    ended_ago_ms: _Amount
    """Since the prompt was computed, or was given up there; without meaning while it waits."""
    decode: _Name
    """The instance with a place for its answer; empty: none, or it has left."""
    opened: bool
    """The first token has come from there."""
    prompt_tokens: _Count
    mean_tokens: _Amount
    """The expected length of its answer."""
    short_tokens: _Length
    """The length of a short answer to it (the 0.1 quantile)."""
    middle_tokens: _Length
    """The length of a median answer to it."""
    variance: _Amount
    """The variance of the answer's length, in tokens²."""
    tpot_ms: _Amount
    """Its TPOT target; 0: none."""
    pause_ms: _Amount
    """The expected pause between its first and second token, if it is handed over."""
    chunks: _Chunks = ()
    """Names of its prompt's chunks (`router.predict.chunks`), told first and whenever all bookings are told: both
    instances will hold them in their prefix caches. Empty: they are told already, or router peers have other names."""
    chunk_tokens: _Amount = 0.0
    """The tokens of one of these chunks, told in each state; 0: unknown, so its answer shares no beginning."""
    answers: _Answers = 1
    """The number of its answers. Routers of earlier versions do not tell it, and do not read it."""


class LoadNote(msgspec.Struct, array_like=True, frozen=True):
    """One note of one router to its peers."""

    router: _Name
    number: _Count
    """One more than the note before."""
    states: Annotated[tuple[BookingState, ...], msgspec.Meta(max_length=STATES_MAX)] = ()
    """The bookings that have changed, in the order of their changes."""
    over: _Numbers = ()
    """The bookings that are over. States of the same note come before."""
    part: _Count = 0
    parts: _Count = 0
    """This note is one of so many, one after the other, that tell all bookings; 0: it tells changes."""
    wants: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=4096)] = ()
    """The peers that this note asks for all of their bookings."""

    @property
    def frees(self) -> bool:
        """Whether a request that waits may find room now."""
        return bool(self.over) or any(each.prompt > PromptState.WAITS for each in self.states)


def tell_every_s(routers: int, least_s: float = TELL_S) -> float:
    """Seconds between two notes of a router that is one of `routers`."""
    return max(least_s, routers / NOTES_MAX)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(LoadNote)


def note_bytes(note: LoadNote) -> bytes:
    """The note as the bytes (MessagePack) that `note_of` reads."""
    return _ENCODER.encode(note)


def note_of(payload: bytes) -> LoadNote | str:
    """The note in these bytes, or the reason why there is none, for logs. Never raises."""
    if len(payload) > NOTE_BYTES_MAX:
        return f"{len(payload)} bytes are more than a note has"
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return str(error)[:200]
