"""Logs, metrics and spans, set up in one place (a shell: it reads OpenTelemetry's own environment).

Every process calls `configure_logging` once. Spans cost nothing unless an OTLP endpoint is set.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_logging(level: str = "INFO") -> None:
    """Logs to stderr, one line an event: stdout belongs to the `ready` line and to answers."""
    logging.basicConfig(stream=sys.stderr, level=level, format=LOG_FORMAT, datefmt="%H:%M:%S", force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def tracing_wanted() -> bool:
    """Whether OpenTelemetry's environment names somewhere to send spans."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return any(os.environ.get(name) for name in names) and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


@cache
def _tracer(service: str) -> Any:
    # Imported late: the SDK costs a tenth of a second that a command line without tracing need not pay.
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return trace.get_tracer("baton")


def span(service: str, name: str, attributes: dict[str, str]) -> AbstractContextManager[Any]:
    """A span around a block of work; nothing at all when tracing is not configured."""
    if not tracing_wanted():
        return nullcontext()
    opened: AbstractContextManager[Any] = _tracer(service).start_as_current_span(name, attributes=attributes)
    return opened
