"""The request trace: keeps one request's record (decisions and times), and reports it to `/explain`, to the meters and
to the OpenTelemetry trace. A shell.

The request driver reports events; the clock is read here only. Nothing is done per token: the stream's first events are
read until the second token is sent, and its last ones for the usage that a client asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from cluster.instance import Instance
from cluster.request import Request
from router.core.clients import Client
from router.core.eligibility import CHAT, Verdict, is_on
from router.core.journey import Choose, Chosen, Lost, Refused
from router.core.slo import SHED, ClientSeen, Judged, judge, late_by, seen_in
from router.core.timing_parts import EngineTold
from router.predict.predictors import answer_tokens
from router.scheduler.placements import SchedulingContext
from router.telemetry.explain_store import NOBODY, ExplainStore, Story
from router.telemetry.metrics import RouterMetrics
from router.telemetry.timing import EngineTimes, Stage, engine_times, told_at_end

if TYPE_CHECKING:
    from cluster.telemetry import RequestSpan, Tracing

HEADER: Final = "x-baton-timing"
"""A client that sends 1 gets the times: as the last comment of a stream, or under this name in an answer's head."""

_LEG_NAMES: Final[dict[str, str]] = {
    Stage.PREFILL_LEG: "prefill",
    Stage.DECODE_LEG: "decode",
    Stage.AGGREGATED_LEG: "whole",
}


