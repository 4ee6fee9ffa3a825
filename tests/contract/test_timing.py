"""A request's time by part, against the mocks' own times; and what `/explain`, headers, metrics and traces tell."""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode
from support.fleet import Fleet, Starter, eventually
from support.hands_over import hands_over
from support.mock import mock_settings
from support.served import served

from cluster.ids import InstanceId, RequestId
from cluster.instance import Instance, Role
from cluster.telemetry import TraceIds, Tracing, tracing
from engine.mock.fleet import MockFleet
from engine.mock.instance import MockInstance as Mock
from engine.twin.events import Effect, Event, RequestFinished, Submit
from router.api.config import RouterConfig
from router.request import body as bodies

pytestmark = pytest.mark.timed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "Once upon a time a small robot found a bright red lantern near the river. " * 3
STEP_MS, TRANSFER_MS = 50.0, 80.0
ASKED = {"x-baton-timing": "1"}
GREEDY = {"model": "fake", "prompt": "hello", "max_tokens": 5, "temperature": 0, "stream": True}


class Watched:
    """A mock's twin that records the true times of its requests, in nanoseconds of the mock's own clock.

    A token's time is when the mock gives it out. On a busy machine that is later than the twin planned.
    """

    def __init__(self, mock: Mock) -> None:
        self._twin = mock.clock._twin
        self._clock = mock.clock
        self._made = mock.serving.made
        self.submitted: dict[str, int] = {}
        self.begun: dict[str, int] = {}
        self.tokens: dict[str, dict[int, int]] = defaultdict(dict)
        mock.clock._twin = self  # type: ignore[assignment]
        mock.serving.made = self.made  # type: ignore[method-assign]

    def next_wakeup(self) -> int | None:
        return self._twin.next_wakeup()

    def handle(self, event: Event, now: int) -> tuple[Effect, ...]:
        if isinstance(event, Submit):
            self.submitted[event.request.id] = now
        effects = self._twin.handle(event, now)
        for effect in effects:
            if isinstance(effect, RequestFinished) and effect.first_run_ns is not None:
                self.begun[effect.request] = effect.first_run_ns
        return effects

    def made(self, request: RequestId, key: int, first: int, count: int) -> None:
        now = self._clock.now_ns()
        self.tokens[request].update(dict.fromkeys(range(first, first + count), now))
        self._made(request, key, first, count)

    def truth(self, request_id: str) -> tuple[float, float, float, float]:
        """Milliseconds: queued, first token after that, second token after that, and all tokens after the first."""
        name = next(each for each in self.submitted if request_id in each)
        submitted, begun, tokens = self.submitted[name], self.begun[name], self.tokens[name]
        last = max(tokens)
        return tuple(
            each / 1e6
            for each in (begun - submitted, tokens[0] - begun, tokens.get(1, 0) - tokens[0], tokens[last] - tokens[0])
        )  # type: ignore[return-value]


@dataclass
class Timed:
    """A router in front of mocks whose twins are watched."""

    endpoint: str
    admin: str
    mocks: MockFleet
    client: aiohttp.ClientSession
    twins: dict[str, Watched] = field(default_factory=dict)
    asked: int = 0

    def body(self, **more: Any) -> dict[str, Any]:
        self.asked += 1
        return {"model": "fake", "prompt": f"[{self.asked}] {STORY}", "max_tokens": 4, "temperature": 0, **more}

    async def explain(self, request_id: str) -> dict[str, Any]:
        """The request's record, once it is complete: the answer's last byte leaves before that."""
        async with asyncio.timeout(5):
            while True:
                async with self.client.get(f"{self.admin}/explain/{request_id}") as response:
                    assert response.status == 200
                    told: dict[str, Any] = await response.json()
                if told["state"] != "open":
                    return told
                await asyncio.sleep(0.005)

    async def busy(self, name: str) -> asyncio.Task[None]:
        """Keep one instance busy for three steps."""
        instance = self.mocks.instances[name]

        async def ask() -> None:
            body = {"model": "fake", "prompt": f"busy {self.asked} {STORY}", "max_tokens": 3}
            async with self.client.post(instance.url + COMPLETIONS, json=body) as response:
                assert response.status == 200
                await response.read()

        task = asyncio.get_running_loop().create_task(ask())
        await eventually(lambda: instance.load().running == 1, "it is busy")
        return task


