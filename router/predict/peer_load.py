"""The load in flight of router peers, booked on this router's rows as its own is. Pure.

Engines' reports are a second old and do not say what waits: routers that know only their own requests place prompts
behind each other's. Bookings of peers stand in the same sums as a router's own, some milliseconds late. The router also
learns instances' speeds from peers' prompts, not from their answers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from router.core.load_notes import BookingState, LoadNote, PromptState
from router.predict.inflight_load import DUTY_S, REBASE_S, InflightLoad
from router.predict.inflight_request import OF_A_PEER, InflightRequest
from router.predict.prefix_cache import PrefixCacheIndex
from router.predict.shared_beginnings import Beginnings, beginnings, lengths_within

SILENT_S: Final = 2.0
"""Seconds without a note after which a peer's bookings are dropped: the peer is gone, or the registry. What its
requests do by then is not known any more."""

ASK_EVERY_S: Final = 0.25
"""Seconds between two questions to a peer for all of its bookings."""

BOOKINGS_MAX: Final = 100_000
"""Bookings of one peer. Further ones are left out."""


class _Peer:
    """What one peer has told."""

    __slots__ = ("asked_s", "bookings", "complete", "heard_s", "number", "told")

    def __init__(self) -> None:
        self.bookings: Final[dict[int, InflightRequest]] = {}
        self.number = -1
        """Of its last note; -1: none has come."""
        self.heard_s: float = 0.0
        self.complete = False
        """It has told all of its bookings, and no note was missing since."""
        self.asked_s: float = -math.inf
        """When it was asked for all of them last."""
        self.told: set[int] | None = None
        """Bookings that its notes have told so far, while they tell all of them."""


class PeerLoad:
    """The bookings of all router peers."""

    def __init__(self, inflight: InflightLoad, row_of: dict[str, int]) -> None:
        """`row_of`: the row of each instance, by name; the fleet keeps it."""
        self._inflight: Final = inflight
        self._row_of: Final = row_of
        self._peers: Final[dict[str, _Peer]] = {}
        self.gaps = 0
        """The number of gaps in peers' notes."""

    @property
    def bookings(self) -> int:
        """The number of all bookings of peers."""
        return sum(len(peer.bookings) for peer in self._peers.values())

    def silent(self, now: float, there: Collection[str]) -> list[str]:
        """Peers that have told nothing for `SILENT_S`, or are not among those that are there."""
        return [name for name, peer in self._peers.items() if name not in there or now - peer.heard_s > SILENT_S]

    def hear(self, note: LoadNote, now: float, prefixes: PrefixCacheIndex | None = None) -> None:
        """Book what a peer tells. `prefixes`: takes what its prompts leave in instances' prefix caches."""
        peer = self._peers.get(note.router)
        if peer is None:
            peer = self._peers[note.router] = _Peer()
        if note.number <= peer.number:
            return  # a copy of an old note
        if note.number != peer.number + 1:
            self.gaps += peer.complete
            peer.complete, peer.told = False, None
        peer.number, peer.heard_s = note.number, now
        if note.part == 1:
            peer.told = set()
        for number in note.over:  # before the states are booked: they take the answer from its instance
            _leave(prefixes, peer.bookings.get(number), now)
        for state in note.states:
            known = peer.bookings.get(state.number)
            named = bool(state.chunks) and (known is None or not known.chunks)  # not told again
            self._book(peer, state, now, prefixes, named=named)
            if prefixes is not None and named:
                self._cache(state, prefixes, now)
            if peer.told is not None:
                peer.told.add(state.number)
        for number in note.over:
            self._drop(peer, number, now)
        if note.parts and note.part == note.parts and peer.told is not None:
            for number in [each for each in peer.bookings if each not in peer.told]:
                self._drop(peer, number, now)
            peer.complete, peer.told = True, None

    def to_ask(self, now: float) -> list[str]:
        """The peers that are to be asked for all bookings now, as notes of theirs are missing. They are asked again
        every `ASK_EVERY_S` until they have told all: a question may be lost, too.
        """
        found = []
        for name, peer in self._peers.items():
            if not peer.complete and peer.told is None and now - peer.asked_s >= ASK_EVERY_S:
                peer.asked_s = now
                found.append(name)
        return found

    def lost(self, router: str, now: float) -> None:
        """Drop all bookings of this peer: it is silent, or has left."""
        peer = self._peers.pop(router, None)
        if peer is not None:
            for number in [*peer.bookings]:
                self._drop(peer, number, now)

    def _book(
        self, peer: _Peer, state: BookingState, now: float, prefixes: PrefixCacheIndex | None, *, named: bool
    ) -> None:
        """`named`: the state has the names of its prompt's chunks, which were not known."""
        booking = peer.bookings.get(state.number)
        if booking is None:
            if len(peer.bookings) >= BOOKINGS_MAX:
                return
            booking = peer.bookings[state.number] = _booking_of(state)
        if named:
            booking.chunks = state.chunks
        self._prompt(booking, state, now)
        row = self._row_of.get(state.decode, -1)
        if row < 0:
            self._inflight.answer_over(booking, now)
            return
        if booking.decode_row != row or named:
            self._inflight.answer_over(booking, now)  # with the beginnings that it was counted with
            booking.beginnings = _beginnings_of(booking, state.chunk_tokens, prefixes, row)
            self._inflight.answer_placed(booking, row, now)
        if state.opened:
            self._inflight.opened(booking, now)

    def _prompt(self, booking: InflightRequest, state: BookingState, now: float) -> None:
        row = self._row_of.get(state.prefill, -1)
        recent = state.prompt is PromptState.WAITS or state.placed_ago_ms < 1000.0 * DUTY_S
        # A prompt that takes no time could not be told from one that has ended.
        if row >= 0 and booking.prefill_row < 0 and recent and state.prompt_ms > 0:
            placed_s = now - min(state.placed_ago_ms / 1000.0, REBASE_S)  # what is older has faded
            self._inflight.prompt_placed(booking, row, state.prompt_ms, state.stall_ms, placed_s)
            booking.plain_ms = state.plain_ms
        if state.prompt > PromptState.WAITS and booking.prefill_ms > 0:
            presumed = state.prompt is PromptState.PRESUMED
            ended_s = now - state.ended_ago_ms / 1000.0
            self._inflight.prompt_over(booking, ended_s, done=state.prompt is PromptState.DONE, presumed=presumed)

    def _cache(self, state: BookingState, prefixes: PrefixCacheIndex, now: float) -> None:
        """Both of the request's instances will have its prompt in their prefix caches."""
        for name in dict.fromkeys((state.prefill, state.decode)):
            row = self._row_of.get(name, -1)
            if row >= 0:
                prefixes.sent(row, state.chunks, now)

    def _drop(self, peer: _Peer, number: int, now: float) -> None:
        booking = peer.bookings.pop(number, None)
        if booking is not None:
            self._inflight.prompt_over(booking, now, done=False)
            self._inflight.answer_over(booking, now)


