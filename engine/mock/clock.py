"""Runs one twin on the wall clock. A shell: it owns one timer, and nothing else of the outside world.

The clock passes on the twin's effects of one moment one by one (`made`, `told`), and then calls `done`.

Engine time is `speed` times real time. One timer wakes the clock at the twin's own next moment or at the next token,
but at most once in `QUANTUM_S`. Everything that has become due in between is done together. So a machine that cannot
keep up writes fewer and larger pieces, and does not fall ever further behind. `lateness` counts how late the clock
wakes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.mock.playback import Made, Playback
from engine.twin.config import StepCosts
from engine.twin.events import Contents, Effect, Event, LoadIs, ReadBlocks, ReadLoad, ReadSlot, SlotSays, Tick
from engine.twin.machine import Twin

QUANTUM_S = 0.001
"""Least real seconds between two wakeups: below what a network adds, above what the wakeups of 50 instances cost."""

NS = 1_000_000_000

PACES_KEPT = 64
"""Speeds that are remembered, to tell how much real time a stretch of engine time took."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """A speed, and where engine time and real time stood when it began."""

    since_ns: int
    since_s: float
    speed: float


class Timers(Protocol):
    """Real time."""

    def time(self) -> float:
        """Seconds, never backwards."""

    def call_later(self, delay: float, callback: Callable[[], object], /) -> asyncio.TimerHandle:
        """Call `callback` once, `delay` seconds from now."""


class WallTime:
    """Real time by `time.monotonic`. uvloop updates its own clock once a millisecond, too coarse for short steps."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call_later = loop.call_later

    def time(self) -> float:
        """Seconds, never backwards."""
        return time.monotonic()


class Lateness:
    """How late a clock has woken, in real seconds."""

    def __init__(self) -> None:
        self.wakeups = 0
        self.sum_s = 0.0
        self.worst_s = 0.0

    def add(self, late_s: float) -> None:
        """Count one wakeup that was so late."""
        self.wakeups += 1
        self.sum_s += late_s
        self.worst_s = max(self.worst_s, late_s)

    def as_json(self) -> dict[str, float]:
        """The count, and the mean and worst lateness in real milliseconds."""
        mean_s = self.sum_s / self.wakeups if self.wakeups else 0.0
        return {"wakeups": self.wakeups, "mean_ms": round(mean_s * 1000, 3), "worst_ms": round(self.worst_s * 1000, 3)}


class Clock:
    """One twin, its playback and its time. `made` receives tokens, `told` all other effects of the twin.

    It has many attributes: the twin and its callbacks, and where engine time stands beside real time.
    """

    def __init__(
        self,
        twin: Twin,
        costs: StepCosts,
        made: Made,
        told: Callable[[Effect], None],
        done: Callable[[], None],
        timers: Timers,
        *,
        speed: float = 1.0,
    ) -> None:
        self.lateness = Lateness()
        self._twin = twin
        self._playback = Playback(costs, made, told)
        self._done = done
        self._timers = timers
        self._paces = [_Pace(0, timers.time(), speed)]
        """The present speed is the last one."""
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._woke_s = self._paces[0].since_s - QUANTUM_S
        self._pending: deque[Event] = deque()
        self._busy = False

    def now_ns(self) -> int:
        """Engine time, in nanoseconds since the clock was made."""
        pace = self._paces[-1]
        return pace.since_ns + round((self._timers.time() - pace.since_s) * pace.speed * NS)

    def real_s(self, engine_ms: float) -> float:
        """The real seconds that so many milliseconds of engine time take at the present speed."""
        return engine_ms / 1000 / self._paces[-1].speed

    def took_s(self, begin_ns: int, end_ns: int) -> float:
        """The real seconds between two moments of engine time, at the speeds of that time."""
        return self._real(end_ns) - self._real(begin_ns)

    def set_speed(self, speed: float) -> None:
        """Let engine time run faster or slower from now on."""
        self._paces.append(_Pace(self.now_ns(), self._timers.time(), speed))
        del self._paces[:-PACES_KEPT]
        self._arm()

    def tell(self, event: Event) -> None:
        """Send the twin an event now, or next if it is handling another one."""
        self._pending.append(event)
        if not self._busy:
            self._carry_out((), None)

    def read(self, event: ReadLoad | ReadBlocks | ReadSlot) -> LoadIs | Contents | SlotSays:
        """Ask the twin now. Do not call this from `made` or `told`: the twin is handling an event then."""
        assert not self._busy, "a twin that handles an event answers no questions"
        now_ns = self.now_ns()
        effects = self._twin.handle(event, now_ns)
        answer = next(effect for effect in effects if isinstance(effect, LoadIs | Contents | SlotSays))
        self._carry_out(effects, now_ns)
        return answer

    def stop(self) -> None:
        """Wake no more, until the next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _handle(self, event: Event) -> None:
        now_ns = self.now_ns()
        due_ns = self._twin.next_wakeup()
        idle = isinstance(event, Tick) and (due_ns is None or due_ns > now_ns)
        self._playback.take(() if idle else self._twin.handle(event, now_ns), now_ns)

    def _carry_out(self, effects: tuple[Effect, ...], now_ns: int | None) -> None:
        """Carry out these effects, and all events that follow from them."""
        self._busy = True
        try:
            if now_ns is not None:
                self._playback.take(effects, now_ns)
            while self._pending:
                self._handle(self._pending.popleft())
        finally:
            self._busy = False
        self._done()
        self._arm()

    def _real(self, at_ns: int) -> float:
        """The real time at this moment of engine time; for one that is still to come, at the present speed."""
        pace = next((each for each in reversed(self._paces) if each.since_ns <= at_ns), self._paces[0])
        return pace.since_s + (at_ns - pace.since_ns) / NS / pace.speed

    def _arm(self) -> None:
        twin_ns, token_ns = self._twin.next_wakeup(), self._playback.next_due()
        due_ns = twin_ns if token_ns is None else token_ns if twin_ns is None else min(twin_ns, token_ns)
        if due_ns is None:
            self.stop()
            return
        due_s = self._real(due_ns)
        if self._timer is not None and due_s == self._due_s:
            return
        self.stop()
        self._due_s = due_s
        at_s = max(due_s, self._woke_s + QUANTUM_S)
        self._timer = self._timers.call_later(max(0.0, at_s - self._timers.time()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._woke_s = self._timers.time()
        self.lateness.add(max(0.0, self._woke_s - self._due_s))
        self.tell(Tick())
