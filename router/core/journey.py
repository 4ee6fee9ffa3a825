"""One request's life, from the choice of instances to the last byte: a machine without sockets (law 2).

P computes the prompt and one token, and holds the prompt's blocks. D pulls them and generates everything the client
reads. The machine decides what happens next; `router.request.driver` carries it out.

The guarantees:

- a hold that P answered with is pulled by D or released in every case, also after the client has left;
- no request waits for its first token beyond the deadline, and no client that has received a token waits for the next
  one beyond the stall timeout, however many instances are tried meanwhile; an answer in one piece has a deadline of its
  own;
- an HTTP status is sent only once it is true: after a failure before the first byte the request moves to another
  instance or gets an error; after the first byte another instance continues where that is exact
  (`router.core.eligibility`), else the stream ends with an error event;
- where it is exact and D can be told its first token, the client gets P's token before the hand-over begins (a *seed*);
- no draw is dropped for what it shows, or sampled answers would have another distribution than one engine's: if D can
  be told P's token, D begins with it, also where the client may not have it yet; else P's token does not matter. It is
  given up only where no instance is left that can begin with it, and the client does not have it;
- where `router.core.early_leg` allows it, the decode leg is sent before P has answered (an *early leg*). It holds no
  blocks at D. If P's leg fails, the early leg is closed, and the request goes on as if it had not been sent;
- if a P stays silent for its turn, a second leg is sent to another P, if there is another. The first answer is used;
  the other leg runs to its end unused, and its hold is released. A leg that pulls a prompt's beginning has a short turn
  (`router.core.turns`), and without another P the same P gets a leg without a source in its place. An aggregated leg
  that pulls has the same turn: until its first token is here, another leg may be sent in its place.

The machine does not know HTTP, instances' load, or any time other than `now`.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from cluster.errors import ApiError, deadline_passed, no_instance, shed, upstream_failed
from cluster.ids import InstanceId
from cluster.wire import TransferFields
from router.core.events import (
    OUTCOMES,
    SOURCE_ATTEMPTS,
    AnswerFromPrefill,
    AwaitFleet,
    CancelPrefill,
    Choose,
    Chosen,
    ClientLeft,
    CloseDecode,
    CloseEarly,
    ClosePrefill,
    DropDecode,
    EarlyLost,
    Effect,
    Ended,
    Event,
    Fail,
    FailStream,
    Finish,
    FleetChanged,
    ForgoPrefill,
    ForwardRefusal,
    HolderLost,
    JourneyState,
    Lost,
    Opened,
    OutlastPrefill,
    PrefillAnswered,
    PrefixSource,
    Refused,
    Relay,
    Release,
    Released,
    SendDecode,
    SendEarly,
    SendPrefill,
    SendSeed,
    SourceHeld,
    Tick,
    UseEarly,
    not_sent,
)
from router.core.turns import TURN, TURN_LEAST_S, after_loss, choice_instead, second_choice, turn_s

__all__ = [
    "CANCEL_WAIT_S",
    "HOLD_USE_S",
    "OUTCOMES",
    "PATIENCE_S",
    "SOURCE_ATTEMPTS",
    "TURN",
    "TURN_LEAST_S",
    "AnswerFromPrefill",
    "AwaitFleet",
    "CancelPrefill",
    "Choose",
    "Chosen",
    "ClientLeft",
    "CloseDecode",
    "CloseEarly",
    "ClosePrefill",
    "DropDecode",
    "EarlyLost",
    "Effect",
    "Ended",
    "Event",
    "Fail",
    "FailStream",
    "Finish",
    "FleetChanged",
    "ForgoPrefill",
    "ForwardRefusal",
    "HolderLost",
    "Journey",
    "JourneyState",
    "Lost",
    "Opened",
    "OutlastPrefill",
    "PrefillAnswered",
    "PrefixSource",
    "Refused",
    "Relay",
    "Release",
    "Released",
    "SendDecode",
    "SendEarly",
    "SendPrefill",
    "SendSeed",
    "SourceHeld",
    "Tick",
    "UseEarly",
    "not_sent",
]

PATIENCE_S = 1.0
"""Seconds for which an unwanted prefill leg may still run before P is told to abort it.

