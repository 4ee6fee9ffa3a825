"""The twin: one vLLM instance as a machine (law 2), in whole nanoseconds.

`handle(event, now_ns) -> effects`, `next_wakeup() -> int | None`. Time never runs backwards. A late call is allowed:
work that was due earlier is done first, each part at its own time, and effects carry the times at which they were due.

A running step is never interrupted. Events during it are applied when it is over: aborts before its tokens are counted,
all others after. Steps in which nothing changes are made together (`runs.py`); an event cuts such a run at the end of
the step under way. With `fast_forward=False` each step is made by itself, with the same result.
"""

from __future__ import annotations

from typing import Final

from cluster.instance import Load
from engine.twin.batch import Batch
from engine.twin.config import StepCosts, TwinConfig
from engine.twin.events import (
    Contents,
    Cut,
    Die,
    Effect,
    EngineReady,
    Event,
    LoadIs,
    ReadBlocks,
    ReadLoad,
    ReadSlot,
    RequestRefused,
    RunShare,
    SlotSays,
    StartEngine,
    StepRun,
    Submit,
    Tick,
)
from engine.twin.flight import Flight
from engine.twin.life import EngineLife
from engine.twin.request import Sequence, Status
from engine.twin.runs import execute, horizon, leap


class Twin:
    """One vLLM instance. It is down until it is started; while it is not ready it refuses requests."""

    def __init__(self, config: TwinConfig, costs: StepCosts, *, fast_forward: bool = True) -> None:
        self.config: Final = config
        self._costs: Final = costs
        self._fast_forward: Final = fast_forward
        self._life: EngineLife | None = None
        self._starting: tuple[int, int] | None = None
        """The time at which it will be ready, and its epoch."""
        self._flight: Flight | None = None
        self._runs = 0
        self._now_ns = 0
        self._due_ns: int | None = None
        self._effects: list[Effect] = []

    def next_wakeup(self) -> int | None:
        """The next time at which something happens without an event: a step ends, a lease ends, the engine is ready."""
        return self._due_ns

    def _look(self) -> int | None:
        """Find the next wake-up anew."""
        due = None if self._starting is None else self._starting[0]
        if self._flight is not None and (due is None or self._flight.end_ns < due):
            due = self._flight.end_ns
        if self._life is not None and (lease := self._life.holds.next_wakeup()) is not None:
            lease = max(lease, self._now_ns)
            due = lease if due is None or lease < due else due
        self._due_ns = due
        return due

    def shunned(self, now_ns: int) -> tuple[str, ...]:
        """Producers that it pulls nothing from now, as its agent reads them at an engine's agent socket."""
        return () if self._life is None else self._life.pulls.wants.peers.shunned(now_ns)

    def handle(self, event: Event, now_ns: int) -> tuple[Effect, ...]:
        """Apply one event, after all work that was due by now."""
        assert now_ns >= self._now_ns, "time does not run backwards"
        due = self._due_ns
        while due is not None and due <= now_ns:
            self._now_ns = due
            self._pass(due)
            due = self._look()
        self._now_ns = now_ns
        if type(event) is not Tick:
            self._take(event, now_ns)
            self._look()
        effects = tuple(self._effects)
        self._effects.clear()
        return effects

    # --- the clock ---------------------------------------------------------------------------------------------------

    def _pass(self, now_ns: int) -> None:
        """Do one piece of the work that is due now: the end of a step, else of a start-up, else of leases."""
        if self._flight is not None and self._flight.end_ns <= now_ns:
            self._land(now_ns)
        elif self._starting is not None and self._starting[0] <= now_ns:
            epoch, self._starting = self._starting[1], None
            self._life = EngineLife(self.config, epoch, self._effects)
            self._effects.append(EngineReady(now_ns, epoch))
        elif self._life is not None:
            self._life.ended(self._life.holds.tick(now_ns))
            self._disturb(self._life, now_ns)

    def _take(self, event: Event, now_ns: int) -> None:
        match event:
            case StartEngine(epoch):
                self._stop(now_ns)
                self._starting = (now_ns + self.config.start_up_ns, epoch)
                if not self.config.start_up_ns:
                    self._pass(now_ns)
            case Die():
                self._stop(now_ns)
            case Tick():
                pass
            case _ if self._life is None:
                self._answer_dead(event, now_ns)
            case ReadSlot(slot):  # no step writes to slots, so no run is cut for this
                self._effects.append(SlotSays(now_ns, self._life.holds.slot(slot)))
            case ReadLoad() | ReadBlocks():
                self._cut(self._life, now_ns)
                self._answer(self._life, event, now_ns)
            case _:
                self._life.take(event, now_ns)
                self._disturb(self._life, now_ns)

    def _answer(self, life: EngineLife, event: ReadLoad | ReadBlocks, now_ns: int) -> None:
        if isinstance(event, ReadLoad):
            self._effects.append(LoadIs(now_ns, life.load()))
        else:
            self._effects.append(Contents(now_ns, life.contents(event.blocks)))

    def _answer_dead(self, event: Event, now_ns: int) -> None:
        """No engine runs: connections fail. Reports of peers and links are about a former life."""
        match event:
            case Submit(request):
                self._effects.append(RequestRefused(now_ns, request.id, "the engine is not ready"))
            case ReadLoad():
                self._effects.append(LoadIs(now_ns, Load()))
            case ReadBlocks():
                self._effects.append(Contents(now_ns, None))
            case ReadSlot():
                self._effects.append(SlotSays(now_ns, None))

    def _stop(self, now_ns: int) -> None:
        if self._flight is not None and self._life is not None:
            self._cut(self._life, now_ns)
        if self._life is not None:
            self._life.die(now_ns)
        self._life = self._flight = self._starting = None

    # --- steps -------------------------------------------------------------------------------------------------------

    def _disturb(self, life: EngineLife, now_ns: int) -> None:
        """An event has come in: it is applied when the step under way is over, or at once."""
        if self._flight is not None:
            self._cut(life, now_ns)
        else:
            life.edge(None, now_ns)
            self._take_off(life, now_ns)

    def _cut(self, life: EngineLife, now_ns: int) -> None:
        """Count the finished steps up to now, and let the run end with the step under way."""
        flight = self._flight
        if flight is None or flight.steps == flight.done + 1:
            return
        over = flight.steps_over(now_ns)
        leap(life.scheduler, life.batches, over - flight.done)
        flight.done = over
        if flight.steps > over + 1:
            flight.cut(over + 1)
            self._effects.append(Cut(flight.number, now_ns, flight.end_ns, flight.steps))

    def _land(self, now_ns: int) -> None:
        """The last step of a run is over."""
        flight, life = self._flight, self._life
        assert flight is not None and life is not None
        leap(life.scheduler, life.batches, flight.steps - 1 - flight.done)
        self._flight = None
        life.edge(life.batches.popleft(), now_ns)
        self._take_off(life, now_ns)

    def _take_off(self, life: EngineLife, now_ns: int) -> None:
        """Begin the decided step, with as many steps like it as are certain."""
        if not life.batches:
            return
        batch = life.batches[0]
        if self.config.contents:
            execute(life.scheduler, batch)
        steps = 1 + (horizon(life.scheduler, life.batches) if self._fast_forward else 0)
        self._runs += 1
        flight = self._flight = Flight.of(batch, self._costs, self._runs, now_ns, steps)
        self._effects.append(
            StepRun(
                number=flight.number,
                at_ns=now_ns,
                end_ns=flight.end_ns,
                steps=steps,
                batch=flight.batch,
                sum_context=flight.sum_context,
                prompt_tokens=flight.new_tokens,
                shares=self._shares(life, batch, now_ns),
            )
        )

    def _shares(self, life: EngineLife, batch: Batch, now_ns: int) -> tuple[RunShare, ...]:
        every, crew = self.config.every_share, life.scheduler.crew
        rows: list[tuple[int, Sequence, int]] = []
        for entry in batch.entries.values():
            sequence = entry.sequence
            if sequence.first_run_ns is None:
                sequence.first_run_ns = now_ns
            unwanted = entry.dead or (entry.stale and self.config.drops_stale_output)
            if entry.samples and not unwanted and (every or not sequence.outputs):
                rows.append((entry.place, sequence, sequence.outputs))
        for sequence in batch.joined:
            if sequence.first_run_ns is None:
                sequence.first_run_ns = now_ns
        together = life.scheduler.running if every and not self.config.contents else batch.joined
        for sequence in together:
            if sequence.first <= batch.number <= sequence.last and sequence.status is Status.RUNNING:
                outputs = crew.outputs(sequence)
                if every or not outputs:
                    rows.append((sequence.place, sequence, outputs))
        if len(rows) > 1:
            rows.sort(key=lambda row: row[0])
        return tuple([RunShare(sequence.request.id, outputs, sequence.key) for _, sequence, outputs in rows])
