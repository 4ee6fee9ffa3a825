"""An engine that answers any bytes. Without a script it answers correctly; a script gives the answer's bytes, and what
to do with the connection afterwards. `fake_engine` behaves as a well-formed HTTP server; this engine need not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cluster.ids import InstanceId
from cluster.instance import Instance, Role

TOKENS = ("one ", "two ", "three ")
TEXT = "".join(TOKENS)
FIRST_TOKEN = 11


@dataclass(frozen=True)
class Asked:
    """One request that the engine has read."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int
    """The number of the engine's connection that it came on, counted from 1."""

    @property
    def prefills(self) -> bool:
        """Whether the request is a prefill leg."""
        return bool((self.body.get("kv_transfer_params") or {}).get("do_remote_decode"))


@dataclass(frozen=True)
class Script:
    """The pieces to write, and what to do with the connection then: `keep`, `close`, `reset` or `hang`."""

    pieces: tuple[bytes, ...]
    then: str = "keep"


def says(*pieces: bytes, then: str = "keep") -> Script:
    """A script of these pieces."""
    return Script(pieces, then)


def head(*lines: str, status: str = "200 OK") -> bytes:
    """The head of an answer."""
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode("latin-1")


def whole(body: bytes, *lines: str, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """A complete answer with a `Content-Length`."""
    return head(f"Content-Type: {kind}", f"Content-Length: {len(body)}", *lines, status=status) + body


def chunk(data: bytes) -> bytes:
    """A chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = head("Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str, *, chat: bool = False, end: str | None = None) -> bytes:
    """The event of one token in a stream."""
    said = {"delta": {"content": text}} if chat else {"text": text}
    return b"data: " + json.dumps({"choices": [{"index": 0, **said, "finish_reason": end}]}).encode() + b"\n\n"


def stream(*events: bytes) -> bytes:
    """A complete stream, with one chunk for each event."""
    return STREAM + b"".join(map(chunk, events)) + LAST_CHUNK


def completion(text: str = TEXT, *, chat: bool = False, end: str = "stop", **more: Any) -> bytes:
    """The body of an answer that is not streamed."""
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return json.dumps({"id": "x", "choices": [{"index": 0, **said, "finish_reason": end}], **more}).encode()


def honest(asked: Asked, name: str) -> bytes:
    """The right answer of the engine `name`."""
    if asked.method == "GET":
        return _told(asked.path, name)
    body, chat = asked.body, "chat" in asked.path
    if body.get("model") != "fake":
        return whole(b'{"error":{"message":"no such model","code":404}}', status="404 Not Found")
    if "completions" not in asked.path:
        return whole(json.dumps({"path": asked.path, "tokens": [1, 2]}).encode())
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    if asked.prefills:
        hold = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": name,
            "remote_request_id": asked.headers["x-request-id"],
            "remote_num_tokens": 7,
        }
        raw = json.loads(completion(TOKENS[0], chat=chat, end="length", usage=usage, kv_transfer_params=hold))
        raw["choices"][0]["token_ids"] = [FIRST_TOKEN]
        return whole(json.dumps(raw).encode())
    if body.get("stream") is not True:
        return whole(completion(chat=chat, usage=usage))
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    last = event("", chat=chat, end="stop")
    return stream(*([role] if chat else []), *(event(each, chat=chat) for each in TOKENS), last, DONE)


def _told(path: str, name: str) -> bytes:
    if path == "/v1/models":
        return whole(b'{"object":"list","data":[{"id":"fake","object":"model","max_model_len":99}]}')
    if path == "/health":
        return whole(b"")
    if path == "/metrics":
        return whole(b"vllm:num_requests_running 0\n", kind="text/plain")
    return whole(f'{{"detail":"{name} has no such path"}}'.encode(), status="404 Not Found")


@dataclass
class HostileEngine:
    """One engine. `script` returns the answer to a request; None: the engine gives the right answer."""

    name: str
    role: Role
    script: Callable[[Asked], Script | None] = lambda _: None
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    """The POST requests that the engine has read."""
    connections: int = 0
    cut: int = 0
    """Connections that the router closed while the engine was writing a script's pieces or hung."""
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def instance(self) -> Instance:
        """The engine as a router's configuration lists it."""
        return Instance(id=InstanceId(self.name), role=self.role, url=self.url, pins=True)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HostileEngine]:
        """Listen on a free port until the context ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for writer in list(self._writers):
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self._writers.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._answer(reader, writer, number):
                    pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        """Read and answer one request. Returns whether the connection stays open for the next one."""
        asked = await _read(reader, number)
        if asked.method == "POST":
            self.asked.append(asked)
        script = self.script(asked) or Script((honest(asked, self.name),))
        try:
            for piece in script.pieces:
                writer.write(piece)
                await writer.drain()
                if len(script.pieces) > 1:
                    await asyncio.sleep(0)
            if script.then == "hang":
                await reader.read()
                self.cut += 1
        except ConnectionError:
            self.cut += 1
            raise
        if script.then == "reset":
            writer.transport.abort()
        return script.then == "keep"


async def _read(reader: asyncio.StreamReader, number: int) -> Asked:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    raw = await reader.readexactly(int(headers.get("content-length", 0)))
    try:
        body = json.loads(raw) if raw else {}
    except ValueError:
        body = {}
    return Asked(method, path, headers, body if isinstance(body, dict) else {}, number)
