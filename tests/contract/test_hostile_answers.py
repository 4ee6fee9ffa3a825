"""Engines' answers that are too long, cut short, encoded, or no answers: the client gets an error, never a 200."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
from support.fleet import eventually
from support.fuzzing import Beside, Told, get, post, router_beside, told
from support.hostile_engine import (
    DONE,
    LAST_CHUNK,
    STREAM,
    TEXT,
    TOKENS,
    Asked,
    HostileEngine,
    Script,
    chunk,
    completion,
    event,
    head,
    says,
    stream,
    whole,
)  # fmt: skip

from cluster.instance import Role

PROMPT = {"model": "fake", "prompt": "hello", "max_tokens": 5}
STREAMED = {**PROMPT, "stream": True}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
COMPLETIONS = "/v1/completions"
LIMIT = 100_000
KIB64 = b"x" * (1 << 16)


@dataclass
class Fleet:
    """A router and its hostile engines."""

    engines: dict[str, HostileEngine]
    router: Beside

    async def ask(self, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> Told:
        return await told(self.router.endpoint, post(path, json.dumps(body).encode(), **headers))

    async def metric(self, line: str) -> float:
        """A counter's value; 0 where it is not shown."""
        text = (await told(self.router.admin, get("/metrics"))).body.decode()
        return next((float(each.rsplit(" ", 1)[1]) for each in text.splitlines() if each.startswith(line)), 0.0)

    @property
    def cut(self) -> int:
        return sum(engine.cut for engine in self.engines.values())

    def all_say(self, script: Callable[[Asked], Script | None] | Script) -> None:
        for engine in self.engines.values():
            engine.script = (lambda _: script) if isinstance(script, Script) else script


@pytest.fixture
async def start() -> AsyncIterator[Any]:
    """`await start("pdb", **settings)`: one engine for each letter: p prefill, d decode, b both."""
    async with AsyncExitStack() as stack:

        async def starter(roles: str, **settings: Any) -> Fleet:
            kinds = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
            engines = {f"{role}{at}": HostileEngine(f"{role}{at}", kinds[role]) for at, role in enumerate(roles)}
            for engine in engines.values():
                await stack.enter_async_context(engine.open())
            limits = {"answer_bytes_max": LIMIT, "first_token_s": 5.0, "stall_s": 5.0, **settings}
            instances = [engine.instance for engine in engines.values()]
            return Fleet(engines, await stack.enter_async_context(router_beside(instances, **limits)))

        yield starter


def message(answer: Told) -> str:
    said: str = json.loads(answer.body)["error"]["message"]
    return said


def text_of(answer: Told) -> str:
    if not answer.body.startswith(b"data:"):
        choices = [json.loads(answer.body)["choices"][0]]
    else:
        events = [json.loads(each[6:]) for each in answer.body.split(b"\n\n") if each.startswith(b"data: {")]
        choices = [each["choices"][0] for each in events if each.get("choices")]
    return "".join(each.get("text") or "" for each in choices)


# --- too long --------------------------------------------------------------------------------------------------------

ENDLESS = {
    "a length": (whole(b"")[:-4].replace(b"Length: 0", b"Length: 999999999") + b"\r\n\r\n", *[KIB64] * 40),
    "no length": (head("Content-Type: application/json"), *[KIB64] * 40),
    "chunks": (head("Transfer-Encoding: chunked"), *[chunk(KIB64)] * 40),
    "chunks as of a stream": (head("Transfer-Encoding: chunked"), *[chunk(b"data: x" * 500 + b"\n\n")] * 600),
    "a refusal": (head("Transfer-Encoding: chunked", status="400 Bad Request"), *[chunk(KIB64)] * 40),
}


