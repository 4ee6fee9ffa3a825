"""The client's side of one exchange: what he is given, and what of it is remembered in case the stream breaks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import aiohttp
import msgspec
from aiohttp import web

from cluster.errors import ApiError
from cluster.request import Request
from router import journey as j
from router.account import Account
from router.exact import CHAT
from router.seam import ERROR_EVENT, Said, Seam, SeamBroken, Seed, said_in
from router.upstream import EngineLost, say

logger = logging.getLogger("baton.router")

EVENT_BYTES_MAX = 1 << 20
"""An event longer than this is passed on in pieces rather than kept."""

REMEMBERED_BYTES_MAX = 256 << 10
"""So much of a stream is kept for its resumption (about 1,000 chunks of vLLM's); a longer one ends with an error."""

LAST_EVENT = b"data: [DONE]"
CUT_OFF = b'"finish_reason":"length"'
"""In an answer that ended by its limit. In a text of the model's own its quotes would be escaped."""

_LEFT = (ConnectionError, aiohttp.ClientConnectionError)


class Reply:
    """What one client is told."""

    def __init__(
        self, http: web.Request, request: Request, account: Account, *, resumable: bool, counts: bool = False
    ) -> None:
        """`counts`: somebody wants to know how many tokens there were."""
        self._http = http
        self._request = request
        self._account = account
        self._due = 3 if request.path == CHAT else 2
        """Events until the second token is out: chats begin with one that only names the role."""
        self._sent: bytearray | None = bytearray() if resumable else None
        self._seed: Seed | None = None
        self.response: web.StreamResponse | None = None
        self.broken_seams = 0
        self._counts = counts
        self._events = 0
        """Events of a stream that are with the client."""
        self._end = b""
        self.cut_off = False
        """The answer ended by its limit."""

    @property
    def whole(self) -> bool:
        """A complete answer lies ready."""
        return isinstance(self.response, web.Response)

    @property
    def first_out(self) -> bool:
        """The first token of a stream is with the client."""
        return self._due <= 1

    async def respond(
        self, status: int, body: bytes, content_type: str = "application/json", *, retry_after_s: int | None = None
    ) -> None:
        """Answer in one piece."""
        if self._http.transport is None:
            return  # nobody is there any more
        told = self._account.answered(body) if status == 200 else self._account.headers()
        headers = self._headers({"Content-Type": content_type}) | told
        if retry_after_s is not None:
            headers["Retry-After"] = str(retry_after_s)
        self.cut_off = CUT_OFF in body
        self.response = web.Response(status=status, body=body, headers=headers)

    async def give(self, seed: Seed) -> j.ClientLeft | None:
        """Begin the stream with P's first token."""
        self._seed = seed
        try:
            await self._begin({"Content-Type": "text/event-stream; charset=utf-8"})
            await self._write(seed.events)
        except _LEFT:
            return j.ClientLeft()
        self._due = 1
        self._account.seeded()
        return None

    async def relay(self, answer: aiohttp.ClientResponse, first_chunk: bytes) -> j.Event:
        """Raw bytes, whole events at a time: a stream that breaks off never leaves half an event with the client.

        A stream that goes on after a seed, or after another that broke, passes a seam first.
        """
        try:
            seam = self._seam()
            await self._begin(answer.headers)
            return await self._relay(answer, first_chunk, seam)
        except EngineLost as lost:
            return self._lost(str(lost))
        except SeamBroken as broken:
            self.broken_seams += 1
            return j.Lost(f"the seam does not hold: {broken}")
        except _LEFT:
            return j.ClientLeft()

    async def _relay(self, answer: aiohttp.ClientResponse, chunk: bytes, seam: Seam | None) -> j.Event:
        rest, last, before = b"", b"", b""
        while chunk:
            if seam is not None:
                chunk = seam.feed(chunk)
                seam = None if seam.closed else seam
            rest += chunk
            end = rest.rfind(b"\n\n") + 2 if len(rest) < EVENT_BYTES_MAX else len(rest)
            if end > 1:
                piece, rest = rest[:end], rest[end:]
                fault = _error_at(piece)
                await self._write(piece[:fault] if fault >= 0 else piece)
                if fault >= 0:
                    said = piece[fault + 6 :].partition(b"\n\n")[0]
                    return self._lost(said[:200].decode(errors="replace"))
                if self._due > 0:
                    self._count(piece)
                before, last = last, piece
            chunk = await next_chunk(answer)
        if LAST_EVENT not in last[-64:] + rest:
            return self._lost("the stream ended before its end")
        assert self.response is not None
        self.cut_off = CUT_OFF in before + last
        await self.response.write_eof(rest + self._account.streamed(before + last))
        return j.Ended()

    def _count(self, events: bytes) -> None:
        """Tokens that are out, up to the second. The end and the usage are none."""
        count = events.count(b"\n\n") - events.count(b'"choices":[]') - (LAST_EVENT in events[-64:])
        before, self._due = self._due, self._due - count
        if before > 1 >= self._due:
            self._account.first_out()
        if self._due <= 0:
            self._account.second_out()

    async def fail(self, error: ApiError) -> None:
        """The status has been sent: say it as vLLM does, in an event, and end the stream."""
        if self.response is None or self._http.transport is None:
            return
        logger.warning("%s: stream failed: %s", self._request.id, error)
        try:
            await self.response.write(b"data: " + msgspec.json.encode(error.body()) + b"\n\ndata: [DONE]\n\n")
            await self.response.write_eof(self._account.comment())
        except _LEFT:
            return

    async def _begin(self, upstream: Mapping[str, str]) -> None:
        if self.response is None:
            self.response = web.StreamResponse(status=200, headers=self._headers(upstream))
            await self.response.prepare(self._http)

    def tokens(self) -> int | None:
        """Tokens of a stream, as its events tell; None where there is none. Engines that put several tokens into one
        event make it too few.
        """
        around = (self._request.path == CHAT) + (LAST_EVENT in self._end)
        return self._events - around if self._events > around else None

    async def _write(self, events: bytes) -> None:
        assert self.response is not None
        if self._counts:
            self._events += events.count(b"\n\n")
            self._end = events[-64:]
        if self._sent is not None:
            self._sent += events
            if len(self._sent) > REMEMBERED_BYTES_MAX:
                self._sent = None
        await self.response.write(events)

    def _seam(self) -> Seam | None:
        """Between what was said and a new stream. None: nothing was said yet."""
        if self.response is None:
            return None
        said = said_in(bytes(self._sent), self._request.path) if self._sent else None
        if said is None and self._seed is not None and self._sent is None:
            said = Said(self._seed.text, role=self._seed.role)
        if said is None:
            raise SeamBroken("nobody knows any more what was said")
        return Seam(self._request.path, said)

    def _lost(self, because: str) -> j.Lost:
        again = bool(self._sent) and said_in(bytes(self._sent or b""), self._request.path) is not None
        return j.Lost(because, again=again)

    def _headers(self, upstream: Mapping[str, str]) -> dict[str, str]:
        headers = {"Content-Type": upstream.get("Content-Type", "application/json"), "X-Request-Id": self._request.id}
        if "Cache-Control" in upstream:
            headers["Cache-Control"] = upstream["Cache-Control"]
        return headers


def _error_at(piece: bytes) -> int:
    """Where an error event begins in whole events; -1 where there is none."""
    if piece.startswith(ERROR_EVENT):
        return 0
    found = piece.find(b"\n\n" + ERROR_EVENT)
    return found + 2 if found >= 0 else -1


async def next_chunk(answer: aiohttp.ClientResponse) -> bytes:
    """The next bytes of a stream; empty at its end.

    Raises:
        EngineLost: it broke, or stalled.
    """
    try:
        return await answer.content.readany()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineLost(say(error), reached=True) from None
