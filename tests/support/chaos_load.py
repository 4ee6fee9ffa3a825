"""Clients of the chaos suite: the requests they send, the answers they receive, and the verdict on each answer.

A mock's answer follows from the prompt alone, so the right answer is computed without an engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from random import Random
from typing import Any

import aiohttp
from support.chaos_scenarios import Limits

from engine.mock import asked
from engine.mock.asked import CHAT, COMPLETIONS
from engine.mock.prompts import said_tokens
from engine.mock.words import text_of

MODEL = "fake"
_LIMITS = asked.MockLimits(model=MODEL, max_model_len=8192, block_size=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One client's request."""

    id: str
    at_s: float
    path: str
    body: dict[str, Any]
    right: str
    leave_after: int | None = None
    """The client disconnects after so many events. 0: after `leave_s` seconds, in any case. None: it stays."""
    leave_s: float = 0.0

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


def asks(seed: int, count: int, span_s: float, leave: float, alike: float) -> list[Ask]:
    """A load of `count` requests spread over `span_s` seconds. A share `leave` of the clients disconnects early.

    The load has both endpoints, streamed answers and whole ones, short and long prompts; a share `alike` of the prompts
    begins alike.
    """
    rng = Random(f"load/{seed}")
    return [_ask(rng, f"c{seed}-{number}", span_s * number / count, leave, alike) for number in range(count)]


def _ask(rng: Random, name: str, at_s: float, leave: float, alike: float) -> Ask:
    story = "Once upon a time there was a system that handed over. " * rng.randint(1, 12)
    prompt = f"{story}[{name}] {rng.random()}" if rng.random() < alike else f"[{name}] {story}"
    body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.randint(6, 24), "temperature": 0}
    path = rng.choice((CHAT, COMPLETIONS))
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if rng.random() < 0.75:
        body["stream"] = True
        if rng.random() < 0.4:
            body["stream_options"] = {"include_usage": True}
    leaves = max(0, rng.randint(-6, 6)) if rng.random() < leave else None
    leave_s = rng.uniform(0.002, 0.03)
    return Ask(id=name, at_s=at_s, path=path, body=body, right=right(path, body), leave_after=leaves, leave_s=leave_s)


def right(path: str, body: dict[str, Any]) -> str:
    """The text that any healthy engine answers."""
    read = asked.read_asked(body, _LIMITS, chat=path == CHAT)
    (prompt,) = read.prompts
    assert read.max_tokens is not None
    return text_of(said_tokens(prompt, prompt.right, 0, read.max_tokens))


@dataclass(slots=True)
class Heard:
    """What one client received. Times are seconds since its request was sent."""

    status: int | None = None
    raw: bytes = b""
    whole: bool = False
    """The HTTP body ended as HTTP demands."""
    broken: str = ""
    """Why the connection broke; empty: it did not break."""
    left: bool = False
    gave_up: bool = False
    moments_s: list[float] = field(default_factory=list)
    """When the status, each piece of the body and the end came."""


class Kind(StrEnum):
    """How a request ended, as its client sees it."""

    RIGHT = "served right"
    ERROR = "true error"
    WRONG = "wrong text"
    HUNG = "hung"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one client's request."""

    ask: Ask
    kind: Kind
    why: str
    longest_s: float


async def send(session: aiohttp.ClientSession, url: str, ask: Ask, patience_s: float) -> Heard:
    """Send one request and read its answer, until the answer ends, the client disconnects or `patience_s` is over."""
    heard, began = Heard(), time.monotonic()

    def mark() -> None:
        heard.moments_s.append(time.monotonic() - began)

    try:
        async with asyncio.timeout(patience_s):
            headers = {"X-Request-Id": ask.id}
            async with session.post(url + ask.path, json=ask.body, headers=headers) as response:
                heard.status = response.status
                mark()
                while piece := await response.content.readany():
                    heard.raw += piece
                    mark()
                    if ask.leave_after is not None and heard.raw.count(b"\n\n") >= ask.leave_after:
                        heard.left = True
                        return heard
                heard.whole = True
    except TimeoutError:
        heard.gave_up = True
    except (aiohttp.ClientError, OSError) as error:
        heard.broken = str(error) or type(error).__name__
    mark()
    return heard


