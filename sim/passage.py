"""One request on its way through the simulated fleet: carries out its journey's effects (live:
`router.request.driver`).

Nothing is decided here. The world supplies the answers of legs; the router's scheduler makes the choices.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from engine.twin import events as ev
from engine.twin.tokens import Prompt, Segment
from loadgen.arrival import Arrival
from router.core import eligibility
from router.core import journey as j
from router.core.eligibility import Verdict, Way
from router.core.values import NO_PROMISE, Wanted
from router.fleet import events as d
from router.predict.predictors import foretold
from router.scheduler.placements import SchedulingContext
from sim import result as rows
from sim import sourcing
from sim.answering import SimulatedAnswering
from sim.instance import SimulatedLeg
from sim.kernel import NS
from sim.prefilling import SimulatedPrefilling

if TYPE_CHECKING:
    from sim.front import SimulatedRouter

_OWN_TEXT: Final = 1 << 63
"""Seeds of text that no other prompt has begin here; block ids of traces stay below."""

_PLAIN: Final = {"prompt": "x", "stream": True}
VERDICTS: Final = {
    (one, greedy): eligibility.verdict(
        eligibility.COMPLETIONS, {**_PLAIN, "max_tokens": 1 if one else 2, **({"temperature": 0} if greedy else {})}
    )
    for one in (True, False)
    for greedy in (True, False)
}
"""The verdicts of `router.core.eligibility` on an ordinary streamed completion: by (one token at most, repeatable)."""


def prompt_of(arrival: Arrival, number: int) -> Prompt:
    """A segment for each shared block, then text of its own, as `loadgen.prompts` makes it."""
    left = max(1, arrival.input_tokens)
    parts: list[Segment] = []
    for block in arrival.prefix:
        if not left:
            break
        taken = min(arrival.block_tokens, left)
        parts.append(Segment(block, taken))
        left -= taken
    if left:
        parts.append(Segment(_OWN_TEXT | number, left))
    return tuple(parts)


def _wanted(front: SimulatedRouter, arrival: Arrival, model: str, verdict: Verdict, text_bytes: int) -> Wanted:
    """What the router knows of a request; `text_bytes`: the size of a prompt whose tokens it must estimate, else 0."""
    hand_over = verdict.way is not Way.AGGREGATED
    tokens = front.world.rough.estimated(model, text_bytes) if text_bytes else arrival.input_tokens
    return Wanted(
        model=model,
        hand_over=hand_over,
        one_prompt=hand_over,
        prefill_only=arrival.output_tokens < 2,
        prompt_tokens=tokens,
        prefix=arrival.prefix,
        prefix_block_tokens=arrival.block_tokens * (tokens / max(1, arrival.input_tokens) if text_bytes else 1),
        slo_class=arrival.slo_class or "",
        arrived=front.kernel.now_s,
        unseeded=not (verdict.way is Way.SEEDED and front.settings.seeding),
    )


class Passage(SchedulingContext):
    """One request on its way through the fleet. It has many attributes, as it holds each part of the request."""

    __slots__ = (
        "_pending",
        "answering",
        "arrival",
        "front",
        "journey",
        "legs",
        "number",
        "prefilling",
        "prompt",
        "row",
        "text_bytes",
        "verdict",
        "watched_s",
    )

    def __init__(self, front: SimulatedRouter, number: int, arrival: Arrival, model: str) -> None:
        self.verdict = VERDICTS[arrival.output_tokens < 2, front.settings.greedy]
        self.text_bytes = front.world.rough.text_bytes(arrival.input_tokens)
        wanted = _wanted(front, arrival, model, self.verdict, self.text_bytes)
        promise = front.promises.get(wanted.slo_class, NO_PROMISE)
        placements = front.scheduler.placements
        if placements is None:
            super().__init__(wanted, promise)
        else:
            wanted, lengths = foretold(placements.lengths, wanted)
            super().__init__(wanted, promise)
            self.expected.lengths = lengths
        limit_s = front.settings.first_token_s
        read_s = front.kernel.now_s + front.lead_ns / NS
        self.front = front
        self.number = number
        self.arrival = arrival
        self.prompt = prompt_of(arrival, number)
        self.journey = j.Journey(
            hand_over=wanted.hand_over,
            stream=True,
            deadline=read_s + limit_s,
            deadline_s=limit_s,
            stall_s=front.settings.stall_s,
        )
        self.watched_s = self.journey.deadline
        """The wake-up that is armed at the router, in seconds: no later than the journey's, which may have moved on."""
        self.row = rows.RequestRow(front.book.class_number(arrival.slo_class))
        self.legs = 0
        """The number of legs so far, source legs left out."""
        self.prefilling = SimulatedPrefilling()
        self.answering = SimulatedAnswering()
        self._pending: deque[j.Effect] = deque()

    def begin(self, _: object = None) -> None:
        """The router has read the request: begin its journey, unless the client has left."""
        if self.journey.state is j.JourneyState.DONE:
            return
        self._pending.extend(self.journey.begin())
        self._drive()

    def feed(self, event: j.Event) -> None:
        """Give the journey an event, and carry out what follows."""
        if self.journey.state is j.JourneyState.DONE:
            return
        self._pending.extend(self.journey.handle(event, self.front.kernel.now_s))
        self._drive()

    def leave(self, _: object = None) -> None:
        """The client closes its connection."""
        self.feed(j.ClientLeft())

    def called(self, _: object = None) -> None:
        """An instance may have a place now: choose again, if the request waits for one."""
        if self.journey.state is j.JourneyState.CHOOSING:
            self.feed(j.FleetChanged())

    def _drive(self) -> None:
        pending = self._pending
        while pending:
            event = self._carry_out(pending.popleft())
            if event is not None:
                pending.extend(self.journey.handle(event, self.front.kernel.now_s))
        wakeup_s = self.journey.next_wakeup()
        if wakeup_s is not None and (wakeup_s < self.watched_s or self.watched_s <= self.front.kernel.now_s):
            self.watched_s = wakeup_s
            self.front.arm(wakeup_s, self.number)

    def _carry_out(self, effect: j.Effect) -> j.Event | None:
        front = self.front
        match effect:
            case j.Choose():
                return self._choose(effect)
            case j.SendPrefill(instance, _, source):
                self.prefilling.send(self, instance, source)
            case j.SendSeed():
                self.row.flags |= rows.SEEDED
                self.row.spoken(front.kernel.now_ns + front.client_ns)
            case j.SendDecode(instance, transfer, _, source):
                return self.answering.send(self, instance, transfer, source)
            case j.SendEarly(instance, _, _):
                self.answering.prepare(front, instance)
            case j.UseEarly(transfer):
                assert self.decode is not None
                return self.answering.send(self, self.decode, transfer, None, prepared=True)
            case j.CloseEarly():
                pass  # it holds nothing: its server's time was spent
            case j.Relay():
                self.row.spoken(front.kernel.now_ns + front.client_ns)
            case j.Finish(outcome):
                front.finish(self, outcome)
            case j.AwaitFleet():
                front.tell(d.FoundNone(self))
            case j.Release(via, transfer):
                front.release(self, via, transfer, waits=self.journey.state is j.JourneyState.RELEASING)
            case j.CloseDecode():
                self.answering.close()
                front.tell(d.Occupied(self, None))
            case j.DropDecode():
                self.answering.close()
            case j.ForgoPrefill(instance):
                return sourcing.forgo(self.prefilling.at(instance))
            case j.CancelPrefill(instance):
                front.abort(self.prefilling.at(instance))
            case j.ClosePrefill():
                self.prefilling.close()
            case j.OutlastPrefill(instance):
                front.outlast(self.prefilling.at(instance))
            case j.Fail(error):
                self.row.status = error.status
                front.book.details[self.number] = error.message
            case j.FailStream(error):
                self.row.flags |= rows.BROKE_OFF
                front.book.details[self.number] = error.message
            case j.ForwardRefusal() | j.AnswerFromPrefill():
                pass  # the status is noted where the leg ended
            case _:
                assert_never(effect)
        return None

    def next_leg(self) -> int:
        """The number of the leg that is sent next."""
        self.legs += 1
        return self.legs

    def _choose(self, effect: j.Choose) -> j.Chosen:
        front = self.front
        now = front.kernel.now_s
        chosen, *called = front.scheduling.handle(d.Asked(self, effect, now), now)
        assert isinstance(chosen, j.Chosen)
        if front.on_choice is not None:
            front.on_choice(self, chosen)
        front.call(tuple(called))
        return chosen

    # --- answers to legs ----------------------------------------------------------------------------------------------

    def answered(self, leg: SimulatedLeg, finished: ev.RequestFinished) -> None:
        """The engine's last answer to a leg has arrived."""
        if leg.sourcing is not None:
            leg.sourcing.over(leg, finished, timed=True)
            return
        if leg.detached:
            return
        self._counted()
        if not leg.prefill:
            self.row.cached_tokens = max(self.row.cached_tokens, finished.local_tokens)
            self.feed(j.Ended())
            return
        event = self.prefilling.answered(leg, finished)
        if event is not None:
            self.feed(event)

    def _counted(self) -> None:
        """The engine has reported how many tokens the prompt has."""
        if not self.text_bytes:
            return
        arrival, size = self.arrival, self.text_bytes
        self.text_bytes = 0
        self.front.world.rough.counted(self.front.model, size, arrival.input_tokens)
        self.wanted = msgspec.structs.replace(
            self.wanted, prompt_tokens=arrival.input_tokens, prefix_block_tokens=arrival.block_tokens
        )

    def opened(self, leg: SimulatedLeg) -> None:
        """The first token of a leg's answer has arrived."""
        if not leg.detached and leg is self.answering.leg:
            leg.beginning = None  # it has pulled, or computed
            self.front.opened(leg)
            self.feed(j.Opened())

    def refused(self, leg: SimulatedLeg, status: int, because: str) -> None:
        """The engine has refused the leg with this HTTP status."""
        if leg.detached:
            return
        if leg.sourcing is not None:
            leg.sourcing.over(leg, None, timed=False)
            return
        self._over(leg)
        if leg.outlasted:
            return
        self.row.status = status
        self.front.book.details[self.number] = because
        self.feed(j.Refused(status, by=leg.at.name if leg.prefill else None))

    def lost(self, leg: SimulatedLeg, because: str, *, untouched: bool = False) -> None:
        """The leg is lost. `untouched`: the engine has not had it."""
        if leg.sourcing is not None:
            if not leg.detached:
                leg.sourcing.over(leg, None, timed=False)
            return
        if leg.detached or (not leg.prefill and leg is not self.answering.leg):
            return
        if leg.outlasted:
            self._over(leg)
            return
        again = self.journey.state is j.JourneyState.STREAMING and self.verdict.resumable
        if again:
            self.row.flags |= rows.RESUMED
        self.front.keep_second(leg)
        self._over(leg)
        self.feed(j.Lost(because, untouched=untouched, again=again, by=leg.at.name if leg.prefill else None))

    def _over(self, leg: SimulatedLeg) -> None:
        if leg.prefill:
            self.front.leg_over(leg)
        else:
            leg.detached = True
            if self.journey.state is j.JourneyState.OPENING:
                self.front.tell(d.Occupied(self, None))
