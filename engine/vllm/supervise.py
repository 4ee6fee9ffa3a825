"""The life cycle of one engine, as a pure machine: when to start, restart, give up, stop, and kill.

It knows nothing of vLLM. `child` turns processes and probes into its events, and its effects into processes.

    IDLE -Begin-> STARTING -Healthy-> READY -ChildExited-> RESTARTING -Tick-> STARTING ...
                     |                  |                     |
                     | StopSupervised   | StopSupervised      | StopSupervised
                     v                  v                     v
                  STOPPING --------ChildExited----------> STOPPED          (FAILED: given up)

An engine that never was ready is not restarted: a wrong flag or a missing file stays wrong. An engine that was ready is
restarted, with growing pauses, a bounded number of times in a window. Every start has its own `epoch`; reports about an
older one change nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """The states as reported outside; the words of `baton engine --json`."""

    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


START_MAX_S = 600.0
"""Longest time from start to first token. Loading a large model from a slow disk takes minutes; a download may take
more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperviseLimits:
    """The machine's time limits. All times in seconds."""

    start_max_s: float = START_MAX_S
    restarts_max: int = 5
    """Restarts allowed within `window_s`; after one more the engine is given up."""
    window_s: float = 600.0
    pause_first_s: float = 1.0
    """Pause before the first restart; doubles with each that follows without a stable time in between."""
    pause_max_s: float = 30.0
    stable_s: float = 60.0
    """An engine that was ready this long has proven itself: the next pause is the first one again."""
    silent_max_s: float = 30.0
    """A ready engine that fails its health checks this long is hanging: a long prefill on CPU blocks for seconds."""
    dead_max_s: float = 1.0
    """The same if the engine itself says that it is dead (503, or its port refuses connections): long enough for more
    than one such answer. vLLM's server lives on after its engine core's death while a client's connection is open (a
    minute was seen)."""
    stop_s: float = 40.0
    """Time from the stop request to the kill: the engine's own drain time and a little."""
    stop_starting_s: float = 5.0
    """The same while it starts: there is nothing to drain."""


# -- events --


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the engine for the first time."""


@dataclass(frozen=True, slots=True)
class WaitsForTurn:
    """The process is not started yet, as another engine starts on the same GPU: its time has not begun."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Reached:
    """The start has come to this stage, in words for people (`logtext.stage`)."""

    epoch: int
    stage: str


@dataclass(frozen=True, slots=True)
class StartHangs:
    """The start will never end, for this reason (`logtext.hangs`)."""

    epoch: int
    because: str


@dataclass(frozen=True, slots=True)
class StartRefused:
    """The engine answers, and refuses what would show that it serves."""

    epoch: int
    because: str


@dataclass(frozen=True, slots=True)
class Healthy:
    """The engine answers; the first answer of an epoch also means that it has made a token."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EngineProbeFailed:
    """The engine did not answer as a healthy one. `dead`: it said so itself, or its port refuses connections."""

    epoch: int
    because: str
    dead: bool = False


@dataclass(frozen=True, slots=True)
class ChildExited:
    """The process is gone, and so is everything below it. `code` as a shell shows it: 128 + n for signal n. `because`:
    why the process could not be started; empty: it ran.
    """

    epoch: int
    code: int
    because: str = ""


@dataclass(frozen=True, slots=True)
class StopSupervised:
    """Stop for good: drain, or do not (`at_once`, or on a second request)."""

    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent at `next_wakeup`."""


Event = (
    Begin
    | WaitsForTurn
    | Reached
    | StartHangs
    | StartRefused
    | Healthy
    | EngineProbeFailed
    | ChildExited
    | StopSupervised
    | Tick
)

# -- effects --


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start the process."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StopChild:
    """Ask the process to finish what it has and end."""