def _booking_of(state: BookingState) -> InflightRequest:
    booking = InflightRequest(
        prompt_tokens=state.prompt_tokens,
        mean_tokens=state.mean_tokens,
        short_tokens=state.short_tokens,
        middle_tokens=state.middle_tokens,
        variance=state.variance,
        tpot_ms=state.tpot_ms or math.inf,
        answers=state.answers,
    )
    booking.number, booking.pause_ms = OF_A_PEER, state.pause_ms
    return booking


def _beginnings_of(
    booking: InflightRequest, chunk_tokens: float, prefixes: PrefixCacheIndex | None, row: int
) -> Beginnings | None:
    """The beginnings of its prompt that other answers on this row may share, as its own router counts them; None: they
    have no names.
    """
    chunks = booking.chunks
    if not chunks or not chunk_tokens:
        return None
    cached = 0 if prefixes is None else prefixes.in_cache(row, chunks, prefixes.match(chunks).chunks_of(row))
    return Beginnings(beginnings(chunks), lengths_within(cached), chunk_tokens, booking.prompt_tokens)


def _leave(prefixes: PrefixCacheIndex | None, booking: InflightRequest | None, now: float) -> None:
    """Its answer is over: it has used its prompt's blocks, and written about as many tokens as were expected."""
    if prefixes is not None and booking is not None and booking.decode_row >= 0 and booking.opened_s >= 0:
        prefixes.used(booking.decode_row, booking.chunks, now)
        prefixes.wrote(booking.decode_row, round(booking.answers * booking.mean_tokens), now)
