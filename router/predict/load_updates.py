"""This router's bookings as its peers are to know them. Pure.

`InflightLoad` reports every change. `LoadUpdates.notes` writes the present state of each booking that has changed since
the last notes. If a request is placed and over between two notes, its state is told only if its prompt was computed:
peers learn from the time that it took.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from router.core.load_notes import STATES_MAX, BookingState, LoadNote, PromptState
from router.predict.inflight_request import InflightRequest


class ToldBooking:
    """One booking, with what peers are to know of its prompt: predicted times in milliseconds, events in seconds."""

    __slots__ = ("booking", "chunks_told", "ended_s", "placed_s", "prompt", "prompt_ms", "stall_ms")

    def __init__(self, booking: InflightRequest) -> None:
        self.booking: Final = booking
        self.chunks_told = False
        self.prompt = PromptState.NONE
        self.prompt_ms = 0.0
        self.stall_ms = 0.0
        self.placed_s = 0.0
        self.ended_s = 0.0


class LoadUpdates:
    """Collects one router's changes, and writes its notes."""

    def __init__(self, router: str, name_of: Callable[[int, int], str], *, shares_names: bool = False) -> None:
        """`router`: this router. `name_of`: the instance that a row had in one of its lives; empty: it has left."""
        self.router: Final = router
        self._name_of: Final = name_of
        self._shares_names: Final = shares_names
        self._booked: Final[dict[int, ToldBooking]] = {}
        """By number: the bookings that go on, and those whose end is not told yet."""
        self._changed: Final[dict[int, None]] = {}
        """The numbers of the bookings that have changed since the last notes, in the order of the changes."""
        self._wants: Final[dict[str, None]] = {}
        """The peers to ask for all of their bookings."""
        self._numbered = 0
        """The number of the last booking."""
        self._written = 0
        """The number of the last note."""
        self._all = False
        """The next notes tell all bookings."""

    # --- what `InflightLoad` reports ----------------------------------------------------------------------------------

    def placed(self, booking: InflightRequest, ms: float, stall_ms: float, now: float) -> None:
        """A prompt has a place: it takes `ms` there and keeps answers waiting for `stall_ms` (both in milliseconds)."""
        told = self._told(booking)
        told.prompt, told.prompt_ms, told.stall_ms, told.placed_s = PromptState.WAITS, ms, stall_ms, now

    def ended(self, booking: InflightRequest, state: PromptState, now: float) -> None:
        """A prompt is computed, or will not be."""
        told = self._told(booking)
        told.prompt, told.ended_s = state, now

    def changed(self, booking: InflightRequest) -> None:
        """An answer has a place, has begun, or is over."""
        self._told(booking)

    def _told(self, booking: InflightRequest) -> ToldBooking:
        if not booking.number:
            self._numbered += 1
            booking.number = self._numbered
        self._changed[booking.number] = None
        told = self._booked.get(booking.number)
        if told is None:
            told = self._booked[booking.number] = ToldBooking(booking)
        return told

    # --- notes --------------------------------------------------------------------------------------------------------

    def want(self, router: str) -> None:
        """Ask this peer for all of its bookings with the next note."""
        self._wants[router] = None

    def tell_all(self) -> None:
        """Tell all bookings with the next notes, with the names of their chunks: a peer wants them."""
        self._all = True

    def skip(self) -> None:
        """There are no peers: forget what has changed."""
        for number in self._changed:
            if not _goes_on(self._booked[number]):
                del self._booked[number]
        self._changed.clear()
        self._wants.clear()

    @property
    def waiting(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._changed) or bool(self._wants) or self._all

    def notes(self, now: float) -> list[LoadNote]:
        """The notes of what has changed since the last call; if nothing has, one empty note. `now`: seconds."""
        whole, self._all = self._all, False
        states, over = [], []
        for number in [*self._booked] if whole else [*self._changed]:
            told = self._booked[number]
            if whole:  # who asks has never heard the names, or has lost the note with them
                told.chunks_told = False
            if _goes_on(told):
                states.append(self._state(number, told, now))
                continue
            if told.prompt is PromptState.DONE:
                states.append(self._state(number, told, now))
            over.append(number)
            del self._booked[number]
        self._changed.clear()
        wants = tuple(self._wants)
        self._wants.clear()
        return self._parts(states, tuple(over), wants, whole)

    def _parts(
        self,
        states: list[BookingState],
        over: tuple[int, ...],
        wants: tuple[str, ...],
        whole: bool,  # noqa: FBT001
    ) -> list[LoadNote]:
        found, parts = [], max(1, math.ceil(len(states) / STATES_MAX))
        for part in range(parts):
            last = part == parts - 1
            self._written += 1
            found.append(
                LoadNote(
                    self.router,
                    self._written,
                    tuple(states[part * STATES_MAX : (part + 1) * STATES_MAX]),
                    over if last else (),
                    part + 1 if whole else 0,
                    parts if whole else 0,
                    wants if last else (),
                )
            )
        return found

    def _state(self, number: int, told: ToldBooking, now: float) -> BookingState:
        of = told.booking
        chunks = () if told.chunks_told or not self._shares_names else of.chunks
        told.chunks_told = True
        return BookingState(
            number,
            self._name_of(of.prefill_row, of.prefill_life) if told.prompt is not PromptState.NONE else "",
            told.prompt,
            of.plain_ms,
            told.prompt_ms,
            told.stall_ms,
            max(0.0, now - told.placed_s) * 1000.0,
            max(0.0, now - told.ended_s) * 1000.0,
            self._name_of(of.decode_row, of.decode_life) if of.decode_row >= 0 else "",
            of.opened_s >= 0,
            of.prompt_tokens,
            of.mean_tokens,
            of.short_tokens,
            of.middle_tokens,
            of.variance,
            of.tpot_ms if math.isfinite(of.tpot_ms) else 0.0,
            of.pause_ms,
            chunks,
            0.0 if of.beginnings is None else of.beginnings.chunk_tokens,
            of.answers,
        )


def _goes_on(told: ToldBooking) -> bool:
    """Whether its prompt or its answer still has a place."""
    return told.booking.decode_row >= 0 or told.prompt is PromptState.WAITS
