"""The simulated router: its scheduler, its open requests and their deadlines (`sim.passage` has one request)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from cluster.ids import InstanceId
from cluster.wire import TransferFields
from engine.twin.request import HoldSource
from loadgen.arrival import Arrival
from router.core import journey as j
from router.core.values import Promise
from router.fleet import events as d
from router.fleet.view import speaks_for
from router.scheduler.decision_log import Fleet, Scheduling
from router.scheduler.scheduler import HANDSHAKE_S, Scheduler
from sim import result as rows
from sim.instance import SimInstance, SimulatedLeg
from sim.kernel import NS
from sim.passage import Passage

if TYPE_CHECKING:
    from sim.world import World


class RequestBook:
    """The requests of all simulated routers together."""

    def __init__(self) -> None:
        self.open: Final[dict[int, Passage]] = {}
        """Requests that are not over."""
        self.prefilling: Final[dict[SimulatedLeg, None]] = {}
        """Prefill legs that have a place, in the order in which they were sent."""
        self.rows: Final = rows.Rows()
        self.details: Final[dict[int, str]] = {}
        self.classes: Final[dict[str | None, int]] = {None: 0}
        self.ended_ns = 0

    def class_number(self, name: str | None) -> int:
        """SLO classes as small numbers, by first appearance."""
        found = self.classes.get(name)
        if found is None:
            found = self.classes[name] = len(self.classes)
        return found


class SimulatedRouter:
    """One simulated router. What a run reports is kept for all routers together (`World.book`).

    It has many attributes: it holds the parts of the router, its deadlines, and short names for parts of the world.
    """

    def __init__(self, world: World, fleet: Fleet, scheduler: Scheduler, scheduling: Scheduling, model: str) -> None:
        self.world: Final = world
        self.fleet: Final = fleet
        """Its view of the fleet, as a machine."""
        self.kernel: Final = world.kernel
        self.settings: Final = world.settings
        self.scheduler: Final = scheduler
        self.scheduling: Final = scheduling
        """The scheduler as a machine."""
        self.model: Final = model
        self.promises: Mapping[str, Promise] = {}
        """Promises of SLO classes by name; the empty name has the promise of requests without a class."""
        self.book: Final = world.book
        self.on_choice: Any = None
        """Called with (passage, chosen) at every choice: a decision log, a test."""
        self.client_ns: Final = round(self.settings.client_us * 1000)
        self.lead_ns: Final = round((self.settings.client_us + self.settings.router_us) * 1000)
        self._deadlines: Final[list[tuple[int, int]]] = []
        self._armed_ns = -1
        self._looks_s = -1.0
        """When the scheduler is to be asked for room next, in seconds; -1: not planned."""

    def arrive(self, arrival: Arrival) -> None:
        """A client sends a request now. The router chooses once it has read it."""
        number = self.book.rows.add()
        passage = self.book.open[number] = Passage(self, number, arrival, self.model)
        self.kernel.at(self.kernel.now_ns + self.lead_ns, passage.begin)
        self.arm(passage.journey.deadline, number)

    def tell(self, event: d.SchedulerEvent) -> None:
        """Send an event to the scheduler; requests that may find a place now ask again."""
        self.call(self.scheduling.handle(event, self.kernel.now_s))

    def call(self, passages: tuple[Any, ...]) -> None:
        """These requests ask again, after the present event."""
        for passage in passages:
            self.kernel.at(self.kernel.now_ns, passage.called)
        wakeup_s = self.scheduler.wakeup_s
        if wakeup_s is not None and wakeup_s != self._looks_s:
            self._looks_s = wakeup_s
            self.kernel.at(max(self.kernel.now_ns, _ns_at(wakeup_s)), self._look, wakeup_s)

    def _look(self, wakeup_s: float) -> None:
        """The fleet may have room now, if no event has come since."""
        if wakeup_s == self._looks_s:
            self._looks_s = -1.0
            self.tell(d.Looked(self.kernel.now_s))

    def leg_over(self, leg: SimulatedLeg) -> None:
        """The router is done with a prefill leg: its place is free."""
        if not leg.detached:
            leg.detached = True
            del self.book.prefilling[leg]
            self.tell(d.LegEnded(leg.at.name))

    def outlast(self, leg: SimulatedLeg) -> None:
        """The request goes on without this prefill leg. The leg may end by itself; it is aborted after `j.PATIENCE_S`,
        and given up `j.CANCEL_WAIT_S` later.
        """
        leg.outlasted = True
        self.kernel.at(self.kernel.now_ns + round(j.PATIENCE_S * NS), self.abort, leg)
        self.kernel.at(self.kernel.now_ns + round((j.PATIENCE_S + j.CANCEL_WAIT_S) * NS), self.leg_over, leg)

    def abort(self, leg: SimulatedLeg) -> None:
        """Abort a leg that nothing waits for any more, and give up the hold of a source that it may pull."""
        if leg.beginning is not None and not leg.over:
            self.release(leg.passage, None, leg.beginning, waits=False)
        self.world.legs.abort(leg)

    def release_elsewhere(self, leg: SimulatedLeg, transfer: TransferFields | None) -> None:
        """Release the hold of a leg that nothing waits for any more, if it has one."""
        if transfer is not None:
            self.release(leg.passage, speaks_for(self.scheduler.view, leg.at.name), transfer, waits=False)

    def opened(self, leg: SimulatedLeg) -> None:
        """An answer's first token is here. If its leg pulled a hold, the two engines have shaken hands."""
        source = leg.request.pull
        if source is not None:
            self.scheduler.view.pair_met(f"{source.producer}@{source.transfer.producer_epoch}", leg.at.name)
        if self.scheduler.remembers or leg.passage.trial is not None:
            self.tell(d.AnswerOpened(leg.passage, self.kernel.now_s))
        if self.scheduler.admission is not None:
            self.tell(d.Roomy())

    def release(self, passage: Passage, via: InstanceId | None, transfer: TransferFields, *, waits: bool) -> None:
        """Give a hold up by its name at its producer; if the producer is out of reach, make `via` reject a leg
        for it.
        """
        source: HoldSource = transfer.fields["source"]
        holder, wait_ns = self.world.by_name[source.producer], self.world.hop_ns * 2
        ok = holder.ready and not holder.cut_off
        if ok:
            self.kernel.at(self.kernel.now_ns + self.world.hop_ns, self.world.pulls.give_up, source)
        elif via is not None:
            ok = self._reject(self.world.by_name[via], transfer)
        if waits:  # else the journey goes on meanwhile
            self.kernel.at(self.kernel.now_ns + wait_ns, passage.feed, j.Released(ok))

    def _reject(self, at: SimInstance, transfer: TransferFields) -> bool:
        """Whether the producer gets the leg's rejection; to a producer it has never met the first message is only a
        handshake.
        """
        if not at.ready or at.cut_off:
            return False
        warm = self.scheduler.view.pair_warm(transfer.producer, at.name)
        wait_ns = self.world.hop_ns * 2 + (0 if warm else round(HANDSHAKE_S * NS))
        self.kernel.at(self.kernel.now_ns + wait_ns, self.world.pulls.given_back, (transfer.fields["source"], at))
        return True

    def announce_lost(self, instance: InstanceId, legs: list[SimulatedLeg]) -> None:
        """An instance is gone, down, or restarted: tell the requests that wait for its first answer, and those
        that pull from it.
        """
        for leg in [each for each in legs if each.passage.front is self]:
            state = leg.passage.journey.state
            waits = leg.prefill or state is j.JourneyState.OPENING
            if waits and not leg.detached:
                leg.passage.lost(leg, "the instance was lost")
                self.world.legs.abort(leg)
        for passage in list(self.book.open.values()):
            if passage.front is self and passage.journey.state is j.JourneyState.OPENING:
                passage.feed(j.HolderLost(instance))

    def unreachable(self, instance: InstanceId) -> bool:
        """A leg could not connect. Returns whether the instance went down by it."""
        if not self.scheduler.view.knows(instance):
            return False
        return bool(self.fleet.handle(d.Unreachable(instance), self.kernel.now_s))

    def finish(self, passage: Passage, outcome: str) -> None:
        """A journey is over: write its row, forget the rest."""
        leg, arrival, row = passage.answering.leg, passage.arrival, passage.row
        tokens = leg.outputs if leg is not None else None
        complete = outcome == "served"
        self.tell(d.Finished(passage, self.kernel.now_s, tokens, not complete, complete=complete))
        last_ns = -1
        if leg is not None and row.first_ns >= 0:
            self.keep_second(leg)
            last_ns = self._seen(leg.last_ns)
        del self.book.open[passage.number]
        passage.answering.leg, passage.prefilling.sent = None, ()  # legs refer to their passage: leave no cycle
        self.book.ended_ns = self.kernel.now_ns
        self.book.rows.write(
            passage.number,
            round(arrival.at_s * NS),
            row.first_ns,
            row.second_ns,
            last_ns,
            self.kernel.now_ns + self.client_ns,
            arrival.input_tokens,
            arrival.output_tokens,
            leg.outputs if leg is not None else 0,
            row.cached_tokens,
            row.prefilled_on,
            leg.at.index if leg is not None else -1,
            rows.OUTCOMES.index(outcome),
            row.slo_class,
            passage.journey.attempt,
            row.flags,
            row.status,
        )

    def keep_second(self, leg: SimulatedLeg) -> None:
        """Note when the client had its second token, if this leg brought it."""
        row = leg.passage.row
        if row.second_ns < 0 <= leg.second_ns <= self.kernel.now_ns and not leg.prefill:
            row.second_ns = self._seen(leg.second_ns)

    def _seen(self, at_engine_ns: int) -> int:
        return at_engine_ns + self.world.hop_ns + self.client_ns if at_engine_ns >= 0 else -1

    # --- deadlines: one timer for all of them -------------------------------------------------------------------------

    def arm(self, wakeup_s: float, number: int) -> None:
        """Wake a journey at its time. Never cancelled: a journey that has moved on does nothing then."""
        heappush(self._deadlines, (max(self.kernel.now_ns, _ns_at(wakeup_s)), number))
        self._wind()

    def _wind(self) -> None:
        """Wake up for the first deadline of a request that is still open."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self.book.open:
            heappop(deadlines)
        if deadlines and (self._armed_ns < 0 or deadlines[0][0] < self._armed_ns):
            self._armed_ns = deadlines[0][0]
            self.kernel.at(self._armed_ns, self._ring)

    def _ring(self, _: object) -> None:
        self._armed_ns = -1
        deadlines, now_ns = self._deadlines, self.kernel.now_ns
        due = []
        while deadlines and deadlines[0][0] <= now_ns:
            due.append(heappop(deadlines)[1])
        for number in due:
            passage = self.book.open.get(number)
            if passage is not None:
                passage.feed(j.Tick())
        self._wind()


def _ns_at(seconds: float) -> int:
    """The first nanosecond at which a clock of floating seconds has come so far."""
    found = math.floor(seconds * NS)
    while found / NS < seconds:
        found += 1
    return found
