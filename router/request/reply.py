"""The client's side of one request: what the client receives, and what is remembered in case the stream breaks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import msgspec

from cluster.errors import ApiError, retry_after_s
from cluster.http.headers import lines
from cluster.request import Request
from router.core import journey as j
from router.core.eligibility import CHAT
from router.core.engine_answers import ABORT, ABORTED
from router.core.timing_parts import EngineTold
from router.http.outlet import Outlet
from router.request.splice import (
    ERROR_EVENT,
    EVENT_BYTES_MAX,
    LAST_EVENT,
    SaidSoFar,
    Seed,
    Splice,
    SpliceBroken,
    said_in,
)
from router.request.trace import RequestTrace

logger = logging.getLogger("baton.router")

REMEMBERED_BYTES_MAX = 256 << 10
"""The most bytes of a stream that are kept for its resumption (about 1,000 chunks of vLLM's). If a longer stream
breaks, it ends with an error."""

_FRAME_ENDS = b"\n\n\r\n"

_ERROR_LATER: Final = b"\n\n" + ERROR_EVENT

_LAST_LINE = b"\n" + LAST_EVENT
"""The last event as a line. It cannot stand in an answer's text: JSON texts have no raw line ends."""

CUT_OFF = b'"finish_reason":"length"'
"""Marks an answer that ended by its limit. In the model's text its quotes would be escaped."""

_EVENTS = "text/event-stream; charset=utf-8"


class SentEvents:
    """The events of one answer that its client has, in pieces as they were written: bare, or framed chunks (`_bare`).

    All pieces are kept while another engine may continue the stream, else the last three.
    """

    __slots__ = (
        "_bytes", "_counts", "_earlier", "_events", "_last", "_last_but_one", "_last_but_two", "_path", "_pieces",
        "_seed", "only_seed", "when_long",
    )  # fmt: skip

    def __init__(self, path: str, *, resumable: bool, counts: bool) -> None:
        """`counts`: the number of tokens is wanted."""
        self._path: Final = path
        self._counts: Final = counts
        self._pieces: list[bytes] | None = [] if resumable else None
        """None: the stream cannot be continued, or has become too long for it."""
        self.when_long: Callable[[], None] | None = None
        """Called once the stream has become too long for that."""
        self._bytes = 0
        """The size of these pieces, framing included."""
        self._last_but_two = self._last_but_one = self._last = b""
        """The last pieces of the engine's stream under way."""
        self._earlier = b""
        """The last pieces of streams before that one."""
        self._events = 0
        """The number of events, if they are counted."""
        self._seed: Seed | None = None
        self.only_seed = False
        """The client has P's first token, and no event of another engine."""

    @property
    def resumable(self) -> bool:
        """Whether another engine may continue the stream."""
        return self._pieces is not None

    def add(self, piece: bytes) -> None:
        """The client gets these whole events."""
        self._last_but_two, self._last_but_one, self._last = self._last_but_one, self._last, piece
        if self.only_seed and b"data:" in piece:  # a comment, which keeps a connection alive, has no data
            self.only_seed = False
        if self._pieces is not None:
            self._pieces.append(piece)
            self._bytes += len(piece)
            if self._bytes > REMEMBERED_BYTES_MAX:
                self._pieces = None
                if self.when_long is not None:
                    self.when_long()
        if self._counts:
            self._events += events_in(piece)

    def add_seed(self, seed: Seed) -> None:
        """The client gets P's first token."""
        self.add(seed.events)
        self._seed, self.only_seed = seed, True

    def next_stream(self) -> None:
        """Another engine's stream follows."""
        self._earlier += self.tail()
        self._last_but_two = self._last_but_one = self._last = b""

    def tail(self) -> bytes:
        """The last events of this stream, from three pieces as they were written: vLLM ends with the last token's, the
        usage and the end, each perhaps in a piece of its own.
        """
        return _bare(self._last_but_two) + _bare(self._last_but_one) + _bare(self._last)

    def said(self) -> SaidSoFar | None:
        """The text that the client has, if another answer can be joined to it."""
        if self._pieces is None:
            return self._only_role()
        if not self._bytes:
            return None
        return said_in(b"".join(map(_bare, self._pieces)), self._path)

    def _only_role(self) -> SaidSoFar | None:
        """What the client has, if that is the role alone (chat): any other answer may follow, also one drawn by lot."""
        if self._path != CHAT or self._last_but_two:
            return None  # perhaps there were more pieces than the three that are kept
        said = said_in(self._earlier + self.tail(), CHAT)
        return said if said is not None and said.role and not said.text else None

    def splice(self) -> Splice:
        """The splice between what the client has and a new stream.

        Raises:
            SpliceBroken: what the client has is not kept.
        """
        said = self.said()
        if said is None and self._seed is not None and self._pieces is None:
            said = SaidSoFar(self._seed.text, role=self._seed.role)
        if said is None:
            raise SpliceBroken("it is not known any more what the client has")
        return Splice(self._path, said)

    def tokens(self) -> int | None:
        """The number of a stream's tokens, counted by events; None: there are none, or they are not counted. It is too
        low for engines that put several tokens into one event.
        """
        around = (self._path == CHAT) + (LAST_EVENT in self.tail()[-70:])
        return self._events - around if self._events > around else None


class Reply:
    """The answer to one client: what engines send is read, checked and written."""

    __slots__ = (
        "_event_bytes", "_event_bytes_max", "_passage", "_request", "_rest", "_simple", "_splice", "_trace",
        "broken_splices", "cut_off", "failed", "outlet", "sent",
    )  # fmt: skip

    def __init__(
        self,
        outlet: Outlet,
        request: Request,
        trace: RequestTrace,
        *,
        resumable: bool,
        counts: bool = False,
        event_bytes_max: int = 1 << 26,
    ) -> None:
        """A reply that has not begun.

        Args:
            outlet: the way to the client.
            request: the client's request.
            trace: records what is sent.
            resumable: another engine may continue a stream that breaks.
            counts: the number of tokens is wanted.
            event_bytes_max: a stream with an event of more bytes has failed.
        """
        self.outlet: Final = outlet
        self._request: Final = request
        self._trace: Final = trace
        self.sent: Final = SentEvents(request.path, resumable=resumable, counts=counts)
        self._splice: Splice | None = None
        self._rest = b""
        """The beginning of an event whose end has not arrived."""
        self._event_bytes = 0
        """The number of passed-on bytes of an event that is too long to keep; 0: there is none."""
        self._event_bytes_max: Final = event_bytes_max
        self._simple = False
        """Whole chunks may pass unchanged: the first two tokens are sent, and nothing has to be removed."""
        self._passage: Callable[[bytes], None] = outlet.write
        self.broken_splices = 0
        self.cut_off = False
        """The answer ended by its limit."""
        self.failed = False
        """The client was told of an error."""

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        *,
        again_s: int | None = None,
        told: EngineTold | None = None,
    ) -> None:
        """Answer in one piece. `again_s`: seconds after which an error itself says to try again. `told`: what an
        engine's completion says beside its text; None: the answer is an error.
        """
        if self.outlet.gone:
            return  # the client has left
        about = self._trace.headers() if told is None else self._trace.answered(told)
        request = self._request
        names = {"X-Request-Id": request.told_id, "X-Baton-Request-Id": request.id}
        headers = {"Content-Type": content_type} | names | about
        again_s = retry_after_s(status, again_s)
        if again_s is not None:
            headers["Retry-After"] = str(again_s)
        self.cut_off = CUT_OFF in body
        self.outlet.whole(status, headers, body)

    def refuse(self, error: ApiError) -> None:
        """Answer with an error."""
        self.failed = True
        self.respond(error.status, msgspec.json.encode(error.body()), again_s=error.retry_after_s)

    def give(self, seed: Seed) -> None:
        """Begin the stream with P's first token."""
        self._begin(_EVENTS, "")
        self.sent.add_seed(seed)
        self.outlet.write(seed.events)
        self._trace.seeded()

    # -- a stream --

    def relay(self, content_type: str, cache_control: str) -> j.Event | None:
        """A stream begins. It is passed on in whole events, so that a stream that breaks never leaves half an event
        with the client. A stream that follows a seed, or a broken stream, passes a splice first. Returns an event if
        that is impossible.
        """
        self._rest, self._simple = b"", False
        self.sent.next_stream()
        try:
            self._splice = self.sent.splice() if self.outlet.begun else None
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
        fault = _aborted_at(piece)
        if fault < 0 and LAST_EVENT in piece:
            fault = self._ended_unsaid_at(piece)
        if fault >= 0:
            self._write(piece[:fault])
            return self.lost(ABORT)
        fault = _error_at(piece)
        if fault >= 0:
            self._write(piece[:fault])
            said = piece[fault + 6 :].partition(b"\n\n")[0]
            return self.lost(said[:200].decode(errors="replace"))
        self._write(piece)
        if self._trace.events_due > 0:
            self._trace.sent(piece, events_in(piece))
        self._simple = self._trace.events_due <= 0 and self._splice is None and not self._rest and self.outlet.passes
        if self._simple:
            self._passage = self.outlet.passage()
        return None

    def _ended_unsaid_at(self, piece: bytes) -> int:
        """The position of a chat's end, usage included, that follows nothing but its role; -1 if the chat has more.

        vLLM 0.32 sends no event for a chat that is aborted before its first token, so no reason either
        (`chat_completion/serving.py`, `chat_completion_stream_generator`).
        """
        if self._request.path != CHAT:
            return -1
        ends = [at for at in (piece.find(b'"choices":[]'), (b"\n" + piece).find(_LAST_LINE)) if at >= 0]
        if not ends:
            return -1  # the model's words
        end = piece.rfind(b"\n\n", 0, min(ends)) + 2 if b"\n\n" in piece[: min(ends)] else 0
        said = said_in(self.sent.tail() + piece[:end], CHAT)  # None: it has an end with a reason, or is no mere text
        return end if said is not None and not said.text else -1

    def pass_on(self, framed: bytes, begin: int) -> j.Event | None:
        """`feed` for one whole chunk that ends with an event. It is framed as it came: its bytes are
        ``framed[begin:-2]``.
        """
        if not self._simple or ERROR_EVENT in framed or ABORTED in framed:
            return self.feed(framed[begin:-2])
        self._passage(framed)
        self.sent.add(framed)
        return None

    def ended(self) -> j.Event:
        """All bytes of the stream have arrived."""
        tail = self.sent.tail()
        if _LAST_LINE not in (b"\n" + tail)[-64:] + self._rest:
            return self.lost("the stream ended before its end")
        self.cut_off = tail.rfind(CUT_OFF) >= 0  # it is near the end, if at all
        self.outlet.end(self._rest + self._trace.streamed(tail))
        return j.Ended()

    def broke_off(self, because: str, *, waited: bool) -> j.Event:
        """The stream's connection is lost, perhaps after the stream's last event. `waited`: as for `lost`."""
        told = not self._rest and _LAST_LINE in (b"\n" + self.sent.tail())[-64:]
        return self.ended() if told else self.lost(because, waited=waited)

    def lost(self, because: str, *, waited: bool = False) -> j.Lost:
        """The stream broke off. `waited`: its engine was silent for so long that no other can be tried after a seed."""
        return j.Lost(because, again=self.sent.said() is not None or (self.sent.only_seed and not waited))

    def _broken(self, broken: SpliceBroken) -> j.Lost:
        """The stream is another answer than the client has begun to read. If the client has only P's token, it has
        nothing of this engine, so another engine may still make an answer that begins with P's token.
        """
        logger.warning("%s: the splice does not hold: %s", self._request.label, broken)
        self.broken_splices += 1
        only_seed = self.sent.only_seed
        return j.Lost(f"the splice does not hold: {broken}", again=only_seed, drew=only_seed)

    def fail(self, error: ApiError) -> None:
        """The status has been sent: report the error in an event, as vLLM does, and end the stream."""
        self.failed = True
        if not self.outlet.begun or self.outlet.gone:
            return
        logger.warning("%s: stream failed: %s", self._request.label, error)
        event = b"data: " + msgspec.json.encode(error.body()) + b"\n\ndata: [DONE]\n\n"
        if self._event_bytes:
            event = b"\n\n" + event
        self.outlet.end(event + self._trace.comment())

    def _begin(self, content_type: str, cache_control: str) -> None:
        if self.outlet.begun:
            return
        request, head = self._request, _lines(content_type, cache_control)
        names = request.told_id.encode(), request.id.encode()
        self.outlet.begin(b"%bX-Request-Id: %b\r\nX-Baton-Request-Id: %b\r\n" % (head, *names))

    def _write(self, events: bytes) -> None:
        self.sent.add(events)
        self.outlet.write(events)