Start = Callable[..., Awaitable[Timed]]


@pytest.fixture
async def timed() -> AsyncIterator[Start]:
    """`await timed(["prefill", "decode"], pins=True)`: mocks with steps so long that a busy machine does not matter."""
    async with AsyncExitStack() as stack:

        async def starter(roles: list[str], *, pins: bool, **router: Any) -> Timed:
            settings = [
                mock_settings(f"{role}-{number}", Role(role), step_ms=STEP_MS, transfer_ms=TRANSFER_MS, max_num_seqs=1)
                for number, role in enumerate(roles)
            ]
            mocks = await stack.enter_async_context(MockFleet(settings))
            twins = {}
            for name, each in mocks.instances.items():
                twins[name] = Watched(each)
            instances = tuple(
                Instance(id=InstanceId(name), role=each.settings.role, url=each.url, pins=pins)
                for name, each in mocks.instances.items()
            )
            config = RouterConfig(instances=instances, port=0, admin_port=0, drain_s=1.0, **hands_over(router))
            endpoint, admin = await stack.enter_async_context(served(config))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            fleet = Timed(endpoint, admin, mocks, client, twins)
            async with asyncio.timeout(5):
                while True:
                    async with client.get(endpoint + "/ready") as response:
                        if {each["state"] for each in (await response.json())["instances"]} == {"up"}:
                            return fleet
                    await asyncio.sleep(0.01)

        yield starter


@dataclass
class Seen:
    """What the client saw: milliseconds."""

    id: str
    ttft: float
    tt2t: float
    total: float
    comment: dict[str, Any]


def answer_text(event: bytes) -> str:
    choices = json.loads(event[6:]).get("choices") if event.startswith(b"data: {") else None
    return (choices[0].get("text") or choices[0].get("delta", {}).get("content") or "") if choices else ""


async def listen(fleet: Timed, body: dict[str, Any], path: str = COMPLETIONS) -> Seen:
    """Read a stream event by event."""
    begun, times, comment = time.monotonic(), [], {}
    async with fleet.client.post(fleet.endpoint + path, json={**body, "stream": True}, headers=ASKED) as response:
        assert response.status == 200
        while event := await _event(response):
            if answer_text(event):
                times.append((time.monotonic() - begun) * 1000)
            if event.startswith(b": x-baton-timing "):
                comment = json.loads(event.partition(b"timing ")[2])
        name = response.headers["X-Request-Id"]
    return Seen(name, times[0], times[1] - times[0], (time.monotonic() - begun) * 1000, comment)