async def test_an_answer_in_one_piece_is_kept_up_to_a_limit(start: Any, subtests: pytest.Subtests) -> None:
    fleet = await start("bbb")
    for name, pieces in ENDLESS.items():
        with subtests.test(name):
            before, cut = await fleet.metric('baton_unfit_answers_total{why="too_long"}'), fleet.cut
            fleet.all_say(lambda asked, pieces=pieces: Script(pieces, "hang") if asked.method == "POST" else None)
            answer = await fleet.ask(PROMPT)
            assert answer.status == 502
            assert "--answer-bytes-max" in message(answer)
            assert any(name in message(answer) for name in fleet.engines)
            await eventually(lambda cut=cut: fleet.cut == cut + 3, "the engines are cut off")
            assert await fleet.metric('baton_unfit_answers_total{why="too_long"}') == before + 3
    assert await fleet.metric('baton_requests_total{outcome="served"') == 0
    fleet.all_say(lambda _: None)
    assert text_of(await fleet.ask(PROMPT)) == TEXT


async def test_a_prefill_answer_is_kept_up_to_a_limit(start: Any) -> None:
    fleet = await start("ppd")
    fleet.engines["p0"].script = fleet.engines["p1"].script = lambda asked: (
        Script(ENDLESS["chunks as of a stream"], "hang") if asked.prefills else None
    )
    answer = await fleet.ask(PROMPT)
    await eventually(lambda: fleet.cut == 2, "the engines are cut off")
    assert await fleet.metric('baton_unfit_answers_total{why="too_long"}') == 2
    assert answer.status == 503 or text_of(answer) == TEXT


@pytest.mark.parametrize("body", [STREAMED, {**STREAMED, "temperature": 0}], ids=["by lot", "seeded"])
async def test_a_stream_whose_event_has_no_end(start: Any, body: dict[str, Any]) -> None:
    """The router must not gather its bytes: before the first event, after that event, or behind a seed."""
    fleet = await start("pd")
    for first in ((), (chunk(event(TOKENS[0])),)):
        fleet.engines["d1"].cut = 0
        fleet.engines["d1"].script = lambda asked, first=first: (
            Script((STREAM, *first, chunk(b'data: {"choices":[{"text":"'), *[chunk(KIB64)] * 50), "hang")
            if asked.method == "POST"
            else None
        )
        answer = await fleet.ask(body)
        await eventually(lambda: fleet.engines["d1"].cut == 1, "the engine is cut off")
        assert answer.status in {502, 503} or b'data: {"error"' in answer.body or text_of(answer) == TEXT


async def test_a_stream_itself_has_no_limit(start: Any) -> None:
    fleet = await start("b")
    events = [event("w" * 1000) for _ in range(300)]
    fleet.all_say(lambda asked: says(stream(*events, DONE)) if asked.method == "POST" else None)
    answer = await fleet.ask(STREAMED)
    assert (answer.status, answer.whole, len(text_of(answer))) == (200, True, 300_000)


async def test_framing_without_an_end_is_cut(start: Any) -> None:
    """Trailers without an end carry no body: they must neither keep a stream alive nor fill memory."""
    fleet = await start("b", stall_s=30.0)
    trailer = (chunk(event("one ")), b"0\r\n", *[b"X-Y: " + b"z" * 1000 + b"\r\n"] * 200)
    fleet.all_say(lambda asked: Script((STREAM, *trailer), "hang") if asked.method == "POST" else None)
    answer = await fleet.ask({**STREAMED, "temperature": 1})
    assert b'data: {"error"' in answer.body
    await eventually(lambda: fleet.cut == 1, "the engine is cut off")


# --- cut short -------------------------------------------------------------------------------------------------------

WHOLE = completion()
CUT: dict[str, tuple[bytes, ...]] = {
    "no length, cut": (head("Content-Type: application/json"), WHOLE[:-9]),
    "no length, HTTP/1.0, cut": (b"HTTP/1.0 200 OK\r\n\r\n", WHOLE[:-1]),
    "no length, nothing": (b"HTTP/1.1 200 OK\r\n\r\n",),
    "a length that is too long": (head(f"Content-Length: {len(WHOLE) + 5}"), WHOLE),
    "a length that is too short": (head(f"Content-Length: {len(WHOLE) - 5}"), WHOLE),
    "chunks without an end": (head("Transfer-Encoding: chunked"), chunk(WHOLE)),
    "half a chunk": (head("Transfer-Encoding: chunked"), chunk(WHOLE)[:-9]),
    "204": (head(status="204 No Content"),),
    "304": (head(status="304 Not Modified"),),
    "206": (whole(WHOLE, status="206 Partial Content"),),
    "302": (head("Location: /", "Content-Length: 0", status="302 Found"),),
}


