"""Sampled answers have one engine's distribution, whichever engines make them and whatever fails on the way.

Four first tokens are equally likely. A script gives the draws of one request, in the order in which engines draw, and
each possible script is played once. So each first token must begin the same number of answers, with no error of chance.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from support.fake_engine import FakeEngine
from support.fleet import Fleet, Starter, eventually

from cluster.wire import EARLY, PINS, TOLD_EARLY, TRANSFER
from cluster.wire import FIRST_TOKEN as PIN

END, HALF, STOP, WORD = TOKENS = range(4)
"""The end of the text, half of a character, a text that may begin a stop string, a word."""
SHOWN = {END: "", HALF: "\ufffd", STOP: "S", WORD: "a"}
"""The text of a token that stands alone, as P tells it."""
ANSWERS = {END: [""], HALF: ["é", "!"], STOP: ["S", "!"], WORD: ["a", "!"]}
"""The texts of the answer that begins with this token, piece by piece."""
SAMPLED = {"model": "fake", "prompt": "hello", "max_tokens": 5, "temperature": 1, "stop": ["Sx"]}


@dataclass
class Lots:
    """The draws of one request, and what its engines do."""

    script: tuple[int, ...] = ()
    drawn: int = 0
    pins: bool = False
    """Engines begin with the token that they are told."""
    fails: str = ""
    """The kind of leg (``prefill``, ``decode``) whose first one fails."""
    deaf: bool = False
    """Engines with early legs do not hear P: they compute the prompt, and draw for themselves."""
    asked: list[asyncio.Future[int]] = field(default_factory=list)
    """Those that early legs wait for."""
    notices: dict[str, asyncio.Future[int]] = field(default_factory=dict)
    """P's notices for early legs, by the name of the hold."""

    def draw(self) -> int:
        self.drawn += 1
        return self.script[self.drawn - 1]

    def begin(self, script: tuple[int, ...], fails: str) -> None:
        self.script, self.drawn, self.fails = script, 0, fails

    def notice(self, name: str) -> asyncio.Future[int]:
        return self.notices.setdefault(name, asyncio.get_running_loop().create_future())

    @property
    def waits(self) -> bool:
        """Whether an early leg waits for P."""
        return any(not each.done() and each in self.asked for each in self.notices.values())

    def strikes(self, leg: str) -> bool:
        """Whether this leg fails; only the first one does."""
        if self.fails != leg:
            return False
        self.fails = ""
        return True


def plays(lots: Lots, engine: FakeEngine) -> None:
    """Let an engine draw by the script."""

    async def prefill(request: web.Request, body: dict[str, Any]) -> web.Response:
        answer = json.loads((await engine._prefill(request)).text or "")
        token, choice = lots.draw(), answer["choices"][0]
        choice |= {"text": SHOWN[token], "finish_reason": "stop" if token == END else "length"}
        if "token_ids" in choice:
            choice["token_ids"] = [token]
        if lots.strikes("prefill"):
            choice["finish_reason"] = "abort"
        else:
            notice = lots.notice(body["kv_transfer_params"][TRANSFER])
            answer["kv_transfer_params"][TOLD_EARLY] = lots.waits and not lots.deaf
            notice.set_result(token)
        return web.json_response(answer)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fields = body.get("kv_transfer_params") or {}
        pinned = fields.get(PIN) if lots.pins else None
        if EARLY in fields:
            notice = lots.notice(fields[TRANSFER])
            lots.asked.append(notice)
            told = await asyncio.shield(notice)
            if lots.deaf:
                await asyncio.sleep(0.02)  # so that P's answer comes first
            pinned = told if fields[PINS] and not lots.deaf else None
            engine.peers[fields[EARLY]].holds.clear()
        engine._free(fields)
        if lots.strikes("decode"):
            return web.json_response({"error": {"message": "boom"}}, status=500)
        return await said(request, body, lots.draw() if pinned is None else pinned)

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked = body.get("kv_transfer_params") or {}
        return await (prefill if asked.get("do_remote_decode") else answer)(request, body)

    engine.behave = behave


