"""The request trace: keeps one request's record (decisions and times), and reports it to `/explain`, to the meters and
to the OpenTelemetry trace. A shell.

The request driver reports events; the clock is read here only. Nothing is done per token: the stream's first events are
read until the second token is sent, and its last ones for the usage that a client asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cluster.instance import Instance
from cluster.request import Request
from router.core.clients import Client
from router.core.eligibility import CHAT, Verdict, is_on
from router.core.events import BROKEN
from router.core.journey import Choose, Chosen, Lost, Refused
from router.core.slo import SHED, ClientSeen, Judged, judge, late_by, seen_in
from router.core.timing_parts import EngineTold
from router.predict.predictors import answer_tokens
from router.request.parts import Telling
from router.request.splice import LAST_EVENT
from router.scheduler.placements import SchedulingContext
from router.telemetry.explain_store import Story
from router.telemetry.metrics import RouterMetrics
from router.telemetry.spans import LEG_NAMES, RecordedSpans, span_name
from router.telemetry.timing import EngineTimes, Stage, engine_times, told_at_end

if TYPE_CHECKING:
    from cluster.telemetry import RequestSpan

HEADER: Final = "x-baton-timing"
"""A client that sends 1 gets the times: as the last comment of a stream, or under this name in an answer's head."""


class RequestTrace:
    """The trace of one request."""

    def __init__(
        self,
        telling: Telling,
        request: Request,
        verdict: Verdict,
        headers: Mapping[str, str],
        client: Client,
    ) -> None:
        """`headers`: as the client sent them."""
        self._telling: Final = telling
        self._request: Final = request
        self._story = Story(request, verdict, client)
        self._timeline = self._story.timeline
        self._asked = headers.get(HEADER) == "1"
        self._leg: str = Stage.AGGREGATED_LEG
        self.events_due = 3 if request.path == CHAT else 2
        """The number of events until the second token is sent: chats begin with one that only names the role."""
        self._told = EngineTold()
        self.times: EngineTimes | None = None
        """What the answering engine reports about its part, if it does."""
        self._spans: RecordedSpans | None = None
        """None: the trace is not recorded."""
        self.untraced = b""
        """A header line for the legs if the trace begins here and is not recorded; else empty."""
        self.unsampled: RequestSpan | None = None
        """The request's span, if it is not recorded: the legs only pass its trace on."""
        if telling.tracing is not None:
            self.untraced = telling.tracing.dropped(headers)
            if not self.untraced:
                span = telling.tracing.request(span_name(request), headers)
                if span.recording:
                    self._spans = RecordedSpans(request, span)
                else:
                    self.unsampled = span

    def begin(self) -> None:
        """The driver begins."""
        self._telling.memory.begin(self._story)

    # -- on its way --

    def chose(self, effect: Choose, chosen: Chosen, context: SchedulingContext) -> None:
        """The policy has decided."""
        now = time.monotonic()
        excluded = sorted(effect.excluded) if effect.excluded else ()
        foretold = (context.ttft_ms, context.tpot_ms) if context.ttft_ms > 0 and chosen.decode is not None else None
        self._timeline.again(now)
        values = (chosen.prefill, chosen.decode, chosen.wait, excluded, foretold)
        self._story.add(now, "choice", values, chosen.because)
        if self._spans is not None:
            self._spans.chose(chosen)

    def waits(self) -> None:
        """The request waits in the flow-control queue."""
        self._timeline.enter(Stage.CREDIT, time.monotonic())

    def called(self) -> None:
        """The request has left the queue."""
        self._timeline.enter(Stage.ROUTER, time.monotonic())

    def sends(self, leg: str, instance: Instance, *, ahead_s: float = 0.0) -> None:
        """A leg is sent; an early leg was sent `ahead_s` seconds ago, and is waited for from now on."""
        now = time.monotonic()
        self._leg = leg
        self._timeline.enter(leg, now, ahead_s)
        self._story.add(now, "leg", (LEG_NAMES[leg], instance))

    def asks_source(self) -> None:
        """The leg that was to be sent waits for a source leg."""
        self._timeline.relabel(Stage.SOURCE)

    def source_over(self) -> None:
        """The leg that has waited for a source leg is sent."""
        self._timeline.leave(Stage.SOURCE, self._leg, time.monotonic())

    @property
    def recorded(self) -> bool:
        """Whether the trace is recorded: then each of its legs has headers of its own (`traced`)."""
        return self._spans is not None

    def traced(self, leg: str, instance: Instance, headers: dict[str, str]) -> dict[str, str]:
        """A leg's headers, its span included."""
        assert self._spans is not None
        return self._spans.leg(leg, instance, headers)

    def failed(self, event: Lost | Refused) -> None:
        """A leg failed, or its engine refused it."""
        now = time.monotonic()
        if isinstance(event, Refused):
            self._story.add(now, "refused", (event.status,))
            error = str(event.status)
        else:
            self._story.add(now, "lost", (), event.because)
            error = "lost"
        if self._spans is not None:
            self._spans.leg_failed(self._leg, error)

    def early_over(self, because: str) -> None:
        """An early leg is closed before it became the decode leg. `because`: the error of its span."""
        if self._spans is not None:
            self._spans.leg_failed(Stage.DECODE_LEG, because)

    # -- the prefill leg --

    def prefilled(self, at: float, finish_reason: str | None, answer: Mapping[str, Any]) -> None:
        """P answered at this time, in monotonic seconds."""
        self._timeline.enter(Stage.ROUTER, at)
        times = engine_times(answer.get("metrics"))
        if times is not None:
            self._timeline.report(Stage.PREFILL_LEG, times)
        self._story.add(at, "prefilled", (finish_reason,))
        if self._spans is not None:
            self._spans.prefilled(finish_reason, answer.get("usage"))

    def not_seeded(self, because: str) -> None:
        """The first token waits for D."""
        self._story.seed = because

    def seeds(self) -> None:
        """The first token is about to be sent before D has answered."""
        self._timeline.seeded = True
        self._timeline.relabel(Stage.RELAY)

    def seeded(self) -> None:
        """The seed is sent."""
        self.events_due = 1
        now = time.monotonic()
        self._timeline.first(now, Stage.ROUTER)
        self._story.add(now, "seed")

    # -- the answering leg --

    def opened(self) -> None:
        """D's answer begins. The client may have had a token already."""
        at = time.monotonic()
        self._timeline.enter(Stage.STEP if self.events_due <= 1 else Stage.RELAY, at)
        self._story.add(at, "opened")

    def sent(self, events: bytes, count: int) -> None:
        """So many events of a stream are sent. Not called any more once the second token is sent. The last event and
        the usage do not count as tokens.
        """
        count -= events.count(b'"choices":[]') + (LAST_EVENT in events[-64:])
        before, self.events_due = self.events_due, self.events_due - count
        if before > 1 >= self.events_due:
            self._timeline.first(time.monotonic(), Stage.STEP)
        if self.events_due <= 0:
            self._timeline.second(time.monotonic())

    def answered(self, told: EngineTold) -> dict[str, str]:
        """A whole answer is about to be sent: returns the headers about it."""
        self._read(told)
        return self.headers()

    def headers(self) -> dict[str, str]:
        """The headers with the times of an answer in one piece, if the client asked for them."""
        self._timeline.end(time.monotonic())
        return {HEADER: self._timing_json().decode()} if self._asked else {}

    def streamed(self, tail: bytes) -> bytes:
        """The whole stream is sent, ending with `tail`; returns what may follow."""
        self._timeline.end(time.monotonic())
        options = self._request.body.get("stream_options")
        if isinstance(options, dict) and is_on(options, "include_usage"):
            self._read(told_at_end(tail) or EngineTold())
        return self.comment()

    def comment(self) -> bytes:
        """The comment with the times of a stream, if the client asked for it."""
        return b": " + HEADER.encode() + b" " + self._timing_json() + b"\n\n" if self._asked else b""

    def _read(self, told: EngineTold) -> None:
        self._told = told
        times = self.times = engine_times(told.metrics)
        if times is not None:
            self._timeline.report(self._leg, times)

    def _timing_json(self) -> bytes:
        return msgspec.json.encode({"id": self._request.id, **self._story.timing(time.monotonic()).as_json()})

    @property
    def usage(self) -> Mapping[str, Any]:
        """The answering engine's token counts, if it reported them."""
        return self._told.usage or {}

    # -- the end --

    def finish(self, outcome: str, context: SchedulingContext | None = None, tokens: int | None = None) -> None:
        """The request is over, after `tokens` tokens of an answer; None: they were not counted."""
        if self._story.outcome:
            return
        now = time.monotonic()
        story, meters, client = self._story, self._telling.meters, self._story.client
        story.outcome = outcome
        try:
            self._timeline.end(now)
            story.add(now, "end", (outcome,))
            counted = answer_tokens(self.usage) if tokens is None else tokens
            meters.over(now, outcome, self._timeline, counted)
            result, late_first = "", False
            if context is not None and (client.slo is not None or context.ttft_ms > 0):
                seen = seen_in(self._timeline.totals(now), counted, streamed=self._request.stream)
                story.judged, late_first = _judge(meters, client, context, seen, outcome)
                result = story.judged.result
            model = self._request.model if context is None else context.wanted.model or ""
            meters.flow.ended(model, client.slo_class, counted, result, late_first=late_first)
        finally:  # a story that is over must not stay open, whatever else fails
            self._telling.memory.finish(story)
        self._end_span(now, outcome)

    def broken(self) -> None:
        """A bug of the router's has ended the request."""
        self.finish(BROKEN)

    def _end_span(self, now: float, outcome: str) -> None:
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.end(outcome, self._story.timing(now), self.usage)


def _judge(
    meters: RouterMetrics, client: Client, context: SchedulingContext, seen: ClientSeen, outcome: str
) -> tuple[Judged, bool]:
    """Compare prediction and promise with the result, and count it. Returns the judgement, and whether the first token
    was late or never came.
    """
    slo = client.slo
    if outcome == "served":
        meters.attainment.compare(context, seen)
    result, late_first = "", False
    if slo is not None:
        result = judge(slo, seen, outcome)
        meters.attainment.ended(client, context, result)
        late_ttft, late_tpot = late_by(slo, seen)
        late_first = late_ttft or seen.ttft_ms is None or result == SHED
        meters.lately.judged(time.monotonic(), client.slo_class, result, late_ttft=late_ttft, late_tpot=late_tpot)
    judged = Judged(
        foretold_ms=(context.ttft_ms, context.tpot_ms),
        seen=seen,
        slo=slo,
        result=result,
        late=context.late,
        degraded=context.degraded,
    )
    return judged, late_first