@dataclass(frozen=True, slots=True)
class KillChild:
    """End the process and everything below it now."""

    because: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Report a new state outside."""

    state: EngineState
    because: str = ""
    again_in_s: float | None = None
    """With RESTARTING: the pause before the next start."""


@dataclass(frozen=True, slots=True)
class GiveUpEngine:
    """The engine will not be started again."""

    because: str


Effect = StartChild | StopChild | KillChild | Announce | GiveUpEngine


class Supervisor:
    """One engine's life. See the module's docstring."""

    def __init__(self, rules: SuperviseLimits) -> None:
        self.rules = rules
        self.state = EngineState.IDLE
        self.epoch = 0
        self._wakeup: float | None = None
        self._was_ready = False
        self._ready_since: float | None = None
        self._failing_since: float | None = None
        self._dead_since: float | None = None
        self._killed_because: str | None = None
        self._stage = ""
        self._refused = ""
        self._pauses = 0  # restarts since the last stable time
        self._restarts: deque[float] = deque()

    def next_wakeup(self) -> float | None:
        """When a `Tick` is due: the end of a start, of a pause or of a stop."""
        return self._wakeup

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold one event in, at `now` (seconds); the effects to carry out, in order."""
        match event:
            case Begin() if self.state is EngineState.IDLE:
                return self._start(now)
            case WaitsForTurn(epoch) if epoch == self.epoch:
                if self.state is EngineState.STARTING and self._killed_because is None:
                    self._wakeup = now + self.rules.start_max_s
                return ()
            case Reached(epoch, stage) if epoch == self.epoch:
                return self._reached(stage)
            case StartHangs(epoch, because) if epoch == self.epoch:
                starts = self.state is EngineState.STARTING and self._killed_because is None
                return self._kill(because) if starts else ()
            case StartRefused(epoch, because) if epoch == self.epoch:
                self._refused = because
                return ()
            case Healthy(epoch) if epoch == self.epoch:
                return self._healthy(now)
            case EngineProbeFailed(epoch, because, dead) if epoch == self.epoch:
                return self._probe_failed(because, now, dead=dead)
            case ChildExited(epoch) if epoch == self.epoch:
                return self._exited(event.because or f"the process ended with exit code {event.code}", now)
            case StopSupervised(at_once):
                return self._stop(now, at_once=at_once)
            case Tick() if self._wakeup is not None and now >= self._wakeup:
                return self._overdue(now)
            case _:
                return ()

    def _start(self, now: float) -> tuple[Effect, ...]:
        self.epoch += 1
        self.state = EngineState.STARTING
        self._wakeup = now + self.rules.start_max_s
        self._ready_since = self._failing_since = self._dead_since = self._killed_because = None
        self._stage = self._refused = ""
        return Announce(EngineState.STARTING), StartChild(self.epoch)

    def _reached(self, stage: str) -> tuple[Effect, ...]:
        if self.state is not EngineState.STARTING or stage == self._stage:
            return ()
        self._stage = stage
        return (Announce(EngineState.STARTING, stage),)

    def _healthy(self, now: float) -> tuple[Effect, ...]:
        if self._killed_because is not None:
            return ()  # too late: its end is on the way
        self._failing_since = self._dead_since = None
        if self.state is not EngineState.STARTING:
            return ()
        self.state = EngineState.READY
        self._wakeup = None
        self._was_ready = True
        self._ready_since = now
        return (Announce(EngineState.READY),)

    def _probe_failed(self, because: str, now: float, *, dead: bool) -> tuple[Effect, ...]:
        if self.state is not EngineState.READY or self._killed_because is not None:
            return ()
        if self._failing_since is None:
            self._failing_since = now
        if not dead:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
        failing_s = now - self._failing_since
        dead_s = -1.0 if self._dead_since is None else now - self._dead_since
        if failing_s < self.rules.silent_max_s and dead_s < self.rules.dead_max_s:
            return ()
        return self._kill(f"no healthy answer for {failing_s:.0f} s ({because})")

    def _kill(self, because: str) -> tuple[Effect, ...]:
        """End the process. One that served is told to be restarting at once: its end may take long, as memory is given
        back and files are removed, and it serves no more.
        """
        self._killed_because = because
        self._wakeup = None
        served = (Announce(EngineState.RESTARTING, because),) if self.state is EngineState.READY else ()
        return *served, KillChild(because)

    def _exited(self, because: str, now: float) -> tuple[Effect, ...]:
        because = self._killed_because or because
        self._wakeup = None
        if self.state is EngineState.STOPPING:
            self.state = EngineState.STOPPED
            return (Announce(EngineState.STOPPED),)
        if self.state not in {EngineState.STARTING, EngineState.READY}:
            return ()
        if not self._was_ready:
            return self._give_up(because)
        return self._restart_later(because, now)

    def _restart_later(self, because: str, now: float) -> tuple[Effect, ...]:
        if self._ready_since is not None and now - self._ready_since >= self.rules.stable_s:
            self._pauses = 0
        while self._restarts and now - self._restarts[0] >= self.rules.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.rules.restarts_max:
            return self._give_up(
                f"{because}; {len(self._restarts)} restarts in {self.rules.window_s:.0f} s did not help"
            )
        self._restarts.append(now)
        pause_s = min(self.rules.pause_max_s, self.rules.pause_first_s * 2**self._pauses)
        self._pauses += 1
        self.state = EngineState.RESTARTING
        self._wakeup = now + pause_s
        return (Announce(EngineState.RESTARTING, because, pause_s),)

    def _give_up(self, because: str) -> tuple[Effect, ...]:
        self.state = EngineState.FAILED
        return Announce(EngineState.FAILED, because), GiveUpEngine(because)

    def _stop(self, now: float, *, at_once: bool) -> tuple[Effect, ...]:
        if self.state in {EngineState.IDLE, EngineState.RESTARTING}:
            self.state = EngineState.STOPPED
            self._wakeup = None
            return (Announce(EngineState.STOPPED),)
        if self.state is EngineState.STOPPING:
            return self._kill("asked to stop at once") if self._killed_because is None else ()
        if self.state not in {EngineState.STARTING, EngineState.READY}:
            return ()
        patience_s = self.rules.stop_s if self.state is EngineState.READY else self.rules.stop_starting_s
        self.state = EngineState.STOPPING
        if self._killed_because is not None:
            return (Announce(EngineState.STOPPING),)
        if at_once:
            return Announce(EngineState.STOPPING), *self._kill("asked to stop at once")
        self._wakeup = now + patience_s
        return Announce(EngineState.STOPPING), StopChild()

    def _overdue(self, now: float) -> tuple[Effect, ...]:
        if self.state is EngineState.RESTARTING:
            return self._start(now)
        if self.state is EngineState.STARTING:
            came_to = f"; the start came as far as: {self._stage}" if self._stage else ""
            answered = f"; its last answer: {self._refused}" if self._refused else ""
            return self._kill(f"no first token after {self.rules.start_max_s:.0f} s{came_to}{answered}")
        return self._kill("it did not stop in time")