async def test_an_answer_that_was_cut_short_is_no_answer(start: Any, subtests: pytest.Subtests) -> None:
    fleet = await start("bb")
    bad = fleet.engines["b0"]
    for name, pieces in CUT.items():
        for streams in (False, True):
            with subtests.test(name, stream=streams):
                script = lambda asked, pieces=pieces: Script(pieces, "close") if asked.method == "POST" else None  # noqa: E731
                bad.script, asked = script, len(bad.asked)
                while len(bad.asked) == asked:  # the router chooses the other one at times
                    answer = await fleet.ask({**PROMPT, "stream": streams})
                    assert (answer.status, text_of(answer)) == (200, TEXT), "another instance answers"
                fleet.all_say(script)
                answer = await fleet.ask({**PROMPT, "stream": streams})
                assert answer.status == 503
                assert "b0" in message(answer) or "b1" in message(answer)
                fleet.all_say(lambda _: None)


async def test_an_old_engine_that_ends_answers_by_closing_is_served(start: Any) -> None:
    """A JSON object that was cut short does not parse, and a stream needs its `[DONE]`: if they are there, all came."""
    fleet = await start("b")
    fleet.all_say(
        lambda asked: says(b"HTTP/1.0 200 OK\r\n\r\n" + WHOLE, then="close") if asked.method == "POST" else None
    )
    assert text_of(await fleet.ask(PROMPT)) == TEXT
    old = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event(TEXT) + DONE
    fleet.all_say(lambda asked: says(old, then="close") if asked.method == "POST" else None)
    assert text_of(await fleet.ask(STREAMED)) == TEXT


async def test_a_stream_that_only_quotes_its_end_has_not_ended(start: Any) -> None:
    fleet = await start("b")
    quoted = STREAM + chunk(event("one ")) + chunk(event("data: [DONE]")) + LAST_CHUNK
    fleet.all_say(lambda asked: says(quoted) if asked.method == "POST" else None)
    answer = await fleet.ask({**STREAMED, "temperature": 1})
    assert b'data: {"error"' in answer.body
    assert await fleet.metric('baton_requests_total{outcome="served"') == 0


BEFORE_ITS_END = STREAM + b"".join(chunk(event(each)) for each in TOKENS)


@pytest.mark.parametrize("roles", ["b", "pd"])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("then", ["close", "reset", "hang"])
async def test_a_connection_that_breaks_after_the_streams_end_breaks_no_stream(
    start: Any, then: str, temperature: int, roles: str
) -> None:
    fleet = await start(roles, stall_s=0.4)
    script = Script((BEFORE_ITS_END + chunk(DONE),), then)
    fleet.all_say(lambda asked: script if asked.method == "POST" and not asked.prefills else None)
    answer = await fleet.ask({**STREAMED, "temperature": temperature})
    assert (answer.whole, text_of(answer)) == (True, TEXT)
    assert answer.body.count(DONE) == 1 and b"error" not in answer.body
    assert await fleet.metric('baton_requests_total{outcome="served"') == 1


@pytest.mark.parametrize("rest", [b"", b"data: [DONE]", b"data: [DONE]\n\ndata: {"])
async def test_a_stream_that_breaks_before_its_end_is_broken(start: Any, rest: bytes) -> None:
    fleet = await start("b")
    script = Script((BEFORE_ITS_END, *([chunk(rest)] if rest else [])), "close")
    fleet.all_say(lambda asked: script if asked.method == "POST" else None)
    answer = await fleet.ask({**STREAMED, "temperature": 1})
    assert b'data: {"error"' in answer.body
    assert await fleet.metric('baton_requests_total{outcome="served"') == 0


