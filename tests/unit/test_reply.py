"""One client's stream: which failures of an engine's stream another engine may repair."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from cluster.errors import ApiError, no_instance, shed, upstream_failed
from cluster.ids import RequestId
from cluster.request import Request
from router.core import journey as j
from router.core.clients import Client
from router.core.eligibility import COMPLETIONS, verdict
from router.http.outlet import Outlet
from router.request.parts import Telling
from router.request.reply import REMEMBERED_BYTES_MAX, Reply
from router.request.splice import seed_of
from router.request.trace import RequestTrace
from router.telemetry.explain_store import ExplainStore
from router.telemetry.metrics import RouterMetrics

pytestmark = pytest.mark.interpreted

EVENTS = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


class _Transport:
    """A transport that keeps the bytes written to it."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False


def _event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]}).encode() + b"\n\n"


def _reply(*, resumable: bool, chunked: bool = False) -> tuple[Reply, _Transport]:
    transport = _Transport()
    outlet = Outlet(cast("Any", transport), lambda *_: None, chunked=chunked, keep=False)
    request = Request(id=RequestId("r"), path=COMPLETIONS, model="m", stream=True, body={}, arrived=0.0)
    telling = Telling(RouterMetrics(), ExplainStore(1), None)
    trace = RequestTrace(telling, request, verdict(COMPLETIONS, {}), {}, Client())
    return Reply(outlet, request, trace, resumable=resumable), transport


def _seeded(*, resumable: bool = False, chunked: bool = False) -> tuple[Reply, _Transport]:
    """A reply whose client has the seed "one ", P's first token. D's stream has begun and has sent no event yet."""
    reply, transport = _reply(resumable=resumable, chunked=chunked)
    answer = {"id": "a", "created": 1, "model": "m", "choices": [{"text": "one ", "token_ids": [7]}]}
    seed = seed_of(answer, COMPLETIONS, ())
    assert not isinstance(seed, str)
    reply.give(seed)
    assert reply.relay(EVENTS, "") is None
    return reply, transport


def _text(transport: _Transport) -> str:
    body = transport.written.partition(b"\r\n\r\n")[2].decode()
    events = [json.loads(event[6:]) for event in body.split("\n\n") if event.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


@pytest.fixture(autouse=True)
async def loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


@pytest.mark.parametrize(
    ("error", "header"), [(no_instance("all drain"), "1"), (shed("late", 7), "7"), (upstream_failed("died"), "")]
)
async def test_a_refusal_has_a_retry_after_header(error: ApiError, header: str) -> None:
    reply, transport = _reply(resumable=False)
    reply.refuse(error)
    head = transport.written.partition(b"\r\n\r\n")[0].decode().splitlines()[1:]
    assert dict(line.split(": ", 1) for line in head).get("Retry-After", "") == header


@pytest.mark.parametrize("resumable", [True, False])
async def test_after_a_first_text_that_differs_from_the_seed_another_engine_is_tried(*, resumable: bool) -> None:
    """The client has no sampled token but the seed, so another engine may sample the rest."""
    reply, transport = _seeded(resumable=resumable)
    lost = reply.feed(_event("zwei ") + _event("drei "))
    assert isinstance(lost, j.Lost) and lost.again and "splice" in lost.because
    assert reply.relay(EVENTS, "") is None
    assert reply.feed(_event("one ") + _event("two ") + DONE) is None
    assert reply.ended() == j.Ended()
    assert _text(transport) == "one two "


@pytest.mark.parametrize("came", [b"", _event("one "), b": alive\n\n", b'data: {"error": {"message": "died"}}\n\n'])
async def test_a_stream_that_breaks_before_any_text_after_the_seed_is_tried_again(came: bytes) -> None:
    reply, transport = _seeded()
    lost = (reply.feed(came) if came else None) or reply.lost("reset")
    assert isinstance(lost, j.Lost) and lost.again
    assert _text(transport) == "one "


async def test_tokens_sampled_after_the_seed_are_never_sampled_again() -> None:
    reply, transport = _seeded()
    assert reply.feed(_event("one ") + _event("two ")) is None
    assert reply.lost("reset") == j.Lost("reset", again=False)
    assert _text(transport) == "one two "


async def test_comments_before_an_engines_text_do_not_hide_that_text() -> None:
    """Two comments once counted as the second token: later chunks passed unread, and came twice after a break."""
    reply, _ = _seeded(chunked=True)
    assert reply.feed(_event("one ") + b": alive\n\n") is None
    assert reply.feed(b": alive\n\n") is None
    framed = b"%x\r\n%b\r\n" % (len(_event("two ")), _event("two "))
    assert reply.pass_on(framed, framed.index(b"\n") + 1) is None
    assert reply.lost("reset") == j.Lost("reset", again=False)


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_streams_end_is_read_in_pieces_that_passed_as_chunks(*, resumable: bool) -> None:
    reply, transport = _reply(resumable=resumable, chunked=True)
    assert reply.relay(EVENTS, "") is None
    for piece in (_event("one "), _event("two "), _event("three "), _event("four "), DONE):
        framed = b"%x\r\n%b\r\n" % (len(piece), piece)
        assert reply.pass_on(framed, framed.index(b"\n") + 1) is None
    assert reply.sent.tail() == _event("four ") + DONE
    assert reply.ended() == j.Ended()
    assert transport.written.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_stream_too_long_to_keep_is_not_resumed() -> None:
    reply, _ = _reply(resumable=True)
    assert reply.relay(EVENTS, "") is None
    assert reply.feed(_event("x" * 100)) is None
    said = reply.sent.said()
    assert reply.sent.resumable and said is not None and said.text == "x" * 100
    assert reply.feed(_event("x" * REMEMBERED_BYTES_MAX)) is None
    assert not reply.sent.resumable and reply.sent.said() is None
    assert reply.sent.tail().startswith(_event("x" * 100))
    assert reply.lost("reset") == j.Lost("reset", again=False)


async def test_after_a_full_wait_for_one_engine_no_other_engine_is_tried() -> None:
    reply, _ = _seeded()
    assert reply.lost("silent for 120 s", waited=True) == j.Lost("silent for 120 s", again=False)


async def test_without_a_seed_a_sampled_stream_is_not_tried_again() -> None:
    reply, _ = _reply(resumable=False)
    assert reply.relay(EVENTS, "") is None
    assert reply.feed(_event("one ")) is None
    assert reply.lost("reset") == j.Lost("reset", again=False)
