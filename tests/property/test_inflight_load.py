"""The load in flight depends on events only, and not on questions asked in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.predict.inflight_load import InflightLoad
from router.predict.inflight_request import InflightRequest
from router.predict.step_model import make_of

MAKE = make_of(costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("H100"), profiles=shipped.profiles()))


def inflight() -> InflightLoad:
    made = InflightLoad()
    made.reach(1)
    made.know(0, MAKE)
    return made


def booking(prompt: int, short: float, tpot_ms: float) -> InflightRequest:
    return InflightRequest(
        prompt_tokens=prompt, mean_tokens=4 * short, short_tokens=short, middle_tokens=3 * short, variance=100.0,
        tpot_ms=tpot_ms,
    )  # fmt: skip


class Twice:
    """One history of requests, in two instances of `InflightLoad`."""

    def __init__(self) -> None:
        self.books = inflight(), inflight()
        self.open: list[tuple[InflightRequest, InflightRequest]] = []

    def begin(self, now: float, prompt: int, short: float, tpot_ms: float) -> None:
        both = booking(prompt, short, tpot_ms), booking(prompt, short, tpot_ms)
        for here, each in zip(self.books, both, strict=True):
            here.prompt_placed(each, 0, prompt / 40, prompt / 80, now)
            here.answer_placed(each, 0, now)
        self.open.append(both)

    def drop(self, now: float, which: int) -> None:
        for here, each in zip(self.books, self.open[which % len(self.open)], strict=True):
            here.prompt_over(each, now, done=False)

    def go_on(self, now: float, which: int, *, ends: bool) -> None:
        both = self.open[which % len(self.open)]
        for here, each in zip(self.books, both, strict=True):
            here.prompt_over(each, now, done=True)
            here.opened(each, now)
            if ends:
                here.answer_over(each, now, 100)
        if ends:
            self.open.remove(both)


steps = st.tuples(
    st.floats(0.0, 1.5),
    st.sampled_from(["begin", "begin", "open", "drop", "end", "ask", "ask"]),
    st.integers(0, 9),
    st.integers(1, 8000),
    st.floats(2.0, 60.0),
    st.sampled_from([12.0, 20.0, 50.0]),
)


@given(st.lists(steps, max_size=40))
def test_questions_about_harm_do_not_change_the_load(history: list[tuple[float, str, int, int, float, float]]) -> None:
    here, now = Twice(), 1.0
    asked, silent = here.books
    for gap_s, what, which, prompt, short, tpot_ms in history:
        now += gap_s
        if what == "begin":
            here.begin(now, prompt, short, tpot_ms)
        elif what == "ask":
            asked.harmed(0, 100.0, short, 40.0, now)
        elif what == "drop" and here.open:
            here.drop(now, which)
        elif here.open:
            here.go_on(now, which, ends=what == "end")
    for ms in (0.0, 1.0, 10.0, 100.0, 1000.0, 1e5):
        assert asked.harmed(0, ms, 20.0, 40.0, now) == silent.harmed(0, ms, 20.0, 40.0, now)
    assert asked.rows[0].limits.by_length == silent.rows[0].limits.by_length