@pytest.mark.parametrize("length_told", [False, True])
async def test_a_relayed_answer_that_may_be_cut_is_cut_for_its_client(start: Any, length_told: bool) -> None:
    fleet = await start("b")
    told_length = ("Content-Length: 999",) if length_told else ()
    fleet.all_say(
        lambda asked: says(head(*told_length), b'{"tokens": [1', then="close") if asked.method == "POST" else None
    )
    answer = await fleet.ask({"model": "fake", "prompt": "x"}, "/tokenize")
    assert not answer.whole


# --- encoded ---------------------------------------------------------------------------------------------------------


def zipped(asked: Asked) -> Script | None:
    """Right answers, compressed with gzip."""
    if asked.method != "POST":
        return None
    body = (event(TEXT) + DONE) if asked.body.get("stream") else completion()
    kind = "text/event-stream" if asked.body.get("stream") else "application/json"
    return says(whole(gzip.compress(body), "Content-Encoding: gzip", kind=kind))


async def test_engines_are_asked_for_plain_bytes(start: Any) -> None:
    fleet = await start("pd")
    await fleet.ask(PROMPT, Accept_Encoding="gzip, br")
    await fleet.ask(STREAMED, Accept_Encoding="gzip")
    await fleet.ask({"model": "fake", "prompt": "x"}, "/tokenize", Accept_Encoding="gzip")
    asked = [each for engine in fleet.engines.values() for each in engine.asked]
    assert {each.headers.get("accept-encoding") for each in asked} == {"identity"}
    assert len(asked) == 5


@pytest.mark.parametrize("body", [PROMPT, STREAMED], ids=["whole", "stream"])
async def test_an_encoded_generation_is_unreadable(start: Any, body: dict[str, Any]) -> None:
    fleet = await start("bbb")
    fleet.all_say(zipped)
    answer = await fleet.ask(body)
    assert answer.status == 502
    assert "gzip" in message(answer)
    assert await fleet.metric('baton_unfit_answers_total{why="encoded"}') == 3


async def test_an_encoded_prefill_answer_is_unreadable(start: Any) -> None:
    fleet = await start("ppd")
    fleet.engines["p0"].script = fleet.engines["p1"].script = lambda asked: zipped(asked) if asked.prefills else None
    answer = await fleet.ask(PROMPT)
    assert answer.status in {502, 503} or text_of(answer) == TEXT
    assert await fleet.metric('baton_unfit_answers_total{why="encoded"}') == 2


async def test_a_relayed_answer_keeps_its_encoding_and_says_so(start: Any) -> None:
    fleet = await start("b")
    fleet.all_say(zipped)
    answer = await fleet.ask({"model": "fake", "prompt": "x"}, "/tokenize")
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(answer.body) == completion()


# --- no completion ---------------------------------------------------------------------------------------------------

NO_COMPLETION = {
    "empty": b"", "{}": b"{}", "[]": b"[]", "null": b"null", "html": b"<html>hello</html>",
    "error": b'{"error":{"message":"boom"}}', "no choices": b'{"choices":[]}', "odd choices": b'{"choices":{}}',
    "empty choice": b'{"choices":[{}]}', "odd choice": b'{"choices":[7]}', "not UTF-8": b'{"choices":[{"text":"a\xff"}',
    "deep": b'{"a":' * 20_000, "deep and whole": b'{"choices":' + b"[" * 5000 + b"]" * 5000 + b"}",
}  # fmt: skip


async def test_a_200_that_is_no_completion_is_the_engines_failure(start: Any, subtests: pytest.Subtests) -> None:
    fleet = await start("bbb")
    for name, body in NO_COMPLETION.items():
        fleet.all_say(lambda asked, body=body: says(whole(body)) if asked.method == "POST" else None)
        for path, asked in ((COMPLETIONS, PROMPT), ("/v1/chat/completions", CHAT)):
            with subtests.test(name, path=path):
                answer = await fleet.ask(asked, path)
                assert answer.status == 502
                assert "no completion" in message(answer)
    assert await fleet.metric('baton_unfit_answers_total{why="no_completion"}') == 6 * len(NO_COMPLETION)
    assert await fleet.metric('baton_requests_total{outcome="served"') == 0


