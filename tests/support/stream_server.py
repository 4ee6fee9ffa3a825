"""A minimal streaming server, for measurements of the load generator.

One timer sends one token to every open answer every `step_s`. An answer is open from `first_s` after its request on.
`python -m support.stream_server [PORT [STEP_MS [FIRST_MS]]]`, run in `tests/`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = chunk(b'data: {"id":"x","choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n')
LAST = chunk(b'data: {"id":"x","choices":[{"index":0,"text":" end","finish_reason":"length"}]}\n\n')


def ending(tokens: int) -> bytes:
    usage = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":8,"completion_tokens":%d}}\n\n' % tokens
    return LAST + chunk(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Streams(asyncio.Protocol):
    """One connection. Of a request, only its length is read."""

    def __init__(self, open_answers: dict[Streams, int], tokens: int, first_s: float) -> None:
        self._open, self._tokens, self._first_s, self._buffer = open_answers, tokens, first_s, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, gap, body = self._buffer.partition(b"\r\n\r\n")
        if not gap:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        self._buffer = body[length:]
        self.transport.write(HEAD)
        if self._first_s:
            asyncio.get_running_loop().call_later(self._first_s, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        if not self.transport.is_closing():
            self._open[self] = self._tokens

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)


async def serve(port: int, step_s: float, first_s: float, tokens: int = 50) -> None:
    open_answers: dict[Streams, int] = {}
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Streams(open_answers, tokens, first_s), "127.0.0.1", port, backlog=4096)
    next_at = loop.time()
    while True:
        next_at += step_s
        await asyncio.sleep(max(0.0, next_at - loop.time()))
        for stream, left in list(open_answers.items()):
            if left > 1:
                stream.transport.write(TOKEN)
                open_answers[stream] = left - 1
            else:
                stream.transport.write(ending(tokens))
                open_answers.pop(stream, None)


if __name__ == "__main__":
    port, step_ms, first_ms = (*sys.argv[1:], *("18099", "20", "0")[len(sys.argv) - 1 :])
    uvloop.run(serve(int(port), float(step_ms) / 1000, float(first_ms) / 1000))
