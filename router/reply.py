"""The client's side of one exchange: what he is given, and what of it is remembered in case the stream breaks."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from cluster.errors import ApiError
from cluster.request import Request
from router import journey as j
from router.account import Account
from router.exact import CHAT
from router.http.outlet import Outlet
from router.seam import ERROR_EVENT, Said, Seam, SeamBroken, Seed, said_in

logger = logging.getLogger("baton.router")

EVENT_BYTES_MAX = 1 << 20
"""An event longer than this is passed on in pieces rather than kept."""

REMEMBERED_BYTES_MAX = 256 << 10
"""So much of a stream is kept for its resumption (about 1,000 chunks of vLLM's); a longer one ends with an error."""

LAST_EVENT = b"data: [DONE]"
CUT_OFF = b'"finish_reason":"length"'
"""In an answer that ended by its limit. In a text of the model's own its quotes would be escaped."""

_EVENTS = "text/event-stream; charset=utf-8"


class Reply:
    """What one client is told."""

    __slots__ = (
        "_account",
        "_before",
        "_before_at",
        "_counts",
        "_due",
        "_events",
        "_last",
        "_last_at",
        "_passage",
        "_request",
        "_rest",
        "_seam",
        "_seed",
        "_sent",
        "_simple",
        "broken_seams",
        "cut_off",
        "outlet",
    )

    def __init__(
        self, outlet: Outlet, request: Request, account: Account, *, resumable: bool, counts: bool = False
    ) -> None:
        """`counts`: somebody wants to know how many tokens there were."""
        self.outlet = outlet
        self._request = request
        self._account = account
        self._due = 3 if request.path == CHAT else 2
        """Events until the second token is out: chats begin with one that only names the role."""
        self._sent: bytearray | None = bytearray() if resumable else None
        self._seed: Seed | None = None
        self._seam: Seam | None = None
        self._rest = b""
        """The beginning of an event whose end has not come."""
        self._simple = False
        """Whole chunks may pass as they come: both first tokens are out, and nothing is to be taken out or kept."""
        self._passage: Callable[[bytes], None] = outlet.write
        self._last, self._last_at, self._before, self._before_at = b"", 0, b"", 0
        """What was written last, and before that; framed as a chunk where the number is not 0 (`_bare`)."""
        self._counts = counts
        self._events = 0
        """Events of a stream that are with the client."""
        self.broken_seams = 0
        self.cut_off = False
        """The answer ended by its limit."""

    @property
    def first_out(self) -> bool:
        """The first token of a stream is with the client."""
        return self._due <= 1

    def respond(
        self, status: int, body: bytes, content_type: str = "application/json", *, retry_after_s: int | None = None
    ) -> None:
        """Answer in one piece."""
        if self.outlet.gone:
            return  # nobody is there any more
        told = self._account.answered(body) if status == 200 else self._account.headers()
        headers = {"Content-Type": content_type, "X-Request-Id": self._request.id} | told
        if retry_after_s is not None:
            headers["Retry-After"] = str(retry_after_s)
        self.cut_off = CUT_OFF in body
        self.outlet.whole(status, headers, body)

    def give(self, seed: Seed) -> None:
        """Begin the stream with P's first token."""
        self._seed = seed
        self._begin(_EVENTS, "")
        self._write(seed.events)
        self._due = 1
        self._account.seeded()

    # -- a stream --

    def relay(self, content_type: str, cache_control: str) -> j.Event | None:
        """A stream begins: raw bytes, whole events at a time, so that one that breaks off never leaves half an event
        with the client. One that goes on after a seed, or after another that broke, passes a seam first.
        """
        self._rest, self._simple = b"", False
        self._last = self._before = b""
        self._last_at = self._before_at = 0
        try:
            self._seam = self._open_seam()
        except SeamBroken as broken:
            return self._broken(broken)
        self._begin(content_type, cache_control)
        return None

    def feed(self, chunk: bytes) -> j.Event | None:
        """Its next bytes. An event: that it has failed."""
        if self._seam is not None:
            try:
                chunk = self._seam.feed(chunk)
            except SeamBroken as broken:
                return self._broken(broken)
            if self._seam.closed:
                self._seam = None
        rest = self._rest + chunk if self._rest else chunk
        end = rest.rfind(b"\n\n") + 2 if len(rest) < EVENT_BYTES_MAX else len(rest)
        if end <= 1:
            self._rest = rest
            return None
        piece, self._rest = rest[:end], rest[end:]
        fault = _error_at(piece)
        self._write(piece[:fault] if fault >= 0 else piece)
        if fault >= 0:
            said = piece[fault + 6 :].partition(b"\n\n")[0]
            return self.lost(said[:200].decode(errors="replace"))
        if self._due > 0:
            self._count(piece)
        self._before, self._before_at, self._last, self._last_at = self._last, self._last_at, piece, 0
        if self._due <= 0 and self._seam is None and not self._rest and self.outlet.chunked and not self.outlet.gone:
            self._simple, self._passage = True, self.outlet.passage()
        else:
            self._simple = False
        return None

    def pass_on(self, framed: bytes, begin: int) -> j.Event | None:
        """The same of one whole chunk that ends as an event does, framed as it came: ``framed[begin:-2]``."""
        if not self._simple or ERROR_EVENT in framed:
            return self.feed(framed[begin:-2])
        self._passage(framed)
        self._before, self._before_at, self._last, self._last_at = self._last, self._last_at, framed, begin
        if self._sent is not None:
            self._remember(framed[begin:-2])
        if self._counts:
            self._events += framed.count(b"\n\n")
        return None

    def ended(self) -> j.Event:
        """Its bytes are all here."""
        last = _bare(self._last, self._last_at)
        if LAST_EVENT not in last[-64:] + self._rest:
            return self.lost("the stream ended before its end")
        tail = _bare(self._before, self._before_at) + last
        self.cut_off = CUT_OFF in tail
        self.outlet.end(self._rest + self._account.streamed(tail))
        return j.Ended()

    def lost(self, because: str) -> j.Lost:
        """It broke off."""
        again = bool(self._sent) and said_in(bytes(self._sent or b""), self._request.path) is not None
        return j.Lost(because, again=again)

    def _broken(self, broken: SeamBroken) -> j.Lost:
        self.broken_seams += 1
        return j.Lost(f"the seam does not hold: {broken}")

    def _count(self, events: bytes) -> None:
        """Tokens that are out, up to the second. The end and the usage are none."""
        count = events.count(b"\n\n") - events.count(b'"choices":[]') - (LAST_EVENT in events[-64:])
        before, self._due = self._due, self._due - count
        if before > 1 >= self._due:
            self._account.first_out()
        if self._due <= 0:
            self._account.second_out()

    def fail(self, error: ApiError) -> None:
        """The status has been sent: say it as vLLM does, in an event, and end the stream."""
        if not self.outlet.begun or self.outlet.gone:
            return
        logger.warning("%s: stream failed: %s", self._request.id, error)
        event = b"data: " + msgspec.json.encode(error.body()) + b"\n\ndata: [DONE]\n\n"
        self.outlet.end(event + self._account.comment())

    def tokens(self) -> int | None:
        """Tokens of a stream, as its events tell; None where there is none. Engines that put several tokens into one
        event make it too few.
        """
        around = (self._request.path == CHAT) + (LAST_EVENT in self._last[-70:])
        return self._events - around if self._events > around else None

    def _begin(self, content_type: str, cache_control: str) -> None:
        if self.outlet.begun:
            return
        headers = {"Content-Type": content_type, "X-Request-Id": self._request.id}
        if cache_control:
            headers["Cache-Control"] = cache_control
        self.outlet.begin(headers)

    def _write(self, events: bytes) -> None:
        if self._counts:
            self._events += events.count(b"\n\n")
        if self._sent is not None:
            self._remember(events)
        self.outlet.write(events)

    def _remember(self, events: bytes) -> None:
        assert self._sent is not None
        self._sent += events
        if len(self._sent) > REMEMBERED_BYTES_MAX:
            self._sent = None

    def _open_seam(self) -> Seam | None:
        """Between what was said and a new stream. None: nothing was said yet."""
        if not self.outlet.begun:
            return None
        said = said_in(bytes(self._sent), self._request.path) if self._sent else None
        if said is None and self._seed is not None and self._sent is None:
            said = Said(self._seed.text, role=self._seed.role)
        if said is None:
            raise SeamBroken("nobody knows any more what was said")
        return Seam(self._request.path, said)


def _bare(written: bytes, framed_at: int) -> bytes:
    """Its events."""
    return written[framed_at:-2] if framed_at else written


def _error_at(piece: bytes) -> int:
    """Where an error event begins in whole events; -1 where there is none."""
    if piece.startswith(ERROR_EVENT):
        return 0
    found = piece.find(b"\n\n" + ERROR_EVENT)
    return found + 2 if found >= 0 else -1
