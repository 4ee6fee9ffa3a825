"""One request's life, from the choice of instances to the last byte: a machine without sockets (law 2).

The first form of the pull journey: P runs the prompt for one token and holds its blocks, D pulls them and generates
everything the client reads. The machine decides what happens at every turn; `router.request.driver` carries it out.

What it promises:

- a hold that P answered with is pulled by D or released, whatever happens, also after the client left;
- nothing waits for a first token beyond the deadline, nor a client who has been given something beyond the stall
  timeout, however many instances are tried meanwhile; an answer in one piece has a deadline of its own;
- an HTTP status is only spoken once it is true: failures before the first byte move on to another instance or answer
  with an error; after it another instance goes on where that is exact (`router.core.eligibility`), else the stream ends
  with an error event;
- where it is exact and D can be told its first token, the client has P's token before the handoff begins (a *seed*);
- a P that keeps silent for its turn gets company: a second leg on another P, where there is one. The first that answers
  is used, the other runs to its end for nobody, and what it holds is released.

It does not know HTTP, instances' load, or time other than `now`.
"""

from __future__ import annotations

import math
from typing import Final

from cluster.errors import ApiError, deadline_passed, no_instance, shed, upstream_failed
from cluster.ids import InstanceId
from cluster.wire import Transfer
from router.core.events import (
    OUTCOMES,
    AnswerFromPrefill,
    AwaitFleet,
    CancelPrefill,
    Choose,
    Chosen,
    ClientLeft,
    CloseDecode,
    ClosePrefill,
    Effect,
    Ended,
    Event,
    Fail,
    FailStream,
    Finish,
    FleetChanged,
    ForwardRefusal,
    Lost,
    Opened,
    OutlastPrefill,
    PrefillAnswered,
    Refused,
    Relay,
    Release,
    Released,
    SendDecode,
    SendPrefill,
    SendSeed,
    State,
    Tick,
)

__all__ = [
    "CANCEL_WAIT_S",
    "HOLD_USE_S",
    "OUTCOMES",
    "PATIENCE_S",
    "TURN",
    "TURN_LEAST_S",
    "AnswerFromPrefill",
    "AwaitFleet",
    "CancelPrefill",
    "Choose",
    "Chosen",
    "ClientLeft",
    "CloseDecode",
    "ClosePrefill",
    "Effect",
    "Ended",
    "Event",
    "Fail",
    "FailStream",
    "Finish",
    "FleetChanged",
    "ForwardRefusal",
    "Journey",
    "Lost",
    "Opened",
    "OutlastPrefill",
    "PrefillAnswered",
    "Refused",
    "Relay",
    "Release",
    "Released",
    "SendDecode",
    "SendPrefill",
    "SendSeed",
    "State",
    "Tick",
]

PATIENCE_S = 1.0
"""How long an unwanted prefill leg may still run before P is told to abort it.

Measured on vLLM 0.32: an abort (or a closed connection) that lands as the step ends is answered with "abort" although
the engine holds the blocks, under a name nobody learns (4 of 62 aborts within a 50 ms prefill). A leg that ends by
itself says what it holds and is released exactly; only long ones are worth the race.
"""

CANCEL_WAIT_S = 30.0
"""Longest wait for an aborted prefill leg's answer: vLLM's own lease has ended by then."""

HOLD_USE_S = 20.0
"""So long after P's answer its hold may still be given to a D. vLLM 0.32's lease is 30 s, and only heartbeats of a D
that has the leg extend it (the first within 5 s). Past it the blocks may be another prompt's, and D would not know.
"""

TURN = 0.5
"""What one instance may use up of the time that a client waits for more, while another could still take over."""

TURN_LEAST_S = 0.1
"""A shorter turn gives nobody the time for a prefill: nobody else is asked any more."""


PREFILLED: frozenset[str | None] = frozenset({"length", "stop"})
"""How a prefill leg ends that has computed its prompt."""

_NOBODY: frozenset[InstanceId] = frozenset()

_OURS: Final = 500
"""From this status on a refusal is not the request's fault: what engines fail is `Lost`, what is refused so is ours."""