async def load(url: str, listed: Sequence[Ask], patience_s: float) -> list[Heard]:
    """Send all requests, each at its time. A client with `leave_after` 0 disconnects after its `leave_s` seconds."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(ask: Ask) -> Heard:
            await asyncio.sleep(ask.at_s)
            short = ask.leave_s if ask.leave_after == 0 else patience_s
            heard = await send(session, url, ask, short)
            if ask.leave_after == 0 and heard.gave_up:
                heard.gave_up, heard.left = False, True
            return heard

        async with asyncio.TaskGroup() as clients:
            tasks = [clients.create_task(one(ask)) for ask in listed]
        return [task.result() for task in tasks]


def judge(ask: Ask, heard: Heard, limits: Limits) -> Verdict:
    """The verdict on one answer: right, left, a true error, or one that must not occur (wrong text, hung)."""
    longest, allowed = _over(ask, heard, limits)

    def say(kind: Kind, why: str = "") -> Verdict:
        if kind in {Kind.RIGHT, Kind.ERROR} and longest > allowed:
            return Verdict(ask, Kind.HUNG, f"{longest:.2f} s of silence, {allowed:g} are allowed; {why}", longest)
        return Verdict(ask, kind, why, longest)

    if heard.gave_up:
        return say(Kind.HUNG, f"nothing more after {heard.moments_s[-2:]} s")
    told = _told(ask, heard)
    if told.text != ask.right[: len(told.text)]:
        return say(Kind.WRONG, f"another text: {told.text[-40:]!r}")
    if heard.left:
        return say(Kind.LEFT)
    if heard.broken:
        return say(Kind.ERROR, f"the connection broke: {heard.broken}")
    if told.error:
        return say(Kind.ERROR, told.error)
    if heard.status != 200 or not told.done or told.text != ask.right or told.reason != "length":
        return say(Kind.WRONG, f"a good end after {len(told.text)} of {len(ask.right)}: {told}")
    asked = not ask.stream or "stream_options" in ask.body
    if told.tokens != len(ask.right) // 4 and (asked or told.tokens is not None):
        return say(Kind.WRONG, f"usage says {told.tokens} tokens")
    return say(Kind.RIGHT)


def _over(ask: Ask, heard: Heard, limits: Limits) -> tuple[float, float]:
    """The longest silence relative to its limit, and that limit, both in seconds."""
    first = limits.first_token_s if ask.stream else limits.whole_s
    moments = [0.0, *heard.moments_s]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    silences = [(gap, (limits.stall_s if number else first) + limits.grace_s) for number, gap in enumerate(gaps)]
    return max(silences, key=lambda each: each[0] - each[1], default=(0.0, limits.grace_s))


@dataclass(slots=True)
class _Told:
    text: str = ""
    error: str = ""
    done: bool = False
    reason: str | None = None
    tokens: int | None = None


def _told(ask: Ask, heard: Heard) -> _Told:
    told = _Told()
    if heard.status == 200 and ask.stream:
        for event in heard.raw.decode(errors="replace").split("\n\n"):
            if event == "data: [DONE]":
                told.done = True
            elif event.startswith("data: ") and (fields := _json(event[6:])) is not None:
                _take(told, fields)
        return told
    fields = _json(heard.raw.decode(errors="replace"))
    if fields is not None:
        told.done = heard.whole
        _take(told, fields)
    if heard.status != 200 and heard.status is not None and not told.error:
        told.error = f"HTTP {heard.status}: {heard.raw[:120]!r}"
    return told


def _json(text: str) -> dict[str, Any] | None:
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _take(told: _Told, fields: dict[str, Any]) -> None:
    if "error" in fields:
        told.error = json.dumps(fields["error"])[:200]
    for choice in fields.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        told.text += part.get("content") or choice.get("text") or ""
        told.reason = choice.get("finish_reason") or told.reason
    usage = fields.get("usage")
    if usage:
        told.tokens = usage["completion_tokens"]


def wordy(verdicts: Sequence[Verdict], kinds: Sequence[Kind]) -> str:
    """The verdicts of these kinds as lines of text, for the message of a failed test."""
    bad = [each for each in verdicts if each.kind in kinds]
    return "\n".join(f"{each.ask.id} {each.ask.path} stream={each.ask.stream}: {each.kind}: {each.why}" for each in bad)
