"""`baton load` against engines that answer, stall, refuse and break: its report agrees with what happened."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.fake_engine import TOKENS, FakeEngine

from baton.cli import main
from cluster.errors import UsageError
from loadgen.arrival import Arrival
from loadgen.ask import fit_of, model_of
from loadgen.body import Asking
from loadgen.http import LoadConnections
from loadgen.record import INTERRUPTED, Record
from loadgen.replay import Replay, RunningLoad, Sending
from loadgen.report import LoadRun, Targets, report_of

pytestmark = pytest.mark.timed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine("engine") as running:
        yield running


def every(gap_s: float, count: int) -> list[Arrival]:
    return [Arrival(at * gap_s, 8, 3) for at in range(count)]


async def send(url: str, arrivals: list[Arrival], *, chat: bool = False, **how: Any) -> RunningLoad:
    replay = Replay(LoadConnections(url), Sending(asking=Asking("fake", chat=chat), **how))
    async with asyncio.timeout(20):
        return await replay.run(arrivals)


def ordered(load: RunningLoad) -> list[Record]:
    return sorted(load.records, key=lambda record: record.request)


@pytest.mark.parametrize("chat", [False, True])
async def test_streams_are_counted_and_timed(engine: FakeEngine, chat: bool) -> None:
    load = await send(f"{engine.url}/v1", every(0.02, 20), chat=chat, headers={"x-custom": "1"})
    assert load.done == load.sent == 20
    for record in load.records:
        assert (record.status, record.error) == (200, None)
        assert record.at_s <= record.sent_s <= record.first_byte_s <= record.end_s  # type: ignore[operator]
    if not chat:  # the fake streams completions' events whatever was asked
        assert {record.chunks for record in load.records} == {len(TOKENS)}
    assert engine.headers[0]["x-custom"] == "1"
    path, body = engine.bodies[0]
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert (body["max_tokens"], body["stream"], body["ignore_eos"]) == (3, True, True)
    assert ("messages" in body) == chat


async def test_class_is_sent_as_header(engine: FakeEngine) -> None:
    await send(engine.url, [Arrival(0, 1, 1, slo_class="batch")])
    assert engine.headers[0]["x-slo-class"] == "batch"


async def stalled_until(engine: FakeEngine, opened: asyncio.Event) -> None:
    async def wait(_: web.Request, __: dict[str, Any]) -> None:
        await opened.wait()

    engine.behave = wait


async def test_a_stall_does_not_hide_the_queue_behind_it(engine: FakeEngine) -> None:
    """Against coordinated omission: a sender that waits for answers would report one slow answer for a whole stall."""
    opened = asyncio.Event()
    await stalled_until(engine, opened)
    asyncio.get_running_loop().call_later(1.0, opened.set)
    load = await send(engine.url, every(0.05, 40))
    records = ordered(load)
    in_stall = [record for record in records if record.at_s < 0.95]
    assert len(in_stall) == 19
    assert sum(record.sent_s < 0.9 for record in in_stall) > 12  # it went on sending
    for record in in_stall:
        assert record.ttft_s is not None and record.ttft_s >= 0.8 - record.at_s
    report = report_of(load.records, LoadRun(), Targets(ttft_ms=300))
    assert report.attained is not None and report.attained <= 40 - 9
    assert report.ttft_ms.p90 is not None and report.ttft_ms.p90 > 450


async def test_bounded_concurrency_says_so_and_still_counts_from_the_intended_moment(engine: FakeEngine) -> None:
    opened = asyncio.Event()
    await stalled_until(engine, opened)
    asyncio.get_running_loop().call_later(0.6, opened.set)
    load = await send(engine.url, every(0.05, 10), concurrency_max=1)
    first, *others = ordered(load)
    assert not first.held_back
    assert load.held_back >= 8
    second = others[0]
    assert second.held_back
    assert second.ttft_s is not None and second.ttft_s > 0.4
    assert second.ttft_sent_s is not None and second.ttft_sent_s < second.ttft_s - 0.3
    report = report_of(load.records, LoadRun(held_back=load.held_back))
    assert any("--max-concurrency" in note for note in report.notes)


async def test_answers_that_are_errors(engine: FakeEngine) -> None:
    answers = [
        web.json_response({"error": {"message": "full", "code": 429}}, status=429, headers={"Retry-After": "1"}),
        web.json_response({"detail": "broken"}, status=500),
        web.Response(status=503),
        web.json_response({"choices": []}),
    ]

    async def behave(_: web.Request, __: dict[str, Any]) -> web.StreamResponse | None:
        return answers.pop(0) if answers else None

    engine.behave = behave
    load = await send(engine.url, every(0.05, 5))
    assert [record.error for record in ordered(load)] == ["shed", "http_500", "http_503", "no_stream", None]
    assert ordered(load)[0].detail == "full"
    report = report_of(load.records, LoadRun(), Targets(ttft_ms=5000))
    assert (report.attainment, report.shed, report.failed) == (0.2, 1, 4)


def broken(kind: str) -> Any:
    async def behave(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "one"}]}\n\n')
        if kind == "hang":
            await asyncio.sleep(30)
        if kind == "error":
            await response.write(b'data: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n')
        if kind == "reset":
            assert request.transport is not None
            request.transport.abort()
        return response

    return behave


@pytest.mark.parametrize(
    ("kind", "error"),
    [("hang", "timeout"), ("error", "stream_error"), ("reset", "broken_off"), ("end", "cut_off")],
)
async def test_streams_that_break(engine: FakeEngine, kind: str, error: str) -> None:
    engine.behave = broken(kind)
    load = await send(engine.url, every(0.01, 3), timeout_s=0.4)
    assert {record.error for record in load.records} == {error}
    assert all(record.chunks == 1 and record.end_s < 3 for record in load.records)


async def test_an_endpoint_that_refuses_connections() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        load = await send(f"http://127.0.0.1:{held.getsockname()[1]}", every(0.01, 3))
    assert {record.error for record in load.records} == {"connect"}


async def test_a_kept_connection_closed_by_the_server_is_no_error(engine: FakeEngine) -> None:
    """The server closes an idle connection just when `baton load` uses it again."""
    seen: set[int] = set()

    async def close_second(request: web.Request, _: dict[str, Any]) -> None:
        assert request.transport is not None
        if id(request.transport) in seen:
            request.transport.abort()
            await asyncio.sleep(1)
        seen.add(id(request.transport))

    engine.behave = close_second
    load = await send(engine.url, [Arrival(0, 1, 1), Arrival(0.3, 1, 1)])
    assert [record.error for record in ordered(load)] == [None, None]
    assert [record.resent for record in ordered(load)] == [False, True]


async def test_stop_then_cut_keeps_what_was_measured(engine: FakeEngine) -> None:
    opened = asyncio.Event()
    replay = Replay(LoadConnections(engine.url), Sending(asking=Asking("fake"), drain_s=30))
    loop = asyncio.get_running_loop()

    async def behave(_: web.Request, __: dict[str, Any]) -> None:
        if len(engine.bodies) > 3:
            await opened.wait()

    engine.behave = behave
    loop.call_later(0.5, replay.stop)
    loop.call_later(0.8, replay.cut)
    async with asyncio.timeout(5):
        load = await replay.run(every(0.1, 1000))
    errors = [record.error for record in ordered(load)]
    assert set(errors) == {None, INTERRUPTED}
    assert errors == sorted(errors, key=lambda error: error is not None)
    assert len(errors) < 10
    assert load.elapsed_s < 2


async def test_cut_while_connecting_ends_at_once() -> None:
    with socket.socket() as full:  # accepts nothing, so connections wait
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        replay = Replay(LoadConnections(f"http://127.0.0.1:{full.getsockname()[1]}"), Sending(asking=Asking("fake")))
        asyncio.get_running_loop().call_later(0.3, replay.cut)
        async with asyncio.timeout(3):
            load = await replay.run(every(0.001, 50))
    assert {record.error for record in load.records} == {INTERRUPTED}


async def test_nothing_to_send(engine: FakeEngine) -> None:
    load = await send(engine.url, [])
    assert report_of(load.records, LoadRun(planned=0)).sent == 0


async def test_the_endpoint_is_asked_for_model_and_tokens(engine: FakeEngine) -> None:
    assert await model_of(engine.url, {}) == "fake"

    async def usage(_: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 7 + len(body["prompt"]) // 4}})

    assert await fit_of(engine.url, {}, Asking("fake")) is None
    engine.behave = usage
    found = await fit_of(engine.url, {}, Asking("fake"))
    assert found is not None
    assert (found.chars_per_token, found.overhead_tokens) == (4.0, 7.0)
    with pytest.raises(UsageError, match="does not answer"):
        await model_of("http://127.0.0.1:9", {})


# The command itself


async def baton_load(*words: str, interrupt_when: Callable[[], bool] | None = None) -> tuple[int | None, str, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton", "load", *words, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        if interrupt_when is not None:
            while not interrupt_when():
                await asyncio.sleep(0.05)
            child.send_signal(signal.SIGINT)
        out, err = await child.communicate()
    return child.returncode, out.decode(), err.decode()


async def test_command_reports_writes_and_replays(engine: FakeEngine, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    more = (
        "--rate",
        "100",
        "--requests",
        "20",
        "--input-tokens",
        "uniform:5-9",
        "--ttft-ms",
        "5000",
        "--out",
        str(out),
    )
    code, text, _ = await baton_load(engine.url, *more)
    assert code == 0
    assert "20 requests sent, 20 completed" in text
    assert "attainment 100.0%" in text
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["request"] for line in lines} == set(range(20))
    code, text, _ = await baton_load(engine.url, "--trace", str(out), "--speed", "2", "--json")
    told = json.loads(text)
    assert (code, told["sent"], told["bad_rows"]) == (0, 20, [])
    sizes = [len(body["prompt"]) for body in engine.generated if body.get("stream")]  # the probes do not stream
    assert len(sizes) == 40
    assert sorted(sizes[:20]) == sorted(sizes[20:])


async def test_ctrl_c_ends_sending_and_reports(engine: FakeEngine, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    words = (engine.url, "--rate", "20", "--duration-s", "600", "--out", str(out), "--json")
    code, text, err = await baton_load(*words, interrupt_when=lambda: len(engine.generated) > 10)
    told = json.loads(text)
    assert code == 130
    assert 0 < told["completed"] == told["sent"] < told["planned"]
    assert "stopping" in err
    assert any("stopped before its end" in note for note in told["notes"])
    assert len(out.read_text().splitlines()) == told["sent"]


async def test_nothing_answered_is_exit_code_1(engine: FakeEngine) -> None:
    async def refuse(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=500)

    engine.behave = refuse
    code, text, _ = await baton_load(engine.url, "--rate", "100", "--requests", "3", "--ttft-ms", "10")
    assert code == 1
    assert "3 × http_500: no" in text
    assert "attainment 0.0%" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which endpoint?"),
        (["ftp://x"], "not a URL"),
        ([""], "not a URL"),
        (["http://[::1"], "Invalid IPv6 URL"),
        (["http://x", "--requests", "999999999999"], "more than 5,000,000 requests"),
        (["http://x", "--duration-s", "1e11"], "more than 5,000,000 requests"),
        (["http://x", "--out", "{tmp}/a.html", "--html", "{tmp}/a.html"], "--out and --html name one file"),
        (["http://x:99999"], "Port out of range"),
        (["http://a..b:8000", "--model", "m"], "'a..b' is no host name"),
        ([f"http://{'a' * 64}:8000", "--model", "m"], f"'{'a' * 64}' is no host name"),
        (["http://x", "--trace", "/nowhere"], "/nowhere: no such file or directory"),
        (["http://x", "--trace", "{tmp}/bad.jsonl", "--strict"], "bad.jsonl: line 2: timestamp -3 is negative"),
        (["http://x", "--trace", "{tmp}/text"], "is in no format known here"),
        (["http://x", "--trace", "{tmp}"], "no *-trace.csv in this folder"),
        (["http://x", "--trace", "{tmp}/bad.jsonl", "--rate", "3"], "--rate makes load up"),
        (["http://x", "--trace", "{tmp}/bad.jsonl", "--format", "servegen"], "is a file"),
        (["http://x", "--trace", "{tmp}/bad.jsonl", "--out", "{tmp}/bad.jsonl"], "would be overwritten"),
        (["http://x", "--format", "azure"], "there is none"),
        (["http://x", "--input-tokens", "few"], "--input-tokens: 'few' is not a number of tokens"),
        (["http://x", "--cv", "2"], "--cv shapes gamma"),
        (["http://x", "--arrivals", "gamma", "--cv", "1e11"], "--cv 1e+11: gamma takes 0.001 to 1000"),
        (["http://x", "--arrivals", "gamma", "--cv", "1e-300"], "--cv 1e-300: gamma takes 0.001 to 1000"),
        (["http://x", "--arrivals", "weibull", "--cv", "40"], "--cv 40: weibull takes 0.001 to 30; gamma takes more"),
        (["http://x", "--rate", "1e-300", "--requests", "3"], "a load lasts up to 1e+09 s"),
        (["http://x", "--chat", "--token-ids", "5-9"], "--token-ids needs completions"),
        (["http://x", "--requests", "1", "--out", "/nowhere/x"], "--out /nowhere/x: there is no folder /nowhere"),
        (["http://x", "--", "--max-model-len", "3"], "takes no vLLM flags"),
        (["http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = '{"timestamp": %d, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'
    (tmp_path / "bad.jsonl").write_text(row % 0 + row % -3 + row % 5)
    (tmp_path / "text").write_text("hello\n")
    assert main(["load", *(word.replace("{tmp}", str(tmp_path)) for word in words)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--rate=0", "--rate=-1", "--rate=nan", "--requests=0", "--seed=-1", "--extra-body=[]",
                                  "--header=x", "--token-ids=9-5", "--cv=x", "--rate-scale=1e18"])  # fmt: skip
def test_bad_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["load", "http://x", flag])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert flag.partition("=")[0] in err
    assert err.count("\n") == 1


def test_skipped_rows_are_counted_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = '{"timestamp": %d, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'
    trace = tmp_path / "trace.jsonl"
    trace.write_text(row % 0 + row % -3 + "text\n" + row % 5)
    assert main(["load", "--trace", str(trace), "--skip-bad", "--dry-run", "--json"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert told["requests"] == 2
    assert [bad.partition(":")[0] for bad in told["bad_rows"]] == ["line 2", "line 3"]
    assert shown.err.count("left out: line") == 2


def test_dry_run_is_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for seed in ("1", "1", "2"):
        assert main(["load", "--dry-run", "--seed", seed, "--input-tokens", "lognormal:p50=9,p90=99"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2]
    assert told[0].startswith("100 requests in ")
