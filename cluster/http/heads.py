"""Heads of clients' requests: read once, within bounds, by httptools. Pure.

A head is read in one call, from its first byte to its last. The parser lives no longer than that call: parser and
callbacks know each other, and such a cycle, left over, would keep whatever hangs on it until the garbage collector
runs.
"""

from __future__ import annotations

from typing import Final

import httptools

from cluster.errors import ApiError, bad_request
from cluster.http.headers import Headers

LINE_BYTES_MAX: Final = 16384
"""Longest request line and longest header: room for long tokens and trace states, none for abuse."""

HEAD_BYTES_MAX: Final = 4 * LINE_BYTES_MAX
"""And all of a head."""

HEADERS_MAX: Final = 128
"""Headers of a request: as many as aiohttp takes. 16,000 empty ones fit into a head, and cost 12 ms to read."""


_VERSIONS: Final = ("1.1", "1.0")


class Head:
    """One request's, as it was read."""

    __slots__ = ("chunks", "headers", "keep")

    def __init__(self, headers: Headers, *, keep: bool, chunks: bool) -> None:
        """What was read.

        Args:
            headers: all of them.
            keep: the connection may go on after this request.
            chunks: the client knows chunks (HTTP/1.1).
        """
        self.headers: Final = headers
        self.keep: Final = keep
        self.chunks: Final = chunks

    def length(self) -> int:
        """Bytes of its body, where that does not come in chunks. Raises ApiError."""
        said = self.headers.get("content-length")
        if said is None:
            return 0
        if not said.isascii() or not said.isdigit() or len(said) > 18:
            raise bad_request("Content-Length is not a number.")
        return int(said)

    def comes_in_chunks(self) -> bool:
        """How its body's end is told. Raises ApiError for any way that two readers could understand differently."""
        said = self.headers.get("transfer-encoding")
        if said is None:
            return False
        if said.lower() != "chunked" or "content-length" in self.headers or not self.chunks:
            raise bad_request("The body's length is told in a way that is not understood here.")
        return True


class _Reading:
    """What a parser says while it reads."""

    __slots__ = ("headers", "keep", "longest", "parser", "version")

    def __init__(self) -> None:
        self.headers = Headers()
        self.keep = False
        self.version = ""
        self.longest = 0
        self.parser: httptools.HttpRequestParser | None = None

    def on_url(self, url: bytes) -> None:
        self.longest = max(self.longest, len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.longest = max(self.longest, len(name) + len(value))
        self.headers.add(name, value)

    def on_headers_complete(self) -> None:
        if self.parser is not None:  # only here it is known: the parser forgets it with the message's end
            self.keep = self.parser.should_keep_alive()
            self.version = self.parser.get_http_version()


def read_head(data: bytes, end: int) -> Head:
    """The head that is ``data[:end]``, up to and with its empty line.

    Raises:
        ApiError: 400 for what is no HTTP, 431 for a head that is too large.
    """
    if data.count(b"\n", 0, end) > HEADERS_MAX + 2:
        raise ApiError(431, "BadRequestError", f"The request has more than {HEADERS_MAX} headers.")
    reading = _Reading()
    parser = httptools.HttpRequestParser(reading)
    reading.parser = parser
    try:
        parser.feed_data(data[:end])
    except httptools.HttpParserUpgrade:
        pass  # offers of other protocols are not taken up
    except httptools.HttpParserError as error:
        raise bad_request(f"This is not a request of HTTP/1.1: {error}") from None
    finally:
        reading.parser = None
    if reading.longest > LINE_BYTES_MAX:
        raise too_long()
    if reading.version not in _VERSIONS:
        raise bad_request(f"HTTP/{reading.version or '?'} is not understood here; use HTTP/1.1.")
    return Head(reading.headers, keep=reading.keep, chunks=reading.version == "1.1")


def too_long() -> ApiError:
    """431: a head, or a line of it, is longer than it may be."""
    return ApiError(431, "BadRequestError", f"A header, or the request line, is longer than {LINE_BYTES_MAX} bytes.")


def check_expectation(expectation: str) -> None:
    """Of a head's ``Expect``. Raises ApiError: 417."""
    if expectation.lower() != "100-continue":
        raise ApiError(417, "BadRequestError", f"`Expect: {expectation[:80]}` is not understood here.")
