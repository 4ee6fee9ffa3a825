"""`baton load` with several senders, conversations, faults, a search and HTML pages, against local engines."""

from __future__ import annotations

import asyncio
import html.parser
import json
import os
import re
import signal
import sys
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.fake_engine import FakeEngine
from support.mock import Mocks

from baton.load_found import Goodput
from baton.load_html import goodput_page, report_page
from baton.load_sending import ManySenders
from loadgen.arrival import Arrival
from loadgen.body import Asking
from loadgen.http import LoadConnections
from loadgen.record import Record, Timings, record_of
from loadgen.replay import LoadShard, Replay, RunningLoad, Sending
from loadgen.report import LoadReport, LoadRun, Targets, report_of
from loadgen.search import Limit, SearchFinished, Try

pytestmark = pytest.mark.timed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine("engine") as running:
        yield running


async def started(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton", "load", *words, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def baton_load(*words: str) -> tuple[int | None, str, str]:
    child = await started(*words)
    async with asyncio.timeout(90):
        out, err = await child.communicate()
    return child.returncode, out.decode(), err.decode()


def streamed(engine: FakeEngine) -> list[dict[str, Any]]:
    return [body for body in engine.generated if body.get("stream")]


# Several senders


async def test_two_senders_send_what_one_sends(engine: FakeEngine, tmp_path: Path) -> None:
    words = (
        "--rate",
        "60",
        "--requests",
        "31",
        "--input-tokens",
        "uniform:5-50",
        "--chars-per-token",
        "4",
        "--seed",
        "7",
    )
    schedules, sizes = [], []
    for senders in ("1", "2"):
        out = tmp_path / senders
        code, text, err = await baton_load(engine.url, *words, "--senders", senders, "--out", str(out), "--json")
        told = json.loads(text)
        assert (code, told["sent"], told["completed"], told["senders"]) == (0, 31, 31, int(senders)), err
        assert told["itl_ms"]["count"] == 31 * 2  # gaps of all senders
        lines = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda each: each["request"])
        schedules.append([(each["request"], each["at_s"], each["input_tokens"]) for each in lines])
        sizes.append(sorted(len(body["prompt"]) for body in streamed(engine)))
        engine.bodies.clear()
    assert schedules[0] == schedules[1]
    assert sizes[0] == sizes[1]