async def _event(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readuntil(b"\n\n")
    except asyncio.IncompleteReadError as error:
        return error.partial


async def ask(fleet: Timed, body: dict[str, Any]) -> Seen:
    """Ask for an answer in one piece."""
    begun = time.monotonic()
    async with fleet.client.post(fleet.endpoint + COMPLETIONS, json=body, headers=ASKED) as response:
        assert response.status == 200
        await response.read()
        told = json.loads(response.headers["x-baton-timing"])
        return Seen(response.headers["X-Request-Id"], 0, 0, (time.monotonic() - begun) * 1000, told)


class Errors:
    """The errors of measured parts, over several requests. The median counts, because a machine may stall."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, name: str, measured: float | None, true: float) -> None:
        assert measured is not None, name
        self._found[name].append((measured, true))

    def check(self) -> None:
        for name, pairs in self._found.items():
            off = statistics.median(abs(measured - true) - max(2.0, true * 0.05) for measured, true in pairs)
            assert off <= 0, f"{name}: (measured, true) {pairs}"


def added(told: dict[str, float | None]) -> float:
    """The sum of all parts and the residual."""
    return sum(part for name, part in told.items() if name != "total" and part is not None)


REPEATS = 5


@pytest.mark.parametrize("usage", [True, False], ids=["usage", "no-usage"])
@pytest.mark.parametrize("pins", [True, False], ids=["seeded", "plain"])
async def test_both_sums_of_a_stream_against_the_mocks_own_truth(timed: Start, pins: bool, usage: bool) -> None:
    fleet = await timed(["prefill", "decode"], pins=pins)
    errors = Errors()
    for _ in range(REPEATS):
        others = [await fleet.busy("prefill-0"), await fleet.busy("decode-1")]  # so that the request waits at both
        body = fleet.body(stream_options={"include_usage": True}) if usage else fleet.body()
        seen = await listen(fleet, body)
        await asyncio.gather(*others)
        timing = (await fleet.explain(seen.id))["timing"]
        ttft, tt2t = timing["ttft_ms"], timing["tt2t_ms"]
        assert timing["way"] == ("seeded" if pins else "plain")
        for each in (ttft, tt2t):
            assert added(each) == pytest.approx(each["total"], abs=0.01)
        queue_p, prefill, *_ = fleet.twins["prefill-0"].truth(seen.id)
        queue_d, step_d, second, _ = fleet.twins["decode-1"].truth(seen.id)
        assert queue_d >= TRANSFER_MS and prefill >= STEP_MS
        errors.add("queue_p", ttft["queue_p"], queue_p)
        errors.add("prefill", ttft["prefill"], prefill)
        handed = tt2t if pins else ttft
        if usage:
            assert "decode_leg" not in handed
            errors.add("handoff_queue_d", handed["handoff_queue_d"], queue_d)
            errors.add("step_d", handed["step_d"], step_d)
        else:
            assert (handed["handoff_queue_d"], handed["step_d"]) == (None, None)
            errors.add("decode_leg", handed["decode_leg"], queue_d + step_d)
        errors.add("step", tt2t["step"], second)
        errors.add("first made", timing["first_made_ms"], queue_p + prefill)
        errors.add("ttft, as the client sees it", ttft["total"], seen.ttft)
        errors.add("tt2t, as the client sees it", tt2t["total"], seen.tt2t)
        errors.add("ttft's parts together", ttft["total"] - ttft["residual"], ttft["total"])
        errors.add("tt2t's parts together", tt2t["total"] - tt2t["residual"], tt2t["total"])
        assert seen.comment["ttft_ms"] == ttft
    errors.check()


async def test_an_answer_in_one_piece_against_the_mocks_own_truth(timed: Start) -> None:
    fleet = await timed(["prefill", "decode"], pins=True)
    errors = Errors()
    for _ in range(REPEATS):
        seen = await ask(fleet, fleet.body())
        timing = (await fleet.explain(seen.id))["timing"]
        answer = timing["answer_ms"]
        assert "ttft_ms" not in timing
        assert added(answer) == pytest.approx(answer["total"], abs=0.01)
        queue_p, prefill, *_ = fleet.twins["prefill-0"].truth(seen.id)
        queue_d, step_d, _, rest = fleet.twins["decode-1"].truth(seen.id)
        for name, true in (("queue_p", queue_p), ("prefill", prefill), ("handoff_queue_d", queue_d),
                           ("step_d", step_d), ("generation", rest)):  # fmt: skip
            errors.add(name, answer[name], true)
        errors.add("parts together", answer["total"] - answer["residual"], answer["total"])
        errors.add("total, as the client sees it", answer["total"], seen.total)
        assert seen.comment["answer_ms"] == answer
    errors.check()


async def test_one_instance_alone_against_the_mocks_own_truth(timed: Start) -> None:
    fleet = await timed(["both"], pins=True)
    errors = Errors()
    for _ in range(REPEATS):
        other = await fleet.busy("both-0")
        seen = await listen(fleet, fleet.body(stream_options={"include_usage": True}))
        await other
        timing = (await fleet.explain(seen.id))["timing"]
        assert timing["way"] == "aggregated"
        queue, prefill, second, _ = fleet.twins["both-0"].truth(seen.id)
        errors.add("queue", timing["ttft_ms"]["queue"], queue)
        errors.add("prefill", timing["ttft_ms"]["prefill"], prefill)
        errors.add("step", timing["tt2t_ms"]["step"], second)
        errors.add("ttft, as the client sees it", timing["ttft_ms"]["total"], seen.ttft)
    errors.check()


async def test_chats_begin_with_an_event_that_is_no_token(timed: Start) -> None:
    fleet = await timed(["prefill", "decode"], pins=False)
    body = fleet.body()
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    errors = Errors()
    for _ in range(3):
        seen = await listen(fleet, body, CHAT)
        timing = (await fleet.explain(seen.id))["timing"]
        errors.add("ttft", timing["ttft_ms"]["total"], seen.ttft)
        errors.add("tt2t", timing["tt2t_ms"]["total"], seen.tt2t)
        assert timing["tt2t_ms"]["total"] > STEP_MS / 2
    errors.check()


# -- what the router reports --


async def explained(fleet: Fleet, request_id: str) -> dict[str, Any]:
    """A request's record, once the request is over."""
    async with asyncio.timeout(5):
        while True:
            async with fleet.client.get(f"{fleet.admin}/explain/{request_id}") as response:
                told: dict[str, Any] = await response.json()
            if told.get("state") != "open":
                return told
            await asyncio.sleep(0.005)


async def post(fleet: Fleet, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, str], str]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with fleet.client.post(fleet.endpoint + COMPLETIONS, json=body, headers=sent) as response:
        return response.status, dict(response.headers), await response.text()