async def test_a_prefill_answer_that_is_no_completion_is_its_failure(start: Any, subtests: pytest.Subtests) -> None:
    fleet = await start("ppd")
    bad = fleet.engines["p0"]
    for name, body in NO_COMPLETION.items():
        bad.script = lambda asked, body=body: says(whole(body)) if asked.prefills else None
        for streams in (False, True):
            with subtests.test(name, stream=streams):
                asked = len(bad.asked)
                while len(bad.asked) == asked:  # the router chooses the other one at times
                    answer = await fleet.ask({**PROMPT, "stream": streams, "temperature": 0})
                    assert (answer.status, text_of(answer)) == (200, TEXT)
    assert await fleet.metric('baton_unfit_answers_total{why="no_completion"}') >= 2 * len(NO_COMPLETION)


async def test_a_hold_in_a_prefill_answer_that_is_no_completion_is_not_lost(start: Any) -> None:
    """The engine may really hold the blocks, so D pulls them."""
    fleet = await start("ppd")
    hold = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "p0", "remote_request_id": "odd"}
    body = json.dumps({"choices": [{"finish_reason": "length"}], "kv_transfer_params": hold}).encode()
    for name in ("p0", "p1"):
        fleet.engines[name].script = lambda asked: says(whole(body)) if asked.prefills else None
    assert text_of(await fleet.ask(PROMPT)) == TEXT
    (leg2,) = fleet.engines["d2"].asked
    assert leg2.body["kv_transfer_params"]["remote_request_id"] == "odd"
    assert await fleet.metric('baton_unfit_answers_total{why="no_completion"}') == 1


NO_STREAM = {
    "nothing": STREAM + LAST_CHUNK,
    "only its end": stream(DONE),
    "empty events": stream(b"data: {}\n\n", DONE),
    "no choices": stream(b'data: {"choices":[]}\n\n', DONE),
    "empty choice": stream(b'data: {"choices":[{}]}\n\n', DONE),
    "comments": stream(*[b": ping\n\n"] * 5, DONE),
    "an error": stream(b'data: {"error":{"message":"boom"}}\n\n', DONE),
    "html events": stream(b"data: <html>\n\n", DONE),
    "html": whole(b"<html>hello</html>", kind="text/html"),
    "a stream called html": stream(event("one "), DONE).replace(b"text/event-stream", b"text/html"),
    "one piece": whole(completion()),
    "deep": stream(b"data: " + b"[" * 30_000 + b"\n\n", DONE),
}


async def test_a_stream_without_a_token_is_the_engines_failure(start: Any, subtests: pytest.Subtests) -> None:
    fleet = await start("bbb")
    for name, raw in NO_STREAM.items():
        with subtests.test(name):
            before = {name: len(engine.asked) for name, engine in fleet.engines.items()}
            unfit = await fleet.metric('baton_unfit_answers_total{why="no_completion"}')
            fleet.all_say(lambda asked, raw=raw: says(raw) if asked.method == "POST" else None)
            answer = await fleet.ask({**STREAMED, "logprobs": 1, "n": 2})
            assert answer.status == 502
            assert all(len(engine.asked) > before[name] for name, engine in fleet.engines.items()), "each was tried"
            assert await fleet.metric('baton_unfit_answers_total{why="no_completion"}') == unfit + 3
    assert await fleet.metric('baton_requests_total{outcome="served"') == 0


