"""The clock driver without a clock: time is a number that the test moves."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from support.twin import ask, text

from cluster.ids import RequestId
from engine.mock.clock import PACES_KEPT, QUANTUM_S, Clock
from engine.mock.settings import SimpleCosts
from engine.twin import events as ev
from engine.twin.config import TwinConfig
from engine.twin.machine import Twin


class Handle:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Timers:
    """An event loop's clock; `late_s` is how late every timer fires."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.late_s = 1000.0, late_s
        self._queue: list[tuple[float, int, Handle]] = []
        self.fired = 0

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Any:
        assert delay >= 0
        handle = Handle(callback)
        heapq.heappush(self._queue, (self.now_s + delay + self.late_s, len(self._queue) + self.fired * 1000, handle))
        return handle

    def run(self, until_s: float = 1e9) -> None:
        """Fire the timers that are due, in order."""
        while self._queue and self._queue[0][0] <= until_s:
            when, _, handle = heapq.heappop(self._queue)
            if handle.callback is not None:
                self.now_s = max(self.now_s, when)
                self.fired += 1
                handle.callback()
        if until_s < 1e9:
            self.now_s = max(self.now_s, until_s)


class Watched:
    """A clock, with its tokens and their times (s), its effects, and the count of its moments."""

    def __init__(self, *, step_ms: float = 10.0, speed: float = 1.0, late_s: float = 0.0, **config: Any) -> None:
        self.timers = Timers(late_s)
        costs = SimpleCosts(step_ms=step_ms, prefill_ms_per_1k=0.0)
        twin = Twin(TwinConfig(num_blocks=1000, **config), costs)
        self.tokens: list[tuple[float, int]] = []
        self.effects: list[ev.Effect] = []
        self.moments = 0
        self.clock = Clock(twin, costs, self._made, self.effects.append, self._done, self.timers, speed=speed)
        self.clock.tell(ev.StartEngine(1))

    def _made(self, request: RequestId, key: int, first: int, count: int) -> None:
        self.tokens += [(round(self.timers.now_s - 1000, 6), index) for index in range(first, first + count)]

    def _done(self) -> None:
        self.moments += 1

    def submit(self, name: str = "a", max_tokens: int = 5) -> None:
        self.clock.tell(ev.Submit(ask(name, text((1, 20)), max_tokens)))


def test_tokens_come_at_the_ends_of_steps() -> None:
    watched = Watched()
    watched.submit()
    watched.timers.run()
    assert watched.tokens == [(0.01, 0), (0.02, 1), (0.03, 2), (0.04, 3), (0.05, 4)]
    assert [type(effect) for effect in watched.effects] == [ev.EngineReady, ev.RequestFinished]


def test_speed_is_engine_time_over_real_time() -> None:
    watched = Watched(speed=4.0, step_ms=40.0)
    watched.submit()
    watched.timers.run()
    assert [when for when, _ in watched.tokens] == [0.01, 0.02, 0.03, 0.04, 0.05]


def test_speed_may_change_under_way() -> None:
    watched = Watched()
    watched.submit()
    watched.timers.run(until_s=1000.02)
    watched.clock.set_speed(0.5)
    watched.timers.run()
    assert [when for when, _ in watched.tokens] == [0.01, 0.02, 0.04, 0.06, 0.08]


def test_what_a_stretch_of_engine_time_took_in_real_time() -> None:
    watched = Watched(speed=2.0)
    watched.timers.run(until_s=1000.02)
    watched.clock.set_speed(0.5)
    watched.timers.run(until_s=1000.06)
    watched.clock.set_speed(2.0)
    watched.timers.run(until_s=1000.08)
    ms = 1_000_000
    assert watched.clock.now_ns() == 100 * ms, "40 ms, 20 ms and 40 ms"
    parts = [(0, 40), (40, 60), (60, 100), (20, 50), (0, 100)]
    took = [round(watched.clock.took_s(begin * ms, end * ms), 9) for begin, end in parts]
    assert took == [0.02, 0.04, 0.02, 0.03, 0.08]


def test_a_speed_that_changes_again_and_again_keeps_the_last_ones() -> None:
    watched = Watched()
    for number in range(1, 10 * PACES_KEPT):
        watched.timers.run(until_s=1000 + number)
        watched.clock.set_speed(1.0 + number % 2)
    assert len(watched.clock._paces) == PACES_KEPT
    assert watched.clock.took_s(watched.clock.now_ns(), watched.clock.now_ns()) == 0.0


def test_wakeups_are_gathered() -> None:
    """Steps of 0.1 ms: the clock wakes at most once a millisecond, and gives out every token in the end."""
    watched = Watched(step_ms=0.1)
    watched.submit(max_tokens=200)
    watched.timers.run()
    assert [index for _, index in watched.tokens] == list(range(200))
    assert watched.timers.fired <= 0.02 / QUANTUM_S + 2
    assert watched.tokens[-1][0] < 0.0225


def test_late_wakeups_are_counted_and_lose_nothing() -> None:
    watched = Watched(late_s=0.025)
    watched.submit()
    watched.timers.run()
    assert [index for _, index in watched.tokens] == list(range(5))
    told = watched.clock.lateness.as_json()
    assert told["worst_ms"] == told["mean_ms"] == 25.0


def test_a_clock_that_is_slowed_under_way_is_not_late_by_that() -> None:
    """Steps of 10 ms take 20 ms from 1000.025 on: only what the timers are late counts, in real time."""
    for late_s in (0.0, 0.002):
        watched = Watched(late_s=late_s)
        watched.submit()
        watched.timers.run(until_s=1000.025)
        watched.clock.set_speed(0.5)
        watched.timers.run()
        assert len(watched.tokens) == 5 and watched.tokens[-1][0] > 0.07
        told = watched.clock.lateness.as_json()
        assert told["worst_ms"] == told["mean_ms"] == 1000 * late_s


def test_questions_are_answered_at_once() -> None:
    watched = Watched()
    watched.submit(max_tokens=100)
    watched.timers.run(until_s=1000.055)
    answer = watched.clock.read(ev.ReadLoad())
    assert isinstance(answer, ev.LoadIs)
    assert answer.load.running == 1
    watched.timers.run()
    assert len(watched.tokens) == 100


def test_an_event_sent_by_a_callback_is_handled_after_the_present_effect() -> None:
    """A callback may send the twin an event. The event is handled after the effect that the callback got."""
    watched = Watched()
    seen: list[str] = []

    def hear(effect: ev.Effect) -> None:
        seen.append(type(effect).__name__)
        if isinstance(effect, ev.RequestFinished) and effect.request == "a":
            watched.submit("b", 1)

    watched.clock._playback._told = hear
    watched.submit("a", 1)
    watched.timers.run()
    assert seen == ["RequestFinished", "RequestFinished"]


def test_idle_clocks_do_not_wake() -> None:
    watched = Watched()
    watched.submit()
    watched.timers.run()
    fired = watched.timers.fired
    watched.timers.run(until_s=2000.0)
    assert watched.timers.fired == fired
    watched.submit("b")
    watched.clock.stop()
    watched.timers.run()
    assert len(watched.tokens) == 5