class Journey:
    """State of one request. `begin` starts it, `handle` moves it on, `Finish` ends it.

    Long, as it is one state machine: a short method for each event and each step that an event may cause.
    """

    __slots__ = (
        "aborted", "asks_second", "attempt", "attempts_max", "because", "deadline", "deadline_s", "decode", "excluded",
        "first_token", "give_up", "hand_over", "held_until", "last_failure", "legs", "now", "outcome", "prefill",
        "spoken", "stall_s", "state", "stream", "touched", "transfer", "turn_ends", "whole_deadline",
    )  # fmt: skip

    def __init__(
        self,
        *,
        hand_over: bool,
        stream: bool,
        deadline: float,
        deadline_s: float,
        stall_s: float = 120.0,
        whole_deadline: float = math.inf,
        attempts_max: int = 3,
    ) -> None:
        """One that has not begun.

        Args:
            hand_over: whether `router.core.eligibility` allows a handoff for this request.
            stream: whether its answer is one.
            deadline: monotonic seconds by which the first byte must be on its way; later the next one that a seed or a
                broken stream left the client waiting for.
            deadline_s: the same as a duration, for the message.
            stall_s: how long a client who has been given something waits for more.
            whole_deadline: monotonic seconds by which an answer that is not streamed must be whole.
            attempts_max: tries in all. Three: the second on another instance, the third for a fleet that is just being
                restarted.
        """
        self.hand_over = hand_over
        self.stream = stream
        self.deadline = deadline
        self.deadline_s = deadline_s
        self.stall_s = stall_s
        self.whole_deadline = whole_deadline
        self.attempts_max = attempts_max
        self.state = State.CHOOSING
        self.attempt = 0
        self.excluded: frozenset[InstanceId] = _NOBODY
        self.prefill: InstanceId | None = None
        """Whose prefill leg was sent last; once one has answered, that one."""
        self.legs: tuple[InstanceId, ...] = ()
        """Whose prefill legs are waited for, oldest first."""
        self.asks_second = False
        """The policy was asked for a second prefill leg, and has not said anything yet."""
        self.decode: InstanceId | None = None
        self.transfer: Transfer | None = None
        self.touched = False
        """A decode instance was sent that hold and failed: it may have pulled it, or given it back, and P's blocks may
        be another prompt's by now. Nobody else may pull it; it is only to be released."""
        self.first_token: int | None = None
        self.spoken = False
        """The client has been given something: a status, and a token or more."""
        self.because = ""
        self.now = 0.0
        self.outcome = "served"
        self.last_failure = ""
        self.give_up = math.inf
        self.aborted = False
        self.held_until = 0.0
        """Until when the hold may be given to a D."""
        self.turn_ends = math.inf
        """When the leg that was sent last has used up its part of a waiting client's time."""

    def begin(self) -> tuple[Effect, ...]:
        """The first effect: ask the policy."""
        return (Choose(self.excluded, self.hand_over),)

    def next_wakeup(self) -> float | None:
        """The deadline while no first token is there, or the end of a leg's turn; the end of our patience with an
        unwanted leg.

        An answer that is not streamed shows its first token only with its last: once P has spoken, its deadline is that
        of the whole answer, since generation may rightly take minutes.
        """
        if self.state is State.CHOOSING:
            return self.deadline
        if self.state is State.PREFILLING:
            return self.turn_ends if self.attempt < self.attempts_max else self.deadline
        if self.state is State.OPENING:
            limit = self.turn_ends if self._may_turn else self.deadline
            return limit if self.stream else self.whole_deadline
        return self.give_up if self.state is State.CANCELLING else None

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold one event in. Late and unexpected events are no-ops: peers may say anything at any time."""
        self.now = now
        row = _TABLE.get((self.state, type(event)))
        if row is not None:
            return row(self, event)  # type: ignore[operator,no-any-return]
        if isinstance(event, Tick):
            wakeup = self.next_wakeup()
            return self._expired(now) if wakeup is not None and now >= wakeup else ()
        return self._leave("client_left", now) if isinstance(event, ClientLeft) else ()

    # -- rows: one method for one (state, event) --

    def _chosen(self, event: Chosen) -> tuple[Effect, ...]:
        self.because = event.because
        if event.wait:
            return (AwaitFleet(),)
        if event.shed_s is not None:
            return self._fail(shed(event.because, event.shed_s))
        if event.decode is None:
            failed = f"; last failure: {self.last_failure}" if self.last_failure else ""
            return self._fail(no_instance(event.because + failed))
        self.attempt += 1
        previous, self.decode = self.decode, event.decode
        usable = self.transfer is not None and not self.touched and self.now < self.held_until
        if (
            event.prefill is not None and usable and not event.anew
        ):  # the blocks still wait on the first P: another D pulls them
            return (self._send_decode(event.decode, self.transfer),)
        release = self._let_go(event.decode if event.decode != self.prefill else previous)
        if event.prefill is None:  # whole, on one engine; a producer must never be asked to pull
            return (*release, self._send_decode(event.decode, None))
        return (*release, self._send_prefill(event.prefill))

    def _second_chosen(self, event: Chosen) -> tuple[Effect, ...]:
        if not self.asks_second:
            return ()
        self.asks_second = False
        if event.prefill is None or event.decode is None or not {event.prefill, event.decode}.isdisjoint(self.legs):
            self._begin_turn()  # waiting is all that can be done; there may be somebody after as long again
            return ()
        self.attempt += 1
        self.because, self.decode = event.because, event.decode
        return (self._send_prefill(event.prefill),)

    def _send_prefill(self, instance: InstanceId) -> SendPrefill:
        self.state, self.prefill = State.PREFILLING, instance
        self.legs += (instance,)
        self._begin_turn()
        return SendPrefill(instance, self.attempt)

    def _begin_turn(self) -> None:
        turn_s = (self.deadline - self.now) * TURN
        self.turn_ends = self.now + turn_s if turn_s >= TURN_LEAST_S else self.deadline

    def _let_go(self, via: InstanceId | None) -> tuple[Effect, ...]:
        """Release a hold that this journey will not use. `via` is not P: an engine cannot release its own."""
        held, self.transfer, self.touched = self.transfer, None, False
        return (Release(via, held),) if held is not None and via is not None else ()

    def _send_decode(self, instance: InstanceId, transfer: Transfer | None) -> SendDecode:
        self.state = State.OPENING
        self.turn_ends = self.now + (self.deadline - self.now) * TURN
        return SendDecode(instance, transfer, self.first_token)

    def _fleet_changed(self, event: FleetChanged) -> tuple[Effect, ...]:
        return (self._choose(),)

    def _choose(self) -> Choose:
        """Ask for instances; what P holds goes only to a D that may have it."""
        usable = self.transfer is not None and not self.touched
        holders = (self.prefill,) if usable and self.prefill is not None else ()
        return Choose(self.excluded, self.hand_over, holders=holders)

    def _prefilled(self, event: PrefillAnswered) -> tuple[Effect, ...]:
        by = self._answered(event.by)
        if by is None:
            return ()
        assert self.decode is not None
        stopped = event.finish_reason == "stop" and event.first
        if event.finish_reason not in PREFILLED or (stopped and self.spoken):
            return self._half_done(by, event)  # "abort": the engine is going down
        self.transfer, self.held_until = event.transfer, self.now + HOLD_USE_S
        self.excluded = (self.excluded | {*self.legs}) - {by}
        self.prefill = by
        others = self._outlast()
        if not stopped:  # also where P stopped at a token that is not the answer's first: what it said is of no use
            seed: tuple[Effect, ...] = ()
            if event.first_token is not None and self.stream and not self.spoken:
                self.first_token = event.first_token
                self._speak()
                seed = (SendSeed(),)
            return (*others, *seed, self._send_decode(self.decode, self.transfer))
        # P's first token was the last one (EOS, a stop string): there is nothing to hand over.
        if not self.stream:
            return (*others, AnswerFromPrefill(), *self._wind_up("served"))
        # A stream must look like the engine's own: P makes it, from its prefix cache.
        via, transfer, self.transfer = self.decode, self.transfer, None
        self.decode = by
        release: tuple[Effect, ...] = (Release(via, transfer),) if transfer is not None else ()
        return (*others, *release, self._send_decode(by, None))

    def _half_done(self, by: InstanceId, event: PrefillAnswered) -> tuple[Effect, ...]:
        """P has answered with nothing to go on with; it may hold blocks all the same."""
        because = f"the prefill leg ended with {event.finish_reason!r}"
        if not self.legs:
            self.transfer, self.held_until = event.transfer, self.now + HOLD_USE_S
            return self._try_again(by, because)
        assert self.decode is not None
        release = (Release(self.decode, event.transfer),) if event.transfer is not None else ()
        return (*release, *self._leg_failed(by, because))

    def _prefill_refused(self, event: Refused) -> tuple[Effect, ...]:
        by = self._answered(event.by)
        if by is None:
            return ()
        if self.legs and event.status >= _OURS:  # not the request's fault: others answer it
            self.last_failure = f"{by}: the prefill leg was refused with HTTP {event.status}"
            self.prefill = self.legs[-1]
            return ()
        others = self._outlast()
        if self.spoken:
            error = upstream_failed(f"{by}: the prefill leg was refused with HTTP {event.status}")
            return (*others, *self._fail(error))
        return (*others, ForwardRefusal(), *self._wind_up("refused"))

    def _prefill_lost(self, event: Lost) -> tuple[Effect, ...]:
        by = self._answered(event.by)
        return self._leg_failed(by, event.because) if by is not None else ()

    def _answered(self, by: InstanceId | None) -> InstanceId | None:
        """Whose prefill leg is not waited for any more; None: it was not waited for."""
        by = by if by is not None else self.prefill
        if by not in self.legs:
            return None
        self.legs = tuple(leg for leg in self.legs if leg != by)
        return by

    def _leg_failed(self, by: InstanceId, because: str) -> tuple[Effect, ...]:
        """Another prefill leg may still answer: the request has not failed before that has."""
        if not self.legs:
            return self._try_again(by, because)
        self.excluded |= {by}
        self.last_failure = f"{by}: {because}"
        newest, self.prefill = by == self.prefill, self.legs[-1]
        return self._ask_second() if newest and self.attempt < self.attempts_max else ()

    def _ask_second(self) -> tuple[Effect, ...]:
        self.asks_second = True
        return (Choose(self.excluded | {*self.legs}, self.hand_over, second=True, holders=self.legs),)

    def _outlast(self) -> tuple[Effect, ...]:
        """Leave the prefill legs that are still under way to themselves."""
        left, self.legs, self.asks_second = self.legs, (), False
        return tuple(OutlastPrefill(leg) for leg in left)

    def _opened(self, event: Opened) -> tuple[Effect, ...]:
        self.state = State.STREAMING
        self.spoken = True
        self.transfer = None  # D has it now, and gives it back itself when it is aborted
        return (Relay(),)

    def _decode_refused(self, event: Refused) -> tuple[Effect, ...]:
        # vLLM tells P itself when its serving layer rejects, but not when the body fails validation before that.
        if self.spoken:
            return self._fail(upstream_failed(f"{self.decode}: the decode leg was refused with HTTP {event.status}"))
        return (ForwardRefusal(), *self._wind_up("refused"))

    def _decode_lost(self, event: Lost) -> tuple[Effect, ...]:
        assert self.decode is not None
        self.touched = self.touched or not event.untouched
        return self._try_again(self.decode, event.because)

    def _ended(self, event: Ended) -> tuple[Effect, ...]:
        return self._wind_up("served")

    def _stream_lost(self, event: Lost) -> tuple[Effect, ...]:
        assert self.decode is not None
        if event.again:  # the answer is generated once more elsewhere, and what the client has is swallowed
            self._speak()
            self.deadline = self.now + self.stall_s * (1 - TURN)  # it may have been silent for its whole turn
            return (CloseDecode(), *self._try_again(self.decode, event.because))
        return (CloseDecode(), *self._fail(upstream_failed(event.because)))

    def _late_answer(self, event: PrefillAnswered) -> tuple[Effect, ...]:
        self.transfer = event.transfer
        return self._wind_up(self.outcome)

    def _late_failure(self, event: Refused | Lost) -> tuple[Effect, ...]:
        return self._wind_up(self.outcome)

    def _released(self, event: Released) -> tuple[Effect, ...]:
        self.state = State.DONE
        return (Finish(self.outcome),)

    # -- shared turns --

    @property
    def _may_turn(self) -> bool:
        """Whether another instance can still take over from a D that keeps the client waiting."""
        return self.spoken and self.attempt < self.attempts_max

    def _speak(self) -> None:
        """The client has been given something, and waits for more."""
        self.spoken = True
        self.deadline = self.now + self.stall_s

    def _try_again(self, failed: InstanceId, because: str) -> tuple[Effect, ...]:
        self.excluded |= {failed}
        self.last_failure = f"{failed}: {because}"
        if self.attempt >= self.attempts_max:
            return self._fail(upstream_failed(self.last_failure))
        self.state = State.CHOOSING
        return (self._choose(),)

    def _fail(self, error: ApiError) -> tuple[Effect, ...]:
        return (self._say(error), *self._wind_up("failed"))

    def _say(self, error: ApiError) -> Effect:
        return FailStream(error) if self.spoken else Fail(error)

    def _expired(self, now: float) -> tuple[Effect, ...]:
        if self.state is State.CANCELLING and not self.aborted:
            assert self.prefill is not None
            self.aborted = True
            self.give_up = now + CANCEL_WAIT_S
            return (CancelPrefill(self.prefill),)
        if self.state is State.CANCELLING:
            return (ClosePrefill(), *self._wind_up(self.outcome))
        if self.state is State.OPENING and self._may_turn and now < self.deadline:
            assert self.decode is not None
            self.touched = True
            return (CloseDecode(), *self._try_again(self.decode, "no token in its turn"))
        if self.state is State.PREFILLING and now < self.deadline:
            return self._ask_second()
        limit = self.stall_s if self.spoken else self.deadline_s
        if self.state is State.OPENING and not self.stream:
            limit += self.whole_deadline - self.deadline  # since its arrival
        return (self._say(deadline_passed(limit)), *self._leave("expired", now))

    def _leave(self, outcome: str, now: float) -> tuple[Effect, ...]:
        """Nobody waits for an answer any more: stop both legs, leave nothing held."""
        if self.state in {State.CANCELLING, State.RELEASING, State.DONE}:
            return ()
        if self.state is State.PREFILLING:
            self.outcome = outcome
            self.state = State.CANCELLING
            self.give_up = now + PATIENCE_S
            self._answered(self.prefill)
            return (CloseDecode(), *self._outlast())  # D's place is free at once
        if self.state in {State.OPENING, State.STREAMING}:
            # A D that has the request gives the hold back when it aborts; a leg cut off on its way there never got so
            # far. Released twice is no harm: P does not know the name any more.
            return (CloseDecode(), *self._wind_up(outcome))
        return self._wind_up(outcome)

    def _wind_up(self, outcome: str) -> tuple[Effect, ...]:
        """End, by way of a release when P still holds blocks for us."""
        self.outcome = outcome
        if self.transfer is not None and self.decode is not None:
            self.state = State.RELEASING
            return (Release(self.decode, self.transfer),)
        self.state = State.DONE
        return (Finish(outcome),)


_TABLE = {
    (State.CHOOSING, Chosen): Journey._chosen,
    (State.CHOOSING, FleetChanged): Journey._fleet_changed,
    (State.PREFILLING, Chosen): Journey._second_chosen,
    (State.PREFILLING, PrefillAnswered): Journey._prefilled,
    (State.PREFILLING, Refused): Journey._prefill_refused,
    (State.PREFILLING, Lost): Journey._prefill_lost,
    (State.OPENING, Opened): Journey._opened,
    (State.OPENING, Refused): Journey._decode_refused,
    (State.OPENING, Lost): Journey._decode_lost,
    (State.STREAMING, Ended): Journey._ended,
    (State.STREAMING, Lost): Journey._stream_lost,
    (State.CANCELLING, PrefillAnswered): Journey._late_answer,
    (State.CANCELLING, Refused): Journey._late_failure,
    (State.CANCELLING, Lost): Journey._late_failure,
    (State.RELEASING, Released): Journey._released,
}
"""Every move there is, besides `Tick` and `ClientLeft`, which may come in any state."""
