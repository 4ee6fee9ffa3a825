"""The client's side of one request: what the client receives, and what is remembered in case the stream breaks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import msgspec

from cluster.errors import ApiError
from cluster.http.headers import lines
from cluster.request import Request
from router.core import journey as j
from router.core.eligibility import CHAT
from router.core.timing_parts import EngineTold
from router.http.outlet import Outlet
from router.request.splice import ERROR_EVENT, EVENT_BYTES_MAX, SaidSoFar, Seed, Splice, SpliceBroken, said_in
from router.request.trace import RequestTrace

logger = logging.getLogger("baton.router")

REMEMBERED_BYTES_MAX = 256 << 10
"""The part of a stream that is kept for its resumption (about 1,000 chunks of vLLM's); a longer one ends with
an error."""

_FRAME_ENDS = b"\n\n\r\n"

_ERROR_LATER: Final = b"\n\n" + ERROR_EVENT

LAST_EVENT = b"data: [DONE]"
_LAST_LINE = b"\n" + LAST_EVENT
"""It cannot stand in a text: JSON texts have no raw line ends."""

CUT_OFF = b'"finish_reason":"length"'
"""Marks an answer that ended by its limit. In the model's text its quotes would be escaped."""

_EVENTS = "text/event-stream; charset=utf-8"


class Reply:
    """The answer to one client.

    The class is long because engines' events and the client's stream meet in it: what is read, counted and written is
    one state.
    """

    __slots__ = (
        "_account",
        "_counts",
        "_due",
        "_event_bytes",
        "_event_bytes_max",
        "_events",
        "_keep",
        "_kept",
        "_kept_bytes",
        "_only_seed",
        "_passage",
        "_request",
        "_rest",
        "_seed",
        "_simple",
        "_splice",
        "_streams_at",
        "broken_splices",
        "cut_off",
        "outlet",
    )

    def __init__(
        self,
        outlet: Outlet,
        request: Request,
        account: RequestTrace,
        *,
        resumable: bool,
        counts: bool = False,
        event_bytes_max: int = 1 << 26,
    ) -> None:
        """`counts`: the number of tokens is wanted. `event_bytes_max`: a stream with a longer event has failed."""
        self.outlet = outlet
        self._request = request
        self._account = account
        self._due = 3 if request.path == CHAT else 2
        """The number of events until the second token is sent: chats begin with one that only names the role."""
        self._kept: list[bytes] | deque[bytes] = [] if resumable else deque(maxlen=2)
        """The written events: all of them while the stream can be resumed, else the last two. Bare events, or as a
        framed chunk (`_bare`)."""
        self._keep = self._kept.append
        self._kept_bytes = 0 if resumable else -1
        """For a stream that can be resumed: the bytes kept, framing included; -1: it cannot be."""
        self._streams_at = 0
        """The number of kept entries from before this stream."""
        self._seed: Seed | None = None
        self._only_seed = False
        """The client has P's first token, and no event of another engine's."""
        self._splice: Splice | None = None
        self._rest = b""
        """The beginning of an event whose end has not arrived."""
        self._event_bytes = 0
        """The number of passed-on bytes of an event that is too long to keep; 0: there is none."""
        self._event_bytes_max = event_bytes_max
        self._simple = False
        """Whole chunks may pass unchanged: both first tokens are sent, and nothing has to be removed or kept."""
        self._passage: Callable[[bytes], None] = outlet.write
        self._counts = counts
        self._events = 0
        """The number of the stream's events that the client has."""
        self.broken_splices = 0
        self.cut_off = False
        """The answer ended by its limit."""

    @property
    def first_out(self) -> bool:
        """Whether the client has the first token of a stream."""
        return self._due <= 1

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        *,
        retry_after_s: int | None = None,
        told: EngineTold | None = None,
    ) -> None:
        """Answer in one piece. `told`: what an engine's completion says beside its text; None: the answer is an
        error.
        """
        if self.outlet.gone:
            return  # the client has left
        about = self._account.headers() if told is None else self._account.answered(told)
        request = self._request
        names = {"X-Request-Id": request.told_id, "X-Baton-Request-Id": request.id}
        headers = {"Content-Type": content_type} | names | about
        if retry_after_s is not None:
            headers["Retry-After"] = str(retry_after_s)
        self.cut_off = CUT_OFF in body
        self.outlet.whole(status, headers, body)

    def give(self, seed: Seed) -> None:
        """Begin the stream with P's first token."""
        self._seed = seed
        self._begin(_EVENTS, "")
        self._write(seed.events)
        self._only_seed = True
        self._due = 1
        self._account.seeded()

    # -- a stream --

    def relay(self, content_type: str, cache_control: str) -> j.Event | None:
        """A stream begins: raw bytes, whole events at a time, so that a stream that breaks never leaves half an event
        with the client. A stream that continues after a seed, or after another that broke, passes a splice first.
        """
        self._rest, self._simple = b"", False
        if self._kept_bytes < 0:
            self._kept.clear()
        self._streams_at = len(self._kept)
        try:
            self._splice = self._open_splice()
        except SpliceBroken as broken:
            return self._broken(broken)
        self._begin(content_type, cache_control)
        return None

    def feed(self, chunk: bytes) -> j.Event | None:
        """Take the stream's next bytes. Returns an event if it has failed."""
        if self._splice is not None:
            try:
                chunk = self._splice.feed(chunk)
            except SpliceBroken as broken:
                return self._broken(broken)
            if self._splice.closed:
                self._splice = None
        rest = self._rest + chunk if self._rest else chunk
        end = rest.rfind(b"\n\n") + 2
        if end <= 1:
            if len(rest) < EVENT_BYTES_MAX:
                self._rest = rest
                return None
            end = len(rest)  # too long to keep: passed on in pieces
            self._event_bytes += end
            if self._event_bytes > self._event_bytes_max:
                return self.lost(f"an event of its stream is longer than {self._event_bytes_max} bytes")
        else:
            self._event_bytes = 0
        piece, self._rest = rest[:end], rest[end:]
        fault = _error_at(piece)
        if fault >= 0:
            self._write(piece[:fault])
            said = piece[fault + 6 :].partition(b"\n\n")[0]
            return self.lost(said[:200].decode(errors="replace"))
        events = self._write(piece)
        if self._due > 0:
            self._count(piece, events or piece.count(b"\n\n"))
        self._simple = self._due <= 0 and self._splice is None and not self._rest and self.outlet.passes
        if self._simple:
            self._passage = self.outlet.passage()
        return None

    def pass_on(self, framed: bytes, begin: int) -> j.Event | None:
        """The same for one whole chunk that ends as an event does, framed as it came: ``framed[begin:-2]``."""
        if not self._simple or ERROR_EVENT in framed:
            return self.feed(framed[begin:-2])
        self._passage(framed)
        self._keep(framed)
        if self._kept_bytes >= 0:
            self._kept_bytes += len(framed)
            if self._kept_bytes > REMEMBERED_BYTES_MAX:
                self._forget()
        if self._counts:
            self._events += framed.count(b"\n\n")
        return None

    def ended(self) -> j.Event:
        """All bytes of the stream have arrived."""
        tail = self._tail()
        if _LAST_LINE not in (b"\n" + tail)[-64:] + self._rest:
            return self.lost("the stream ended before its end")
        self.cut_off = tail.rfind(CUT_OFF) >= 0  # it is near the end, if at all
        self.outlet.end(self._rest + self._account.streamed(tail))
        return j.Ended()

    def broke_off(self, because: str, *, waited: bool) -> j.Event:
        """The stream's connection is lost, maybe after the stream's own end. `waited`: as for `lost`."""
        told = not self._rest and _LAST_LINE in (b"\n" + self._tail())[-64:]
        return self.ended() if told else self.lost(because, waited=waited)

    def lost(self, because: str, *, waited: bool = False) -> j.Lost:
        """The stream broke off. `waited`: the client has been kept waiting for as long as any client is."""
        return j.Lost(because, again=self._said() is not None or (self._only_seed and not waited))

    def _said(self) -> SaidSoFar | None:
        """What the client has, if another answer can be joined to it."""
        if self._kept_bytes <= 0:
            return None
        return said_in(b"".join(map(_bare, self._kept)), self._request.path)

    def _tail(self) -> bytes:
        """The last events of this stream, from two pieces as they were written."""
        kept = self._kept
        return b"".join([_bare(kept[at]) for at in range(max(self._streams_at, len(kept) - 2), len(kept))])

    def _broken(self, broken: SpliceBroken) -> j.Lost:
        """The stream is another answer. A client that has only P's token can get an answer that begins with it: of
        what this engine has drawn it has nothing.
        """
        logger.warning("%s: the splice does not hold: %s", self._request.label, broken)
        self.broken_splices += 1
        return j.Lost(f"the splice does not hold: {broken}", again=self._only_seed, drew=self._only_seed)

    def _count(self, events: bytes, count: int) -> None:
        """Tokens that are out, up to the second, of so many events. The end and the usage are none."""
        count -= events.count(b'"choices":[]') + (LAST_EVENT in events[-64:])
        before, self._due = self._due, self._due - count
        if before > 1 >= self._due:
            self._account.first_out()
        if self._due <= 0:
            self._account.second_out()

    def fail(self, error: ApiError) -> None:
        """The status has been sent: report the error in an event, as vLLM does, and end the stream."""
        if not self.outlet.begun or self.outlet.gone:
            return
        logger.warning("%s: stream failed: %s", self._request.label, error)
        event = b"data: " + msgspec.json.encode(error.body()) + b"\n\ndata: [DONE]\n\n"
        if self._event_bytes:
            event = b"\n\n" + event
        self.outlet.end(event + self._account.comment())

    def tokens(self) -> int | None:
        """The number of a stream's tokens, from its events; None if there is no stream. It is too low for engines that
        put several tokens into one event.
        """
        around = (self._request.path == CHAT) + (LAST_EVENT in self._tail()[-70:])
        return self._events - around if self._events > around else None

    def _begin(self, content_type: str, cache_control: str) -> None:
        if self.outlet.begun:
            return
        request, head = self._request, _lines(content_type, cache_control)
        names = request.told_id.encode(), request.id.encode()
        self.outlet.begin(b"%bX-Request-Id: %b\r\nX-Baton-Request-Id: %b\r\n" % (head, *names))

    def _write(self, events: bytes) -> int:
        """How many these are, where they are counted."""
        count = 0
        if self._only_seed and b"data:" in events:  # not so a comment, which keeps a connection alive
            self._only_seed = False
        if self._counts:
            count = events.count(b"\n\n")
            self._events += count
        self._keep(events)
        if self._kept_bytes >= 0:
            self._kept_bytes += len(events)
            if self._kept_bytes > REMEMBERED_BYTES_MAX:
                self._forget()
        self.outlet.write(events)
        return count

    def _forget(self) -> None:
        """The stream has become too long to be resumed."""
        self._kept = deque(list(self._kept)[self._streams_at :], maxlen=2)
        self._keep, self._kept_bytes, self._streams_at = self._kept.append, -1, 0

    def _open_splice(self) -> Splice | None:
        """The splice between what the client has and a new stream. None: the client has nothing yet."""
        if not self.outlet.begun:
            return None
        said = self._said()
        if said is None and self._seed is not None and self._kept_bytes < 0:
            said = SaidSoFar(self._seed.text, role=self._seed.role)
        if said is None:
            raise SpliceBroken("it is not known any more what the client has")
        return Splice(self._request.path, said)


@lru_cache(maxsize=64)
def _lines(content_type: str, cache_control: str) -> bytes:
    """The lines of a stream's head. An engine's are mostly the same."""
    return lines({"Content-Type": content_type} | ({"Cache-Control": cache_control} if cache_control else {}))


def _bare(written: bytes) -> bytes:
    """The events without framing. Only a frame ends with HTTP's line end; those of events differ."""
    return written[written.find(b"\n") + 1 : -2] if written.endswith(_FRAME_ENDS) else written


def _error_at(piece: bytes) -> int:
    """The position of an error event in whole events; -1 if there is none."""
    if piece.startswith(ERROR_EVENT):
        return 0
    found = piece.find(_ERROR_LATER)
    return found + 2 if found >= 0 else -1