async def said(request: web.Request, body: dict[str, Any], token: int) -> web.StreamResponse:
    """The answer that begins with this token."""
    texts, reason = ANSWERS[token], "stop" if token == END else "length"
    if not body.get("stream"):
        choice = {"index": 0, "text": "".join(texts), "finish_reason": reason}
        return web.json_response({"id": "x", "choices": [choice]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for text, ends in zip(texts, [None] * (len(texts) - 1) + [reason], strict=True):
        choices = [{"index": 0, "text": text, "finish_reason": ends}]
        await response.write(f"data: {json.dumps({'choices': choices})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def first_of(fleet: Fleet, body: dict[str, Any]) -> int:
    """The token with which the answer to this body begins."""
    status, answer = await fleet.post("/v1/completions", json=body)
    assert status == 200, answer
    if body.get("stream"):
        events = [json.loads(each.removeprefix("data: ")) for each in answer.strip().split("\n\n")[:-1]]
        text = "".join(event["choices"][0]["text"] for event in events)
    else:
        text = answer["choices"][0]["text"]
    return next(token for token, texts in ANSWERS.items() if "".join(texts) == text)


async def measured(fleet: Fleet, lots: Lots, body: dict[str, Any], *, fails: str = "", draws: int = 2) -> Counter[int]:
    """How many answers begin with each token, over all scripts of so many draws."""
    begun: Counter[int] = Counter()
    for script in itertools.product(TOKENS, repeat=draws):
        lots.begin(script, fails)
        begun[await first_of(fleet, body)] += 1
    return begun


async def started(start: Starter, *, pins: bool, **settings: Any) -> tuple[Fleet, Lots]:
    lots = Lots(pins=pins)

    def prepare(engines: dict[str, FakeEngine]) -> None:
        for engine in engines.values():
            plays(lots, engine)

    return await start(pins=pins, prepare=prepare, **settings), lots


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("pins", [False, True], ids=["unpinned", "pinned"])
@pytest.mark.parametrize(
    ("settings", "seed"),
    [({}, {}), ({"early": True}, {}), ({"seeding": False}, {}), ({}, {"seed": -1})],
    ids=["late leg", "early leg", "no seeds", "seed -1"],
)
async def test_each_first_token_has_its_own_chance(
    start: Starter, stream: bool, pins: bool, settings: dict[str, Any], seed: dict[str, Any]
) -> None:
    fleet, lots = await started(start, pins=pins, **settings)
    begun = await measured(fleet, lots, {**SAMPLED, **seed, "stream": stream})
    assert begun == dict.fromkeys(TOKENS, 4)
    assert any(leg["kv_transfer_params"] for leg in fleet.engines["decode-0"].generated), "answers were handed over"
    await eventually(lambda: fleet.held == 0, "no hold is left")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("pins", [False, True], ids=["unpinned", "pinned"])
@pytest.mark.parametrize("fails", ["prefill", "decode"])
async def test_a_leg_that_fails_changes_no_chance(start: Starter, stream: bool, pins: bool, fails: str) -> None:
    """P's token stays the answer's first, also if another P computes the prompt again and draws another one."""
    fleet, lots = await started(start, pins=pins, prefill=2, decode=2)
    begun = await measured(fleet, lots, {**SAMPLED, "stream": stream}, fails=fails, draws=3)
    assert begun == dict.fromkeys(TOKENS, 16)
    await eventually(lambda: fleet.held == 0, "no hold is left")


async def test_a_draw_that_is_lost_with_the_only_engine_that_takes_it_is_drawn_again(start: Starter) -> None:
    """The client has nothing of the lost draw, and the engine's loss does not depend on it."""
    deaf = frozenset({"prefill-0", "decode-1"})
    fleet, lots = await started(start, pins=True, decode=2, deaf=deaf)
    begun: Counter[int] = Counter()
    for script in itertools.product((END, HALF, STOP), TOKENS, TOKENS, TOKENS):
        lots.begin(script, "decode")
        begun[await first_of(fleet, {**SAMPLED, "stream": True})] += 1
    assert begun == dict.fromkeys(TOKENS, 48)
    told = [(leg.get("kv_transfer_params") or {}).get(PIN) for leg in fleet.engines["decode-0"].generated]
    assert any(token is not None for token in told), "some answers were bound before the loss"
    await eventually(lambda: fleet.held == 0, "no hold is left")


async def test_an_early_leg_that_has_not_heard_of_ps_token_changes_no_chance(start: Starter) -> None:
    """If the client has P's token, another instance goes on with it. If not, D is told it before it answers."""
    fleet, lots = await started(start, pins=True, early=True, decode=2)
    lots.deaf = True
    assert await measured(fleet, lots, {**SAMPLED, "stream": True}, draws=3) == dict.fromkeys(TOKENS, 16)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("given", [{"temperature": 0}, {"seed": 7}], ids=["greedy", "seed"])
async def test_an_answer_without_chance_is_what_each_engine_would_say(
    start: Starter, stream: bool, given: dict[str, Any]
) -> None:
    fleet, lots = await started(start, pins=True)
    for token in TOKENS:
        lots.begin((token,) * 3, "")
        assert await first_of(fleet, {**SAMPLED, **given, "stream": stream}) == token
