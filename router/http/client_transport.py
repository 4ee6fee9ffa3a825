"""One client's transport: whether it is read, until when the client has to do something, and how it ends. A shell."""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import struct
import termios
from collections.abc import Callable
from typing import Final

KEEPALIVE_S: Final = 75.0
"""Seconds for which idle client connections are kept, as common proxies do."""

_ACKED: Final = struct.Struct("@Q")
_ACKED_AT: Final = 120
"""Where Linux' ``struct tcp_info`` has ``tcpi_bytes_acked`` (include/uapi/linux/tcp.h, since 4.1)."""

_EARLY_S: Final = 0.001
"""The loop may call a timer so many seconds too early."""


class ClientTransport:
    """The transport of one client's connection, and its deadline. If the deadline moves into the future, the loop's
    timer stays, and is set again when it fires too early: so most deadlines cost no timer.
    """

    __slots__ = ("_due", "_late", "_loop", "_paused", "_taken", "_timer", "deadline", "raw")

    def __init__(self, loop: asyncio.AbstractEventLoop, late: Callable[[], None]) -> None:
        """`late`: called when the deadline has passed."""
        self._loop: Final = loop
        self._late: Callable[[], None] | None = late
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """The time at which the timer fires, on the loop's clock."""
        self._taken = -1
        """Bytes that the client's machine had taken at the last look."""
        self._paused = False
        self.deadline = math.inf
        """On the loop's clock; infinite: nothing is awaited. `within` sets it; the owner may set it to infinite."""
        self.raw: asyncio.Transport | None = None
        """None: the client is not connected yet, or has left."""

    # -- time --

    def within(self, seconds: float) -> None:
        """Set the time within which the next bytes have to arrive."""
        self.deadline = self._loop.time() + seconds
        if self._timer is not None and self._due > self.deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._due = self.deadline
            self._timer = self._loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._late is None or math.isinf(self.deadline):
            return
        left_s = self.deadline - self._loop.time()
        if left_s > _EARLY_S:
            self.within(left_s)
        else:
            self._late()

    def extend_for_client(self) -> bool:
        """If bytes of answers wait for the client, give it more time; cut it off if it has taken none since the last
        look. Returns whether bytes wait.
        """
        raw = self.raw
        if raw is None or not self.untaken:
            return False
        former, self._taken = self._taken, _taken(raw)
        if self._taken == former:
            self.abort()
        else:
            self.within(KEEPALIVE_S)
        return True

    @property
    def untaken(self) -> bool:
        """Whether bytes of answers wait here for the client. A TLS transport does not count those that it has given to
        the transport below it; as long as some wait there, the kernel has some, too.
        """
        raw = self.raw
        if raw is None:
            return False
        try:
            if raw.get_write_buffer_size():
                return True
            tls = raw.get_extra_info("sslcontext") is not None
            return tls and any(fcntl.ioctl(raw.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4)))
        except (AttributeError, OSError, ValueError):  # it is closed; asyncio's TLS transport has no state then
            return False

    # -- reading --

    def pause(self) -> None:
        """Do not read the client's bytes for now."""
        if self.raw is not None:  # also if it is paused: aiohttp may have resumed the transport that it shares
            self._paused = True
            self.raw.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.raw is not None and self._paused:
            self._paused = False
            self.raw.resume_reading()

    # -- the end --

    def finish(self, *, unheard: bool) -> None:
        """Close the connection when all is written. `unheard`: some of the client's bytes are not read, or may be on
        their way. A socket that is closed with unread bytes is reset, and the client may never read its answer. So only
        the direction to the client is closed then.
        """
        if self.raw is None:
            return
        if not unheard or not self.raw.can_write_eof():
            self.raw.close()
            return
        self.resume()  # further bytes are dropped, and the end must be noticed
        try:
            self.raw.write_eof()
        except OSError:  # the client has reset it meanwhile
            self.raw.abort()

    def close(self) -> None:
        """Close the connection when all is written."""
        if self.raw is not None and not self.raw.is_closing():  # asyncio's TLS transport forgets itself if told twice
            self.raw.close()

    def give_way(self) -> None:
        """Close the connection, without waiting for a client that has bytes to read."""
        if self.raw is not None and self.raw.get_write_buffer_size():
            self.raw.abort()
        else:
            self.close()

    def abort(self) -> None:
        """Close the connection now."""
        if self.raw is not None:
            self.raw.abort()

    def lost(self) -> None:
        """The connection is closed: forget the owner, which refers to this object."""
        self.raw = self._late = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _taken(raw: asyncio.Transport) -> int:
    """A number that grows as the client's machine takes bytes. Below a TLS transport only the kernel counts them."""
    try:
        told = raw.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + _ACKED.size)
        return int(_ACKED.unpack_from(told, _ACKED_AT)[0])
    except (AttributeError, OSError, struct.error):  # no TCP, or another kernel
        return -raw.get_write_buffer_size()
