"""Engines with hostile answers: a client gets a whole answer, an error or a visible cut; honest requests are served."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from support.fuzzing import Beside, Case, Fuzzing, Told, post, router_beside, told, watched
from support.hostile_answers import hostile
from support.hostile_engine import DONE, TEXT, Asked, HostileEngine, Script

from cluster.instance import Role

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWER_BYTES_MAX = 1 << 20
TOGETHER = 60
"""Cases that run at once. They mostly wait for engines that hang; at once, they wait together."""
TRIES = 5
"""Tries of an honest request: on a busy machine it may miss the short deadlines that this test sets."""
GROWN_BYTES_MAX = 256 << 20


def request_of(chance: random.Random) -> tuple[str, dict[str, object]]:
    """Path and body of a random valid request."""
    path = chance.choice((COMPLETIONS, COMPLETIONS, CHAT, CHAT, "/tokenize"))
    body: dict[str, object] = {"model": "fake"}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body["prompt"] = "hello"
    if path != "/tokenize":
        body |= {"max_tokens": chance.choice((1, 5, 5, 5)), "stream": chance.random() < 0.6}
        body |= {"temperature": 0} if chance.random() < 0.5 else {}
    return path, body


def fault_in(path: str, streams: bool, answer: Told) -> str:
    """What is wrong with an answer to a client. Empty if the answer is whole, an error, or visibly cut off."""
    if path == "/tokenize":
        return ""  # relayed unread: `read_answer` has seen that it is well-formed
    if not answer.status:
        return "cut off without a word"
    if answer.status != 200:
        try:
            said = json.loads(answer.body)
        except ValueError:
            return f"an error without JSON: {answer.body[:200]!r}"
        return "" if answer.whole and 400 <= answer.status < 600 and isinstance(said, dict) else "no error"
    if streams:
        ended = answer.body.endswith(DONE) or b"\ndata: [DONE]" in answer.body
        return "" if ended or not answer.whole else f"a stream without an end: {answer.body[-200:]!r}"
    try:
        choices = json.loads(answer.body)["choices"]
    except (ValueError, KeyError, TypeError):
        return f"200 with no completion: {answer.body[:200]!r}"
    return "" if answer.whole and choices else f"200 with no completion: {answer.body[:200]!r}"


class Fleet:
    """Hostile engines, and the random numbers for the answers to each request."""

    def __init__(self) -> None:
        self.chances: dict[str, random.Random] = {}
        """Random numbers by request id: each leg of a request draws from them, in order."""
        roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
        self.engines = [HostileEngine(f"{role.value}-{at}", role) for at, role in enumerate(roles)]
        for engine in self.engines:
            engine.script = lambda asked, name=engine.name: self._script(asked, name)

    def _script(self, asked: Asked, name: str) -> Script | None:
        chance = self.chances.get(asked.headers.get("x-request-id", ""))
        return hostile(chance, asked, name) if chance is not None and chance.random() < 0.7 else None


@asynccontextmanager
async def hostile_fleet() -> AsyncIterator[tuple[Fleet, Beside]]:
    fleet = Fleet()
    async with AsyncExitStack() as stack:
        for engine in fleet.engines:
            await stack.enter_async_context(engine.open())
        limits = {"first_token_s": 1.0, "stall_s": 0.6, "whole_s": 1.0, "answer_bytes_max": ANSWER_BYTES_MAX}
        instances = [engine.instance for engine in fleet.engines]
        yield fleet, await stack.enter_async_context(router_beside(instances, **limits))


async def send(fleet: Fleet, router: Beside, case: Case) -> None:
    """Send one request to engines that misbehave, and judge its answer."""
    with case:
        path, body = request_of(case.chance)
        name = f"case-{case.seed}"
        fleet.chances[name] = case.chance
        try:
            answer = await told(router.endpoint, post(path, json.dumps(body).encode(), X_Request_Id=name), within_s=20)
        finally:
            del fleet.chances[name]
        fault = fault_in(path, bool(body.get("stream")), answer)
        assert not fault, (fault, path, body, answer.status)
        assert not router.bugs, router.bugs[0]


async def served_right(router: Beside) -> None:
    """Check that honest requests are served, in one piece and streamed."""
    for stream in (False, True):
        body = {"model": "fake", "prompt": "hello", "max_tokens": 5, "stream": stream, "temperature": 0}
        for _ in range(TRIES):
            answer = await told(router.endpoint, post(COMPLETIONS, json.dumps(body).encode()))
            if answer.status != 504 and b'"DeadlineExceededError"' not in answer.body:
                break
        assert (answer.status, answer.whole) == (200, True), answer
        if stream:
            events = [json.loads(each[6:]) for each in answer.body.split(b"\n\n") if each.startswith(b"data: {")]
            assert answer.body.endswith(DONE)
        else:
            events = [json.loads(answer.body)]
        assert "".join(each["choices"][0]["text"] for each in events) == TEXT


async def test_hostile_answers(fuzz: Fuzzing) -> None:
    async with hostile_fleet() as (fleet, router), watched(router) as watch:
        for cases in fuzz.rounds(fixed=60, together=TOGETHER):
            async with asyncio.TaskGroup() as group:
                for case in cases:
                    group.create_task(send(fleet, router, case))
            await served_right(router)
    assert watch.grown_bytes < GROWN_BYTES_MAX
