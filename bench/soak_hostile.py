"""Hostile clients for `make soak`: their attacks on a router, and whether honest clients notice.

They come in phases of `PHASE_S`, with and without them in turns, the first without. As a process of its own
(`python -m bench.soak_hostile`) it sends, bounded in number, rate and time:

- uploads of which a part comes, and then nothing or the connection's end;
- bodies and heads that are no HTTP, or too much of it: trailers, crumbs, extensions, headers, other framings;
- streams that are read a few bytes at a time, and left;
- connections that send nothing, or half of a head;
- pipelines of requests whose answers are never read.

Streams ask for chat completions: honest clients ask for completions, so that the routers' counters tell them apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

PHASE_S = 40.0
"""Length of a phase: two of the soak's turns, so that each phase has one instance drained and one killed."""

EDGE_S = 4.0
"""Requests this soon after a phase's beginning are not judged: a load's clock is known only from its process' start."""

RATIO_MAX = 1.5
"""Largest p99 TTFT of honest clients with hostile ones, over that without."""

JUDGED_REQUESTS_MIN = 300
"""In each kind of phase: with fewer the 99th percentile is one or two requests."""

IDLE, WORKERS, PIPELINED, HOLD_S, REST_S = 150, 3, 60, 4.0, 0.25

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
CHAT = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "stream": True}).encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

ODD: Final[dict[str, bytes]] = {
    "trailers": CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X-A: bcdefgh\r\n" * 3000,
    "crumbs": CHUNKED + b"1\r\nx\r\n" * 10_000,
    "extensions": CHUNKED + b"1;" + b"x" * 20_000,
    "headers": HEAD + b"a:\r\n" * 10_000 + b"\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    "bytes in headers": HEAD + b"X-SLO-Class: \xff\r\nContent-Type: \xff\r\nContent-Length: 2\r\n\r\n{}",
    "no JSON": HEAD + b"Content-Length: 4000\r\n\r\n" + b"[" * 4000,
    "no HTTP": b"\x16\x03\x01\x02\x00" * 50 + b"\r\n\r\n",
    "too large": HEAD + b"Content-Length: 99999999999\r\n\r\n",
}


class Hostile:
    """The clients of one process."""

    def __init__(self, endpoints: Sequence[str], chance: random.Random) -> None:
        self._addresses = [(each.hostname, each.port) for each in map(urlsplit, endpoints)]
        self._chance = chance
        self.done: Counter[str] = Counter()

    async def phase(self, seconds: float) -> None:
        """All of them, for so long."""
        kinds = (self._upload, self._odd, self._slow_reader, self._pipeline)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for kind, count in (*((each, WORKERS) for each in kinds), (self._idle, IDLE)):
                    for _ in range(count):
                        group.create_task(self._again(kind))

    async def _again(self, kind: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        await asyncio.sleep(self._chance.random())
        while True:
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                reader, writer = await asyncio.open_connection(*self._chance.choice(self._addresses), limit=1 << 14)
                try:
                    await kind(reader, writer)
                finally:
                    writer.transport.abort()
                self.done[kind.__name__.strip("_")] += 1
            await asyncio.sleep(REST_S)

    async def _upload(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 4000000\r\n\r\n" + b"x" * self._chance.choice((10, 100_000, 1_000_000)))
        await writer.drain()
        await asyncio.sleep(self._chance.choice((0.0, 0.2, HOLD_S)))

    async def _odd(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = self._chance.choice(sorted(ODD))
        writer.write(ODD[name])
        async with asyncio.timeout(HOLD_S):
            status = (await reader.readexactly(12))[9:]
        self.done["answered 4xx" if status.startswith(b"4") else f"answered {status.decode()}: {name}"] += 1

    async def _slow_reader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(CHAT) + CHAT)
        _reading(writer).pause_reading()
        await asyncio.sleep(HOLD_S / 2)
        _reading(writer).resume_reading()
        for _ in range(self._chance.randrange(1, 8)):
            await reader.read(64)
            await asyncio.sleep(REST_S)

    async def _idle(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._chance.random() < 0.5:
            writer.write(HEAD)
        await asyncio.sleep(HOLD_S * (1 + self._chance.random()))

    async def _pipeline(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _reading(writer).pause_reading()
        models = b"GET /v1/models HTTP/1.1\r\nHost: soak\r\n\r\n"
        writer.write((HEAD + b"Content-Length: 2\r\n\r\n{}") * PIPELINED + models * PIPELINED)
        await asyncio.sleep(HOLD_S)


def _reading(writer: asyncio.StreamWriter) -> asyncio.ReadTransport:
    """The connection as something to read from: one of TCP is both."""
    assert isinstance(writer.transport, asyncio.ReadTransport)
    return writer.transport


def phase_at(seconds: float) -> tuple[bool, float]:
    """Whether hostile clients are there so long after the beginning, and since when they are, or are not."""
    number, since = divmod(seconds, PHASE_S)
    return number % 2 == 1, since


def judged(records: Sequence[tuple[float, float]]) -> dict[str, float | int | None]:
    """p99 of honest requests (seconds since the beginning, TTFT in seconds) without and with hostile clients, and their
    ratio; None if there are too few requests.
    """
    times: dict[bool, list[float]] = {False: [], True: []}
    for at_s, ttft_s in records:
        hostile, since_s = phase_at(at_s)
        if since_s >= EDGE_S:
            times[hostile].append(ttft_s)
    few = min(map(len, times.values())) < JUDGED_REQUESTS_MIN
    without, beside = (_p99(each) if each else None for each in (times[False], times[True]))
    ratio = None if few or not without or beside is None else beside / without
    return {
        "requests_without": len(times[False]),
        "requests_beside": len(times[True]),
        "p99_ttft_s_without": without,
        "p99_ttft_s_beside": beside,
        "ratio": None if ratio is None else round(ratio, 3),
    }


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def honest(file: Path, later_s: float) -> list[tuple[float, float]]:
    """From a load's `--out` that began this long after the hostile clients' process: when each request was sent, and
    its TTFT. A request without a first token counts as late as its end.
    """
    found = []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        answered = record.get("first_token_s") if record.get("error") is None else None
        found.append((later_s + record["at_s"], (answered or record["end_s"]) - record["at_s"]))
    return found


async def _run(endpoints: Sequence[str], seconds: float, seed: int) -> dict[str, int]:
    hostile, began = Hostile(endpoints, random.Random(seed)), time.monotonic()
    print("ready", flush=True)
    while (now := time.monotonic() - began) < seconds:
        present, since_s = phase_at(now)
        left_s = min(PHASE_S - since_s, seconds - now)
        await (hostile.phase(left_s) if present else asyncio.sleep(left_s))
    return dict(sorted(hostile.done.items()))


def main() -> int:
    """Run them, and say how many there were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("endpoints", nargs="+")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(_run(args.endpoints, args.seconds, args.seed))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