async def test_the_timing_comment_comes_last_and_only_on_request(start: Starter) -> None:
    fleet = await start(pins=True)
    _, _, text = await post(fleet, GREEDY)
    assert text.endswith("data: [DONE]\n\n")
    assert "x-baton-timing" not in text
    _, headers, text = await post(fleet, GREEDY, x_baton_timing="1", X_Request_Id="mine")
    before, _, comment = text.partition("data: [DONE]\n\n")
    assert before.count("data: ") == 3
    assert comment.startswith(": x-baton-timing {")
    told = json.loads(comment.partition("timing ")[2])
    assert (told["id"], told["way"]) == (headers["X-Baton-Request-Id"], "seeded")
    assert comment.endswith("}\n\n")


async def test_ds_times_are_found_when_the_streams_end_comes_in_pieces(start: Starter) -> None:
    fleet = await start(prefill=0, decode=1)
    usage = {"choices": [], "usage": {"prompt_tokens": 3}, "metrics": {"queue_time_ms": 1, "time_to_first_token_ms": 2}}
    came = asyncio.Event()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in ({"choices": [{"text": "one "}]}, {"choices": [{"text": "two "}]}, usage):
            await response.write(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())
            await came.wait()
            came.clear()
        await response.write(b"data: [DONE]\n\n")
        return response

    fleet.engines["decode-0"].behave = answer
    body = {**GREEDY, "stream_options": {"include_usage": True}}
    async with fleet.client.post(fleet.endpoint + COMPLETIONS, json=body, headers=ASKED) as response:
        for _ in range(3):
            await response.content.readuntil(b"\n\n")
            came.set()
        text = (await response.content.read()).decode()
    ttft = json.loads(text.partition("timing ")[2])["ttft_ms"]
    assert (ttft["queue"], ttft["prefill"]) == (1, 2)


async def test_an_answer_of_one_token_has_no_time_to_a_second(start: Starter) -> None:
    """The events of usage and of a stream's end do not count as tokens."""
    fleet = await start(prefill=0, decode=1)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = b'data: {"choices":[{"text":"one "}]}\n\ndata: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
        await response.write(events)
        return response

    fleet.engines["decode-0"].behave = answer
    _, _, text = await post(fleet, GREEDY, x_baton_timing="1")
    told = json.loads(text.partition("timing ")[2])
    assert "ttft_ms" in told
    assert "tt2t_ms" not in told


