"""Carries out one `Journey` on real connections: effects in, events back. No decision is made here.

Nothing here waits: what connections and timers report is fed to the journey as it comes, and what that wants is done at
once. Tasks are only for what is rare, and outlives an answer (`router.request.releases`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cluster import wire
from cluster.errors import ApiError, no_room
from cluster.ids import InstanceId
from cluster.instance import Instance
from cluster.request import Request
from router.core import engine_answers as answers
from router.core import journey as j
from router.core.clients import Client
from router.core.eligibility import has_room
from router.core.slo import SHED
from router.core.timing_parts import Told
from router.core.values import Sent
from router.core.verdict import Verdict, Way
from router.http.headers import Headers, lines
from router.http.outlet import Outlet
from router.http.upstream import Answer, EngineLost
from router.predict.predictors import PredictedRequest, RequestPredictor, answer_tokens, cached_in
from router.request.body import closing, opened
from router.request.legs import AnswerLeg, LegOwner, PrefillLeg, PrefillSaid
from router.request.parts import Parts
from router.request.releases import Releases, stamped, transfer_id
from router.request.reply import Reply
from router.request.splice import Seed, seed_of, stops_of
from router.request.trace import RequestTrace
from router.scheduler.scheduler import Calls, SchedulingContext
from router.telemetry.timing import Stage

logger = logging.getLogger("baton.router")

_FAILED = (j.Lost, j.Refused)

_BUG = "%s: a request failed in the router"

_NO_USAGE: Mapping[str, Any] = {}

FAR_S = 5.0
"""What is due later than this has no timer yet: most of it comes before. Looked at every `legs.SWEEP_S`."""

_TIMED = frozenset({j.State.CHOOSING, j.State.PREFILLING, j.State.OPENING, j.State.CANCELLING})
"""States that a clock may end."""


class RequestDriver(LegOwner):
    """One client request on its way through the fleet.

    Long, as every effect of `router.core.journey` and every event of legs and client has a short method here, all on
    the state of one request.
    """

    __slots__ = (
        "_account",
        "_answer",
        "_at_desk",
        "_cached_tokens",
        "_driven",
        "_due",
        "_had_cached",
        "_head",
        "_in_line",
        "_journey",
        "_legs",
        "_looked_at",
        "_made_by",
        "_onward",
        "_open",
        "_over",
        "_parted",
        "_parts",
        "_pending",
        "_prefill_answer",
        "_presumed",
        "_producer",
        "_refusal",
        "_relayed",
        "_releasing",
        "_request",
        "_resumed",
        "_seat",
        "_seed",
        "_sent",
        "_shed",
        "_slow",
        "_taken",
        "_timer",
        "_verdict",
        "_way",
        "_whole",
        "_whole_told",
        "answer_bytes_max",
        "reply",
        "streams",
    )

    def __init__(
        self,
        parts: Parts,
        outlet: Outlet,
        headers: Headers,
        request: Request,
        journey: j.Journey,
        seat: SchedulingContext,
        verdict: Verdict,
        client: Client,
        taken: PredictedRequest | None,
    ) -> None:
        """A request that is about to begin.

        Args:
            parts: of its router.
            outlet: where its answer goes.
            headers: its own.
            request: what it asks.
            journey: at its beginning.
            seat: at the desk.
            verdict: how it may be served.
            client: whose it is.
            taken: what was foretold of it; None: nobody foresees anything.
        """
        self._parts = parts
        self._request = request
        self.streams = request.stream
        self.answer_bytes_max = parts.limits.answer_bytes_max
        self._journey = journey
        self._verdict = verdict
        self._account = RequestTrace(
            parts.telling.memory, parts.meters, parts.telling.tracing, request, verdict, headers, client
        )
        resumable = verdict.resumable and request.stream
        self.reply = Reply(
            outlet,
            request,
            self._account,
            resumable=resumable,
            counts=taken is not None,
            event_bytes_max=self.answer_bytes_max,
        )
        self._seat = seat
        self._taken = taken
        if headers.onward is None:
            onward = {**parts.engines.credentials.headers_for(headers), "content-type": "application/json"}
            headers.onward = onward, lines(onward)
        self._onward, start = headers.onward
        account = self._account
        self._head = b"%bx-request-id: %b\r\n%b" % (start, request.id.encode(), account.untraced)
        """Headers of its legs, as lines."""
        if account.unsampled is not None:
            self._head = lines(account.unsampled.passed_on(self._headers))
        self._set_out()

    def _set_out(self) -> None:
        """What every exchange begins with."""
        self._presumed: asyncio.TimerHandle | None = None
        """When the prompt of an answer in one piece is taken to be computed."""
        self._sent: tuple[Sent, ...] = ()
        self._cached_tokens = 0
        """Where its prompt is computed, and how much of it is taken to be cached there: until that is known."""
        self._shed = self._resumed = False
        self._open: tuple[bytes | memoryview, ...] = ()
        """Its body without its end, while legs are still to be sent."""
        self._driven = False
        """Effects are being carried out: what is fed meanwhile is seen to by who does that."""
        self._over = False
        self._at_desk = True
        """The desk has not heard of its end."""
        self._parted = False
        """All is done that an end asks for."""
        self._in_line = False
        self._looked_at = False
        """It is in `Legs.long`."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When it fires, in monotonic seconds; often earlier than wanted, as moving it costs more than looking."""
        self._slow: asyncio.TimerHandle | None = None
        """When a client who does not keep up is cut off."""
        self._producer: PrefillLeg | None = None
        """Whose answer the journey goes on with; before there is one, who was sent a leg last."""
        self._releasing: asyncio.Task[j.Event] | None = None
        self._had_cached: int | None = None
        """Prompt tokens that the first P had cached."""
        self._prefill_answer: Answer | None = None
        self._refusal: Answer | None = None
        self._answer: AnswerLeg | None = None
        self._whole: Answer | None = None
        self._whole_told: Told | None = None
        """What it says beside its text."""
        self._seed: Seed | None = None
        self._way = "whole"
        self._relayed = False
        self._made_by: tuple[str, int, str] | None = None
        """The weights, the circle, and what the model's name means, of the instance that made what the client already
        has."""
        self._pending: deque[j.Effect] = deque()
        self._legs: dict[InstanceId, PrefillLeg] = {}
        """Prefill legs that are waited for, oldest first."""

    def begin(self) -> None:
        """From here on everything is driven by what comes. It has ended once `Parts.open` forgets it."""
        self._parts.open.add(self)
        self.reply.outlet.exchange = self
        try:
            self._account.begin()
            self._pending.extend(self._journey.begin())
            self._drive()
        except Exception:  # as in `_try`
            logger.exception(_BUG, self._request.label)
            self._abandon()

    def feed(self, event: j.Event) -> None:
        """Something has happened."""
        self._try(None, event)

    def _try(self, step: Callable[..., j.Event | None] | None, *given: Any) -> None:
        """What a step of ours makes of something, or without one an event, fed to the journey, and its effects carried
        out. A bug in any of it ends this exchange, and no other: places are given back.
        """
        if self._over:
            return
        try:
            event = given[0] if step is None else step(*given)
            if event is not None:
                self._fold(event)
                if not self._driven:
                    self._drive()
        except Exception:  # whatever it is: every other client of this process goes on being served
            logger.exception(_BUG, self._request.label)
            self._abandon()

    def _fold(self, event: j.Event) -> None:
        if isinstance(event, _FAILED):
            self._account.failed(event)
        self._pending.extend(self._journey.handle(event, time.monotonic()))

    def _drive(self) -> None:
        """Carry out what is pending. What is fed meanwhile becomes pending, too."""
        self._driven = True
        pending = self._pending
        try:
            while pending and not self._over:
                effect = pending.popleft()
                event = _CARRY_OUT[type(effect)](self, effect)
                if event is not None:
                    self._fold(event)
            if not self._over and self._journey.state in _TIMED:
                self._wait()
        finally:
            self._driven = False

    def _wait(self) -> None:
        """With nothing pending: for a call from the line, and for the clock, where the journey's state says so."""
        if self._journey.state is j.State.CHOOSING and not self._in_line:
            self._in_line = True
            self._account.waits()
            self._parts.line.wait(self._seat, self._called)
        wakeup = self._journey.next_wakeup()
        if wakeup is not None and (self._timer is None or self._due > wakeup):
            self._arm(wakeup)

    def _arm(self, wakeup: float) -> None:
        left_s = wakeup - time.monotonic()
        if left_s > FAR_S:
            if not self._looked_at:
                self._looked_at = True
                self._parts.engines.legs.long.add(self)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = wakeup
        self._timer = self._parts.engines.loop.call_later(max(0.0, left_s), self._tick)

    def look(self, now: float) -> None:
        """A moment like any other: what was far may be near now."""
        if self._timer is None and self._journey.state in _TIMED:
            wakeup = self._journey.next_wakeup()
            if wakeup is not None:
                self._arm(wakeup)

    def _tick(self) -> None:
        self._timer = None
        wakeup = self._journey.next_wakeup()
        if self._over or wakeup is None or self._journey.state not in _TIMED:
            return
        if wakeup > time.monotonic():
            self._arm(wakeup)
            return
        self._leave_line()
        self.feed(j.Tick())

    def _called(self) -> None:
        if self._in_line and not self._over:
            self._leave_line()
            self.feed(j.FleetChanged())

    def _call(self, whom: Calls) -> None:
        """To be asked again, where there is anybody; most often there is not."""
        if whom or self._parts.desk.wakeup_s is not None:
            self._parts.dispatch.call(whom)

    def _leave_line(self) -> None:
        if self._in_line:
            self._in_line = False
            self._parts.line.forget(self._seat)
            self._account.called()

    def _abandon(self) -> None:
        """A bug of ours has ended this exchange. Each step is tried, whatever became of the others: places are given
        back, the request is not open any more, and its client hears of it.
        """
        if self._parted:
            return
        self._over = True
        steps: tuple[Callable[[], None], ...] = (
            self._close_prefill,
            self._close_decode,
            self._leave_desk,
            self._forget,
            self._account.broken,
            self._tell_broken,
            self._part,
        )
        for step in steps:
            try:
                step()
            except Exception:  # the next step is as good as before
                logger.exception(_BUG, self._request.label)

    def _leave_desk(self) -> None:
        if self._at_desk:
            self._call(self._parts.desk.finish(self._seat, time.monotonic()))
            self._at_desk = False

    def _tell_broken(self) -> None:
        outlet = self.reply.outlet
        if outlet.begun:
            outlet.abort()
        else:
            problem = ApiError(500, "InternalServerError", "The router failed on this request; its log says why.")
            self._parts.refusals.refuse(outlet, problem)

    def stop(self) -> None:
        """The router ends: whatever comes now is not looked at."""
        self._forget()

    def _part(self) -> None:
        """From its legs, which know it: a cycle would keep it, body and tokens, until somebody looks for cycles."""
        self._producer = self._answer = None
        self._parted = True

    def _forget(self) -> None:
        """Nothing is to come any more."""
        self._over = True
        self._parts.line.forget(self._seat)
        if self._looked_at:
            self._parts.engines.legs.long.discard(self)
        for timer in (self._timer, self._slow):
            if timer is not None:
                timer.cancel()
        self._timer = self._slow = None
        if self in self._parts.open:
            self._parts.open.discard(self)
            self._parts.clients.leave(self._seat.wanted.tenant)

    # -- small effects --

    def _await_fleet(self, _: j.AwaitFleet) -> None:
        self._call(self._parts.desk.found_none(self._seat))

    def _begin_cancel(self, effect: j.CancelPrefill) -> None:
        self._parts.tasks.spawn(self._releases().cancel_prefill(effect.instance), f"abort-{self._request.id}")

    def _close_prefill(self, _: j.ClosePrefill | None = None) -> None:
        for leg in list(self._legs.values()):
            leg.cut()
        self._legs.clear()

    def _leave_prefill(self, effect: j.OutlastPrefill) -> None:
        self._parts.tasks.spawn(
            self._releases().outlast(self._legs.pop(effect.instance)), f"release-{self._request.id}"
        )

    def _forward_refusal(self, _: j.ForwardRefusal) -> None:
        refusal = self._refusal
        assert refusal is not None
        if answers.object_in(refusal.body) is not None:
            retry_after_s = 1 if refusal.status == 503 else None
            kind = answers.json_type(refusal.content_type)
            self.reply.respond(refusal.status, refusal.body, kind, retry_after_s=retry_after_s)
        else:
            error = answers.refusal(refusal.status, refusal.body)
            self.reply.respond(error.status, msgspec.json.encode(error.body()))

    def _fail_stream(self, effect: j.FailStream) -> None:
        self.reply.fail(effect.error)

    # -- what the client's connection says --

    def client_left(self) -> None:
        """He will read nothing more."""
        self._stop_waiting_for_client()
        self.feed(j.ClientLeft())

    def client_full(self) -> None:
        """He does not keep up: his engine waits, for as long as an engine may keep him waiting."""
        leg = self._answer
        if leg is not None and leg.http is not None:
            leg.http.pause()
        if self._slow is None:
            self._slow = self._parts.engines.loop.call_later(self._parts.limits.client_stall_s, self._cut_client)

    def client_drained(self) -> None:
        """He does again."""
        self._stop_waiting_for_client()
        leg = self._answer
        if leg is not None and leg.http is not None:
            leg.http.resume()

    def _stop_waiting_for_client(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _cut_client(self) -> None:
        self._slow = None
        logger.warning("%s: its client reads nothing: cut off", self._request.label)
        self.reply.outlet.abort()

    # -- choosing --

    def _choose(self, effect: j.Choose) -> j.Chosen:
        if self._made_by is not None and effect.excluded:
            weights, circle, meaning = self._made_by
            self._seat.wanted = msgspec.structs.replace(
                self._seat.wanted, weights=weights, circle=circle, meaning=meaning
            )
        chosen, called = self._parts.desk.choose(self._seat, effect, time.monotonic())
        self._call(called)
        if effect.second and chosen.prefill is None:  # all stays as it is
            return chosen
        if effect.excluded:
            kind = "second" if effect.second else "resumed" if self._relayed else "again"
            self._parts.meters.retries.labels(kind).inc()
            self._resumed = self._resumed or self._relayed
        self._account.chose(effect, chosen, self._seat)
        expected = self._seat.expected
        if expected.booking is not None:
            self._sent, self._cached_tokens = tuple(expected.sent), expected.booking.cached_tokens
        return chosen

    def _spoken_by(self, leg: PrefillLeg | AnswerLeg | None) -> None:
        """The client has text of this leg's engine: from here on only its like goes on."""
        view = self._parts.view
        if leg is not None and view.knows(leg.instance):
            maker = view.get(leg.instance)
            meaning = maker.meaning(self._seat.wanted.model)
            self._made_by = maker.instance.weights, view.all().circle(maker.id), meaning

    # -- the prefill leg --

    def _send_prefill(self, effect: j.SendPrefill) -> None:
        instance, attempt = effect.instance, effect.attempt
        parts = self._parts
        leg = self._producer = PrefillLeg(self, instance, attempt)
        transfer = transfer_id(self._parts, self._request, instance, attempt)
        if not self._open:
            self._open = opened(self._request.raw)
        fields = wire.prefill_fields(self._request.body, token_ids=self._may_seed(), transfer=transfer)
        body = *self._open, closing(self._stamped(fields, instance, leg))
        leg.started = time.monotonic()
        target = parts.view.get(instance).instance
        headers = self._lines(Stage.PREFILL_LEG, target)
        parts.view.leg_started(instance)
        self._legs[instance] = leg
        parts.losses.watch(instance, leg, leg.left)
        leg.http = parts.engines.legs.send(target.url, self._request.path, headers, body, leg)

    @property
    def _headers(self) -> dict[str, str]:
        """Of its legs."""
        return {**self._onward, "x-request-id": self._request.id}

    def _releases(self) -> Releases:
        return Releases(self._parts, self._request, self._headers)

    def _lines(self, stage: str, target: Instance) -> bytes:
        """A leg is sent: its headers, as lines."""
        self._account.sends(stage, target)
        return lines(self._account.traced(stage, target, self._headers)) if self._account.recorded else self._head

    def _stamped(self, body: Mapping[str, Any], to: InstanceId, holder: PrefillLeg | None) -> Mapping[str, Any]:
        """A leg with the ticket that a guarded engine asks for. `holder`: whose blocks it is about."""
        producer, attempt = (to, self._journey.attempt) if holder is None else (holder.instance, holder.attempt)
        return stamped(self._parts, self._request, body, to, producer, attempt)

    def prefill_over(self, leg: PrefillLeg) -> None:
        """Its place is free again, however it ended."""
        try:
            self._parts.losses.unwatch(leg.instance, leg)
            self._parts.dispatch.leg_ended(leg.instance)
        except Exception:  # the place is given to another request: this exchange goes on
            logger.exception(_BUG, self._request.label)

    def prefill_said(self, leg: PrefillLeg, said: PrefillSaid | j.Lost | j.Refused) -> None:
        """It has ended by itself."""
        if self._legs.get(leg.instance) is leg:
            del self._legs[leg.instance]
            self._try(self._read_prefill, leg, said)

    def prefill_left(self, leg: PrefillLeg) -> None:
        """Its instance is lost; it may yet do its work, and hold blocks for us."""
        if self._legs.get(leg.instance) is leg:
            del self._legs[leg.instance]
            self._parts.tasks.spawn(self._releases().see_out(leg, j.CANCEL_WAIT_S), f"release-{self._request.id}")
            self.feed(j.Lost("the instance was lost", by=leg.instance))

    def _read_prefill(self, leg: PrefillLeg, said: PrefillSaid | j.Lost | j.Refused) -> j.Event:
        if isinstance(said, PrefillSaid):
            self._parts.meters.leg("prefill", said.at - leg.started)
        newest = leg.attempt == self._journey.attempt
        fields = self._fields(leg.instance, said.answer) if isinstance(said, PrefillSaid) else said
        if not isinstance(fields, dict):
            if newest:
                self._prompt_over(done=False)
            return msgspec.structs.replace(fields, by=leg.instance)
        assert isinstance(said, PrefillSaid)
        self._producer, self._prefill_answer = leg, said.answer
        reason = wire.first_finish_reason(fields)
        usage = fields.get("usage")
        done = newest and reason in j.PREFILLED  # else it computed nothing that its time could teach us
        self._prompt_over(done=done, usage=usage if isinstance(usage, dict) and done else {})
        # An older leg's own times began before the stage that it ends: they are left out, and nothing is claimed.
        self._account.prefilled(said.at, reason, fields if newest else {**fields, "metrics": None})
        transfer = self._transfer_in(fields)
        not_first = self._not_first(leg, transfer, fields)
        token = self._read_seed(fields, not_first)
        return j.PrefillAnswered(reason, transfer, token, not not_first, by=leg.instance)

    def _not_first(self, leg: PrefillLeg, transfer: wire.Transfer | None, fields: Mapping[str, Any]) -> str:
        """Why P's token is not known to be the answer's first: by its own word, and by the proof of the pair."""
        if transfer is None:
            return "P holds nothing: what it has computed cannot be told"
        because = transfer.stops_short_of(fields)
        decode = self._seat.decode
        return because or ("" if decode is None else self._parts.view.not_exact(leg.instance, decode))

    def _transfer_in(self, fields: dict[str, Any]) -> wire.Transfer | None:
        """The hold that P's answer describes; a client is told of what the first of his P had cached."""
        transfer = wire.read_transfer(fields)
        if transfer is None:
            return None
        if self._had_cached is None:
            self._had_cached = transfer.cached_tokens
        return transfer.at_most_cached(self._had_cached)

    def _fields(self, by: InstanceId, answer: Answer) -> dict[str, Any] | j.Lost | j.Refused:
        """Of P's answer."""
        if answer.status != 200:
            return self._refused(by, answer)
        fields, told = answers.object_in(answer.body), answers.completion_in(answer.body)
        if fields is not None and isinstance(told, Told):
            return fields
        lost = self._unfit(by, told if isinstance(told, str) else "unreadable answer")
        if fields is None or wire.read_transfer(fields) is None:
            return lost
        return {**fields, "choices": None}  # half done: what it holds is pulled or given back

    def _unfit(self, by: InstanceId, because: str) -> j.Lost | j.Refused:
        """An engine has answered with status 200 and no answer."""
        return self.engine_lost(by, EngineLost(because, reached=True, unfit="no_completion"))

    def _prompt_over(self, *, done: bool, usage: Mapping[str, Any] = _NO_USAGE) -> None:
        """Its prompt was computed where it was last sent to, or will not be (`done` false)."""
        intake, seat = self._parts.intake, self._seat
        if intake is None or self._taken is None:
            return
        seat.wanted = intake.told(seat.wanted, self._taken, usage)
        cached = cached_in(usage)
        if done and cached is not None and seat.expected.booking is not None:
            self._parts.meters.attainment.prefix(self._cached_tokens, cached)
            self._count_cached(cached)
        self._sent = ()
        self._parts.desk.prompt_over(seat, time.monotonic(), done=done, cached_tokens=cached)

    def _may_seed(self) -> bool:
        """Where it is exact, and D can be told to begin with P's token."""
        allowed = self._parts.limits.seeding and self._verdict.way is Way.SEEDED
        return allowed and self._parts.desk.pins(self._seat)

    def _read_seed(self, answer: dict[str, Any], not_first: str) -> int | None:
        if self._seed is not None or not self._may_seed():
            off = not self._parts.limits.seeding
            self._account.not_seeded("seeding is off" if off else "D's engine cannot be told its first token")
            return None
        if not_first:
            self._account.not_seeded(not_first)
            return None
        if not self._has_room(answer):
            self._account.not_seeded("D may refuse its length")
            return None
        seed = seed_of(answer, self._request.path, stops_of(self._request.body))
        if isinstance(seed, str):
            logger.debug("%s: not seeded: %s", self._request.id, seed)
            self._account.not_seeded(seed)
            return None
        self._seed = seed
        self._spoken_by(self._producer)
        return seed.token

    def _has_room(self, answer: dict[str, Any]) -> bool:
        assert self._seat.decode is not None
        usage = answer.get("usage")
        prompt_tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        context = self._parts.view.get(self._seat.decode).context(self._request.model)
        return has_room(self._request.body, prompt_tokens if isinstance(prompt_tokens, int) else None, context)

    def _send_seed(self, _: j.SendSeed) -> None:
        assert self._seed is not None
        if self.reply.outlet.gone:
            return  # this very moment: his connection will say so
        self._parts.meters.first_byte(time.monotonic() - self._request.arrived)
        self._parts.meters.seeds.inc()
        self._account.seeds()
        self.reply.give(self._seed)

    def _refused(self, by: InstanceId, answer: Answer) -> j.Lost | j.Refused:
        """4xx is the client's to read; all else is the engine's fault, and another engine may do better."""
        if wire.is_ticket_refused(answer.status, answer.body):
            logger.error(
                "%s: our ticket was refused: %s", self._request.label, answer.body[:300].decode(errors="replace")
            )
            return j.Lost("the engine's guard refused the router's ticket", untouched=True)
        if answer.status >= 500:
            return j.Lost(f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        if answer.status < 400:
            return self._unfit(by, f"it answered {answer.status}, which is no completion")
        self._refusal = answer
        return j.Refused(answer.status)

    def engine_lost(self, instance: InstanceId, lost: EngineLost) -> j.Lost | j.Refused:
        """What a broken leg is to the journey. What we have run out of, another instance could not give us either."""
        if lost.ours:
            logger.warning("%s: %s", self._request.label, lost)
            problem = no_room(str(lost))
            self._refusal = Answer(problem.status, "application/json", msgspec.json.encode(problem.body()))
            return j.Refused(problem.status)
        if lost.unfit:
            self._parts.meters.unfit.labels(lost.unfit).inc()
        if not lost.reached:
            self._parts.dispatch.unreachable(instance)
        logger.warning("%s: %s lost: %s", self._request.label, instance, lost)
        return j.Lost(str(lost), untouched=not lost.reached)

    def _answer_from_prefill(self, _: j.AnswerFromPrefill) -> None:
        assert self._prefill_answer is not None
        raw = self._prefill_answer.body
        answer, told = wire.without_transfer(answers.object_in(raw) or {}), answers.completion_in(raw)
        self.reply.respond(200, msgspec.json.encode(answer), told=told if isinstance(told, Told) else None)

    # -- the answering leg --

    def _send_decode(self, effect: j.SendDecode) -> j.Event | None:
        instance, transfer = effect.instance, effect.transfer
        parts = self._parts
        away = parts.desk.turned_away(instance)
        if away is not None:
            return away
        self._way = "handoff" if transfer is not None else "whole"
        fields = wire.decode_body({}, transfer, effect.first_token)
        if fields:
            fields = self._stamped(fields, instance, self._producer if transfer is not None else None)
        if fields and not self._open:
            self._open = opened(self._request.raw)
        body = (*self._open, closing(fields)) if fields else (self._request.raw,)
        self._occupy(instance)
        leg = self._answer = AnswerLeg(self, instance, "" if transfer is None else transfer.producer)
        if transfer is None and not self.streams:
            self._presume(leg.started)
        target = parts.view.get(instance).instance
        pulls = transfer is not None
        stage = Stage.DECODE_LEG if pulls else Stage.WHOLE_LEG
        headers = self._lines(stage, target)
        silence_s = parts.limits.stall_s if self.streams else 0.0
        parts.losses.watch(instance, leg, leg.left)
        # A leg that pulls is sent once: a hold that may have been pulled must not be pulled again.
        leg.http = parts.engines.legs.send(
            target.url, self._request.path, headers, body, leg, once=pulls, silence_s=silence_s
        )
        return None

    def _presume(self, now: float) -> None:
        """Nobody says when the prompt of an answer in one piece is computed: it is when that was foretold."""
        if self._taken is not None and self._seat.ttft_ms > 0:
            left_s = self._request.arrived + self._seat.ttft_ms / 1000 - now
            self._presumed = self._parts.engines.loop.call_later(max(0.0, left_s), self._presume_over)

    def _presume_over(self) -> None:
        self._parts.desk.prompt_over(self._seat, time.monotonic(), done=False)
        self._call(self._parts.desk.room())

    def _presume_no_more(self) -> None:
        if self._presumed is not None:
            self._presumed.cancel()

    def answer_began(self, leg: AnswerLeg, because: str) -> None:
        """The beginning of a stream with a good status is here. `because`: why it is none; empty: it is one."""
        if leg is self._answer:
            self._try(self._opened, leg, self._no_stream(leg, because) if because else None)

    def _no_stream(self, leg: AnswerLeg, because: str) -> j.Lost | j.Refused:
        refusal = answers.refusal_in(leg.pieces)
        if refusal is None:
            return self._unfit(leg.instance, because)
        status, body = refusal
        self._refusal = Answer(status, "application/json", body)
        return j.Refused(status)

    def answer_ended(self, leg: AnswerLeg) -> None:
        """All of it is here."""
        if leg is not self._answer:
            return
        if leg.relays:
            self._try(self.reply.ended)
        else:
            self._try(self._opened, leg, self._read_whole(leg))

    def _read_whole(self, leg: AnswerLeg) -> j.Event | None:
        if leg.status == 200 and self.streams:
            return self._unfit(leg.instance, "the stream ended before its first token")
        answer = Answer(leg.status, leg.content_type, leg.pieces)
        if answer.status != 200:
            return self._refused(leg.instance, answer)
        told = answers.completion_in(answer.body)
        if isinstance(told, str):
            return self._unfit(leg.instance, told)
        self._whole, self._whole_told = answer, told
        return None

    def answer_lost(self, leg: AnswerLeg, lost: EngineLost) -> None:
        """It broke off."""
        if leg is not self._answer:
            return
        if leg.relays:
            self._try(self.reply.lost, str(lost))
        else:
            self._try(self._lost_unopened, leg, lost)

    def _lost_unopened(self, leg: AnswerLeg, lost: EngineLost) -> j.Event:
        return self._opened(leg, self.engine_lost(leg.instance, lost))

    def answer_left(self, leg: AnswerLeg) -> None:
        """Its instance is lost."""
        if leg is self._answer and leg.opening:
            self._try(self._opened, leg, j.Lost("the instance was lost"))

    def _opened(self, leg: AnswerLeg, failure: j.Event | None) -> j.Event:
        """Its status is known: it begins to answer, or it has failed."""
        leg.opening = False
        self._open = ()
        self._parts.losses.unwatch(leg.instance, leg)
        self._parts.meters.leg("decode", time.monotonic() - leg.started)
        if leg.pulled and self._producer is not None and isinstance(failure, j.Lost | None):
            because = None if failure is None else failure.because
            self._parts.meters.pulled(self._producer.instance, leg.instance, because)
        if failure is not None:
            self._close_decode()
            return failure
        if leg.pulled:
            self._parts.view.pair_met(leg.pulled, leg.instance)
        self._presume_no_more()
        if self.streams or self._seat.wanted.prefill_only:  # else all of the answer is here, and says no time
            self._parts.desk.opened(self._seat, time.monotonic())
            self._call(self._parts.desk.room())
        self._account.opened(spoken=self.reply.first_out)
        return j.Opened()

    def _close_decode(self, _: j.CloseDecode | None = None) -> None:
        leg, self._answer, self._whole = self._answer, None, None
        if leg is not None:
            self._parts.losses.unwatch(leg.instance, leg)
            leg.close()
        self._presume_no_more()
        self._occupy(None)

    def _occupy(self, instance: InstanceId | None) -> None:
        """Count our answering leg at this instance, and nowhere else."""
        self._call(self._parts.desk.occupy(self._seat, instance))

    def _relay(self, _: j.Relay) -> j.Event | None:
        if not self._relayed and self._seed is None:
            self._parts.meters.first_byte(time.monotonic() - self._request.arrived)
        self._relayed = True
        if self._whole is not None:
            content_type = answers.json_type(self._whole.content_type)
            self.reply.respond(200, self._whole.body, content_type, told=self._whole_told)
            return j.Ended()
        leg = self._answer
        assert leg is not None
        self._spoken_by(leg)
        leg.relays = True
        if leg.http is not None and self._verdict.resumable:
            leg.http.limit_silence(self._parts.limits.stall_s * j.TURN)
        if leg.http is not None:
            leg.http.chunk = self.reply.pass_on
        if leg.http is not None and self.reply.outlet.full:
            leg.http.pause()
        return self.reply.relay(leg.content_type, leg.cache_control) or self.reply.feed(leg.pieces)

    def passed_on(self, event: object) -> None:
        """A chunk has told of this."""
        assert isinstance(event, j.Lost)
        self.feed(event)

    def relayed(self, data: bytes) -> None:
        """More of the stream."""
        self._try(self.reply.feed, data)

    # -- the end --

    def _fail(self, effect: j.Fail) -> None:
        error = effect.error
        self._shed = error.retry_after_s is not None
        body = msgspec.json.encode(error.body())
        self.reply.respond(error.status, body, retry_after_s=error.retry_after_s)

    def _begin_release(self, effect: j.Release) -> None:
        assert self._producer is not None
        releasing = self._releases().release(effect.via, effect.transfer, self._producer)
        self._releasing = self._parts.tasks.spawn(releasing, f"release-{self._request.id}")  # it may go on meanwhile
        self._releasing.add_done_callback(self._released)

    def _released(self, task: asyncio.Task[j.Event]) -> None:
        if task is self._releasing:
            failed = task.cancelled() or task.exception() is not None
            self.feed(j.Released(ok=False) if failed else task.result())

    def _report_cached(self, intake: RequestPredictor, cached_tokens: int | None) -> None:
        """One instance did all of it, and has said with its end how much of the prompt it had."""
        if cached_tokens is not None:
            self._parts.meters.attainment.prefix(self._cached_tokens, cached_tokens)
            self._count_cached(cached_tokens)
            intake.reported(self._sent, self._seat.wanted, cached_tokens)

    def _count_cached(self, cached_tokens: int) -> None:
        wanted = self._seat.wanted
        flow = self._parts.meters.flow
        flow.prefilled(wanted.model or "", wanted.slo_class, wanted.prompt_tokens, cached_tokens)

    def _finish(self, effect: j.Finish) -> None:
        outcome = effect.outcome
        self._presume_no_more()
        tokens = self._count_tokens()
        cut_off = outcome != "served" or self.reply.cut_off
        here = None if self._resumed else tokens  # made by two engines they say nothing about either's speed
        now = time.monotonic()
        parts = self._parts
        said = self._engine_said(here)
        self._call(parts.desk.finish(self._seat, now, here, cut_off=cut_off, engine_ms=said))
        self._at_desk = False
        self._forget()
        outcome = SHED if self._shed else outcome
        parts.meters.ended(self._request.path, self._way, outcome, now - self._request.arrived)
        if self.reply.broken_seams:
            parts.meters.broken_seams.inc(self.reply.broken_seams)
        self._account.finish(outcome, self._seat, tokens)
        if self.reply.outlet.exchange is self:  # nobody has told him an end: better none than to wait for ever
            self.reply.outlet.abort()
        self._part()

    def _engine_said(self, tokens: int | None) -> tuple[float, float] | None:
        """Of an answer in one piece: what its prompt took, if the same engine computed it, and each later token, ms."""
        times = self._account.times
        if self.streams or times is None or not tokens:
            return None
        after_s = times.generation_s or 0.0
        prompt_ms = 0.0 if self._presumed is None else times.first_s * 1000
        return prompt_ms, after_s * 1000 / (tokens - 1) if tokens > 2 else 0.0

    def _count_tokens(self) -> int | None:
        """Of the answer: as its engine has counted them, else by the events that went through."""
        intake, usage = self._parts.intake, self._account.usage
        if intake is None or self._taken is None:
            return None
        if usage and self._sent:  # no P has said it
            self._seat.wanted = intake.told(self._seat.wanted, self._taken, usage)
            self._report_cached(intake, cached_in(usage))
        tokens, answers = answer_tokens(usage) or self.reply.tokens(), self._request.body.get("n")
        return tokens // answers if tokens and isinstance(answers, int) and answers > 1 else tokens


_CARRY_OUT: Mapping[type[j.Effect], Callable[[RequestDriver, Any], j.Event | None]] = {
    j.Choose: RequestDriver._choose,
    j.AwaitFleet: RequestDriver._await_fleet,
    j.SendPrefill: RequestDriver._send_prefill,
    j.SendSeed: RequestDriver._send_seed,
    j.SendDecode: RequestDriver._send_decode,
    j.CancelPrefill: RequestDriver._begin_cancel,
    j.ClosePrefill: RequestDriver._close_prefill,
    j.OutlastPrefill: RequestDriver._leave_prefill,
    j.CloseDecode: RequestDriver._close_decode,
    j.Relay: RequestDriver._relay,
    j.AnswerFromPrefill: RequestDriver._answer_from_prefill,
    j.ForwardRefusal: RequestDriver._forward_refusal,
    j.Fail: RequestDriver._fail,
    j.FailStream: RequestDriver._fail_stream,
    j.Release: RequestDriver._begin_release,
    j.Finish: RequestDriver._finish,
}
"""How each effect is carried out; what that returns is fed to the journey."""
