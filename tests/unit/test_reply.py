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
from router.core.eligibility import CHAT, COMPLETIONS, verdict
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


def _reply(*, resumable: bool, chunked: bool = False, path: str = COMPLETIONS) -> tuple[Reply, _Transport]:
    transport = _Transport()
    outlet = Outlet(cast("Any", transport), lambda *_: None, chunked=chunked, keep=False)
    request = Request(id=RequestId("r"), path=path, model="m", stream=True, body={}, arrived=0.0)
    telling = Telling(RouterMetrics(), ExplainStore(1), None)
    trace = RequestTrace(telling, request, verdict(path, {}), {}, Client())
    return Reply(outlet, request, trace, resumable=resumable, counts=True), transport


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
    assert reply.sent.tail() == _event("three ") + _event("four ") + DONE
    assert reply.ended() == j.Ended()
    assert transport.written.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_stream_too_long_to_keep_is_not_resumed() -> None:
    reply, _ = _reply(resumable=True)
    assert reply.relay(EVENTS, "") is None
    assert reply.feed(_event("x" * 100)) is None
    said = reply.sent.said()
    assert reply.sent.resumable and said is not None and said.text == "x" * 100
    told: list[bool] = []
    reply.sent.when_long = lambda: told.append(reply.sent.resumable)
    assert reply.feed(_event("x" * REMEMBERED_BYTES_MAX)) is None
    assert reply.feed(_event("y")) is None
    assert told == [False], "once, and then it is so"
    assert not reply.sent.resumable and reply.sent.said() is None
    assert reply.sent.tail().endswith(_event("y"))
    assert reply.lost("reset") == j.Lost("reset", again=False)


async def test_after_a_full_wait_for_one_engine_no_other_engine_is_tried() -> None:
    reply, _ = _seeded()
    assert reply.lost("silent for 120 s", waited=True) == j.Lost("silent for 120 s", again=False)


async def test_without_a_seed_a_sampled_stream_is_not_tried_again() -> None:
    reply, _ = _reply(resumable=False)
    assert reply.relay(EVENTS, "") is None
    assert reply.feed(_event("one ")) is None
    assert reply.lost("reset") == j.Lost("reset", again=False)


ABORT = b'data: {"id":"a","choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n'


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("with_more", [False, True])
async def test_a_stream_that_its_engine_aborts_is_lost_and_its_client_does_not_get_the_abort(
    *, chunked: bool, with_more: bool
) -> None:
    """vLLM ends what it has with status 200, a reason "abort" and a usual end, when it is stopped, paused or asleep."""
    reply, transport = _reply(resumable=True, chunked=chunked)
    assert reply.relay(EVENTS, "") is None
    assert reply.feed(_event("one ")) is None
    if with_more:
        lost = reply.feed(_event("two ") + ABORT + DONE)
    else:
        piece = b"%x\r\n%b\r\n" % (len(ABORT), ABORT)
        lost = reply.pass_on(piece, piece.find(b"\n") + 1)
    assert isinstance(lost, j.Lost) and lost.because == "its engine aborted it" and lost.again
    assert b"abort" not in transport.written and (b"two " in transport.written) == with_more


async def test_words_about_an_abort_in_a_text_end_no_stream() -> None:
    reply, _ = _reply(resumable=True)
    assert reply.relay(EVENTS, "") is None
    assert reply.feed(_event('"finish_reason":"abort"')) is None


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}\n\n'


def _delta(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("pieces", [[ROLE + USAGE + DONE], [ROLE, DONE], [ROLE, USAGE + DONE], [ROLE + DONE]])
async def test_a_chat_that_ends_after_its_role_was_aborted(*, pieces: list[bytes], resumable: bool) -> None:
    """vLLM 0.32 leaves the event with the reason out if a chat is aborted before its first token."""
    reply, transport = _reply(resumable=resumable, path=CHAT)
    assert reply.relay(EVENTS, "") is None
    *before, last = pieces
    assert all(reply.feed(each) is None for each in before)
    assert reply.feed(last) == j.Lost("its engine aborted it", again=True)
    assert transport.written.count(b'"role"') == 1 and b"[DONE]" not in transport.written


@pytest.mark.parametrize(
    "said",
    [
        [_delta("one")],
        [_delta(""), _delta(""), _delta("")],
        [b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n'],
        [b'data: {"choices":[{"index":1,"delta":{"role":"assistant"}}]}\n\n'],
    ],
)
async def test_a_drawn_chat_goes_on_elsewhere_only_after_its_role_alone(said: list[bytes]) -> None:
    reply, transport = _reply(resumable=False, path=CHAT)
    for _ in range(2):  # the second engine breaks off, too
        assert reply.relay(EVENTS, "") is None and reply.feed(ROLE) is None
        assert reply.broke_off("broken", waited=False) == j.Lost("broken", again=True)
    assert reply.relay(EVENTS, "") is None
    assert all(reply.feed(each) is None for each in [ROLE, *said])
    assert reply.broke_off("broken", waited=False) == j.Lost("broken", again=False)
    assert transport.written.count(ROLE[:-1]) == 1


async def test_a_drawn_chat_that_goes_on_after_its_role_is_whole() -> None:
    reply, transport = _reply(resumable=False, path=CHAT)
    assert reply.relay(EVENTS, "") is None and reply.feed(ROLE) is None
    assert reply.lost("broken") == j.Lost("broken", again=True)
    pieces = [ROLE, _delta("one"), _delta(" two", "stop") + DONE]
    assert reply.relay(EVENTS, "") is None and all(reply.feed(each) is None for each in pieces)
    assert reply.ended() == j.Ended() and transport.written.endswith(b"".join(pieces))


async def test_another_path_than_chat_has_no_role() -> None:
    """Responses name their events, and none of them is known to say nothing."""
    reply, _ = _reply(resumable=False, path="/v1/responses")
    assert reply.relay(EVENTS, "") is None
    assert reply.feed(b'event: response.created\ndata: {"type":"response.created"}\n\n') is None
    assert reply.lost("broken") == j.Lost("broken", again=False)


@pytest.mark.parametrize(
    "pieces",
    [
        [ROLE, _delta("", "stop"), DONE],
        [ROLE, _delta("", "stop") + USAGE + DONE],
        [ROLE, _delta("one"), DONE],
        [ROLE + _delta("one") + DONE],
        [ROLE + _delta("data: [DONE]"), _delta("", "stop") + DONE],
        [ROLE, b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n', DONE],
    ],
)
async def test_a_chat_with_a_token_or_a_reason_has_ended(pieces: list[bytes]) -> None:
    reply, transport = _reply(resumable=True, path=CHAT)
    assert reply.relay(EVENTS, "") is None
    assert all(reply.feed(each) is None for each in pieces)
    assert reply.ended() == j.Ended() and transport.written.endswith(b"".join(pieces))


@pytest.mark.parametrize("framed", [False, True])
async def test_comments_are_no_tokens(*, framed: bool) -> None:
    """Engines send comments to keep a connection alive (vLLM's --sse-keep-alive-interval)."""
    reply, _ = _reply(resumable=True)
    assert reply.relay(EVENTS, "") is None
    alive = b": keep-alive\n\n"
    for piece in (alive, _event("one"), alive, alive + _event(" two") + alive, _event(" : three"), alive, DONE):
        framing = b"%x\r\n%b\r\n" % (len(piece), piece)
        assert (reply.pass_on(framing, framing.find(b"\n") + 1) if framed else reply.feed(piece)) is None
    assert reply.sent.tokens() == 3
