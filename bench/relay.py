"""The floor: a relay with the hand-over's two legs and nothing else. Not a product.

    python -m bench.relay --prefill-url URL … --decode-url URL …      prints `ready relay http://127.0.0.1:PORT`

It takes turns, and has no other policy, no checks, no limits, no retries, no metrics. Bodies are not parsed: leg 1 is
the client's body with fields appended (of equal keys the last counts, in every known JSON parser), leg 2 the same with
the fields that P answered. D's bytes go to the client unchanged. A router's cost beyond this pays for what it does
beyond this.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

LEG_1 = (
    b',"max_tokens":1,"stream":false,"stream_options":null,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}'
)
FIELDS = b'"kv_transfer_params":'
REQUEST = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class Pool:
    """Keep-alive connections to one engine."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        self.netloc = parts.netloc.encode()
        self.idle: list[Upstream] = []

    async def take(self) -> Upstream:
        """An idle connection or a new one."""
        if self.idle:
            return self.idle.pop()
        _, made = await asyncio.get_running_loop().create_connection(lambda: Upstream(self), self.host, self.port)
        return made


class Upstream(asyncio.Protocol):
    """One connection to an engine: collects an answer for leg 1, passes it on for leg 2."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._to: Client | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, path: bytes, body: bytes, client: Client, *, raw: bool) -> None:
        """Send a leg; its answer goes to `client`, as raw bytes or whole."""
        self._to, self._raw, self._body = client, raw, bytearray()
        self._transport.write(REQUEST % (path, self._pool.netloc, len(body), body))

    def data_received(self, data: bytes) -> None:
        if self._to is not None and self._raw:
            self._to.transport.write(data)
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._raw:
            self._body += body

    def on_message_complete(self) -> None:
        client, self._to = self._to, None
        self._pool.idle.append(self)
        if client is not None and not self._raw:
            client.prefilled(bytes(self._body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._pool.idle:
            self._pool.idle.remove(self)
        if self._to is not None:
            self._to.transport.close()

    def drop(self) -> None:
        """The client has left."""
        self._to = None
        self._transport.abort()


class Client(asyncio.Protocol):
    """One client connection; requests one after the other."""

    def __init__(self, prefill: itertools.cycle[Pool], decode: itertools.cycle[Pool], tasks: asyncio.TaskGroup) -> None:
        self._prefill, self._decode, self._tasks = prefill, decode, tasks
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", bytearray()
        self._leg: Upstream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._body:
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")  # /health
            return
        self._open = bytes(self._body[: self._body.rindex(b"}")])
        self._body = bytearray()
        self._send(next(self._prefill), self._open + LEG_1, raw=False)

    def prefilled(self, said: bytes) -> None:
        """Leg 1 is answered: its fields go into leg 2. Without any, P refused, and the client gets the refusal."""
        if FIELDS not in said:
            self.transport.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
            return
        fields = said[said.rindex(FIELDS) : said.rindex(b"}")]
        self._send(next(self._decode), self._open + b"," + fields + b"}", raw=True)

    def _send(self, pool: Pool, body: bytes, *, raw: bool) -> None:
        if pool.idle:
            self._leg = pool.idle.pop()
            self._leg.send(self._path, body, self, raw=raw)
        else:
            self._tasks.create_task(self._connect(pool, body, raw=raw))

    async def _connect(self, pool: Pool, body: bytes, *, raw: bool) -> None:
        try:
            self._leg = await pool.take()
        except OSError:
            self.transport.close()
            return
        self._leg.send(self._path, body, self, raw=raw)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._leg is not None and self._leg._to is self:  # noqa: SLF001 - two halves of one relay
            self._leg.drop()


async def serve(prefill_urls: list[str], decode_urls: list[str]) -> None:
    """Relay until SIGTERM."""
    prefill, decode = (itertools.cycle([Pool(url) for url in urls]) for urls in (prefill_urls, decode_urls))
    async with asyncio.TaskGroup() as tasks:
        server = await asyncio.get_running_loop().create_server(
            lambda: Client(prefill, decode, tasks), "127.0.0.1", 0, backlog=4096
        )
        sys.stdout.write(f"ready relay http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-url", action="append", required=True, metavar="URL")
    parser.add_argument("--decode-url", action="append", required=True, metavar="URL")
    args = parser.parse_args()
    uvloop.run(serve(args.prefill_url, args.decode_url))