class RequestTrace:
    """The trace of one request.

    The class is long because it has a short method for each event of a request, and all of them fill one record.
    """

    def __init__(
        self,
        memory: ExplainStore,
        meters: RouterMetrics,
        tracing: Tracing | None,
        request: Request,
        verdict: Verdict,
        headers: Mapping[str, str],
        client: Client = NOBODY,
    ) -> None:
        self._memory = memory
        self._meters = meters
        self._request = request
        self._client = client
        self._story = Story(request, verdict, client)
        self._timeline = self._story.timeline
        self._asked = headers.get(HEADER) == "1"
        options = request.body.get("stream_options")
        self._usage_asked = isinstance(options, dict) and is_on(options, "include_usage")
        self._leg: str = Stage.AGGREGATED_LEG
        self._told = EngineTold()
        self.times: EngineTimes | None = None
        """What the answering engine reports about its part, if it does."""
        self._span: RequestSpan | None = None
        self.untraced = b""
        """A line for its legs' heads: the trace that begins here and is not recorded."""
        self.unsampled: RequestSpan | None = None
        """The client's trace, if it is not recorded."""
        if tracing is not None:
            self.untraced = tracing.dropped(headers)
            if not self.untraced:
                self._trace(tracing.request(self._operation(), headers))

    def _trace(self, span: RequestSpan) -> None:
        if span.recording:
            span.say(self._request_attributes())
            self._span = span
        else:
            self.unsampled = span

    def begin(self) -> None:
        """The driver begins."""
        self._memory.begin(self._story)

    # -- on its way --

    def chose(self, effect: Choose, chosen: Chosen, context: SchedulingContext) -> None:
        """The policy has decided."""
        now = time.monotonic()
        excluded = sorted(effect.excluded) if effect.excluded else ()
        foretold = (context.ttft_ms, context.tpot_ms) if context.ttft_ms > 0 and chosen.decode is not None else None
        self._timeline.again(now)
        values = (chosen.prefill, chosen.decode, chosen.wait, excluded, foretold)
        self._story.add(now, "choice", values, chosen.because)
        if self._span is not None:
            choice = {"baton.prefill": chosen.prefill, "baton.decode": chosen.decode, "baton.because": chosen.because}
            self._span.event("baton.choice", choice)

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
        self._story.add(now, "leg", (_LEG_NAMES[leg], instance))

    @property
    def recorded(self) -> bool:
        """Whether the trace is recorded: then each of its legs has headers of its own (`traced`)."""
        return self._span is not None

    def traced(self, leg: str, instance: Instance, headers: dict[str, str]) -> dict[str, str]:
        """A leg's headers, its span included."""
        assert self._span is not None
        place = urlsplit(instance.url)
        attributes = {
            "gen_ai.operation.name": self._operation_name(),
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": self._request.model,
            "server.address": place.hostname or "",
            "server.port": place.port or (443 if place.scheme == "https" else 80),
            "baton.instance": instance.id,
            "baton.instance.epoch": instance.epoch,
        }
        return self._span.leg(_LEG_NAMES[leg], headers, attributes)

    def failed(self, event: Lost | Refused) -> None:
        """A leg failed, or its engine refused it."""
        now = time.monotonic()
        if isinstance(event, Refused):
            self._story.add(now, "refused", (event.status,))
            error = str(event.status)
        else:
            self._story.add(now, "lost", (), event.because)
            error = "lost"
        if self._span is not None:
            self._span.leg_over(_LEG_NAMES[self._leg], error)

    # -- the prefill leg --

    def prefilled(self, at: float, finish_reason: str | None, answer: Mapping[str, Any]) -> None:
        """P answered at this time."""
        self._timeline.enter(Stage.ROUTER, at)
        times = engine_times(answer.get("metrics"))
        if times is not None:
            self._timeline.report(Stage.PREFILL_LEG, times)
        self._story.add(at, "prefilled", (finish_reason,))
        if self._span is not None:
            usage = answer.get("usage")
            told: dict[str, Any] = _usage(usage if isinstance(usage, dict) else {})
            if finish_reason is not None:
                told["gen_ai.response.finish_reasons"] = [finish_reason]
            self._span.leg_over("prefill", attributes=told)

    def not_seeded(self, because: str) -> None:
        """The first token waits for D."""
        self._story.seed = because

    def seeds(self) -> None:
        """The first token is about to be sent before D has answered."""
        self._timeline.seeded = True
        self._timeline.relabel(Stage.RELAY)

    def seeded(self) -> None:
        """The seed is sent."""
        now = time.monotonic()
        self._timeline.first(now, Stage.ROUTER)
        self._story.add(now, "seed")

    # -- the answering leg --

    def opened(self, *, spoken: bool) -> None:
        """D's answer begins; `spoken`: the client has had a token already."""
        at = time.monotonic()
        self._timeline.enter(Stage.STEP if spoken else Stage.RELAY, at)
        self._story.add(at, "opened")

    def first_out(self) -> None:
        """The first token of a stream without a seed is sent."""
        self._timeline.first(time.monotonic(), Stage.STEP)

    def second_out(self) -> None:
        """The second token is sent."""
        self._timeline.second(time.monotonic())

    def answered(self, told: EngineTold) -> dict[str, str]:
        """A whole answer is about to be sent: returns the headers about it."""
        self._read(told)
        return self.headers()

    def headers(self) -> dict[str, str]:
        """The headers about times of an answer in one piece, if the client asked for them."""
        self._timeline.end(time.monotonic())
        return {HEADER: self._timing_json().decode()} if self._asked else {}

    def streamed(self, tail: bytes) -> bytes:
        """The whole stream is sent, ending with `tail`; returns what may follow."""
        self._timeline.end(time.monotonic())
        if self._usage_asked:
            self._read(told_at_end(tail) or EngineTold())
        return self.comment()

    def comment(self) -> bytes:
        """The comment about times of a stream, if the client asked for it."""
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
        self._story.outcome = outcome
        try:
            self._timeline.end(now)
            self._story.add(now, "end", (outcome,))
            counted = answer_tokens(self._told.usage or {}) if tokens is None else tokens
            self._meters.over(now, outcome, self._timeline, counted)
            result, late_first = "", False
            if context is not None and (self._client.slo is not None or context.ttft_ms > 0):
                seen = seen_in(self._timeline.totals(now), counted, streamed=self._request.stream)
                result, late_first = self._judge(context, seen, outcome)
            model = self._request.model if context is None else context.wanted.model or ""
            self._meters.flow.ended(model, self._client.slo_class, counted, result, late_first=late_first)
        finally:  # a story that is over must not stay open, whatever else fails
            self._memory.finish(self._story)
        self._end_span(now, outcome)

    def broken(self) -> None:
        """A bug of the router's has ended the request."""
        self.finish("broken")

    def _end_span(self, now: float, outcome: str) -> None:
        span, self._span = self._span, None
        if span is None:
            return
        timing = self._story.timing(now)
        times = {} if timing.ttft is None else {"gen_ai.response.time_to_first_chunk": timing.ttft.total_s}
        for name, each in (("ttft", timing.ttft), ("tt2t", timing.tt2t), ("answer", timing.answer)):
            if each is not None:
                parts = {**each.parts, "residual": each.residual_s}
                times |= {f"baton.{name}.{part}": value for part, value in parts.items() if value is not None}
        told = {**_usage(self._told.usage or {}), **times, "baton.way": timing.way, "baton.outcome": outcome}
        span.end("" if outcome == "served" else outcome, told)

    def _judge(self, context: SchedulingContext, seen: ClientSeen, outcome: str) -> tuple[str, bool]:
        """Compare prediction and promise with the result: whether the class's promise was kept, and whether the first
        token was late or never came.
        """
        attainment, slo = self._meters.attainment, self._client.slo
        if outcome == "served":
            attainment.compare(context, seen)
        result, late_first = "", False
        if slo is not None:
            result = judge(slo, seen, outcome)
            attainment.ended(self._client, context, result)
            late_ttft, late_tpot = late_by(slo, seen)
            late_first = late_ttft or seen.ttft_ms is None or result == SHED
            now = time.monotonic()
            self._meters.lately.judged(now, self._client.slo_class, result, late_ttft=late_ttft, late_tpot=late_tpot)
        self._story.judged = Judged(
            foretold_ms=(context.ttft_ms, context.tpot_ms),
            seen=seen,
            slo=slo,
            result=result,
            late=context.late,
            degraded=context.degraded,
        )
        return result, late_first

    # -- in an OpenTelemetry trace --

    def _operation_name(self) -> str:
        return "chat" if self._request.path == CHAT else "text_completion"

    def _operation(self) -> str:
        return f"{self._operation_name()} {self._request.model}".strip()

    def _request_attributes(self) -> dict[str, Any]:
        """By the GenAI semantic conventions (opentelemetry-semantic-conventions 0.66b2, ``gen_ai.*``)."""
        body, request = self._request.body, self._request
        found: dict[str, Any] = {
            "gen_ai.operation.name": self._operation_name(),
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": request.model,
            "gen_ai.request.stream": request.stream,
            "http.route": request.path,
            "baton.request.id": request.id,
        }
        if request.client_id:
            found["baton.request.client_id"] = request.client_id
        for name, key in _SETTINGS.items():
            value = body.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[name] = value
        return found


_SETTINGS: Final = {
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.seed": "seed",
}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's token counts."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = {
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": cached,
    }
    return {name: count for name, count in counts.items() if isinstance(count, int)}