def senders_of(parent: int) -> list[int]:
    """Process ids of the children of `baton load`."""
    found = []
    for each in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if each.name.isdigit() and int((each / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(each.name))
    return sorted(found)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_a_sender_that_dies_is_reported_and_its_share_is_not_sent(engine: FakeEngine) -> None:
    child = await started(engine.url, "--rate", "40", "--requests", "120", "--senders", "2", "--json")
    while len(streamed(engine)) < 20:
        await asyncio.sleep(0.02)
    (first, _) = senders_of(child.pid)
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        out, _ = await child.communicate()
    told = json.loads(out)
    assert child.returncode == 1
    assert 60 < told["sent"] < 120
    assert told["completed"] == told["sent"]
    (note,) = (each for each in told["notes"] if "died" in each)
    assert re.search(r"sender [12] of 2 died \(signal 9\): (\d+) of its 60 requests count as not sent", note)


async def test_ctrl_c_reaches_every_sender(engine: FakeEngine) -> None:
    child = await started(engine.url, "--rate", "40", "--duration-s", "600", "--senders", "2", "--json")
    while len(streamed(engine)) < 20:
        await asyncio.sleep(0.02)
    pids = senders_of(child.pid)
    child.send_signal(signal.SIGINT)
    async with asyncio.timeout(30):
        out, _ = await child.communicate()
    told = json.loads(out)
    assert child.returncode == 130
    assert 20 <= told["completed"] == told["sent"] < 2000
    assert not alive(pids)


SENDING = Sending(asking=Asking("fake"))


def arrivals(count: int, every_s: float = 0.02) -> list[Arrival]:
    return [Arrival(at_s=number * every_s, input_tokens=5, output_tokens=3) for number in range(count)]


def nothing(_: object) -> None:
    """Ignores a record, or the state of a load."""


async def test_a_stop_before_the_start_is_no_death_of_a_sender(engine: FakeEngine) -> None:
    senders = ManySenders(engine.url, 2)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        sending = group.create_task(senders.send(arrivals(100), SENDING, nothing, nothing))
        while len(senders._children) < 2:
            await asyncio.sleep(0)
        senders.stop()
        sent = await sending
    assert sent.notes == ()
    assert sent.load.stopped
    assert (sent.load.sent, sent.load.elapsed_s) == (0, 0.0)
    assert streamed(engine) == []


async def test_there_is_no_sender_without_a_request(engine: FakeEngine) -> None:
    senders = ManySenders(engine.url, 50)
    async with asyncio.timeout(60):
        sent = await senders.send(arrivals(2), SENDING, nothing, nothing)
    assert len(senders._children) == 2
    assert sent.load.sent == 2


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
async def test_a_stop_while_senders_are_started_is_kept(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    senders, begun = ManySenders(engine.url, 2), list[asyncio.subprocess.Process]()
    start = asyncio.create_subprocess_exec

    async def stopped(*words: Any, **rest: Any) -> asyncio.subprocess.Process:
        begun.append(await start(*words, **rest))
        if len(begun) == 1 + last:
            senders.stop()
        return begun[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", stopped)
    async with asyncio.timeout(60):
        sent = await senders.send(arrivals(100), SENDING, nothing, nothing)
    assert (sent.notes, sent.load.stopped, sent.load.sent) == ((), True, 0)
    assert len(begun) == 1 + last, "none is started after the stop"
    assert not alive([each.pid for each in begun])
    assert streamed(engine) == []


async def test_senders_that_cannot_all_be_started_leave_none(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[asyncio.subprocess.Process]()
    start = asyncio.create_subprocess_exec

    async def second_fails(*words: Any, **rest: Any) -> asyncio.subprocess.Process:
        if begun:
            raise BlockingIOError("no more processes")
        begun.append(await start(*words, **rest))
        return begun[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", second_fails)
    async with asyncio.timeout(60):
        with pytest.raises(BlockingIOError):
            await ManySenders(engine.url, 2).send(arrivals(100), SENDING, nothing, nothing)
    assert not alive([each.pid for each in begun])


async def test_a_load_that_was_cut_does_not_cut_the_next_one(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for goodput cuts a trial short, and the same senders then send the next trial."""
    monkeypatch.setattr("baton.load_sending.LAST_WORDS_S", 0.5)
    senders = ManySenders(engine.url, 2)

    def cut(load: RunningLoad) -> None:
        if load.sent:
            senders.cut()

    async with asyncio.timeout(60):
        sent = await senders.send(arrivals(2000), SENDING, nothing, cut)
        assert sent.load.stopped
        sent = await senders.send(arrivals(100), SENDING, nothing, nothing)
    assert (sent.notes, sent.load.stopped, sent.load.sent) == ((), False, 100)


async def test_a_load_that_is_stopped_before_its_first_second_took_no_time(engine: FakeEngine) -> None:
    replay = Replay(LoadConnections(engine.url), SENDING)
    replay.stop()
    load = await replay.run(arrivals(3), LoadShard(0, 1, time.perf_counter() + 60))
    assert (load.sent, load.elapsed_s) == (0, 0.0)


# Conversations


async def test_conversations_hold_the_real_answers(engine: FakeEngine, tmp_path: Path) -> None:
    out = tmp_path / "talks.jsonl"
    words = ("--sessions", "2", "--think-s", "0.05", "--turns", "3", "--requests", "12", "--input-tokens", "9")
    code, text, err = await baton_load(engine.url, *words, "--chars-per-token", "4", "--out", str(out))
    assert code == 0, err
    assert "closed loop" in text and "blind to its capacity" in text
    prompts = [body["prompt"] for body in streamed(engine)]
    assert len(prompts) == 12
    assert sum(prompt.count("one two three ") == 2 for prompt in prompts) >= 3  # third turns hold two answers
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["turn"] for record in records} == {1, 2, 3}
    assert all(record["closed_loop"] for record in records)


# Faults and stages


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    with Mocks.start("--instances", "both=1", "--step-ms", "2", "--prefill-ms-per-1k", "5") as mocks:
        yield mocks.urls["both-0"]


# A search


async def limited(engine: FakeEngine, at_once: int, hold_s: float) -> None:
    """Give the engine a known capacity: `at_once` requests at a time, each for `hold_s` seconds."""
    places = asyncio.Semaphore(at_once)

    async def behave(_: web.Request, __: dict[str, Any]) -> None:
        async with places:
            await asyncio.sleep(hold_s)

    engine.behave = behave


@pytest.mark.long
async def test_the_search_finds_an_engine_of_known_capacity(engine: FakeEngine, tmp_path: Path) -> None:
    """Six places for 0.1 s each allow 60 requests a second. Soon above that, a TTFT of 400 ms is missed."""
    await limited(engine, 6, 0.1)
    page = tmp_path / "goodput.html"
    words = (
        "--find-goodput",
        "--ttft-ms",
        "400",
        "--rate",
        "24",
        "--trial-s",
        "1",
        "--precision",
        "0.15",
        "--repeats",
        "1",
    )
    words += ("--arrivals", "constant", "--chars-per-token", "4", "--input-tokens", "4", "--html", str(page), "--json")
    code, text, err = await baton_load(engine.url, *words)
    told = json.loads(text)
    found = told["goodput"]
    assert (code, found["limit"], found["low"], found["confidence"]) == (0, "server", None, None), err
    assert 40 < found["rate"] < 80
    assert found["trials"] == len(told["tries"])
    assert "does not hold" in err and "goodput" in page.read_text()


@pytest.mark.long
async def test_no_trial_of_a_search_sends_a_text_of_an_earlier_one(engine: FakeEngine, tmp_path: Path) -> None:
    """An engine would have it in its prefix cache: later trials would find it faster than its users do."""
    trace = tmp_path / "trace.jsonl"
    row = {"input_tokens": 60, "output_tokens": 1, "prefix": [7], "block_tokens": 16}  # few words may be alike
    trace.write_text("".join(json.dumps({"at_s": at / 20, **row}) + "\n" for at in range(100)))
    words = ("--find-goodput", "--ttft-ms", "2000", "--rate", "30", "--top-rate", "60", "--trial-s", "1")
    words += ("--trace", str(trace), "--chars-per-token", "4", "--repeats", "1", "--json")
    code, text, err = await baton_load(engine.url, *words)
    tries = json.loads(text)["tries"]
    assert len(tries) >= 2, (code, err)  # beside other programs the search may end with its sender's limit
    prompts = [body["prompt"] for body in streamed(engine)]
    starts = {prompt[: 16 * 4] for prompt in prompts}
    assert len(set(prompts)) == len(prompts) > 30 * len(tries) / 2
    assert len(starts) == len(tries), "one beginning is shared in each trial"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--senders", "2", "--max-concurrency", "4"), "--max-concurrency counts"),
        (("--plot", "x.gif"), "name it .png, .svg, .pdf"),
        (("--requests", "99999999999999999999", "--duration-s", "5"), "up to 1,000,000,000,000,000"),
        (("--prefix-tokens", "10", "--prefix-groups", "99999999999999999999"), "up to 1,000,000,000,000,000"),
    ],
)
async def test_a_load_that_makes_no_sense_is_refused(words: tuple[str, ...], said: str) -> None:
    code, text, err = await baton_load("http://127.0.0.1:9", *words)
    assert code == 2 and not text
    assert said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "needs a promise"),
        (("--ttft-ms", "5", "--requests", "3"), "--requests is of one load"),
        (("--ttft-ms", "5", "--fault", "1s kill x"), "--fault has its moment in one load"),
        (("--ttft-ms", "5", "--rate", "9", "--top-rate", "5"), "begins above --top-rate"),
        (("--ttft-ms", "5", "--trace", "/nowhere"), "/nowhere: no such file"),
    ],
)
async def test_a_search_that_makes_no_sense_is_refused(words: tuple[str, ...], said: str) -> None:
    code, _, err = await baton_load("http://127.0.0.1:9", "--find-goodput", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


# Pages


class Page(html.parser.HTMLParser):
    """The addresses that a browser would fetch for a page, the page's tags, and the text that it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.shown = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "srcset"}]

    def handle_data(self, data: str) -> None:
        self.shown += data


def one(number: int = 0, *, error: str | None = None) -> Record:
    found = record_of(number, Arrival(0.5, 10, 2), Timings(0.5, 0.6, 0.8, array("d", [0.6, 0.7])))
    found.error, found.detail = error, "<script>alert(1)</script>" if error else ""
    parts = {"total": 60.0, "router": 10.0, "prefill": 45.0, "residual": 5.0}
    found.timing = {"way": "<b>plain", "ttft_ms": parts}
    return found


def of(records: list[Record]) -> LoadReport:
    return report_of(records, LoadRun(planned=len(records), elapsed_s=1.0), Targets(ttft_ms=200))


@pytest.mark.parametrize("records", [[], [one()], [one(error="stream_error")], [one(), one(1), one(2, error="shed")]])
def test_a_page_of_no_request_of_one_and_of_some(records: list[Record]) -> None:
    text = report_page("http://x/<i>", of(records), records, ("line 3: <u>",))
    page = Page(text)
    assert page.fetched and all(each.startswith("data:image/svg+xml;base64,") for each in page.fetched)
    assert not {"script", "i", "b", "u", "link"} & set(page.tags)
    assert "http://x/<i>" in page.shown and "line 3: <u>" in page.shown
    assert f"{len(records)} request{'s' * (len(records) != 1)} sent" in page.shown
    assert ("<script>alert(1)</script>" in page.shown) == any(record.error for record in records)
    assert "default-src 'none'" in text


def test_a_page_of_a_search_with_and_without_a_result() -> None:
    tries = (Try(repeat=0, rate=3.0, holds=True, counted=9, attained=9), Try(repeat=1, rate=4.0, holds=False, counted=9,
             attained=1, whole=False, sender_late="late <x>"))  # fmt: skip
    for loads, told in (((), ()), (tuple((3.0, 3.1) for _ in range(6)), tries)):
        finished = SearchFinished(
            limit=Limit.SERVER if loads else Limit.STOPPED, rate=3.05 if loads else None, low=3.0 if loads else None,
            high=3.1 if loads else None, confidence=0.97 if loads else None, at_least=3.0, loads=loads, requests=50,
            trials=len(told), late=0, because="why",
        )  # fmt: skip
        page = Page(goodput_page("http://x", Goodput(finished, told, Targets(ttft_ms=5), 0.95)))
        assert ("97.0% interval 3 to 3.1" in page.shown) == bool(loads)
        assert ("late <x>" in page.shown) == bool(loads)


# Faults on a mock


async def test_faults_come_at_their_moment_and_stand_in_the_report(mock: str) -> None:
    words = (
        "--rate",
        "20",
        "--arrivals",
        "constant",
        "--duration-s",
        "3",
        "--output-tokens",
        "2",
        "--input-tokens",
        "9",
    )
    faults = ("--target", f"both-0={mock}", "--fault", "1s refuse both-0", "--fault", "2s clear both-0")
    code, text, err = await baton_load(mock, *words, *faults, "--chars-per-token", "4", "--json")
    told = json.loads(text)
    assert code == 0, err
    assert [(each["what"], each["at_s"], each["error"]) for each in told["faults"]] == [
        ("refuse both-0", 1.0, None), ("clear both-0", 2.0, None),
    ]  # fmt: skip
    assert all(0 <= each["done_s"] - each["at_s"] < 0.8 for each in told["faults"])
    assert 8 < told["failed"] < 32 and told["errors"][0]["kind"] == "http_503"
    async with aiohttp.ClientSession() as client, client.get(f"{mock}/mock/faults") as answer:
        assert (await answer.json())["faults"] == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("1s refuse other", "no cluster named `default` runs"),
        ("9s refuse both-0", "the last request is sent at"),
        ("1s kill both-0", "only an instance of a `baton up`"),
        ("1s drain both-0", "/state answers 404"),
        ("1s refuse both-0 status=3", "`status` is 3"),
        ("refuse both-0", "write WHEN WHAT INSTANCE"),
    ],
)
async def test_faults_that_cannot_be_done_are_refused_before_the_load(
    mock: str, fault: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = ("--rate", "20", "--duration-s", "3", "--chars-per-token", "4", "--target", f"both-0={mock}")
    code, out, err = await baton_load(mock, *words, "--fault", fault)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err


# Traces with bad rows


async def test_a_bad_row_never_stops_a_load(engine: FakeEngine, tmp_path: Path) -> None:
    row = '{"timestamp": %d, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n'
    trace = tmp_path / "trace.jsonl"
    trace.write_text(row % 0 + row % -3 + "text\n" + row % 900)
    code, out, err = await baton_load(engine.url, "--trace", str(trace), "--chars-per-token", "4")
    assert code == 0
    assert "2 bad rows of the trace were left out; the first: line 2: timestamp -3 is negative" in out
    last = err.splitlines()[-3:]
    assert last[0] == "left out: line 2: timestamp -3 is negative"
    assert last[1].startswith("left out: line 3: ")
    assert last[2] == "left out: 2 bad rows in all (--strict stops at the first)"
    trace.write_text(row % -1 + row % -3)
    code, out, err = await baton_load(engine.url, "--trace", str(trace), "--format", "mooncake")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no row can be sent: line 1: timestamp -1 is negative, and 1 more" in err
