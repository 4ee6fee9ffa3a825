"""A closed loop of connections for CPU figures: cheap, and it checks the bytes that it reads.

Every answer's bytes are compared with what the engine wrote. A router may write an event anew (vllm-router does so with
the one that holds `usage`): then its tokens must still be the same, in order, and it counts as rewritten.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from bench.contestants import KEY
from bench.engine import MODEL, events
from loadgen.http import Failed, LoadConnections
from loadgen.prompts import text_of

BODIES = 64
"""Different prompts; they are sent in turn."""

ANSWER_S = 60.0
"""An answer not whole by then has failed."""


@dataclass(slots=True)
class Sent:
    """The result of a run."""

    done: int = 0
    rewritten: int = 0
    """Answers whose tokens are right but whose bytes differ."""
    failed: int = 0
    examples: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    def take(self, status: int, found: bytes, wanted: bytes, why: str = "") -> None:
        """Judge one answer. `why`: what broke the connection, if the status is 0."""
        if status != 200:
            self.fail(f"{why or f'HTTP {status}'}: {found[:200]!r}")
        elif found != wanted and tokens_of(found) != tokens_of(wanted):
            self.fail(f"other tokens than the engine's: {found[-200:]!r}")
        else:
            self.done += 1
            self.rewritten += found != wanted

    def fail(self, why: str) -> None:
        """Count a failure, and keep the first few."""
        self.failed += 1
        if len(self.examples) < 3:
            self.examples.append(why[:300])


def requests(pool: LoadConnections, prompt_bytes: int, tokens: int) -> list[bytes]:
    """Whole HTTP requests, made before anything is measured."""
    found = []
    for number in range(BODIES):
        text = text_of(b"bench %d" % number, prompt_bytes)
        said = {"model": MODEL, "prompt": text, "max_tokens": tokens, "stream": True, "temperature": 0}
        body = msgspec.json.encode(said | {"stream_options": {"include_usage": True}})
        head = f"POST {pool.base}/v1/completions HTTP/1.1\r\nhost: {pool.netloc}\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {KEY}\r\n"
        found.append(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    return found


async def closed_loop(url: str, connections: int, count: int, prompt_bytes: int, tokens: int) -> Sent:
    """Send `count` requests, `connections` at a time, each as soon as the one before is answered."""
    pool = LoadConnections(url)
    sent = Sent()
    turns = itertools.cycle(requests(pool, prompt_bytes, tokens))
    numbers = iter(range(count))
    expected = events(tokens)

    async def one_after_the_other() -> None:
        for _ in numbers:
            await _exchange(pool, next(turns), expected, sent)

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(one_after_the_other())
    finally:
        pool.close()
    sent.elapsed_s = time.perf_counter() - began
    return sent


async def _exchange(pool: LoadConnections, request: bytes, expected: Sequence[bytes], sent: Sent) -> None:
    listener = _Answer(asyncio.get_running_loop().create_future())
    try:
        async with asyncio.timeout(ANSWER_S):
            connection = pool.idle() or await pool.connect()
            connection.send(request, listener)
            status = await listener.over
    except (Failed, TimeoutError) as error:
        sent.fail(f"{type(error).__name__}: {error}")
        return
    sent.take(status, b"".join(listener.pieces), b"".join(expected), listener.why)


def tokens_of(body: bytes) -> list[str]:
    """The texts of a stream's events; an event that is no JSON stands for itself."""
    found: list[str] = []
    for line in body.split(b"\n"):
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        try:
            choices = msgspec.json.decode(data)["choices"]
        except (msgspec.DecodeError, LookupError, TypeError):
            return [*found, data.decode(errors="replace")]
        found += [choice["text"] for choice in choices]
    return found


class _Answer:
    """Reads one answer."""

    __slots__ = ("over", "pieces", "why")

    def __init__(self, over: asyncio.Future[int]) -> None:
        self.over, self.why = over, ""
        self.pieces: list[bytes] = []

    def piece(self, status: int, data: bytes, now: float) -> None:
        self.pieces.append(data)

    def ended(self, status: int, now: float) -> None:
        if not self.over.done():
            self.over.set_result(status)

    def broke(self, why: str, now: float, *, stale: bool) -> None:
        self.why = why
        if not self.over.done():
            self.over.set_result(0)