Measured on vLLM 0.32: if an abort (or a closed connection) arrives as the step ends, the answer is "abort" although the
engine holds the blocks (4 of 62 aborts within a 50 ms prefill). The answer does not name that hold. An engine with
Baton's connector gives it up by the router's own name for it; another keeps it until its lease ends. A leg that ends by
itself names its hold, which is then released exactly. Only for long legs is an abort worth that risk.
"""

CANCEL_WAIT_S = 30.0
"""The longest wait for an aborted prefill leg's answer, in seconds: vLLM's own lease has ended by then."""

HOLD_USE_S = 20.0
"""Seconds after P's answer for which its hold may still be given to a D. vLLM 0.32's lease is 30 s, and only heartbeats
of a D that has the leg extend it (the first within 5 s). After the lease the blocks may belong to another prompt, and a
D without Baton's connector would not notice."""

PREFILLED: frozenset[str | None] = frozenset({"length", "stop"})
"""The finish reasons of a prefill leg that has computed its prompt."""

TICKETS_REFUSED_MAX: Final = 2
"""Legs whose ticket is refused before the request is served whole: one engine may lack a key, two will not."""

_NO_INSTANCES: frozenset[InstanceId] = frozenset()

_OURS: Final = 500
"""From this HTTP status on, a refusal is not the request's fault. (An engine's own 5xx comes as `Lost`; a `Refused`
with such a status is the router's: the router lacks a resource.)"""


