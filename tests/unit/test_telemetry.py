"""The router's fast decision to drop a trace agrees with OpenTelemetry's sampler; logs that cannot be written."""

from __future__ import annotations

import errno
import io
import logging
import random
import sys
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased

from cluster import telemetry
from cluster.telemetry import TraceIds, Tracing, configure_logging

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}


def traced(sampler: Sampler, ids: Any = None) -> Tracing:
    return Tracing(TracerProvider(sampler=sampler, shutdown_on_exit=False, id_generator=ids or TraceIds()))


@pytest.mark.parametrize("sampler", [TraceIdRatioBased(0.25), ParentBased(TraceIdRatioBased(0.25))])
def test_a_trace_that_is_not_dropped_is_recorded_and_the_share_is_the_samplers(sampler: Sampler) -> None:
    random.seed(1)
    tracing = traced(sampler)
    recorded = 0
    for _ in range(2000):
        line = tracing.dropped({})
        if line:
            name = int(line.split(b"-")[1], 16)
            assert name & ((1 << 64) - 1) >= TraceIdRatioBased(0.25).bound
        else:
            assert tracing.request("x", {}).recording, "the trace is recorded under the id that was not dropped"
            recorded += 1
    assert 400 < recorded < 600, "500, with a standard deviation of 19"


def test_no_two_dropped_traces_have_the_same_id() -> None:
    tracing = traced(ALWAYS_OFF)
    lines = [tracing.dropped({}) for _ in range(100)]
    assert len(set(lines)) == 100
    assert all(line.startswith(b"traceparent: 00-") and line.endswith(b"-02\r\n") for line in lines)


@pytest.mark.parametrize("headers", [PARENT, {**PARENT, "tracestate": "a=b"}, {"tracestate": "a=b"}])
def test_opentelemetry_decides_about_traces_of_clients(headers: dict[str, str]) -> None:
    tracing = traced(ParentBased(TraceIdRatioBased(0.0)))
    assert not tracing.dropped(headers)
    assert not tracing.request("x", headers).recording


@pytest.mark.parametrize(
    ("sampler", "ids"), [(ALWAYS_ON, None), (ParentBased(ALWAYS_ON), None), (ALWAYS_OFF, RandomIdGenerator())]
)
def test_opentelemetry_decides_each_time_for_other_samplers_and_id_generators(sampler: Sampler, ids: Any) -> None:
    tracing = traced(sampler, ids)
    assert not any(tracing.dropped({}) for _ in range(100))
    assert tracing.request("x", {}).recording is (sampler is not ALWAYS_OFF)


class Unwritable(io.StringIO):
    """A standard error stream that cannot be written: its disk is full, or the reader of its pipe is gone."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self._error = error

    def write(self, _: str) -> int:
        raise OSError(self._error, "cannot be written")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream", [Unwritable(errno.ENOSPC), Unwritable(errno.EPIPE), Unwritable(errno.EBADF), closed(), None]
)
def test_a_line_of_the_log_that_cannot_be_written_raises_nothing(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging()
    logging.getLogger("baton.router").warning("a line")
    logging.getLogger("baton.router").error("another", exc_info=ValueError("x"))
    assert len(root.handlers) == 1, "the lines went to this handler"


def test_the_last_spans_hold_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no collector answers, the library tries for half a minute."""
    monkeypatch.setattr(telemetry, "CLOSE_S", 0.01)
    answered = threading.Event()
    tracing = traced(ALWAYS_ON)
    monkeypatch.setattr(tracing._provider, "shutdown", answered.wait)
    tracing.close()
    assert not answered.is_set()
    answered.set()
