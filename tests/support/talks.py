"""Conversations with a real cluster, and what clients see: times to the first token, and tokens computed again."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

TURNS = 4
SENTENCE = "On day {} the fox carried the baton to the mill and the owl carried it back. "


@dataclass
class Heard:
    """What the clients saw."""

    first_s: list[float] = field(default_factory=list)
    """Seconds to the first token, of turns after the first."""
    computed: int = 0
    """Prompt tokens of those turns that no cache had."""
    prompts: int = 0
    """All prompt tokens of those turns."""
    said: list[str] = field(default_factory=list)
    """Answers, turn by turn, in the order of the conversations."""
    asked: list[list[dict[str, str]]] = field(default_factory=list)
    """The messages that these answers are to."""


@dataclass
class Turn:
    """One answer."""

    text: str = ""
    first_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    """Comes last. Empty: the answer was not complete."""


def first_turns(talks: int) -> list[list[dict[str, str]]]:
    """The messages of the first turn of each conversation: some 1,300 tokens of its own, and a question."""
    return [[*_beginning(talk), {"role": "user", "content": _question(talk, 0)}] for talk in range(talks)]


def _beginning(talk: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": "".join(SENTENCE.format(100 * talk + day) for day in range(16))}]


def _question(talk: int, turn: int) -> str:
    return f"What happened on day {100 * talk + turn}?"


def converse(endpoint: str, talks: int, *, at_once: int = 1, seed: int | None = None) -> Heard:
    """Send one turn of each conversation, `at_once` at a time, then the next turns. A conversation begins with some
    1,300 tokens of its own.

    Args:
        endpoint: the router's URL.
        talks: how many conversations.
        at_once: clients.
        seed: of the order in each turn; None: always the same order. Where two clients keep one order, a router that
            only balances sends each conversation to the same instance again.
    """
    chance = random.Random(seed)
    heard, messages = Heard(), [_beginning(talk) for talk in range(talks)]
    with ThreadPoolExecutor(at_once) as clients:
        for turn in range(TURNS):
            for number, each in enumerate(messages):
                each.append({"role": "user", "content": _question(number, turn)})
            order = list(range(talks))
            if seed is not None:
                chance.shuffle(order)
            answers = dict(zip(order, clients.map(lambda at: ask(endpoint, messages[at]), order), strict=True))
            for number, each in enumerate(messages):
                answer = answers[number]
                heard.asked.append(list(each))
                each.append({"role": "assistant", "content": answer.text})
                heard.said.append(answer.text)
                if turn:
                    heard.first_s.append(answer.first_s)
                    cached = (answer.usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
                    heard.computed += answer.usage["prompt_tokens"] - cached
                    heard.prompts += answer.usage["prompt_tokens"]
    return heard


def ask(endpoint: str, messages: list[dict[str, str]], *, name: str = "", **more: Any) -> Turn:
    """One streamed answer. `name`: the request's id; `more`: fields of the body.

    Raises:
        OSError: the status is not 200, or the connection broke.
        KeyError: the stream ended with an error.
    """
    began, turn = time.monotonic(), Turn()
    for event in _stream(endpoint, messages, name, more):
        for choice in event["choices"]:
            said = choice["delta"].get("content") or ""
            turn.first_s = turn.first_s or (time.monotonic() - began if said or choice["finish_reason"] else 0.0)
            turn.text += said
        turn.usage = event.get("usage") or turn.usage
    return turn


def _stream(endpoint: str, messages: list[dict[str, str]], name: str, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
    body = {"model": "baton-tiny", "messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, **more}  # fmt: skip
    headers = {"Content-Type": "application/json", **({"X-Request-Id": name} if name else {})}
    request = urllib.request.Request(f"{endpoint}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    except urllib.error.HTTPError as refused:
        raise OSError(f"HTTP {refused.code}: {refused.read(300)!r}") from refused
