"""A running pair of engines, vLLM's or mocks, and the requests that the checks of `engine_contract` send to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import struct
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from support.cluster import within
from support.tickets import ticketed

from cluster import wire
from cluster.instance import Load
from engine.vllm.metrics import parse_load

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "Once upon a time a small robot found a bright red lantern near the river. "
IDLE_S = 5.0
"""Seconds within which an idle engine's metrics show it as idle. vLLM updates its metrics once a step, and an engine
without work makes no steps."""


class RandomPrompts:
    """Random prompts of letters for the model that ships, and request bodies that ask for token ids."""

    chance: random.Random

    def prompt(self, tokens: int) -> list[int]:
        return [self.chance.randrange(97, 123) for _ in range(tokens)]

    def body(self, prompt: list[int], tokens: int = 6) -> dict[str, Any]:
        return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine of one model, by their URLs."""

    prefill: str
    decode: str
    model: str
    introduced: bool = False
    """Whether D pulls only from engines that it was introduced to, as Baton's connector does."""

    @property
    def both(self) -> tuple[str, str]:
        return self.prefill, self.decode

    def body(self, **more: Any) -> dict[str, Any]:
        """The body of a completion with a new prompt, which is in no prefix cache."""
        fresh = f"[{uuid.uuid4().hex}] {STORY}"
        return {"model": self.model, "prompt": fresh, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}

    def chat(self, **more: Any) -> dict[str, Any]:
        body = self.body(**more)
        return {**body, "messages": [{"role": "user", "content": body.pop("prompt")}]}

    def leg(self, path: str = COMPLETIONS, **more: Any) -> tuple[dict[str, Any], wire.TransferFields]:
        """Send a prefill leg, so that P holds the prompt. Returns the client's body and P's transfer fields."""
        body = self.body(**more) if path == COMPLETIONS else self.chat(**more)
        status, answer = ask(self.prefill, path, wire.prefill_body(body))
        assert status == 200, answer
        transfer = wire.read_transfer(answer)
        assert transfer is not None, answer
        return body, transfer

    def hand_over(self, path: str = COMPLETIONS, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Send both legs. Returns the client's body and D's answer."""
        body, transfer = self.leg(path, **more)
        status, answer = ask(self.decode, path, wire.decode_body(body, transfer))
        assert status == 200, answer
        return body, answer

    def pulled(self) -> int:
        return load(self.decode).external_kv_tokens

    def idle(self) -> bool:
        loads = [load(url) for url in self.both]
        return all(each.running == each.waiting == 0 and each.kv_usage == 0 for each in loads)


def load(url: str) -> Load:
    return parse_load(get(url, "/metrics")[1].decode())


def get(url: str, path: str, method: str = "GET") -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, method=method), timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(url: str, path: str, body: Any, *, content_type: str = "application/json", **headers: str) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(ticketed(url, body)).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url + path, raw, {"Content-Type": content_type, **named})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def stream(url: str, path: str, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The content type and the events of a stream; the stream has to end with [DONE]."""
    raw = json.dumps(ticketed(url, {**body, "stream": True})).encode()
    request = urllib.request.Request(url + path, raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        kind, text = answer.headers["Content-Type"], answer.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    events = text.removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    return kind, [json.loads(event.removeprefix("data: ")) for event in events]


class Open:
    """A request that has been sent and whose client may disconnect (`leave`) before the answer's end."""

    def __init__(self, url: str, path: str, body: dict[str, Any], request_id: str = "") -> None:
        address = urlsplit(url)
        self._response: http.client.HTTPResponse | None = None
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id or uuid.uuid4().hex}
        self._connection.request("POST", path, json.dumps(ticketed(url, body)), headers)

    def first_line(self) -> bytes:
        """The first line of a streamed answer; the stream goes on."""
        self._response = self._connection.getresponse()
        return self._response.readline()

    def answer(self) -> tuple[int, Any]:
        """The status and the body of an answer that is not streamed."""
        with contextlib.closing(self._connection), self._connection.getresponse() as response:
            return response.status, json.loads(response.read())

    def leave(self) -> None:
        """Disconnect with a TCP reset, as when the client's process dies."""
        if self._connection.sock is not None:
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()
        if self._response is not None:
            self._response.close()


def settles(pair: Pair, within_s: float = IDLE_S) -> None:
    """Wait until neither engine has a running request, a waiting request or a used KV block."""
    within(within_s, pair.idle)
