"""Requests of one connection, one after another, whole: for servers that read a body before they answer. Pure.

The router's front reads heads and chunks with the same code, but decides between a head and its body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.errors import too_large
from cluster.http.framing import Chunks
from cluster.http.headers import Headers
from cluster.http.heads import HEAD_BYTES_MAX, RequestHead, check_expectation, read_head, too_long


@dataclass(frozen=True, slots=True)
class Request:
    """One request, complete."""

    method: str
    path: str
    """Without the query."""
    headers: Headers
    body: bytes
    keep_alive: bool
    """Whether the connection stays open after the answer."""


class RequestReader:
    """Reads requests. After an error nothing more can be read: where the next request begins is not known."""

    def __init__(self, body_bytes_max: int) -> None:
        self._bytes_max: Final = body_bytes_max
        self._rest = b""
        """The beginning of a head whose end has not come yet."""
        self._head: RequestHead | None = None
        """The head of the request whose body is coming."""
        self._chunks: Chunks | None = None
        self._pieces: list[bytes] = []
        """The pieces so far of a body that does not come in chunks."""
        self._left = 0
        """Bytes of such a body that are still to come."""
        self._asks = False
        """Whether the client waits for ``100 Continue``."""

    def feed(self, data: bytes) -> list[Request]:
        """Take what came. Returns the requests that are complete with it.

        Raises:
            ApiError: 400: no request; 413, 431: too large; 417: an expectation that is not met.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        found: list[Request] = []
        while data or self._head is not None:
            if self._head is None:
                end = data.find(b"\r\n\r\n") + 4
                if max(end, len(data) if end < 4 else 0) > HEAD_BYTES_MAX:
                    raise too_long()
                if end < 4:
                    self._rest = data
                    break
                self._begin(read_head(data, end))
                data = data[end:]
            data, request = self._take(data)
            if request is None:
                break
            found.append(request)
        return found

    @property
    def midway(self) -> bool:
        """Whether a part of a request has come, and its rest has not."""
        return self._head is not None or bool(self._rest)

    def asked_to_go_on(self) -> bool:
        """Whether the client waits for ``100 Continue`` before it sends its body. True once for a request."""
        asks, self._asks = self._asks and self._head is not None, False
        return asks

    def _begin(self, head: RequestHead) -> None:
        """A head has come."""
        expects = head.headers.get("expect")
        if expects is not None:
            check_expectation(expects)
        self._head, self._asks = head, expects is not None
        if head.comes_in_chunks():
            self._chunks = Chunks(self._bytes_max)
            return
        self._left = head.length()
        if self._left > self._bytes_max:
            raise too_large(self._bytes_max)

    def _take(self, data: bytes) -> tuple[bytes, Request | None]:
        """Read on in a body. Returns the bytes after it, and the request if it is complete."""
        head, chunks = self._head, self._chunks
        assert head is not None
        if chunks is not None:
            data = data[chunks.feed(data) :]
            if not chunks.done:
                return b"", None
            body = chunks.body.getvalue()
        else:
            piece, data = data[: self._left], data[self._left :]
            self._pieces.append(piece)
            self._left -= len(piece)
            if self._left:
                return b"", None
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._head = self._chunks = None
        self._pieces = []
        path = head.target.partition(b"?")[0].decode("latin-1")
        return data, Request(head.method.decode("latin-1"), path, head.headers, body, head.keep)