@pytest.mark.interpreted
async def test_reading_a_body_counts_as_the_routers_time(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await start(prefill=0, decode=1)
    parse = bodies.parse_json

    def slowly(*args: Any) -> Any:
        time.sleep(0.03)
        return parse(*args)

    monkeypatch.setattr(bodies, "parse_json", slowly)
    _, headers, _ = await post(fleet, {**GREEDY, "stream": False}, x_baton_timing="1")
    assert json.loads(headers["x-baton-timing"])["answer_ms"]["router"] >= 30


async def test_the_header_of_an_answer_in_one_piece(start: Starter) -> None:
    fleet = await start(pins=True)
    _, headers, _ = await post(fleet, {**GREEDY, "stream": False})
    assert "x-baton-timing" not in headers
    _, headers, _ = await post(fleet, {**GREEDY, "stream": False}, x_baton_timing="1")
    told = json.loads(headers["x-baton-timing"])
    assert told["way"] == "plain"
    assert told["answer_ms"]["queue_p"] is None, "these engines do not report their times"
    assert told["answer_ms"]["prefill_leg"] > 0


async def test_errors_tell_their_times_too(start: Starter) -> None:
    fleet = await start(prefill=0, decode=1)

    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "boom"}}, status=500)

    fleet.engines["decode-0"].behave = fail
    status, headers, _ = await post(fleet, GREEDY, x_baton_timing="1")
    assert status >= 500
    assert json.loads(headers["x-baton-timing"])["total_ms"] > 0


async def test_explain_tells_decisions_with_their_because(start: Starter) -> None:
    fleet = await start(pins=True)
    await post(fleet, GREEDY, X_Request_Id="one")
    told = await explained(fleet, "one")
    assert (told["client_id"], told["state"], told["model"], told["stream"]) == ("one", "served", "fake", True)
    assert told["verdict"] == {"way": "seeded", "because": "", "resumable": True}
    assert told["seed"] == {"given": True, "because": ""}
    turns = [turn["turn"] for turn in told["turns"]]
    assert turns == ["choice", "leg", "prefilled", "seed", "leg", "opened", "end"]
    choice, prefill, _, _, decode, *_ = told["turns"]
    assert (choice["prefill"], choice["decode"]) == ("prefill-0", "decode-0")
    assert choice["because"]
    assert (prefill["leg"], prefill["instance"]) == ("prefill", "prefill-0")
    assert (decode["leg"], decode["instance"]) == ("decode", "decode-0")
    times = [turn["at_ms"] for turn in told["turns"]]
    assert times == sorted(times)
    assert times[0] >= 0
    assert "hello" not in json.dumps(told), "the record has no word of the prompt"


@pytest.mark.parametrize(
    ("settings", "more", "because"),
    [
        ({"pins": False}, {}, "D's engine cannot be told its first token"),
        ({"pins": True, "seeding": False}, {}, "seeding is off"),
        ({"pins": True}, {"logprobs": 1}, "logprobs, top_logprobs: the first chunk carries"),
        ({"pins": True}, {"stop": "e t"}, "the first token may begin a stop string"),
    ],
)
async def test_explain_tells_why_there_was_no_seed(
    start: Starter, settings: dict[str, Any], more: dict[str, Any], because: str
) -> None:
    fleet = await start(**settings)
    await post(fleet, {**GREEDY, **more}, X_Request_Id="one")
    seed = (await explained(fleet, "one"))["seed"]
    assert not seed["given"]
    assert seed["because"].startswith(because)


async def test_explain_tells_earlier_tries(start: Starter) -> None:
    fleet = await start(pins=True, prefill=2)

    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "boom"}}, status=500)

    fleet.engines["prefill-0"].behave = fail
    for number in range(2):  # one of the two goes to prefill-0 first
        await post(fleet, GREEDY, X_Request_Id=f"r{number}")
    stories = [await explained(fleet, f"r{number}") for number in range(2)]
    told = next(each for each in stories if any(turn["turn"] == "lost" for turn in each["turns"]))
    lost = next(turn for turn in told["turns"] if turn["turn"] == "lost")
    assert "boom" in lost["because"]
    first, second = (turn for turn in told["turns"] if turn["turn"] == "choice")
    assert (first["prefill"], first["excluded"]) == ("prefill-0", [])
    assert (second["prefill"], second["excluded"]) == ("prefill-1", ["prefill-0"])
    assert told["timing"]["ttft_ms"]["retries"] > 0


