"""Answers to the requests of one connection, one after another: read within bounds by httptools. Pure.

A connection feeds what it receives, and takes what it finds in the reader's attributes. It has one request under way at
a time, so bytes behind an answer's end answer nothing: they end the connection (`keep`).
"""

from __future__ import annotations

from typing import Final

import httptools

from cluster.http.headers import encoding, printable

HEAD_BYTES_MAX: Final = 1 << 16
"""Limit for an answer's head, and for its framing (trailers, extensions of chunks) between two bytes of its body. An
answer with more is refused."""

_NO_ANSWER: Final = (httptools.HttpParserError, httptools.HttpParserUpgrade)
"""What the parser raises. The second, for a status 101, does not inherit from the first."""

_READ: Final = frozenset(
    {b"content-type", b"cache-control", b"content-encoding", b"content-length", b"transfer-encoding"}
)
"""The headers of an answer that are looked at."""


class AnswerReader:
    """Reads answers: `reset` before each request is sent, `feed` what comes, `close` once the connection is gone.

    It has many attributes because the parser's callbacks store each finding in one, and no object is made per answer.
    """

    __deletable__ = ("_parser",)  # compiled (mypyc) no other attribute can be
    __slots__ = (
        "_fault",
        "_framing_bytes",
        "_head_bytes",
        "_length_known",
        "_parser",
        "bodies",
        "cache_control",
        "complete",
        "content_type",
        "encoding",
        "head",
        "keep",
        "on_body",
        "status",
    )

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        """Pieces of the body that came with the last `feed`. The caller takes them out before it calls `feed` again."""
        self.on_body = self.bodies.append
        """The parser's callback."""
        self._parser = httptools.HttpResponseParser(self)
        self.reset()

    def reset(self) -> None:
        """Begin the answer to the next request. Call it before the request is sent."""
        self.content_type, self.cache_control, self.encoding = "application/json", "", ""
        self.head = self.complete = False
        """Whether the whole head (`head`) and the whole answer (`complete`) have come."""
        self.keep = False
        """Whether the connection may take another request; known once `complete` is true."""
        self.status = 0
        self._length_known = False
        self._head_bytes = self._framing_bytes = 0
        self._fault = ""

    @property
    def heard(self) -> bool:
        """Whether any byte has come since `reset`."""
        return self._head_bytes > 0

    @property
    def ends_with_connection(self) -> bool:
        """Whether an answer without a length is under way: it is complete when the peer closes the connection."""
        return self.head and not self._length_known and not self.complete

    def feed(self, data: bytes) -> str:
        """Read the next bytes. Returns why this is no HTTP answer; empty: none is wrong so far."""
        if not self.head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except _NO_ANSWER as error:
            if not self.complete:
                return self._fault or str(error)
            self.keep = False  # the answer is whole; what stands behind its end goes with the connection
        if self.bodies:
            self._framing_bytes = 0
        elif self.head:
            self._framing_bytes += len(data)
            if self._framing_bytes > HEAD_BYTES_MAX and not self.complete:
                return "its framing has no end"
        elif self._head_bytes > HEAD_BYTES_MAX:
            return "its head has no end"
        return ""

    def close(self) -> None:
        """End reading. It breaks the cycle of reader and parser, which refer to each other."""
        del self._parser

    # -- httptools' callbacks --

    def on_message_begin(self) -> None:
        if self.complete:  # behind the end of an answer: it would be read as the next request's
            self.keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in _READ or self.head:  # a trailer: not read
            return
        said = value.decode("latin-1")
        if name == b"content-type":
            self.content_type = printable(said) or self.content_type
        elif name == b"cache-control":
            self.cache_control = printable(said)
        elif name == b"content-encoding":
            self.encoding = encoding(said)
        elif name == b"transfer-encoding" and said.strip().lower() != "chunked":
            self._fault = f"its transfer encoding is {said[:40]!r}"
        else:
            self._length_known = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.head:
            raise ValueError("an answer to no request")
        if not 100 <= self.status < 600 or self.status == 101:
            self._fault = f"its status is {self.status}"
        if self._fault:
            raise ValueError("an answer that is not read")
        if self.status < 200:  # only says that more is to come
            self.content_type, self.cache_control, self.encoding = "application/json", "", ""
            return
        self.head = True

    def on_message_complete(self) -> None:
        if self.head:
            self.complete = True
            self.keep = self._length_known and self._parser.should_keep_alive()  # known only here
        else:
            self._length_known = False
