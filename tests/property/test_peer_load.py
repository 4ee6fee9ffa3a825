"""Whatever notes are lost, doubled or late: once a peer has heard all of them, it has booked what the router has."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.core.load_notes import LoadNote, note_bytes, note_of
from router.predict.inflight_load import InflightLoad
from router.predict.inflight_request import InflightRequest
from router.predict.load_updates import LoadUpdates
from router.predict.peer_load import PeerLoad
from router.predict.step_model import make_of

MAKE = make_of(costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("H100"), profiles=shipped.profiles()))
NAMES = ("p", "d")


class Both:
    """A router, its peer, and the notes between them."""

    def __init__(self) -> None:
        self.here, self.there = InflightLoad(), InflightLoad()
        for each in (self.here, self.there):
            for row in range(2):
                each.know(row, MAKE)
        self.updates = LoadUpdates("a", lambda row, life: NAMES[row] if self.here.rows[row].life == life else "")
        self.here.updates = self.updates
        self.peer = PeerLoad(self.there, {name: row for row, name in enumerate(NAMES)})
        self.open: list[InflightRequest] = []
        self.old: list[LoadNote] = []

    def begin(self, now: float, prompt: int, tpot_ms: float, row: int) -> None:
        made = InflightRequest(
            prompt_tokens=prompt, mean_tokens=80.0, short_tokens=20.0, middle_tokens=60.0, variance=100.0,
            tpot_ms=tpot_ms,
        )  # fmt: skip
        self.here.prompt_placed(made, row, prompt / 40, prompt / 80, now)
        self.here.answer_placed(made, 1, now)
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

    def tell(self, fate: str, now: float) -> None:
        for note in self.updates.notes(now):
            read = note_of(note_bytes(note))
            assert isinstance(read, LoadNote)
            if fate != "lost":
                self.hear(read, now)
            if fate == "doubled":
                self.hear(read, now)
            if fate == "late" and self.old:
                self.hear(self.old[0], now)
            self.old.append(read)

    def hear(self, note: LoadNote, now: float) -> None:
        if self.peer.hear(note, now):
            self.updates.tell_all()


def counts(load: InflightLoad) -> list[Any]:
    return [
        (
            at.prompts, at.decoding, dict(at.targets), round(at.kv_mean), round(at.answer_context), round(at.backlog),
            [len(limits) for limits in at.limits.by_length],
        )
        for at in load.rows
    ]  # fmt: skip


steps = st.tuples(
    st.floats(0.0, 0.4),
    st.sampled_from(["begin", "begin", "open", "end", "lose", "tell", "tell"]),
    st.integers(0, 9),
    st.integers(1, 8000),
    st.sampled_from([12.0, 50.0, float("inf")]),
    st.sampled_from(["heard", "heard", "lost", "doubled", "late"]),
)


@given(st.lists(steps, max_size=60))
def test_a_peer_books_what_the_router_has(history: list[tuple[float, str, int, int, float, str]]) -> None:
    both, now = Both(), 1.0
    for gap_s, what, which, prompt, tpot_ms, fate in history:
        now += gap_s
        if what == "begin":
            both.begin(now, prompt, tpot_ms, which % 2)
        elif what == "tell":
            both.tell(fate, now)
        else:
            both.go_on(what, which, now)
    for _ in range(3):  # the last notes are heard: one that shows a gap, those that tell all, and one more
        both.tell("heard", now)
    assert counts(both.there) == counts(both.here)
    assert both.peer.bookings == len(both.open)
    assert all(not at.reported.open for at in both.there.rows)
    both.peer.lost("a", now)
    assert [(at.prompts, at.decoding) for at in both.there.rows] == [(0, 0), (0, 0)]
    assert both.there.answers == 0


@given(st.lists(steps, max_size=60))
def test_a_router_alone_keeps_nothing_for_peers(history: list[tuple[float, str, int, int, float, str]]) -> None:
    both, now = Both(), 1.0
    for gap_s, what, which, prompt, tpot_ms, _ in history:
        now += gap_s
        if what == "begin":
            both.begin(now, prompt, tpot_ms, which % 2)
        elif what == "tell":
            both.updates.skip()
        else:
            both.go_on(what, which, now)
    both.updates.skip()
    assert not both.updates.waiting
    assert len(both.updates._booked) == len(both.open)
    both.updates.tell_all()
    both.tell("heard", now)
    assert counts(both.there) == counts(both.here)


def test_an_instance_that_starts_anew_has_none_of_its_former_requests() -> None:
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
    assert both.there.rows[0].prompts == 1