async def test_explain_shows_a_request_that_is_under_way(start: Starter) -> None:
    fleet = await start(pins=True)
    may_speak = asyncio.Event()

    async def wait(request: web.Request, body: dict[str, Any]) -> None:
        await may_speak.wait()

    fleet.engines["decode-0"].behave = wait
    async with fleet.client.post(
        fleet.endpoint + COMPLETIONS, json=GREEDY, headers={"X-Request-Id": "one"}
    ) as response:
        await response.content.readuntil(b"\n\n")
        async with fleet.client.get(f"{fleet.admin}/explain/one") as about:
            told = await about.json()
        async with fleet.client.get(f"{fleet.admin}/explain") as about:
            (line,) = (await about.json())["requests"]
        may_speak.set()
        await response.read()
    assert told["state"] == line["state"] == "open"
    assert told["timing"]["ttft_ms"]["total"] > 0
    assert line["tt2t_ms"] is None


async def test_a_client_that_left_is_no_open_request(start: Starter) -> None:
    fleet = await start(pins=True)

    async def hang(request: web.Request, body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    fleet.engines["decode-0"].behave = hang
    async with fleet.client.post(
        fleet.endpoint + COMPLETIONS, json=GREEDY, headers={"X-Request-Id": "one"}
    ) as response:
        await response.content.readuntil(b"\n\n")
    assert (await explained(fleet, "one"))["state"] == "client_left"


async def test_only_the_last_requests_are_kept_and_unknown_ones_are_refused(start: Starter) -> None:
    fleet = await start(explain_last=3)
    for number in range(8):
        await post(fleet, {**GREEDY, "stream": False}, X_Request_Id=f"r{number}")
        await explained(fleet, f"r{number}")
    async with fleet.client.get(f"{fleet.admin}/explain") as response:
        lines = (await response.json())["requests"]
    assert [line["client_id"] for line in lines] == ["r7", "r6", "r5"]
    async with fleet.client.get(f"{fleet.admin}/explain?n=1") as response:
        assert len((await response.json())["requests"]) == 1
    async with fleet.client.get(f"{fleet.admin}/explain?n=-1") as response:
        assert response.status == 400
    async with fleet.client.get(f"{fleet.admin}/explain/r4") as response:
        assert response.status == 404
        message = (await response.json())["error"]["message"]
    assert "`r4`" in message and "last 3 finished" in message
    async with fleet.client.get(f"{fleet.endpoint}/explain/r7") as response:
        assert response.status == 404, "not on the clients' port"


async def test_histograms_by_way(start: Starter) -> None:
    fleet = await start(pins=True)
    await post(fleet, GREEDY, X_Request_Id="one")
    await explained(fleet, "one")
    async with fleet.client.get(f"{fleet.admin}/metrics") as response:
        text = await response.text()
    for line in (
        'baton_ttft_seconds_count{way="seeded"} 1.0',
        'baton_tt2t_seconds_count{way="seeded"} 1.0',
        'baton_first_made_seconds_count{way="seeded"} 1.0',
        'baton_part_seconds_count{part="prefill_leg",sum="ttft",way="seeded"} 1.0',
        'baton_part_seconds_count{part="residual",sum="tt2t",way="seeded"} 1.0',
        "baton_first_byte_seconds_count 1.0",
    ):
        assert line in text, line


# -- traces --

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Make routers that start from now on trace into memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("router.api.server.tracing", lambda _: Tracing(provider))
    return exporter


async def ended(fleet: Fleet, spans: InMemorySpanExporter, request_id: str) -> dict[str, ReadableSpan]:
    """A request's spans by name, once it is over."""
    await explained(fleet, request_id)
    return {each.name: each for each in spans.get_finished_spans()}


def traceparent(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


async def test_a_span_for_the_request_and_one_for_each_leg(start: Starter, spans: InMemorySpanExporter) -> None:
    fleet = await start(pins=True)
    await post(fleet, GREEDY, X_Request_Id="one", Traceparent=PARENT)
    found = await ended(fleet, spans, "one")
    assert set(found) == {"text_completion fake", "prefill", "decode"}
    request, prefill, decode = (found[name] for name in ("text_completion fake", "prefill", "decode"))
    assert traceparent(request).startswith(PARENT[:36])
    assert request.parent is not None and f"{request.parent.span_id:016x}" == PARENT[36:52]
    for leg, name in ((prefill, "prefill-0"), (decode, "decode-0")):
        assert leg.parent is not None and leg.parent.span_id == request.get_span_context().span_id
        engine = fleet.engines[name]
        place, _, port = engine.url.removeprefix("http://").partition(":")
        attributes = leg.attributes or {}
        assert (attributes["server.address"], attributes["server.port"]) == (place, int(port))
        assert attributes["baton.instance"] == name
        sent = [value for key, value in engine.headers[-1].items() if key.lower() == "traceparent"]
        assert sent == [traceparent(leg)], "the engine's own spans continue this one"
    attributes = request.attributes or {}
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == "fake"
    assert attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["baton.way"] == "seeded"
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert attributes["baton.ttft.prefill_leg"] > 0
    assert (prefill.attributes or {})["gen_ai.response.finish_reasons"] == ("length",)
    (choice,) = request.events
    assert (choice.attributes or {})["baton.because"]


async def test_usage_in_a_span(start: Starter, spans: InMemorySpanExporter) -> None:
    fleet = await start(prefill=0, decode=0, both=1)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        return web.json_response({"choices": [{"text": "x"}], "usage": usage})

    fleet.engines["both-0"].behave = answer
    await post(fleet, {**GREEDY, "stream": False}, X_Request_Id="one")
    found = await ended(fleet, spans, "one")
    attributes = found["text_completion fake"].attributes or {}
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 4


async def test_a_number_that_otlp_cannot_hold_is_in_no_span(start: Starter, spans: InMemorySpanExporter) -> None:
    fleet = await start(prefill=0, decode=1)
    await post(fleet, {**GREEDY, "seed": 1 << 63, "top_k": 5}, X_Request_Id="one")
    attributes = (await ended(fleet, spans, "one"))["text_completion fake"].attributes or {}
    assert "gen_ai.request.seed" not in attributes
    assert attributes["gen_ai.request.max_tokens"] == 5


async def test_failures_are_errors_in_a_trace(start: Starter, spans: InMemorySpanExporter) -> None:
    fleet = await start(prefill=0, decode=1)

    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "boom"}}, status=500)

    fleet.engines["decode-0"].behave = fail
    await post(fleet, GREEDY, X_Request_Id="one")
    told = await ended(fleet, spans, "one")
    assert told
    for each in told.values():
        assert each.status.status_code is StatusCode.ERROR
        assert (each.attributes or {})["error.type"] == ("failed" if each.name.startswith("text") else "lost")


