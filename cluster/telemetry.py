"""Sets up logs and spans in one place (a shell: it reads OpenTelemetry's own environment).

Every process calls `configure_logging` once. `tracing` gives None unless an OTLP endpoint is set, and then costs
nothing: no span is made, nothing is imported. OpenTelemetry decides how much is recorded (``OTEL_TRACES_SAMPLER``).
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

CLOSE_S: Final = 2.0
"""Seconds for the last spans at a program's end."""

_TRACE_HEADERS = frozenset({"traceparent", "tracestate"})

_PASSED_ON: ContextVar[Mapping[str, str]] = ContextVar("baton_trace", default=MappingProxyType({}))
"""Headers of the span in which the current task works."""


def configure_logging(level: str = "INFO") -> None:
    """Write logs to stderr, one line an event: stdout belongs to the `ready` line and to answers.

    A line that cannot be written (stderr is closed, its disk is full) is lost; nothing is raised.
    """
    logging.raiseExceptions = False  # else Python reports the failure on stderr, which raises if stderr is closed
    logging.basicConfig(stream=sys.stderr, level=level, format=LOG_FORMAT, datefmt="%H:%M:%S", force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def tracing_wanted() -> bool:
    """Whether OpenTelemetry's environment names a place to send spans to."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return any(os.environ.get(name) for name in names) and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


def tracing(service: str) -> Tracing | None:
    """The maker of this process' spans; None if tracing is not configured. Call it once, at the start."""
    if not tracing_wanted():
        return None
    # Imported late: the SDK costs a tenth of a second that a command line without tracing need not pay.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)})
    ids: Any = TraceIds()
    provider = TracerProvider(resource=named, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return Tracing(provider)


def _exporter() -> Any:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if next((os.environ[name] for name in names if os.environ.get(name)), "http/protobuf") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http()


def trace_headers() -> dict[str, str]:
    """Headers that tie an outgoing request to the current trace; empty outside of a trace."""
    return dict(_PASSED_ON.get())


class TraceIds:
    """OpenTelemetry's id generator, which can be given the next trace's id: the sampler decides by the id."""

    def __init__(self) -> None:
        self.next_trace: int | None = None

    def generate_span_id(self) -> int:
        """64 random bits, not all of them 0."""
        return random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        """128 random bits, not all of them 0; or the id that was set to be next."""
        told, self.next_trace = self.next_trace, None
        return told or random.getrandbits(128) or 1

    def is_trace_id_random(self) -> bool:
        """True: the ids are random, and headers may say so."""
        return True


class Tracing:
    """Makes spans of requests."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._kinds: Final = SpanKind
        self._within: Final = set_span_in_context
        self._provider: Final = provider
        self._tracer: Final = provider.get_tracer("baton")
        self._propagator: Final = TraceContextTextMapPropagator()
        self._ids: Final = provider.id_generator if isinstance(provider.id_generator, TraceIds) else None
        self._bound: Final = _bound_of(provider)

    def dropped(self, headers: Mapping[str, str]) -> bytes:
        """The ``traceparent`` line for engines of a trace that begins here and is not sampled; empty: call `request`.

        It covers requests that are in no trace yet, and samplers that decide by the trace's id alone. The library makes
        some thirty calls to come to the same decision, which most requests of a busy router need not pay.
        """
        if self._ids is None or self._bound is None or not _TRACE_HEADERS.isdisjoint(headers):
            return b""
        trace = self._ids.generate_trace_id()
        if trace & _LOW_64 < self._bound:
            self._ids.next_trace = trace
            return b""
        return b"traceparent: 00-%032x-%016x-02\r\n" % (trace, self._ids.generate_span_id())

    def request(self, name: str, headers: Mapping[str, str]) -> RequestSpan:
        """The span of a request, as part of its client's trace. `headers`: a mapping that ignores upper and lower
        case.
        """
        given = {key: headers[key] for key in _TRACE_HEADERS if key in headers}
        context = self._propagator.extract(given)
        return RequestSpan(self, self._tracer.start_span(name, context=context, kind=self._kinds.SERVER))

    def asked(self, name: str, attributes: Mapping[str, Any]) -> RequestSpan:
        """The span of a request that this program makes by itself; a trace begins with it."""
        return RequestSpan(self, self._tracer.start_span(name, kind=self._kinds.CLIENT, attributes=dict(attributes)))

    @contextmanager
    def asking(self, name: str, attributes: Mapping[str, Any]) -> Iterator[RequestSpan]:
        """Open a span as `asked` does, for a `with` block: `trace_headers` names it there. End it inside the block."""
        span = self.asked(name, attributes)
        token = _PASSED_ON.set(span.passed_on({}))
        try:
            yield span
        finally:
            _PASSED_ON.reset(token)

    def child(self, parent: Span, name: str, attributes: Mapping[str, Any]) -> Span:
        """A span within another one, for a request to another program."""
        context = self._within(parent)
        return self._tracer.start_span(name, context=context, kind=self._kinds.CLIENT, attributes=dict(attributes))

    def injected(self, within: Span, headers: Mapping[str, str]) -> dict[str, str]:
        """These headers, with the trace of `within` in place of the client's."""
        kept = {name: value for name, value in headers.items() if name.lower() not in _TRACE_HEADERS}
        self._propagator.inject(kept, context=self._within(within))
        return kept

    def close(self) -> None:
        """Send the spans that are not sent yet, for at most `CLOSE_S`: while no collector answers, the library tries
        again for half a minute, and no program should end that late.
        """
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(CLOSE_S)


_LOW_64: Final = (1 << 64) - 1


def _bound_of(provider: TracerProvider) -> int | None:
    """New traces are sampled if the lower 64 bits of their id are below this bound; None: the sampler decides
    otherwise.
    """
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased

    sampler = provider.sampler
    if isinstance(sampler, ParentBased):
        sampler = sampler._root  # noqa: SLF001 - there is no other way to ask for it
    if isinstance(sampler, TraceIdRatioBased):
        return sampler.bound
    return 0 if sampler is ALWAYS_OFF else None


class RequestSpan:
    """One request's span and those of its legs. `end` ends all of them."""

    __slots__ = ("_legs", "_span", "_tracing", "recording")

    def __init__(self, tracing: Tracing, opened: Span) -> None:
        self.recording: Final = opened.is_recording()
        """False if the sampler decided against this trace: then only `passed_on` matters."""
        self._tracing = tracing
        self._span = opened
        self._legs: dict[str, Span] = {}

    def passed_on(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Headers that tell an engine of this trace and of the sampler's decision: the same for every leg."""
        return self._tracing.injected(self._span, headers)

    def say(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes of the request's span."""
        self._span.set_attributes(attributes)

    def leg(self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> dict[str, str]:
        """Begin a leg's span. Returns the headers to send the leg with: the engine's own spans become its children."""
        self.leg_over(name)
        leg = self._legs[name] = self._tracing.child(self._span, name, attributes)
        return self._tracing.injected(leg, headers)

    def leg_over(self, name: str, error: str = "", attributes: Mapping[str, Any] | None = None) -> None:
        """End a leg's span; `error` says what went wrong, if anything."""
        leg = self._legs.pop(name, None)
        if leg is not None:
            _close(leg, error, attributes or {})

    def event(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Record a decision in the span."""
        self._span.add_event(name, {key: value for key, value in attributes.items() if value is not None})

    def end(self, error: str, attributes: Mapping[str, Any]) -> None:
        """End the request's span."""
        for name in list(self._legs):
            self.leg_over(name, error)
        _close(self._span, error, attributes)


def _close(opened: Span, error: str, attributes: Mapping[str, Any]) -> None:
    from opentelemetry.trace import Status, StatusCode

    for key, value in attributes.items():
        if value is not None:
            opened.set_attribute(key, value)
    if error:
        opened.set_attribute("error.type", error)
        opened.set_status(Status(StatusCode.ERROR, error))
    opened.end()
