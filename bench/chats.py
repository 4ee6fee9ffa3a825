"""Chat sessions as people hold them, sent in an open loop; measures each turn's time to its first token.

Sessions arrive at random, whatever happened to the earlier ones. A session begins with one of a few system prompts, or
with a text of its own. Each of its turns brings the whole conversation so far, comes a while after the answer before,
and is timed from the moment when it was due.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadgen.http import Failed, LoadConnections
from loadgen.prompts import text_of
from loadgen.stream import Tally

ANSWER_S = 10.0
"""An answer that is not whole by then has failed."""

BYTES_PER_TOKEN = 4
"""Bytes of text that a mock counts as one token."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Which sessions come, and how fast."""

    name: str
    sessions: int
    per_s: float
    """Sessions that begin in a second, on average."""
    turns: int
    systems: int
    """System prompts that sessions share; 0: each has a text of its own instead."""
    system_tokens: int
    user_tokens: int
    answer_tokens: int
    think_s: float
    """From an answer to the next turn, on average."""


@dataclass(slots=True)
class Seen:
    """Clients' measurements of a phase."""

    ttft_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    """How late each turn was sent after it was due: the sender's own fault."""
    prompt_tokens: int = 0
    failed: list[str] = field(default_factory=list)


async def hold(url: str, model: str, scenario: Scenario, salt: str, shared: str, seed: int) -> Seen:
    """Run all sessions of a phase to their ends.

    Args:
        url: the router.
        model: its name there.
        scenario: the sessions.
        salt: makes the users' texts different from those of every other phase.
        shared: the same for the system prompts: a phase with another phase's value finds them in the caches.
        seed: of arrivals and pauses, so that each contestant has the same.
    """
    seen, pool, chance = Seen(), LoadConnections(url), random.Random(seed)
    try:
        async with asyncio.TaskGroup() as group:
            due_s = time.perf_counter()
            for number in range(scenario.sessions):
                due_s += chance.expovariate(scenario.per_s)
                session = _Session(pool, model, scenario, seen, random.Random(chance.random()))
                group.create_task(session.run(due_s, f"{salt} {number}", shared))
    finally:
        pool.close()
    return seen


class _Session:
    """One client's session."""

    def __init__(
        self, pool: LoadConnections, model: str, scenario: Scenario, seen: Seen, chance: random.Random
    ) -> None:
        self.pool, self.model, self.scenario, self.seen, self.chance = pool, model, scenario, seen, chance

    async def run(self, due_s: float, name: str, shared: str) -> None:
        """Send turn after turn; a failed turn ends the session."""
        scenario = self.scenario
        which = f"system {shared} {self.chance.randrange(scenario.systems)}" if scenario.systems else f"own {name}"
        system = text_of(which.encode(), scenario.system_tokens * BYTES_PER_TOKEN)
        messages: list[dict[str, str]] = [{"role": "system", "content": system}]
        for turn in range(scenario.turns):
            said = text_of(f"user {name} {turn}".encode(), scenario.user_tokens * BYTES_PER_TOKEN)
            messages.append({"role": "user", "content": said})
            await asyncio.sleep(due_s - time.perf_counter())
            answer = await self._ask(messages, due_s, name)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})
            due_s = time.perf_counter() + self.chance.expovariate(1.0) * scenario.think_s

    async def _ask(self, messages: Sequence[dict[str, str]], due_s: float, name: str) -> str | None:
        request, listener = self._request(messages, name), _Answer(asyncio.get_running_loop().create_future())
        sent_s = due_s
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = self.pool.idle() or await self.pool.connect()
                sent_s = time.perf_counter()
                connection.send(request, listener)
                why = await listener.over
        except (Failed, TimeoutError) as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            self.seen.failed.append(why)
            return None
        answered = listener.tally.end()
        if answered.error or not answered.token_s:
            self.seen.failed.append(answered.error or "no token")
            return None
        self.seen.late_ms.append((sent_s - due_s) * 1e3)
        self.seen.ttft_ms.append((answered.token_s[0] - due_s) * 1e3)
        self.seen.prompt_tokens += answered.prompt_tokens or 0
        return text_in(b"".join(listener.pieces))

    def _request(self, messages: Sequence[dict[str, str]], name: str) -> bytes:
        said: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": self.scenario.answer_tokens}
        said |= {"stream": True, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
        body = msgspec.json.encode(said)
        head = f"POST {self.pool.base}/v1/chat/completions HTTP/1.1\r\nhost: {self.pool.netloc}\r\n"
        # The header by which vllm-router's consistent_hash knows a session.
        head += f"content-type: application/json\r\nx-session-id: {name.replace(' ', '-')}\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def text_in(body: bytes) -> str:
    """The text of a stream of chat events."""
    found = []
    for line in body.split(b"\n"):
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            choices = msgspec.json.decode(data).get("choices", ())
            found += [choice.get("delta", {}).get("content") or "" for choice in choices]
    return "".join(found)


class _Answer:
    """Reads one answer."""

    __slots__ = ("over", "pieces", "tally")

    def __init__(self, over: asyncio.Future[str]) -> None:
        self.over, self.tally = over, Tally()
        self.pieces: list[bytes] = []

    def piece(self, status: int, data: bytes, now: float) -> None:
        self.pieces.append(data)
        self.tally.feed(data, now)

    def ended(self, status: int, now: float) -> None:
        self._over("" if status == 200 else f"HTTP {status}: {b''.join(self.pieces)[:200]!r}")

    def broke(self, why: str, now: float, *, stale: bool) -> None:
        self._over(why or "the connection broke")

    def _over(self, why: str) -> None:
        if not self.over.done():
            self.over.set_result(why)
