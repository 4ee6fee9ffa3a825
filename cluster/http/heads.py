"""Heads of requests: read once, within bounds, by httptools. Pure.

One call reads one whole head, and drops its parser at the end. Parser and callbacks refer to each other; such a cycle
would keep its objects alive until the garbage collector runs.
"""

from __future__ import annotations

from typing import Final

import httptools

from cluster.errors import ApiError, bad_request
from cluster.http.headers import Headers

LINE_BYTES_MAX: Final = 16384
"""Limit for the request line and for each header: enough for long tokens and trace states."""

HEAD_BYTES_MAX: Final = 4 * LINE_BYTES_MAX
"""Limit for a whole head."""

HEADERS_MAX: Final = 128
"""Limit for the number of headers, the same as aiohttp's. 16,000 empty ones fit into a head and take 12 ms to read."""

_VERSIONS: Final = ("1.1", "1.0")


class RequestHead:
    """The head of one request."""

    __slots__ = ("chunks", "headers", "keep", "method", "target")

    def __init__(self, method: bytes, target: bytes, headers: Headers, *, keep: bool, chunks: bool) -> None:
        """A head with these parts.

        Args:
            method: in capital letters.
            target: path and query, as the client wrote them.
            headers: all headers.
            keep: the connection stays open after this request.
            chunks: the client can read an answer in chunks (HTTP/1.1).
        """
        self.method: Final = method
        self.target: Final = target
        self.headers: Final = headers
        self.keep: Final = keep
        self.chunks: Final = chunks

    def length(self) -> int:
        """Length of the body in bytes, for a body that is not in chunks; 0: no body.

        Raises:
            ApiError: 400: Content-Length is not a number.
        """
        said = self.headers.get("content-length")
        if said is None:
            return 0
        if not said.isascii() or not said.isdigit() or len(said) > 18:
            raise bad_request("Content-Length is not a number.")
        return int(said)

    def comes_in_chunks(self) -> bool:
        """Whether the body is in chunks.

        Raises:
            ApiError: 400: two readers could find different ends of the body.
        """
        said = self.headers.get("transfer-encoding")
        if said is None:
            return False
        if said.lower() != "chunked" or "content-length" in self.headers or not self.chunks:
            raise bad_request("The body's length is told in a way that is not understood here.")
        return True


class _Reading:
    """The parser's callbacks."""

    __slots__ = ("headers", "keep", "longest", "method", "parser", "target", "version")

    def __init__(self) -> None:
        self.headers = Headers()
        self.keep = False
        self.method = self.target = b""
        self.version = ""
        self.longest = 0
        self.parser: httptools.HttpRequestParser | None = None

    def on_url(self, url: bytes) -> None:
        self.target += url
        self.longest = max(self.longest, len(self.target))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.longest = max(self.longest, len(name) + len(value))
        self.headers.add(name, value)

    def on_headers_complete(self) -> None:
        if self.parser is not None:  # the parser forgets all this at the end of the message
            self.keep = self.parser.should_keep_alive()
            self.method = self.parser.get_method()
            self.version = self.parser.get_http_version()


def read_head(data: bytes, end: int) -> RequestHead:
    """Read the head ``data[:end]``; its empty line is included.

    Raises:
        ApiError: 400: not HTTP; 431: the head is too large.
    """
    if data.count(b"\n", 0, end) > HEADERS_MAX + 2:
        raise ApiError(431, "BadRequestError", f"The request has more than {HEADERS_MAX} headers.")
    reading = _Reading()
    parser = httptools.HttpRequestParser(reading)
    reading.parser = parser
    try:
        parser.feed_data(data[:end])
    except httptools.HttpParserUpgrade:
        pass  # this server speaks no other protocol
    except httptools.HttpParserError as error:
        raise bad_request(f"This is not a request of HTTP/1.1: {error}") from None
    finally:
        reading.parser = None
    if reading.longest > LINE_BYTES_MAX:
        raise too_long()
    if reading.version not in _VERSIONS:
        raise bad_request(f"HTTP/{reading.version or '?'} is not understood here; use HTTP/1.1.")
    chunks = reading.version == "1.1"
    return RequestHead(reading.method, reading.target, reading.headers, keep=reading.keep, chunks=chunks)


def too_long() -> ApiError:
    """431: a head or one of its lines is too long."""
    return ApiError(431, "BadRequestError", f"A header, or the request line, is longer than {LINE_BYTES_MAX} bytes.")


def check_expectation(expectation: str) -> None:
    """Check the value of an ``Expect`` header. Raises ApiError (417) unless it is ``100-continue``."""
    if expectation.lower() != "100-continue":
        raise ApiError(417, "BadRequestError", f"`Expect: {expectation[:80]}` is not understood here.")
