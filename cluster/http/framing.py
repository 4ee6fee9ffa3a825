"""Bodies in chunks: each piece is read as it comes, within bounds. Pure.

httptools reads chunks as well, but keeps trailers of any length and reports no extensions. A client may send both with
a body, so this module counts them: they are limited to a few kilobytes, and dropped. It follows RFC 9112 (7.1) to the
letter: a line ends with CR LF, a size is hexadecimal digits. It refuses everything else, because another reader of the
same bytes might find another request in them.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Final

from cluster.errors import ApiError, bad_request, too_large

LINE_BYTES_MAX: Final = 1024
"""A chunk's first line: its size and its extensions (signatures of uploads are some 90 bytes)."""

EXTENSION_BYTES_MAX: Final = 1 << 16
"""All extensions of one body."""

TRAILER_BYTES_MAX: Final = 1 << 13
"""All trailers of one body. Baton does not read them."""

CRUMBS_MAX: Final = 8192
CRUMB_BYTES: Final = 64
"""A body may have `CRUMBS_MAX` chunks, and one more for every `CRUMB_BYTES` bytes: even the smallest chunk costs a
microsecond."""

_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})([ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")

_LINE, _BYTES, _END, _TRAILERS, _DONE = range(5)


class Chunks:
    """Reads one body in chunks: `feed` until `done`."""

    __slots__ = ("_bytes_max", "_chunks", "_keeps", "_left", "_rest", "_spare", "_state", "body", "size")

    def __init__(self, bytes_max: int, *, keeps: bool = True) -> None:
        """Start before the body's first byte.

        Args:
            bytes_max: limit of the body's size.
            keeps: collect the body in `body`; False: only find its end.
        """
        self.body = BytesIO()  # `getvalue` of a BytesIO makes no copy
        self.size = 0
        self._bytes_max: Final = bytes_max
        self._keeps: Final = keeps
        self._state = _LINE
        self._left = 0
        self._rest = b""
        """The beginning of a line whose end has not come yet."""
        self._chunks = 0
        self._spare = EXTENSION_BYTES_MAX
        """Bytes that extensions may still take; after the last chunk, bytes that trailers may still take."""

    @property
    def done(self) -> bool:
        """Whether the body's end has come."""
        return self._state == _DONE

    def feed(self, data: bytes) -> int:
        """Read the next bytes. Returns how many of them belong to this body: all of them until `done`.

        Raises:
            ApiError: 400: not a chunk; 413: the body is too large; 431: its trailers are too long.
        """
        at, before = 0, len(self._rest)
        if before:
            data, self._rest = self._rest + data, b""
        end = len(data)
        while at < end and self._state != _DONE:
            if self._state == _BYTES:
                taken = min(self._left, end - at)
                if self._keeps:
                    self.body.write(data[at : at + taken] if taken < end else data)
                at += taken
                self._left -= taken
                if not self._left:
                    self._state = _END
            else:
                went = self._line(data, at)
                if went < 0:
                    self._rest = data[at:]
                    at = end
                else:
                    at = went
        return at - before

    def _line(self, data: bytes, at: int) -> int:
        """Read one line. Returns where it ends, or -1: its end has not come yet."""
        if self._state == _LINE:
            return self._size(data, at)
        if self._state == _TRAILERS:
            return self._trailer(data, at)
        found = data[at : at + 2]  # the end of a chunk's bytes
        if found == b"\r\n":
            self._state = _LINE
            return at + 2
        if found == b"\r":
            return -1
        raise _unreadable()

    def _size(self, data: bytes, at: int) -> int:
        match = _SIZE.match(data, at)
        if match is None:
            if data.find(b"\n", at, at + LINE_BYTES_MAX) >= 0:
                raise _unreadable()
            if len(data) - at >= LINE_BYTES_MAX:
                raise _too_long()
            return -1
        if match.end(2) > 0:
            self._spare -= match.end(2) - match.start(2)
            if self._spare < 0 or match.end() - at > LINE_BYTES_MAX:
                raise _too_long()
        self._left = int(match[1], 16)
        if not self._left:
            self._state, self._spare = _TRAILERS, TRAILER_BYTES_MAX
            return match.end()
        self.size += self._left
        if self.size > self._bytes_max:
            raise too_large(self._bytes_max)
        self._chunks += 1
        if self._chunks > CRUMBS_MAX + self.size // CRUMB_BYTES:
            raise bad_request(f"The body comes in too many chunks of less than {CRUMB_BYTES} bytes.")
        self._state = _BYTES
        return match.end()

    def _trailer(self, data: bytes, at: int) -> int:
        if data.startswith(b"\r\n", at):
            self._state = _DONE
            return at + 2
        match = _TRAILER.match(data, at)
        if match is None:
            if data.find(b"\n", at, at + self._spare) >= 0:
                raise _unreadable()
            if len(data) - at > self._spare:
                raise _trailers()
            return -1
        self._spare -= match.end() - at
        if self._spare < 0:
            raise _trailers()
        return match.end()


def _unreadable() -> ApiError:
    return bad_request("This is not a request of HTTP/1.1: the body is not in chunks as it should be.")


def _too_long() -> ApiError:
    most = f"{LINE_BYTES_MAX} bytes a line, {EXTENSION_BYTES_MAX} in all"
    return bad_request(f"The extensions of the body's chunks are too long: {most}.")


def _trailers() -> ApiError:
    return ApiError(431, "BadRequestError", f"The body's trailers are longer than {TRAILER_BYTES_MAX} bytes.")
