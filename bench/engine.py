"""A mock engine for measuring routers: speaks vLLM's hand-over over HTTP, computes nothing, and is cheap.

    python -m bench.engine --count 2        prints ["http://127.0.0.1:41001", …], one address for each engine

Leg 1 gets an answer with `kv_transfer_params`; leg 2 a stream of `max_tokens` events, each its own chunk and its own
write, `pace_ms` apart (0: all in one write). One process plays as many engines as asked for, each on a port of its own.
It reads a body by two searches, without parsing: no measurement may wait for it.

`POST /bench {"pace_ms": 10}` sets the pace, `GET /bench` gives counts: first legs, second legs with a transfer,
requests served whole, streams whose client left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from functools import lru_cache
from typing import Any, cast

import httptools
import uvloop

MODEL = "bench"
FIRST_LEG = re.compile(rb'"do_remote_decode"\s*:\s*true')
SECOND_LEG = re.compile(rb'"do_remote_prefill"\s*:\s*true')
NAMES_TOKEN = re.compile(rb'"return_token_ids"\s*:\s*true')
MAX_TOKENS = re.compile(rb'"max_tokens"\s*:\s*(\d{1,6})\b')
STREAM = re.compile(rb'"stream"\s*:\s*true')

BLOCKS_MAX = 16_384
"""Most blocks, those of the whole context that it reports."""

BLOCK_BYTES = 64
"""Of a prompt, for each block id in the transfer: 16 tokens of 4 bytes, as on a GPU."""

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def encode(said: Any) -> bytes:
    """Compact JSON, as vLLM writes it."""
    return json.dumps(said, separators=(",", ":")).encode()


def event(number: int, last: int) -> bytes:
    """Token `number` of a stream, as vLLM 0.32 writes it."""
    reason = "length" if number == last else None
    choice = {"index": 0, "text": f" t{number}", "logprobs": None, "finish_reason": reason, "stop_reason": None}
    said = {"id": "cmpl-bench", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + encode(said) + b"\n\n"


def ending(tokens: int) -> tuple[bytes, bytes]:
    """The usage event and the end of the stream."""
    usage = {"prompt_tokens": 8, "total_tokens": 8 + tokens, "completion_tokens": tokens}
    said = {"id": "cmpl-bench", "object": "text_completion", "created": 1, "model": MODEL, "choices": []}
    return b"data: " + encode({**said, "usage": usage}) + b"\n\n", b"data: [DONE]\n\n"


@lru_cache(maxsize=64)
def events(tokens: int) -> tuple[bytes, ...]:
    """Every event of an answer of so many tokens."""
    return (*(event(number, tokens) for number in range(1, tokens + 1)), *ending(tokens))


@lru_cache(maxsize=64)
def writes(tokens: int) -> tuple[bytes, ...]:
    """The events in the form in which they are written: a chunk for each token, and the ending after the last one."""
    *told, usage, done = map(chunk, events(tokens))
    return (*told[:-1], told[-1] + usage + done + b"0\r\n\r\n")


@lru_cache(maxsize=256)
def prefilled(blocks: int, *, named: bool = False) -> bytes:
    """The whole answer to leg 1. `named`: it gives its token's id."""
    choice = {"index": 0, "text": " t1", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    choice |= {"token_ids": [1]} if named else {}
    fields = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, blocks + 1))],
        "remote_engine_id": "0f2f5a0e-9c3b-4a43-9a3a-1c4f0a8f3c55",
        "remote_request_id": "cmpl-bench-0-8a7b6c5d",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": blocks * 16,
    }
    said: dict[str, Any] = {"id": "cmpl-bench", "object": "text_completion", "created": 1, "model": MODEL}
    usage = {"prompt_tokens": blocks * 16, "total_tokens": blocks * 16 + 1, "completion_tokens": 1}
    return answer(encode({**said, "choices": [choice], "usage": usage, "kv_transfer_params": fields}))


def answer(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    """A whole HTTP answer."""
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


class Engines:
    """The state that all engines of this process share."""

    def __init__(self) -> None:
        self.pace_s = 0.0
        self.first_legs = self.second_legs = self.whole = self.cut = 0

    def plain(self, url: bytes, body: bytes) -> bytes:
        """The answer to a request that is no generation."""
        if url == b"/v1/models":
            listed = [{"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "max_model_len": 262144}]
            return answer(encode({"object": "list", "data": listed}))
        if url == b"/metrics":
            return answer(b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n", b"text/plain; version=0.0.4")
        if url == b"/bench":
            if body:
                self.pace_s = json.loads(body)["pace_ms"] / 1000
            return answer(encode(vars(self)))
        if url in {b"/health", b"/ping", b"/load", b"/v1/traces"}:
            return answer(b"{}")
        if url == b"/v1/embeddings":
            return answer(encode({"object": "list", "data": [], "model": MODEL}))
        if url == b"/v1/audio/transcriptions":
            return answer(b'{"text":""}')
        return answer(b'{"error":{"message":"not here","code":404}}', status=b"404 Not Found")


class Connection(asyncio.Protocol):
    """One connection; requests one after the other."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._left: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._engines.cut += 1

    # httptools' callbacks

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = bytes(self._body), bytearray()
        url = self._url.partition(b"?")[0]
        if url not in {b"/v1/completions", b"/v1/chat/completions"}:
            self._transport.write(self._engines.plain(url, body))
        elif FIRST_LEG.search(body):
            self._engines.first_legs += 1
            named = NAMES_TOKEN.search(body) is not None
            self._transport.write(prefilled(min(BLOCKS_MAX, max(1, len(body) // BLOCK_BYTES)), named=named))
        else:
            self._generate(body)

    def _generate(self, body: bytes) -> None:
        if SECOND_LEG.search(body):
            self._engines.second_legs += 1
        else:
            self._engines.whole += 1
        wanted = MAX_TOKENS.search(body)
        tokens = int(wanted[1]) if wanted else 16
        if not STREAM.search(body):
            self._transport.write(prefilled(1))  # for a router that probes; no measurement uses it
            return
        first, *rest = writes(tokens)
        pace_s = self._engines.pace_s
        if not pace_s or not rest:
            self._transport.write(STREAM_HEAD + first + b"".join(rest))
            return
        self._transport.write(STREAM_HEAD + first)
        self._left = rest[::-1]
        self._due = self._loop.time() + pace_s
        self._timer = self._loop.call_at(self._due, self._next)

    def _next(self) -> None:
        self._transport.write(self._left.pop())
        if self._left:
            self._due += self._engines.pace_s
            self._timer = self._loop.call_at(self._due, self._next)
        else:
            self._timer = None


async def serve(count: int) -> None:
    """Open the ports, print their addresses, and serve until stdin ends or SIGTERM."""
    loop = asyncio.get_running_loop()
    engines = Engines()
    servers = [
        await loop.create_server(lambda: Connection(engines), "127.0.0.1", 0, backlog=4096) for _ in range(count)
    ]
    sys.stdout.write(json.dumps([f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers]) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2, metavar="N", help="engines, each on its own port (default 2)")
    uvloop.run(serve(parser.parse_args().count))