@lru_cache(maxsize=64)
def _lines(content_type: str, cache_control: str) -> bytes:
    """The lines of a stream's head. They are kept, as most streams of an engine have the same."""
    return lines({"Content-Type": content_type} | ({"Cache-Control": cache_control} if cache_control else {}))


def events_in(written: bytes) -> int:
    """The number of events in whole events. Comments, which keep a connection alive, are none; in an answer's text, a
    line's end would be escaped.
    """
    return written.count(b"\n\n") - written.count(b"\n:") - written.startswith(b":")


def _bare(written: bytes) -> bytes:
    """The events without framing. Only a framed chunk ends with CRLF: events end with LF."""
    return written[written.find(b"\n") + 1 : -2] if written.endswith(_FRAME_ENDS) else written


def _aborted_at(piece: bytes) -> int:
    """The position of an event by which an engine says that it has aborted the request; -1 if there is none."""
    at = piece.find(ABORTED)
    return at if at < 0 else piece.rfind(b"\n\n", 0, at) + 2 if b"\n\n" in piece[:at] else 0


def _error_at(piece: bytes) -> int:
    """The position of an error event in whole events; -1 if there is none."""
    if piece.startswith(ERROR_EVENT):
        return 0
    found = piece.find(_ERROR_LATER)
    return found + 2 if found >= 0 else -1