async def test_a_stream_that_begins_with_the_clients_fault_is_a_refusal(start: Any, subtests: pytest.Subtests) -> None:
    """vLLM reports a token id out of range so. The client of an aggregated request gets a 400, as for a prefill leg."""
    fleet = await start("b")
    codes = ((400, 400), (422, 422), (500, 503), (404, 503), (True, 503), ("400", 503), (None, 503))
    for (code, status), comment in product(codes, (b"", b": keep-alive\n\n")):
        with subtests.test(code=code, comment=comment):
            error = b"data: " + json.dumps({"error": {"message": "boom", "code": code}}).encode() + b"\n\n"
            raw = stream(*filter(None, (comment, error, DONE)))
            fleet.all_say(lambda asked, raw=raw: says(raw) if asked.method == "POST" else None)
            answer = await fleet.ask(STREAMED)
            assert answer.status == status
            assert "boom" in message(answer)


async def test_a_refusal_without_json_is_told_in_json(start: Any, subtests: pytest.Subtests) -> None:
    """A proxy in front of an engine may refuse in this way."""
    fleet = await start("b")
    for body in (b"<html>413</html>", b"", b"[]", b'"no"', b"\xff"):
        with subtests.test(body=body):
            refusal = whole(body, status="413 Too Large", kind="text/html")
            fleet.all_say(lambda asked, refusal=refusal: says(refusal) if asked.method == "POST" else None)
            answer = await fleet.ask(PROMPT)
            assert (answer.status, answer.headers["content-type"]) == (413, "application/json")
            assert "413" in message(answer)


# --- heads -----------------------------------------------------------------------------------------------------------

HEADS = {
    "status 0": head("Content-Length: 2", status="000 x") + b"{}",
    "status 99": head("Content-Length: 2", status="099 x") + b"{}",
    "status 600": head("Content-Length: 2", status="600 x") + b"{}",
    "status 999": head("Content-Length: 2", status="999 x") + b"{}",
    "status 1000": head("Content-Length: 2", status="1000 x") + b"{}",
    "status 101": head("Upgrade: x", "Connection: upgrade", status="101 Switching Protocols") + b"hello",
    "a flood of 1xx": head(status="103 Early Hints") * 5000,
    "line feed in a header": head("Content-Type: a\nX-Evil: b", "Content-Length: 2") + b"{}",
    "return in a header": head("Content-Type: a\rX-Evil: b", "Content-Length: 2") + b"{}",
    "NUL in a header": head("Content-Type: a\0b", "Content-Length: 2") + b"{}",
    "transfer encoding gzip": head("Transfer-Encoding: gzip, chunked") + chunk(WHOLE) + LAST_CHUNK,
    "a negative chunk": head("Transfer-Encoding: chunked") + b"-5\r\nhello\r\n",
    "a huge chunk": head("Transfer-Encoding: chunked") + b"f" * 20 + b"\r\nhello\r\n",
}


LENIENT = {"line feed in a header", "return in a header"}
"""Heads that aiohttp accepts, as browsers do: the router may relay such an answer."""


async def test_malformed_heads_are_errors(start: Any, subtests: pytest.Subtests) -> None:
    fleet = await start("b")
    for name, raw in HEADS.items():
        for path, body in ((COMPLETIONS, PROMPT), (COMPLETIONS, STREAMED), ("/tokenize", PROMPT)):
            with subtests.test(name, path=path, stream=body is STREAMED):
                fleet.all_say(lambda asked, raw=raw: says(raw, then="close") if asked.method == "POST" else None)
                answer = await fleet.ask(body, path)
                relayed = path == "/tokenize" and name in LENIENT
                assert answer.status in {502, 503} or not answer.whole or relayed
                assert not any("evil" in name for name in answer.headers)
        fleet.all_say(lambda _: None)
        assert text_of(await fleet.ask(PROMPT)) == TEXT


async def test_a_strange_content_type_is_not_passed_on(start: Any, subtests: pytest.Subtests) -> None:
    fleet = await start("b")
    for kind in ("application/json; \xff\xfe", "text/html", "a" * 5000):
        with subtests.test(kind=kind[:20]):
            script = says(whole(completion(), kind=kind))
            fleet.all_say(lambda asked, script=script: script if asked.method == "POST" else None)
            answer = await fleet.ask(PROMPT)
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            relayed = await fleet.ask({"model": "fake", "prompt": "x"}, "/tokenize")
            assert len(relayed.headers.get("content-type", "")) < 300