@pytest.mark.parametrize("ids", [RandomIdGenerator(), TraceIds()], ids=["library's names", "ours"])
async def test_a_trace_that_is_not_sampled_has_no_spans_but_reaches_the_engines(
    start: Starter, monkeypatch: pytest.MonkeyPatch, ids: Any
) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False, id_generator=ids)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("router.api.server.tracing", lambda _: Tracing(provider))
    fleet = await start(pins=True)
    await post(fleet, GREEDY, X_Request_Id="one")
    assert (await explained(fleet, "one"))["state"] == "served"
    assert not exporter.get_finished_spans()
    heard = []
    for name in ("prefill-0", "decode-0"):
        said = [value for key, value in fleet.engines[name].headers[-1].items() if key.lower() == "traceparent"]
        assert len(said) == 1
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", said[0])
        assert not int(said[0][-2:], 16) & 1, "not sampled"
        heard += said
    assert heard[0] == heard[1], "both legs name the same, unrecorded span"


async def test_without_tracing_the_clients_own_trace_goes_on(start: Starter) -> None:
    fleet = await start(pins=True)
    await post(fleet, GREEDY, traceparent=PARENT)
    for name in ("prefill-0", "decode-0"):
        sent = {key.lower(): value for key, value in fleet.engines[name].headers[-1].items()}
        assert sent["traceparent"] == PARENT


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_opentelemetrys_environment_turns_tracing_on(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    assert tracing("baton-router") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    made = tracing("baton-router")
    assert made is not None
    made.close()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing("baton-router") is None


def test_a_router_without_tracing_does_not_even_import_it() -> None:
    check = "import sys, router.api.app; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
