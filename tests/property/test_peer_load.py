"""Load notes may be lost, doubled or late: once they arrive again, a peer has the same bookings as the router."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.core import load_notes
from router.core.load_notes import BookingState, LoadNote, PromptState, note_bytes, note_of
from router.predict import load_updates
from router.predict.inflight_load import InflightLoad
from router.predict.inflight_request import InflightRequest
from router.predict.load_updates import LoadUpdates
from router.predict.peer_load import PeerLoad
from router.predict.prefix_cache import PrefixCacheIndex
from router.predict.shared_beginnings import Beginnings, beginnings, lengths_within
from router.predict.step_model import make_of

MAKE = make_of(costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("H100"), profiles=shipped.profiles()))
NAMES = ("p", "d")
EACH = 250
"""Tokens of a chunk of the prompts, which have one of three texts."""

Step = tuple[float, str, int, int, float, str]
"""Seconds since the step before, the event, the request, its prompt tokens, its target in ms, and the note's fate."""


def large_caches() -> PrefixCacheIndex:
    """Both instances' prefix caches, which evict nothing."""
    made = PrefixCacheIndex()
    for row in range(2):
        made.join(row, 10_000_000, 1)
    return made


class Both:
    """A router, its peer, and the notes between them."""

    def __init__(self) -> None:
        self.here, self.there = InflightLoad(), InflightLoad()
        for each in (self.here, self.there):
            for row in range(2):
                each.know(row, MAKE)
        self.updates = self.here.updates = LoadUpdates("a", self.name_of, shares_names=True)
        self.caches, self.peers_caches = large_caches(), large_caches()
        self.peer = PeerLoad(self.there, {name: row for row, name in enumerate(NAMES)})
        self.open: list[InflightRequest] = []
        self.old: list[LoadNote] = []

    def name_of(self, row: int, life: int) -> str:
        return NAMES[row] if self.here.rows[row].life == life else ""

    def begin(self, now: float, prompt: int, tpot_ms: float, row: int) -> None:
        made = InflightRequest(
            prompt_tokens=prompt, mean_tokens=80.0, short_tokens=20.0, middle_tokens=60.0, variance=100.0,
            tpot_ms=tpot_ms,
        )  # fmt: skip
        self.here.prompt_placed(made, row, prompt / 40, prompt / 80, now)
        made.chunks = tuple(range(100 * (prompt % 3), 100 * (prompt % 3) + prompt // EACH))
        cached = lengths_within(self.caches.match(made.chunks).chunks_of(1))
        made.beginnings = Beginnings(beginnings(made.chunks), cached, EACH, prompt)
        self.here.answer_placed(made, 1, now)
        self.caches.sent(1, made.chunks, now)
        self.open.append(made)

    def go_on(self, what: str, which: int, now: float) -> None:
        if not self.open:
            return
        booking = self.open[which % len(self.open)]
        if what == "lose":
            self.here.prompt_over(booking, now, done=False)
        else:
            self.here.prompt_over(booking, now, done=True)
            self.here.opened(booking, now)
        if what != "open":
            self.here.answer_over(booking, now, 50)
            self.open.remove(booking)

    def play(self, history: list[Step], *, tells: bool) -> float:
        """Play all steps; returns the time at their end. `tells`: the router has a peer."""
        now = 1.0
        for gap_s, what, which, prompt, tpot_ms, fate in history:
            now += gap_s
            if what == "begin":
                self.begin(now, prompt, tpot_ms, which % 2)
            elif what != "tell":
                self.go_on(what, which, now)
            elif tells:
                self.tell(fate, now)
            else:
                self.updates.skip()
        return now

    def tell(self, fate: str, now: float) -> None:
        for note in self.updates.notes(now):
            read = note_of(note_bytes(note))
            assert isinstance(read, LoadNote)
            if fate != "lost":
                self.hear(read, now, asks=fate != "unasked")
            if fate == "first":
                fate = "lost"
            if fate == "doubled":
                self.hear(read, now)
            if fate == "late" and self.old:
                self.hear(self.old[0], now)
            self.old.append(read)

    def hear(self, note: LoadNote, now: float, *, asks: bool = True) -> None:
        """The peer reads a note. `asks`: the peer's question for all bookings reaches the router."""
        self.peer.hear(note, now, self.peers_caches)
        if self.peer.to_ask(now) and asks:
            self.updates.tell_all()


def counts(load: InflightLoad) -> list[Any]:
    return [
        (at.prompts, at.decoding, dict(at.targets), [len(limits) for limits in at.limits.by_length]) for at in load.rows
    ]


def sums(load: InflightLoad) -> list[float]:
    """Sums of bookings, which are added and taken back in another order at the peer."""
    return [each for at in load.rows for each in (at.kv_mean, at.answer_context, at.backlog)]


steps = st.tuples(
    st.floats(0.0, 0.4),
    st.sampled_from(["begin", "begin", "open", "end", "lose", "tell", "tell"]),
    st.integers(0, 9),
    st.integers(1, 8000),
    st.sampled_from([12.0, 50.0, float("inf")]),
    st.sampled_from(["heard", "heard", "lost", "doubled", "late", "unasked", "first"]),
)


@pytest.fixture(autouse=True)
def _small_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bookings at most fit into a note, so that many bookings take several notes."""
    monkeypatch.setattr(load_updates, "STATES_MAX", 2)


@given(st.lists(steps, max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_peer_has_the_same_bookings_as_the_router(history: list[Step]) -> None:
    both = Both()
    now = both.play(history, tells=True)
    for _ in range(3):  # the last notes arrive: one that shows a gap, those with all bookings, and one more
        now += 1.0
        both.tell("heard", now)
    assert not both.peer.to_ask(now + 1.0)
    assert counts(both.there) == counts(both.here)
    assert sums(both.there) == pytest.approx(sums(both.here), abs=0.1)
    assert both.peer.bookings == len(both.open)
    assert all(not at.reported.open for at in both.there.rows)
    both.peer.lost("a", now)
    assert [(at.prompts, at.decoding) for at in both.there.rows] == [(0, 0), (0, 0)]
    assert both.there.answers == 0


@given(st.lists(steps, max_size=60))
def test_a_router_without_peers_keeps_no_updates_for_them(history: list[Step]) -> None:
    both = Both()
    now = both.play(history, tells=False)
    both.updates.skip()
    assert not both.updates.waiting
    assert len(both.updates._booked) == len(both.open)
    both.updates.tell_all()
    both.tell("heard", now)
    assert counts(both.there) == counts(both.here)
    assert sums(both.there) == pytest.approx(sums(both.here), abs=0.1)


def test_a_restarted_instance_has_none_of_its_former_requests() -> None:
    both = Both()
    both.begin(1.0, 4000, 50.0, 0)
    both.tell("heard", 1.01)
    for each in (both.here, both.there):
        each.know(0, MAKE)
    both.begin(1.1, 4000, 50.0, 0)
    both.tell("heard", 1.11)
    both.updates.tell_all()
    both.tell("heard", 1.12)
    assert counts(both.there) == counts(both.here)
    assert sums(both.there) == pytest.approx(sums(both.here), abs=0.1)
    assert both.there.rows[0].prompts == 1


def test_a_prompt_that_waits_for_long_is_booked_by_a_router_that_comes_later() -> None:
    both = Both()
    both.begin(1.0, 4000, 50.0, 0)
    both.updates.tell_all()
    both.tell("heard", 31.0)
    assert both.there.rows[0].prompts == 1
    assert both.there.rows[0].recent * both.there.faded(31.0) < 0.001


def test_a_question_that_is_lost_is_asked_again() -> None:
    both = Both()
    both.updates.tell_all()
    both.begin(1.0, 4000, 50.0, 0)
    both.tell("heard", 1.01)
    both.go_on("end", 0, 1.5)
    both.tell("lost", 1.51)
    both.tell("unasked", 2.0)
    assert both.peer.bookings == 1, "the note on the end was lost, and so was the question"
    both.tell("heard", 2.5)
    both.tell("heard", 3.0)
    assert both.peer.bookings == 0


@pytest.mark.interpreted
def test_notes_without_the_first_part_do_not_replace_the_bookings() -> None:
    both = Both()
    both.updates.tell_all()
    for number in range(5):
        both.begin(1.0 + number, 4000, 50.0, 0)
    both.tell("heard", 6.0)
    both.updates.tell_all()
    first, *others = both.updates.notes(7.0)
    assert (first.parts, len(others)) == (3, 2)
    for note in others:
        both.peer.hear(note, 7.0)
    assert both.peer.bookings == 5
    assert both.peer.to_ask(8.0) == ["a"]


@pytest.mark.interpreted
def test_a_finished_answer_of_a_peer_has_used_its_place_in_the_prefix_cache() -> None:
    class Recording(PrefixCacheIndex):
        def used(self, row: int, chunks: Any, now: float) -> None:
            seen.append(("used", row, tuple(chunks)))

        def wrote(self, row: int, tokens: int, now: float) -> None:
            seen.append(("wrote", row, tokens))

    both, seen = Both(), list[Any]()
    both.begin(1.0, 4000, 50.0, 0)
    both.open[0].chunks = (11, 22)
    prefixes = Recording()

    def tell(now: float) -> None:
        for note in both.updates.notes(now):
            both.peer.hear(note, now, prefixes)

    tell(1.01)
    both.go_on("open", 0, 1.2)
    tell(1.21)
    both.go_on("end", 0, 2.0)
    tell(2.01)
    assert seen == [("used", 1, (11, 22)), ("wrote", 1, 80)]


def test_a_prompt_of_a_peer_that_ended_earlier_turns_no_clock_back() -> None:
    both = Both()
    both.begin(1.0, 4000, 50.0, 0)
    both.go_on("open", 0, 1.2)  # its prompt is computed at 1.2 s, and its answer goes on
    own = InflightRequest(prompt_tokens=9, mean_tokens=8.0, short_tokens=2.0, middle_tokens=7.0, variance=1.0)
    both.there.prompt_placed(own, 0, 500.0, 0.0, 5.0)
    before = both.there.waits_ms(5.1)[0]
    both.updates.tell_all()
    both.tell("heard", 5.1)
    assert both.there.waits_ms(5.1)[0] == pytest.approx(before)


def test_the_fullest_note_is_read() -> None:
    state = BookingState(
        number=2**53, prefill="p" * 256, prompt=PromptState.WAITS, plain_ms=1e9, prompt_ms=1e9, stall_ms=1e9,
        placed_ago_ms=1e9, ended_ago_ms=1e9, decode="d" * 256, opened=True, prompt_tokens=2**53, mean_tokens=1e9,
        short_tokens=1e9, middle_tokens=1e9, variance=1e9, tpot_ms=1e9, pause_ms=1e9,
        chunks=(2**64 - 1,) * load_notes.CHUNKS_MAX, chunk_tokens=1e9,
    )  # fmt: skip
    note = LoadNote("a", 1, (state,) * load_notes.STATES_MAX)
    assert note_of(note_bytes(note)) == note