# --- what hostile numbers and words may do ---------------------------------------------------------------------------


def miscounts(count: Any) -> Callable[[Asked], Script | None]:
    """Right answers with `count` in every field that wants a number."""
    usage = {"prompt_tokens": count, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": count}}
    metrics = {"queue_time_ms": count, "time_to_first_token_ms": count, "generation_time_ms": count}
    hold = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "p0", "remote_request_id": "r"}
    hold |= {"remote_num_tokens": count, "remote_prefill_cached_tokens": count}

    def script(asked: Asked) -> Script | None:
        if asked.method != "POST":
            return None
        more = {"kv_transfer_params": hold, "end": "length"} if asked.prefills else {}
        return says(whole(completion(usage=usage, metrics=metrics, **more)))

    return script


async def test_counts_that_are_no_numbers_break_nothing(start: Any, subtests: pytest.Subtests) -> None:
    fleet = await start("pd", policy="workload")
    for at, count in enumerate((10**30, -1, 1e300, True, "7", None, [7], {"a": 1}), start=1):
        with subtests.test(count=count):
            fleet.all_say(miscounts(count))
            assert (await fleet.ask(PROMPT)).status == 200
            assert await fleet.metric('baton_requests_total{outcome="served"') == at
    fleet.all_say(lambda _: None)
    assert text_of(await fleet.ask(PROMPT)) == TEXT


async def test_a_long_finish_reason_is_not_repeated(start: Any) -> None:
    fleet = await start("ppd")
    fleet.engines["p0"].script = fleet.engines["p1"].script = lambda asked: (
        says(whole(completion(end="r" * 50_000))) if asked.prefills else None
    )
    answer = await fleet.ask(PROMPT, X_Request_Id="mine")
    explained = await told(fleet.router.admin, get("/explain/mine"))
    assert len(answer.body) < 5000
    assert len(explained.body) < 20_000


# --- probes ----------------------------------------------------------------------------------------------------------

PROBED = {
    "deep": whole(b"[" * 100_000),
    "not UTF-8": whole(b'{"data":[{"id":"\xff"}]}'),
    "no strings": whole(b'{"data":[{"id":7},{"id":{"a":1}},{"id":null},7]}'),
    "odd lengths": whole(b'{"data":[{"id":"fake","max_model_len":1000000000000000000000000000000}]}'),
    "encoded": whole(gzip.compress(b'{"data":[]}'), "Content-Encoding: gzip"),
    "huge": whole(b'{"data":[' + b'{"id":"x"},' * 1_000_000 + b'{"id":"x"}]}'),
    "counts": whole(
        b"vllm:num_requests_running 1e300\nvllm:num_requests_waiting 1e300\n"
        b'vllm:cache_config_info{block_size="999999999999",num_gpu_blocks="999999999999"} 1\n',
        kind="text/plain",
    ),
}  # fmt: skip


async def test_probes_outlive_odd_answers_of_engines(start: Any) -> None:
    """Odd answers about models, load and paths: the router probes each such engine again, and another engine serves."""
    fleet = await start("b" * (len(PROBED) + 1), policy="workload")
    asked: Counter[str] = Counter()

    def odd(request: Asked, name: str, raw: bytes) -> Script | None:
        if request.method == "POST":
            return None
        asked[name] += request.path == "/health"
        return None if request.path == "/health" else says(raw)

    for engine, (name, raw) in zip(fleet.engines.values(), PROBED.items(), strict=False):
        engine.script = partial(odd, name=name, raw=raw)
    await eventually(lambda: all(asked[name] >= 2 for name in PROBED), "each is probed again after its odd word")
    for _ in range(3):
        assert text_of(await fleet.ask(PROMPT)) == TEXT