class Journey:
    """State of one request. `begin` starts it, `handle` moves it on, `Finish` ends it.

    Long, and with many attributes, as it is one state machine: a short method for each event, and for each step that
    an event may cause.
    """

    __slots__ = (
        "aborted", "arrived", "asks_second", "attempt", "attempts_max", "barred", "barred_until", "because",
        "deadline", "deadline_s", "decode", "early", "early_at", "excluded", "first_token", "give_up", "hand_over",
        "held_until", "last_failure", "legs", "now", "outcome", "prefill", "prefilled", "pulled", "sent_at", "spared",
        "spoken", "stall_s", "state", "stream", "tickets_refused", "touched", "transfer", "turn_ends", "unbound",
        "unpinned", "untold", "whole_deadline",
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
        """Make the machine of a request that has not begun.

        Args:
            hand_over: whether `router.core.eligibility` allows a hand-over for this request.
            stream: whether the answer is streamed.
            deadline: monotonic seconds by which the first byte, or the next one after a break, must be on its way.
            deadline_s: the same as a duration, since the request's arrival.
            stall_s: how long a client that has received a part waits for more, in seconds.
            whole_deadline: monotonic seconds by which an answer that is not streamed must be whole.
            attempts_max: tries in all; a second takes another instance, a third helps while a fleet is restarted.
        """
        self.hand_over, self.stream = hand_over, stream
        self.deadline, self.deadline_s, self.arrived = deadline, deadline_s, deadline - deadline_s
        self.stall_s, self.whole_deadline, self.attempts_max = stall_s, whole_deadline, attempts_max
        self.state, self.attempt, self.tickets_refused = JourneyState.CHOOSING, 0, 0
        self.excluded: frozenset[InstanceId] = _NO_INSTANCES
        self.barred, self.barred_until = _NO_INSTANCES, -math.inf
        """Instances that may be told to abort by the request's id until then, which would end a later leg there."""
        self.prefill: InstanceId | None = None
        """The instance of the prefill leg that was sent last; once one has answered, the answering instance."""
        self.legs: tuple[InstanceId, ...] = ()
        """The instances whose prefill legs are still awaited, oldest first."""
        self.asks_second = False
        """The journey has asked the policy for a second leg and has no reply yet."""
        self.decode: InstanceId | None = None
        self.transfer: TransferFields | None = None
        self.prefilled = False
        """A P has held the prompt, and has reported how many of its tokens were cached. The client gets the number of
        the first P. An early leg would report that of a later P, so none is sent any more."""
        self.touched = False
        """A decode instance was sent that hold and failed. It may have pulled the hold, or given it back, so P's blocks
        may belong to another prompt by now. No other instance may pull the hold; it can only be released."""
        self.spared: InstanceId | None = None
        """A D that is excluded only because its answer began with another token: asked again if no other is left."""
        self.untold = False
        """The decode leg was sent early, before the first token was known: D could not be told that token."""
        self.first_token: int | None = None
        self.unpinned: frozenset[InstanceId] = _NO_INSTANCES
        """Instances that are excluded only because they cannot be told the first token."""
        self.unbound = False
        """A drawn first token was given up. No later one binds the answer, so this happens once in a journey."""
        self.spoken = False
        """The client has received a status, and a token or more."""
        self.because, self.now, self.outcome, self.last_failure = "", 0.0, "served", ""
        self.give_up = math.inf
        """In state `CANCELLING`, the end of the wait for the prefill leg; P is asked to abort it once (`aborted`)."""
        self.aborted = False
        self.held_until = 0.0
        """Until when the hold may be given to a D."""
        self.early = False
        """The decode leg is at `decode` already, and waits for the hold of the only prefill leg."""
        self.early_at = math.inf
        """The time at which the early leg is to be sent; infinite: none is to be sent, or it was sent."""
        self.turn_ends = math.inf
        """The time at which the leg that was sent last has used up its share of a waiting client's time."""
        self.sent_at = 0.0
        """When the last leg was sent; with a source, when that was asked."""
        self.pulled: PrefixSource | None = None
        """The source of the hold that the last leg pulls; None: it pulls no beginning, as far as is known."""

    def begin(self) -> tuple[Effect, ...]:
        """The first effect: ask the policy."""
        return (Choose(self.excluded, self.hand_over),)

    def next_wakeup(self) -> float | None:
        """The next of these times: the deadline while there is no first token, the end of a leg's turn, the end of the
        wait for an unwanted leg.

        An answer that is not streamed shows its first token only with its last. So once P has answered, the deadline is
        that of the whole answer, as generation may take minutes. If it is lost, the next try has as long for its first
        token as a new request has.
        """
        if self.state is JourneyState.CHOOSING:
            return self.deadline
        if self.state is JourneyState.PREFILLING:
            return min(self.early_at, self.turn_ends if self.attempt < self.attempts_max else self.deadline)
        if self.state is JourneyState.OPENING:
            return self.turn_ends if self._may_turn else self._until
        return self.give_up if self.state is JourneyState.CANCELLING else None

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Apply one event. Late and unexpected events change nothing: peers may send anything at any time."""
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
            if self.spared is not None:
                return self._ask_spared(self.spared)
            if self.first_token is not None and not self.spoken:
                return self._unbind()
            failed = f"; last failure: {self.last_failure}" if self.last_failure else ""
            return self._fail(no_instance(event.because + failed))
        self.attempt += 1
        previous, self.decode = self.decode, event.decode
        if event.prefill is not None and self._may_be_pulled and not event.anew:  # the blocks are held on the first P
            return (self._send_decode(event.decode, self.transfer),)
        release = self._let_go(event.decode if event.decode != self.prefill else previous)
        if event.prefill is None:  # aggregated: one engine serves it all; a producer must never be asked to pull
            return (*release, self._send_decode(event.decode, None, event.source))
        prefill = self._send_prefill(event.prefill, event.source)
        if event.early_s is None or self.spoken or self.prefilled:
            return (*release, prefill)
        self.early_at = self.now + event.early_s
        return (*release, prefill, *(self._send_early() if event.early_s <= 0 else ()))

    def _ask_spared(self, spared: InstanceId) -> tuple[Effect, ...]:
        """Only the D that drew a token of its own is left. It will be told the client's token."""
        asked = frozenset({self.prefill}) if self.prefill is not None else _NO_INSTANCES
        self.excluded, self.spared = (self.excluded | asked) - {spared}, None
        return (self._choose(),)

    def _unbind(self) -> tuple[Effect, ...]:
        """No instance is left that can begin with the drawn token, and the client does not have it: draw again."""
        self.unbound, self.first_token = True, None
        self.excluded, self.unpinned = self.excluded - self.unpinned, _NO_INSTANCES
        return (msgspec.structs.replace(self._choose(), unbound=True),)

    def _send_early(self) -> tuple[Effect, ...]:
        assert self.decode is not None and self.prefill is not None
        self.early, self.early_at = True, math.inf
        return (SendEarly(self.decode, self.prefill, self.attempt),)

    def _drop_early(self) -> tuple[Effect, ...]:
        """The hold that the early leg waits for will not come, or is not wanted."""
        under_way, self.early, self.early_at = self.early, False, math.inf
        return (CloseEarly(),) if under_way else ()

    def _second_chosen(self, event: Chosen) -> tuple[Effect, ...]:
        if not self.asks_second:
            return ()
        self.asks_second = False
        anew = self.pulled is not None and event.prefill == self.prefill  # the same P: in place of the leg that pulls
        taken = {event.decode} if anew else {event.prefill, event.decode}
        if event.prefill is None or event.decode is None or not taken.isdisjoint(self.legs):
            self._go_on()  # nothing to do but wait; an instance may be free after as long again
            return ()
        early = self._drop_early()  # it waits for the hold of the first P
        first = self._outlast() if anew else ()
        self.attempt += 1
        self.because, self.decode = event.because, event.decode
        return (*early, *first, self._send_prefill(event.prefill, None))

    def _instead_chosen(self, event: Chosen) -> tuple[Effect, ...]:
        """The answering leg that pulls is given up for another one, without a source, if there is a place for it."""
        if not self.asks_second:
            return ()
        self.asks_second = False
        if event.decode is None:
            self._go_on()
            return ()
        self.attempt += 1
        left = (DropDecode(), *self._let_go(self.decode))
        self._renew()
        self.because, self.decode = event.because, event.decode
        if event.prefill is None:
            return (*left, self._send_decode(event.decode, None))
        return (*left, self._send_prefill(event.prefill, None))

    def _send_prefill(self, instance: InstanceId, source: PrefixSource | None) -> SendPrefill:
        self.state, self.prefill = JourneyState.PREFILLING, instance
        self.legs += (instance,)
        self.sent_at, self.pulled, self.asks_second = self.now, None, False
        self.turn_ends = self.now + turn_s(self.deadline - self.now)
        return SendPrefill(instance, self.attempt, source)

    def _go_on(self) -> None:
        """The last leg has another turn."""
        answers = self.state is JourneyState.OPENING
        until = self._until if answers else self.deadline
        self.turn_ends = self.now + turn_s(until - self.now, self.now - self.sent_at, self.pulled)
        if answers and self.spoken:
            self.turn_ends = min(self.turn_ends, self._half_at)

    def _source_held(self, event: SourceHeld) -> tuple[Effect, ...]:
        """The last leg pulls: from here on a source that stands still would keep the client waiting."""
        by = self.decode if self.state is JourneyState.OPENING else self.prefill
        if event.by == by and self.transfer is None and not self.asks_second:
            latest, self.pulled = self.turn_ends, event.source
            self._go_on()
            self.turn_ends = min(self.turn_ends, latest)
        return ()

    def _holder_lost(self, event: HolderLost) -> tuple[Effect, ...]:
        """P is lost while D pulls from it: D's read may hang until the transport notices."""
        if self.transfer is not None and event.instance == self.prefill and self.pulled is None:
            self.touched = True  # no other instance can pull it either
            prompt_s, silent_s = self.sent_at - self.arrived, self.now - self.sent_at
            self.pulled = after_loss(event.instance, prompt_s, silent_s, event.answer_s)
            self._go_on()
        return ()

    def _let_go(self, via: InstanceId | None) -> tuple[Effect, ...]:
        """Release a hold that this journey will not use. `via` is not P: an engine cannot release its own."""
        held, self.transfer, self.touched = self.transfer, None, False
        return (Release(via, held),) if held is not None and via is not None else ()

    def _send_decode(
        self, instance: InstanceId, transfer: TransferFields | None, source: PrefixSource | None = None
    ) -> SendDecode:
        self.state, self.untold = JourneyState.OPENING, False
        self.sent_at, self.pulled, self.asks_second = self.now, None, False
        self.turn_ends = self._half_at
        return SendDecode(instance, transfer, self.first_token, source)

    def _fleet_changed(self, event: FleetChanged) -> tuple[Effect, ...]:
        return (self._choose(),)

    def _choose(self) -> Choose:
        """Ask for instances; a hold goes only to a D that may have it."""
        holders = (self.prefill,) if self._may_be_pulled and self.prefill is not None else ()
        return Choose(self._not_now(), self.hand_over, holders=holders)

    def _not_now(self) -> frozenset[InstanceId]:
        """Instances that no leg may go to now."""
        return self.excluded | self.barred if self.now < self.barred_until else self.excluded

    def _prefilled(self, event: PrefillAnswered) -> tuple[Effect, ...]:
        by = self._answered(event.by)
        if by is None:
            return ()
        assert self.decode is not None
        self.prefilled = self.prefilled or event.transfer is not None
        stopped = event.finish_reason == "stop" and event.first
        if event.finish_reason not in PREFILLED or (stopped and self.spoken):
            return self._half_done(by, event)  # "abort": the engine is going down
        self.transfer, self.held_until = event.transfer, self.now + HOLD_USE_S
        self.excluded = (self.excluded | {*self.legs}) - {by}
        self.prefill = by
        early = self.early and not stopped and self._may_use_early(event)
        others = self._outlast() if early else (*self._outlast(), *self._drop_early())
        self.early, self.early_at = False, math.inf
        if not stopped:  # also if P's stop token is not the answer's first: then P's answer is of no use
            seed = self._bind(event)
            sent = self._send_decode(self.decode, self.transfer)
            self.untold = early
            return (*others, *seed, UseEarly(self.transfer) if early and self.transfer is not None else sent)
        # P's first token was the last one (EOS, a stop string): there is nothing to hand over.
        if not self.stream:
            return (*others, AnswerFromPrefill(), *self._wind_up("served"))
        # A stream must look like the engine's own: let P generate it from its prefix cache.
        via, transfer, self.transfer = self.decode, self.transfer, None
        self.decode = by
        release: tuple[Effect, ...] = (Release(via, transfer),) if transfer is not None else ()
        return (*others, *release, self._send_decode(by, None))

    @staticmethod
    def _may_use_early(event: PrefillAnswered) -> bool:
        """Whether the early leg may answer. A D that was not told of the hold may compute the prompt itself, and draw a
        token of its own. If the client has no token yet, no splice would notice that; so D is told by a leg of its own.
        Otherwise the leg is used: mostly D's question has not reached P yet, and P tells it *late*, in milliseconds.
        """
        return event.transfer is not None and (event.pinned is None or event.transfer.told_early)

    def _bind(self, event: PrefillAnswered) -> tuple[Effect, ...]:
        """The first P's token stays the answer's first, whatever a later P draws. The client gets it now, if it may."""
        if self.spoken or self.first_token is not None or self.unbound or not self.stream:
            return ()
        shown = event.first_token is not None
        self.first_token = event.first_token if shown else event.pinned
        if not shown:
            return ()
        self._speak()
        return (SendSeed(),)

    def _half_done(self, by: InstanceId, event: PrefillAnswered) -> tuple[Effect, ...]:
        """P has answered without a usable result; it may hold blocks nevertheless."""
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
        if self.legs and event.status >= _OURS:  # not the request's fault: another leg may still answer
            self.last_failure = f"{by}: the prefill leg was refused with HTTP {event.status}"
            self.prefill = self.legs[-1]
            return ()
        others = (*self._outlast(), *self._drop_early())
        if self.spoken:
            error = upstream_failed(f"{by}: the prefill leg was refused with HTTP {event.status}")
            return (*others, *self._fail(error))
        return (*others, ForwardRefusal(), *self._wind_up("refused"))

    def _prefill_lost(self, event: Lost) -> tuple[Effect, ...]:
        by = self._answered(event.by)
        if by is None:
            return ()
        self._ticket_refused(event)
        return self._leg_failed(by, event.because)

    def _ticket_refused(self, event: Lost) -> None:
        """A first engine that refuses tickets may lack the key. After a second one the router is taken to be wrong (its
        clock, its key): the request is served whole, which needs no ticket.
        """
        self.tickets_refused += event.no_ticket
        if self.tickets_refused >= TICKETS_REFUSED_MAX:
            self.hand_over = False

    def _answered(self, by: InstanceId | None) -> InstanceId | None:
        """The instance of a prefill leg that is not awaited any more; None: no leg was awaited."""
        by = by if by is not None else self.prefill
        if by not in self.legs:
            return None
        self.legs = tuple(leg for leg in self.legs if leg != by)
        return by

    def _leg_failed(self, by: InstanceId, because: str) -> tuple[Effect, ...]:
        """One prefill leg has failed. While another may still answer, the request has not failed."""
        if not self.legs:
            return self._try_again(by, because)
        self.excluded |= {by}
        self.last_failure = f"{by}: {because}"
        newest, self.prefill = by == self.prefill, self.legs[-1]
        return self._ask_second() if newest and self.attempt < self.attempts_max else ()

    def _ask_second(self) -> tuple[Effect, ...]:
        self.asks_second = True
        if self.state is JourneyState.OPENING:
            assert self.decode is not None and self.pulled is not None
            # An answer in one piece may be late for another reason: its share is limited.
            lost = self.transfer is not None and self.stream
            return (choice_instead(self._not_now(), self.decode, self.pulled, hand_over=self.hand_over, lost=lost),)
        return (second_choice(self._not_now(), self.legs, self.pulled, hand_over=self.hand_over),)

    def _outlast(self) -> tuple[Effect, ...]:
        """Let the prefill legs that are still under way run to their end unused."""
        left, self.legs, self.asks_second = self.legs, (), False
        return tuple(OutlastPrefill(leg) for leg in left)

    def _early_opened(self, event: Opened) -> tuple[Effect, ...]:
        """D has begun its answer, and P's has not arrived: it is late, or D has computed the prompt itself. P's token
        is of no use any more.
        """
        if not self.early:
            return ()
        self.early, self.early_at = False, math.inf
        self.barred, self.barred_until = frozenset(self.legs), self.now + PATIENCE_S + CANCEL_WAIT_S
        return (*self._outlast(), *self._opened(event))

    def _early_lost(self, event: EarlyLost) -> tuple[Effect, ...]:
        self.early = False
        return ()

    def _opened(self, event: Opened) -> tuple[Effect, ...]:
        self.state = JourneyState.STREAMING
        self.spoken = True
        self.transfer = None  # D has the hold now, and releases it itself when it is aborted
        return (Relay(),)

    def _decode_refused(self, event: Refused) -> tuple[Effect, ...]:
        # vLLM tells P itself when its serving layer rejects, but not when the body fails validation earlier.
        if self.spoken:
            return self._fail(upstream_failed(f"{self.decode}: the decode leg was refused with HTTP {event.status}"))
        return (ForwardRefusal(), *self._wind_up("refused"))

    def _decode_lost(self, event: Lost) -> tuple[Effect, ...]:
        assert self.decode is not None
        self.touched = self.touched or not event.untouched
        self._ticket_refused(event)
        if event.unpinned:  # no try was made
            self.unpinned |= {self.decode}
            self.attempts_max += 1
        self._renew()
        return self._try_again(self.decode, event.because)

    def _renew(self) -> None:
        """An answer in one piece may be given up long after the time for a first token: the next leg has as long."""
        if not self.stream:
            self.deadline = min(self.whole_deadline, max(self.deadline, self.now + self.deadline_s))

    def _ended(self, event: Ended) -> tuple[Effect, ...]:
        return self._wind_up("served")

    def _stream_lost(self, event: Lost) -> tuple[Effect, ...]:
        assert self.decode is not None
        if event.again:  # another instance generates the answer again; the router drops what the client already has
            self._speak()
            self.deadline = self.now + self.stall_s * (1 - TURN)  # it may have been silent for its turn
            if event.drew and self.untold:
                self.spared = self.decode
            return (CloseDecode(), *self._try_again(self.decode, event.because))
        return (CloseDecode(), *self._fail(upstream_failed(event.because)))

    def _late_answer(self, event: PrefillAnswered) -> tuple[Effect, ...]:
        self.transfer = event.transfer
        return self._wind_up(self.outcome)

    def _late_failure(self, event: Refused | Lost) -> tuple[Effect, ...]:
        return self._wind_up(self.outcome)

    def _released(self, event: Released) -> tuple[Effect, ...]:
        self.state = JourneyState.DONE
        return (Finish(self.outcome),)

    # -- shared turns --

    @property
    def _may_be_pulled(self) -> bool:
        """Whether another D may pull the hold."""
        return self.transfer is not None and not self.touched and self.now < self.held_until

    @property
    def _may_turn(self) -> bool:
        """Whether another instance can still take over from a D that keeps the client waiting."""
        return (self.spoken or self.pulled is not None) and self.attempt < self.attempts_max

    @property
    def _until(self) -> float:
        """The deadline of the answering leg: for the first token, or, where that is not seen, for the whole answer."""
        return self.deadline if self.stream else self.whole_deadline

    @property
    def _half_at(self) -> float:
        """When the answering leg has used up its share of the time that was left as it was sent."""
        return self.sent_at + (self._until - self.sent_at) * TURN

    def _speak(self) -> None:
        """The client has received output, and waits for more."""
        self.spoken = True
        self.deadline = self.now + self.stall_s

    def _try_again(self, failed: InstanceId, because: str) -> tuple[Effect, ...]:
        early = self._drop_early()
        self.excluded |= {failed}
        self.last_failure = f"{failed}: {because}"
        if self.attempt >= self.attempts_max:
            return (*early, *self._fail(upstream_failed(self.last_failure)))
        self.state = JourneyState.CHOOSING
        return (*early, self._choose())

    def _fail(self, error: ApiError) -> tuple[Effect, ...]:
        return (self._say(error), *self._wind_up("failed"))

    def _say(self, error: ApiError) -> Effect:
        return FailStream(error) if self.spoken else Fail(error)

    def _expired(self, now: float) -> tuple[Effect, ...]:
        if self.state is JourneyState.CANCELLING and not self.aborted:
            assert self.prefill is not None
            self.aborted = True
            self.give_up = now + CANCEL_WAIT_S
            return (CancelPrefill(self.prefill),)
        if self.state is JourneyState.CANCELLING:
            return (ClosePrefill(), *self._wind_up(self.outcome))
        if self.state is JourneyState.OPENING and self._may_turn and now < self._until:
            if self.pulled is not None and not (self.spoken and now >= self._half_at):
                return self._ask_second()
            assert self.decode is not None
            self.touched = True
            return (CloseDecode(), *self._try_again(self.decode, "no token in its turn"))
        if self.state is JourneyState.PREFILLING and now >= self.early_at and now < self.deadline:
            return self._send_early()
        if self.state is JourneyState.PREFILLING and now < self.deadline:
            return self._ask_second()
        until = self._until if self.state is JourneyState.OPENING else self.deadline
        limit = self.stall_s if self.spoken else until - self.arrived
        return (self._say(deadline_passed(limit)), *self._leave("expired", now))

    def _leave(self, outcome: str, now: float) -> tuple[Effect, ...]:
        """The client does not wait for an answer any more: stop both legs, leave nothing held."""
        if self.state in {JourneyState.CANCELLING, JourneyState.RELEASING, JourneyState.DONE}:
            return ()
        if self.state is JourneyState.PREFILLING:
            self.outcome = outcome
            self.state = JourneyState.CANCELLING
            self.give_up = now + PATIENCE_S
            self.early, self.early_at = False, math.inf
            self._answered(self.prefill)
            assert self.prefill is not None
            return (CloseDecode(), *self._outlast(), ForgoPrefill(self.prefill))  # D's place is free at once
        if self.state in {JourneyState.OPENING, JourneyState.STREAMING}:
            # A D that has the request releases the hold when it aborts; a leg cut off on its way there never got so
            # far. A second release does no harm: P no longer knows the name.
            return (CloseDecode(), *self._wind_up(outcome))
        return self._wind_up(outcome)

    def _wind_up(self, outcome: str) -> tuple[Effect, ...]:
        """End the journey; if P still holds blocks for it, release them first."""
        self.outcome = outcome
        if self.transfer is not None and self.decode is not None:
            release = Release(self.decode, self.transfer)
            if self.state is JourneyState.CHOOSING:  # it waits in the queue: others must not wait for the release
                self.state = JourneyState.DONE
                return (release, Finish(outcome))
            self.state = JourneyState.RELEASING
            return (release,)
        self.state = JourneyState.DONE
        return (Finish(outcome),)


_TABLE = {
    (JourneyState.CHOOSING, Chosen): Journey._chosen,
    (JourneyState.CHOOSING, FleetChanged): Journey._fleet_changed,
    (JourneyState.PREFILLING, Chosen): Journey._second_chosen,
    (JourneyState.PREFILLING, SourceHeld): Journey._source_held,
    (JourneyState.PREFILLING, PrefillAnswered): Journey._prefilled,
    (JourneyState.PREFILLING, Refused): Journey._prefill_refused,
    (JourneyState.PREFILLING, Lost): Journey._prefill_lost,
    (JourneyState.PREFILLING, EarlyLost): Journey._early_lost,
    (JourneyState.PREFILLING, Opened): Journey._early_opened,
    (JourneyState.OPENING, Chosen): Journey._instead_chosen,
    (JourneyState.OPENING, SourceHeld): Journey._source_held,
    (JourneyState.OPENING, HolderLost): Journey._holder_lost,
    (JourneyState.OPENING, Opened): Journey._opened,
    (JourneyState.OPENING, Refused): Journey._decode_refused,
    (JourneyState.OPENING, Lost): Journey._decode_lost,
    (JourneyState.STREAMING, Ended): Journey._ended,
    (JourneyState.STREAMING, Lost): Journey._stream_lost,
    (JourneyState.CANCELLING, PrefillAnswered): Journey._late_answer,
    (JourneyState.CANCELLING, Refused): Journey._late_failure,
    (JourneyState.CANCELLING, Lost): Journey._late_failure,
    (JourneyState.RELEASING, Released): Journey._released,
}
"""All moves, except `Tick` and `ClientLeft`, which may come in any state."""
