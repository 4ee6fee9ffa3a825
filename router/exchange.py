"""Carries out one `Journey` on real connections: effects in, events back. No decision is made here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import web

from cluster import wire
from cluster.ids import InstanceId, TransferId
from cluster.request import Request
from router import journey as j
from router.account import Account
from router.clients import Client
from router.desk import HANDSHAKE_S, Seat
from router.exact import CHAT, Verdict, Way, has_room
from router.intake import Intake, Taken, answer_tokens, cached_in
from router.prefixes import Sent
from router.promises import SHED
from router.reply import Reply, next_chunk
from router.seam import ERROR_EVENT, Seed, seed_of, stops_of
from router.timing import Stage
from router.upstream import Answer, EngineLost, limit_silence, read

if TYPE_CHECKING:
    from router.server import Router

logger = logging.getLogger("baton.router")

_NO_USAGE: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class _Said:
    """What an engine said to a prefill leg, and when."""

    answer: Answer
    at: float


@dataclass(slots=True)
class _Leg:
    """A prefill leg that was sent: a task of its own, so that a client's leaving does not cut it off before it said
    what it holds.
    """

    instance: InstanceId
    attempt: int
    lost: asyncio.Future[None]
    """Done when its instance is lost."""
    task: asyncio.Task[_Said | j.Lost] = field(init=False)


class Exchange:
    """One client request on its way through the fleet."""

    def __init__(
        self,
        router: Router,
        http: web.Request,
        request: Request,
        journey: j.Journey,
        seat: Seat,
        verdict: Verdict,
        client: Client,
        taken: Taken | None,
    ) -> None:
        """`taken`: what was foretold of it; None: nobody foresees anything."""
        self._router = router
        self._request = request
        self._journey = journey
        self._verdict = verdict
        self._account = Account(router.memory, router.meters, router.tracing, request, verdict, http.headers, client)
        resumable = verdict.resumable and request.stream
        self._reply = Reply(http, request, self._account, resumable=resumable, counts=taken is not None)
        self._seat = seat
        self._taken = taken
        self._presumed: asyncio.TimerHandle | None = None
        """When the prompt of an answer in one piece is taken to be computed."""
        self._sent: tuple[Sent, ...] = ()
        self._cached_tokens = 0
        """Where its prompt is computed, and how much of it is taken to be cached there: until that is known."""
        self._shed = self._resumed = False
        self._headers = {**router.headers_for(http), "Content-Type": "application/json"}
        self._headers["X-Request-Id"] = request.id
        self._pending: deque[j.Effect] = deque()
        self._legs: dict[InstanceId, _Leg] = {}
        """Prefill legs that are waited for, oldest first."""
        self._producer: _Leg | None = None
        """Whose answer the journey goes on with; before there is one, who was sent a leg last."""
        self._releasing: asyncio.Task[j.Event] | None = None
        self._prefill_answer: Answer | None = None
        self._refusal: Answer | None = None
        self._answer: Answer | aiohttp.ClientResponse | None = None
        self._first_chunk = b""
        self._seed: Seed | None = None
        self._way = "whole"
        self._relayed = False

    async def run(self) -> web.StreamResponse:
        """The answer to the client. What is left to do then, or once the client has left, goes on in the background."""
        self._pending.extend(self._journey.begin())
        try:
            await self._drive(until_answered=True)
        except asyncio.CancelledError:
            self._router.spawn(self._wind_down(), f"after-{self._request.id}")
            raise
        except Exception:  # whatever it was: places are given back before it goes on to the log
            self._abandon()
            raise
        if not self._over:
            self._router.spawn(self._drive_on(), f"after-{self._request.id}")
        return self._reply.response or web.Response(status=499)  # nobody reads it: the client left at this very moment

    async def _wind_down(self) -> None:
        self._feed(j.ClientLeft())
        await self._drive_on()

    async def _drive_on(self) -> None:
        """What is left once nobody waits for it."""
        try:
            await self._drive()
        except Exception:  # whatever it was: places are given back before it goes on to the log
            self._abandon()
            raise

    def _abandon(self) -> None:
        """A bug of ours has ended this exchange: places are given back all the same, and it is not open any more."""
        self._account.finish("broken")
        for leg in self._legs.values():
            leg.task.cancel()
        self._close_decode()
        self._router.call(self._router.desk.finish(self._seat, time.monotonic()))
        self._router.line.forget(self._seat)

    @property
    def _over(self) -> bool:
        return self._journey.state is j.State.DONE and not self._pending

    def _feed(self, event: j.Event) -> None:
        if isinstance(event, j.Lost | j.Refused):
            self._account.failed(event)
        self._pending.extend(self._journey.handle(event, time.monotonic()))

    async def _drive(self, *, until_answered: bool = False) -> None:
        """Until `Finish`: carry out what is pending; with nothing pending, wait for the prefill leg or the clock."""
        while not self._over and not (until_answered and self._reply.whole):
            if not self._pending:
                self._feed(await self._next_event())
                continue
            event = await self._carry_out(self._pending.popleft())
            if event is not None:
                self._feed(event)

    async def _next_event(self) -> j.Event:
        if self._journey.state is j.State.CHOOSING:
            self._account.waits()
            called = await self._router.line.wait(self._seat, self._seconds_left())
            self._account.called()
            return j.FleetChanged() if called else j.Tick()
        if self._journey.state is j.State.RELEASING and self._releasing is not None:
            await asyncio.wait({self._releasing})  # goes on although this is cancelled: the client may leave meanwhile
            return self._releasing.result()
        return await self._prefill_event()

    async def _prefill_event(self) -> j.Event:
        """A prefill leg's answer or loss, the oldest's first; or the end of the time for it."""
        assert self._legs, f"nothing to wait for in {self._journey.state}"
        waited = [each for leg in self._legs.values() for each in (leg.task, leg.lost)]
        await asyncio.wait(waited, timeout=self._seconds_left(), return_when=asyncio.FIRST_COMPLETED)
        for leg in list(self._legs.values()):
            if leg.task.done():
                del self._legs[leg.instance]
                return self._read_prefill(leg, leg.task.result())
            if leg.lost.done():
                del self._legs[leg.instance]
                self._router.spawn(self._see_out(leg, j.CANCEL_WAIT_S), f"release-{self._request.id}")
                return j.Lost("the instance was lost", by=leg.instance)
        return j.Tick()

    async def _outlast(self, leg: _Leg) -> None:
        """Another has answered: this one may still end by itself (`j.PATIENCE_S`), then P is asked to abort it."""
        done, _ = await asyncio.wait({leg.task}, timeout=j.PATIENCE_S)
        if not done and self._router.view.knows(leg.instance):
            await self._cancel_prefill(leg.instance)
        await self._see_out(leg, j.CANCEL_WAIT_S)

    async def _see_out(self, leg: _Leg, wait_s: float) -> None:
        """A leg that nobody waits for may yet do its work, and hold blocks for us. To cut it off races with that."""
        done, _ = await asyncio.wait({leg.task}, timeout=wait_s)
        said = leg.task.result() if done else None
        transfer = _hold_in(said.answer) if isinstance(said, _Said) else None
        if transfer is not None:
            await self._release(InstanceId(""), transfer, leg)
        leg.task.cancel()

    def _seconds_left(self) -> float | None:
        wakeup = self._journey.next_wakeup()
        return None if wakeup is None else max(0.0, wakeup - time.monotonic())

    async def _carry_out(self, effect: j.Effect) -> j.Event | None:
        match effect:
            case j.Choose():
                return self._choose(effect)
            case j.AwaitFleet():
                self._router.call(self._router.desk.found_none(self._seat))
            case j.SendPrefill(instance, attempt):
                self._send_prefill(instance, attempt)
            case j.SendSeed():
                return await self._send_seed()
            case j.SendDecode():
                return await self._send_decode(effect)
            case j.CancelPrefill(instance):
                await self._cancel_prefill(instance)
            case j.ClosePrefill():
                for leg in self._legs.values():
                    leg.task.cancel()
            case j.OutlastPrefill(instance):
                self._router.spawn(self._outlast(self._legs.pop(instance)), f"release-{self._request.id}")
            case j.CloseDecode():
                self._close_decode()
            case j.Relay():
                return await self._relay()
            case j.AnswerFromPrefill():
                await self._answer_from_prefill()
            case j.ForwardRefusal():
                assert self._refusal is not None
                await self._reply.respond(self._refusal.status, self._refusal.body, self._refusal.content_type)
            case j.Fail(error):
                self._shed = error.retry_after_s is not None
                body = msgspec.json.encode(error.body())
                await self._reply.respond(error.status, body, retry_after_s=error.retry_after_s)
            case j.FailStream(error):
                await self._reply.fail(error)
            case j.Release(via, transfer):
                assert self._producer is not None
                releasing = self._release(via, transfer, self._producer)
                self._releasing = self._router.spawn(releasing, f"release-{self._request.id}")  # it may go on meanwhile
            case j.Finish(outcome):
                self._finish(outcome)
        return None

    # -- choosing --

    def _choose(self, effect: j.Choose) -> j.Chosen:
        chosen, called = self._router.desk.choose(self._seat, effect, time.monotonic())
        self._router.call(called)
        logger.debug("%s: %s", self._request.id, chosen.because)
        if effect.second and chosen.prefill is None:  # all stays as it is
            return chosen
        if effect.excluded:
            kind = "second" if effect.second else "resumed" if self._relayed else "again"
            self._router.meters.retries.labels(kind).inc()
            self._resumed = self._resumed or self._relayed
        self._account.chose(effect, chosen, self._seat)
        expected = self._seat.expected
        if expected.booking is not None:
            self._sent, self._cached_tokens = tuple(expected.sent), expected.booking.cached_tokens
        return chosen

    # -- the prefill leg --

    def _send_prefill(self, instance: InstanceId, attempt: int) -> None:
        self._router.view.leg_started(instance)
        leg = self._legs[instance] = self._producer = _Leg(instance, attempt, self._router.losses.of(instance))
        leg.task = self._router.spawn(self._run_prefill(leg), f"prefill-{self._request.id}-{attempt}")

    async def _run_prefill(self, leg: _Leg) -> _Said | j.Lost:
        try:
            body = wire.prefill_body(self._request.body, token_ids=self._may_seed())
            raw = msgspec.json.encode(self._stamped(body, leg.instance, leg))
            started = time.monotonic()
            target = self._router.view.get(leg.instance).instance
            headers = self._account.sends(Stage.PREFILL_LEG, target, self._headers)
            answer = await self._router.upstream.call(target, "POST", self._request.path, raw, headers)
        except EngineLost as lost:
            return self._lost(leg.instance, lost)
        finally:
            self._router.leg_ended(leg.instance)
        answered = time.monotonic()
        self._router.meters.leg_seconds.labels("prefill").observe(answered - started)
        return _Said(answer, answered)

    def _stamped(self, body: Mapping[str, Any], to: InstanceId, holder: _Leg | None) -> Mapping[str, Any]:
        """A leg with the ticket that a guarded engine asks for. `holder`: whose blocks it is about."""
        producer, attempt = (to, self._journey.attempt) if holder is None else (holder.instance, holder.attempt)
        epoch = self._router.view.get(producer).instance.epoch if self._router.view.knows(producer) else 0
        transfer = TransferId(self._request.id, attempt, epoch)
        return self._router.tickets.stamp(body, to, transfer, producer=producer)

    def _read_prefill(self, leg: _Leg, said: _Said | j.Lost) -> j.Event:
        newest = leg.attempt == self._journey.attempt
        fields = said if isinstance(said, j.Lost) else self._fields(said.answer)
        if not isinstance(fields, dict):
            if newest:
                self._prompt_over(done=False)
            return replace(fields, by=leg.instance)
        assert isinstance(said, _Said)
        answer = said.answer
        self._producer, self._prefill_answer = leg, answer
        reason = wire.first_finish_reason(fields)
        usage = fields.get("usage")
        self._prompt_over(done=newest, usage=usage if isinstance(usage, dict) else {})
        # An older leg's own times began before the stage that it ends: they are left out, and nothing is claimed.
        self._account.prefilled(said.at, reason, fields if newest else {**fields, "metrics": None})
        return j.PrefillAnswered(reason, wire.read_transfer(fields), self._read_seed(fields), by=leg.instance)

    def _fields(self, answer: Answer) -> dict[str, Any] | j.Lost | j.Refused:
        """Of P's answer."""
        if answer.status != 200:
            return self._refused(answer)
        try:
            fields = msgspec.json.decode(answer.body)
        except msgspec.DecodeError as error:
            return j.Lost(f"unreadable answer: {error}")
        return fields if isinstance(fields, dict) else j.Lost("unreadable answer: not an object")

    def _prompt_over(self, *, done: bool, usage: Mapping[str, Any] = _NO_USAGE) -> None:
        """Its prompt was computed where it was last sent to, or will not be (`done` false)."""
        intake, seat = self._router.intake, self._seat
        if intake is None or self._taken is None:
            return
        seat.wanted = intake.told(seat.wanted, self._taken, usage)
        cached = cached_in(usage)
        if done and cached is not None and seat.expected.booking is not None:
            self._router.meters.attainment.prefix(self._cached_tokens, cached)
        self._sent = ()
        self._router.desk.prompt_over(seat, time.monotonic(), done=done, cached_tokens=cached)

    def _may_seed(self) -> bool:
        """Where it is exact, and D can be told to begin with P's token."""
        allowed = self._router.config.seeding and self._verdict.way is Way.SEEDED
        return allowed and self._router.desk.pins(self._seat)

    def _read_seed(self, answer: dict[str, Any]) -> int | None:
        if self._seed is not None or not self._may_seed():
            off = not self._router.config.seeding
            self._account.not_seeded("seeding is off" if off else "D's engine cannot be told its first token")
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
        return seed.token

    def _has_room(self, answer: dict[str, Any]) -> bool:
        assert self._seat.decode is not None
        usage = answer.get("usage")
        prompt_tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        context = self._router.view.get(self._seat.decode).context(self._request.model)
        return has_room(self._request.body, prompt_tokens if isinstance(prompt_tokens, int) else None, context)

    async def _send_seed(self) -> j.Event | None:
        assert self._seed is not None
        self._router.meters.first_byte_seconds.observe(time.monotonic() - self._request.arrived)
        self._router.meters.seeds.inc()
        self._account.seeds()
        return await self._reply.give(self._seed)

    def _refused(self, answer: Answer) -> j.Lost | j.Refused:
        """4xx is the client's to read; 5xx is the engine's fault, and another engine may do better."""
        if wire.is_ticket_refused(answer.status, answer.body):
            logger.error("%s: our ticket was refused: %s", self._request.id, answer.body[:300].decode(errors="replace"))
            return j.Lost("the engine's guard refused the router's ticket", untouched=True)
        if answer.status >= 500:
            return j.Lost(f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        self._refusal = answer
        return j.Refused(answer.status)

    def _lost(self, instance: InstanceId, lost: EngineLost) -> j.Lost:
        if not lost.reached:
            self._router.unreachable(instance)
        logger.warning("%s: %s lost: %s", self._request.id, instance, lost)
        return j.Lost(str(lost), untouched=not lost.reached)

    async def _cancel_prefill(self, instance: InstanceId) -> None:
        """vLLM aborts by its own ids: ``cmpl-ID-0`` for completions, ``chatcmpl-ID`` for chat."""
        engine_id = f"chatcmpl-{self._request.id}" if self._request.path == CHAT else f"cmpl-{self._request.id}-0"
        target = self._router.view.get(instance).instance
        await self._router.upstream.abort(target, (engine_id,), self._headers)

    async def _answer_from_prefill(self) -> None:
        assert self._prefill_answer is not None
        answer = wire.without_transfer(msgspec.json.decode(self._prefill_answer.body))
        await self._reply.respond(200, msgspec.json.encode(answer))

    # -- the answering leg --

    async def _send_decode(self, effect: j.SendDecode) -> j.Event | None:
        instance, transfer = effect.instance, effect.transfer
        if self._journey.state is not j.State.OPENING:
            return None  # the client left while his first token was written
        away = self._router.desk.turned_away(instance)
        if away is not None:
            return away
        self._way = "handoff" if transfer is not None else "whole"
        leg = wire.decode_body(self._request.body, transfer, effect.first_token)
        body = self._stamped(leg, instance, self._producer if transfer is not None else None)
        self._occupy(instance)
        started = time.monotonic()
        if transfer is None and not self._request.stream:
            self._presume(started)
        opening = self._router.spawn(
            self._open_decode(instance, msgspec.json.encode(body), pulls=transfer is not None),
            f"decode-{self._request.id}",
        )
        try:
            event = await self._opened(opening, instance)
        finally:
            opening.cancel()
        if not isinstance(event, j.Opened):
            self._close_decode()
        elif transfer is not None:
            self._router.view.pair_met(transfer.producer, instance)
        self._router.meters.leg_seconds.labels("decode").observe(time.monotonic() - started)
        return event

    def _presume(self, now: float) -> None:
        """Nobody says when the prompt of an answer in one piece is computed: it is when that was foretold."""
        if self._taken is not None and self._seat.ttft_ms > 0:
            left_s = self._request.arrived + self._seat.ttft_ms / 1000 - now
            self._presumed = asyncio.get_running_loop().call_later(max(0.0, left_s), self._presume_over)

    def _presume_over(self) -> None:
        self._router.desk.prompt_over(self._seat, time.monotonic(), done=False)
        self._router.call(self._router.desk.room())

    def _presume_no_more(self) -> None:
        if self._presumed is not None:
            self._presumed.cancel()

    async def _opened(self, opening: asyncio.Task[j.Event], instance: InstanceId) -> j.Event:
        lost = self._router.losses.of(instance)
        legs: set[asyncio.Future[Any]] = {opening, lost}
        done: set[asyncio.Future[Any]] = set()
        while not done and self._seconds_left() != 0:  # uvloop's timers fire up to a millisecond early
            done, _ = await asyncio.wait(legs, timeout=self._seconds_left(), return_when=asyncio.FIRST_COMPLETED)
        if opening in done:
            return opening.result()
        return j.Lost("the instance was lost") if lost in done else j.Tick()

    async def _open_decode(self, instance: InstanceId, body: bytes, *, pulls: bool) -> j.Event:
        """Send, and wait until the status is true: the whole body, or the first event of a stream.

        A leg that pulls is sent once: a hold that may have been pulled must not be pulled again.
        """
        target = self._router.view.get(instance).instance
        stream = self._request.stream
        headers = self._account.sends(Stage.DECODE_LEG if pulls else Stage.WHOLE_LEG, target, self._headers)
        try:
            response = await self._router.upstream.open(
                target, "POST", self._request.path, body, headers, stream=stream, once=pulls
            )
            self._answer = response
            if response.status != 200 or not stream:
                self._answer = answer = await read(response)
                return self._begins() if answer.status == 200 else self._refused(answer)
            self._first_chunk = await next_chunk(response)
        except EngineLost as lost:
            return self._lost(instance, lost)
        if not self._first_chunk:
            return j.Lost("the stream ended before its first token")
        if self._first_chunk.startswith(ERROR_EVENT):
            return j.Lost(self._first_chunk[6:200].decode(errors="replace"))
        return self._begins()

    def _begins(self) -> j.Opened:
        self._presume_no_more()
        if self._request.stream or self._seat.wanted.prefill_only:  # else all of the answer is here, and says no time
            self._router.desk.opened(self._seat, time.monotonic())
            self._router.call(self._router.desk.room())
        self._account.opened(spoken=self._reply.first_out)
        return j.Opened()

    def _close_decode(self) -> None:
        if isinstance(self._answer, aiohttp.ClientResponse):
            self._answer.close()
        self._answer = None
        self._presume_no_more()
        self._occupy(None)

    def _occupy(self, instance: InstanceId | None) -> None:
        """Count our answering leg at this instance, and nowhere else."""
        self._router.call(self._router.desk.occupy(self._seat, instance))

    async def _relay(self) -> j.Event:
        if not self._relayed and self._seed is None:
            self._router.meters.first_byte_seconds.observe(time.monotonic() - self._request.arrived)
        self._relayed = True
        if isinstance(self._answer, Answer):
            await self._reply.respond(200, self._answer.body, self._answer.content_type)
            return j.Ended()
        assert self._answer is not None
        if self._verdict.resumable:
            limit_silence(self._answer, self._router.config.stall_s * j.TURN)
        return await self._reply.relay(self._answer, self._first_chunk)

    # -- the end --

    async def _release(self, via: InstanceId, transfer: wire.Transfer, holder: _Leg) -> j.Event:
        """Have D tell P to free this hold, or, where D does not answer, another one."""
        done = await self._reject(via, transfer, holder)
        if not done:
            other = self._router.desk.speaks_for(holder.instance, via)
            done = other is not None and await self._reject(other, transfer, holder)
        self._router.meters.releases.labels(str(done).lower()).inc()
        if not done:
            logger.warning("%s: a hold of %d tokens is left to its lease", self._request.id, transfer.tokens)
        return j.Released(done)

    async def _reject(self, via: InstanceId, transfer: wire.Transfer, holder: _Leg) -> bool:
        """Have it reject a leg for this hold. To a producer it has never met, D's first word only starts a handshake,
        and the release leaves with the next: measured on vLLM 0.32, where an idle D polls nothing.
        """
        done = await self._reject_once(via, transfer, holder)
        if done and not self._router.view.pair_warm(transfer.producer, via):
            await asyncio.sleep(HANDSHAKE_S)
            done = await self._reject_once(via, transfer, holder)
        return done

    async def _reject_once(self, via: InstanceId, transfer: wire.Transfer, holder: _Leg) -> bool:
        if not self._router.view.knows(via):
            return False
        body = msgspec.json.encode(self._stamped(wire.release_body(transfer), via, holder))
        target = self._router.view.get(via).instance
        try:
            answer = await self._router.upstream.say(target, "/v1/completions", body, self._headers)
        except EngineLost:
            return False
        if wire.is_ticket_refused(answer.status, answer.body):
            return False  # by the guard: the engine heard nothing of it
        return 400 <= answer.status < 500  # the rejection is the release

    def _report_cached(self, intake: Intake, cached_tokens: int | None) -> None:
        """One instance did all of it, and has said with its end how much of the prompt it had."""
        if cached_tokens is not None:
            self._router.meters.attainment.prefix(self._cached_tokens, cached_tokens)
            intake.reported(self._sent, self._seat.wanted, cached_tokens)

    def _finish(self, outcome: str) -> None:
        self._presume_no_more()
        tokens = self._count_tokens()
        cut_off = outcome != "served" or self._reply.cut_off
        here = None if self._resumed else tokens  # made by two engines they say nothing about either's speed
        self._router.call(self._router.desk.finish(self._seat, time.monotonic(), here, cut_off=cut_off))
        self._router.line.forget(self._seat)
        outcome = SHED if self._shed else outcome
        seconds = time.monotonic() - self._request.arrived
        self._router.meters.requests.labels(self._request.path, self._way, outcome).inc()
        self._router.meters.request_seconds.observe(seconds)
        self._router.meters.broken_seams.inc(self._reply.broken_seams)
        self._account.finish(outcome, self._seat, tokens)
        logger.debug("%s: %s, %s, %.3f s", self._request.id, self._way, outcome, seconds)

    def _count_tokens(self) -> int | None:
        """Of the answer: as its engine has counted them, else by the events that went through."""
        intake, usage = self._router.intake, self._account.usage
        if intake is None or self._taken is None:
            return None
        if usage and self._sent:  # no P has said it
            self._seat.wanted = intake.told(self._seat.wanted, self._taken, usage)
            self._report_cached(intake, cached_in(usage))
        tokens, answers = answer_tokens(usage) or self._reply.tokens(), self._request.body.get("n")
        return tokens // answers if tokens and isinstance(answers, int) and answers > 1 else tokens


def _hold_in(answer: Answer) -> wire.Transfer | None:
    """What P's answer says it holds for us, of an answer that is not used."""
    try:
        fields = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
    return wire.read_transfer(fields) if answer.status == 200 and isinstance(fields, dict) else None
