"""Backpressure for request bodies: how many bytes a router reads at once, and which upload goes on at the limit. Pure.

Bytes count when they have arrived, not when they are announced: a client that announces much and sends nothing takes no
room from others. At the limit every upload waits (its connection is not read) except the oldest one, which may always
go on: so one upload finishes, and its room goes to the next. Each has its own time limit, waiting or not. At any time
the bytes are at most the limit, one whole body, and one read for each waiting upload.

A large body counts until it is parsed (`keep`): until then it lies in memory beside those that are still arriving.
While there is such a body no upload goes on at the limit, not even the oldest: parsing makes room.

One client (a tenant; without tenants an address) has at most `SHARE` of the bytes and of the waiting places. At its
share its own uploads wait for each other by the same rule, and other clients' uploads go on.
"""

from __future__ import annotations

from typing import Final, Protocol

from cluster.errors import ApiError, no_room
from router.core.clients import SHARE

READ_BYTES: Final = 1 << 18
"""The most that arrives with one read: an upload that goes on may bring so much before it is held again."""

LINE_MAX: Final = 128
"""The number of uploads that may wait; more are refused, as each has brought its first bytes already."""


def share_of(places: int) -> int:
    """The number of places that one client may have out of `places`; at least one."""
    return max(1, int(places * SHARE))


class Upload(Protocol):
    """A body that is being read."""

    def hold(self) -> None:
        """Stop reading the body."""

    def go_on(self) -> None:
        """Read on."""


class _Client:
    """One client's uploads."""

    __slots__ = ("bytes", "held", "kept", "uploads")

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of all its bodies."""
        self.kept = 0
        """The number of its kept bodies (`Uploads.keep`)."""
        self.held = 0
        """The number of its uploads that are held."""
        self.uploads: Final[dict[Upload, None]] = {}
        """The oldest first."""


class UnparsedBody:
    """A body that has fully arrived and is not parsed yet."""

    __slots__ = ("client", "size")

    def __init__(self, client: str | None, size: int) -> None:
        self.client: Final = client
        self.size: Final = size


class Uploads:
    """The uploads of one router."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: above so many bytes of bodies, uploads wait."""
        self._bytes_max: Final = bytes_max
        self._of: Final[dict[Upload, int]] = {}
        """The bytes of each upload, the oldest first."""
        self._whose: Final[dict[Upload, str | None]] = {}
        """The client of each upload."""
        self._clients: Final[dict[str | None, _Client]] = {}
        """None: uploads without a share of their own."""
        self._kept = 0
        """The number of kept bodies."""
        self._held_up: Final[dict[Upload, None]] = {}
        """The held uploads, in the order in which they were held."""
        self._reading: Final[dict[Upload, None]] = {}
        """The uploads that are not held."""
        self.bytes = 0
        """The bytes of all uploads and of all kept bodies."""

    @property
    def waiting(self) -> int:
        """The number of held uploads."""
        return len(self._held_up)

    def waits(self, upload: Upload) -> bool:
        """Whether this upload is held."""
        return upload in self._held_up

    def add(self, upload: Upload, count: int, client: str | None = None) -> bool:
        """`count` more bytes of this body have arrived. False: the upload is new, and too many wait already, of all or
        of this client.
        """
        if upload not in self._of:
            own = self._clients.get(client)
            too_many = client is not None and own is not None and own.held >= share_of(LINE_MAX)
            if too_many or len(self._held_up) >= LINE_MAX:
                return False
            self._of[upload], self._whose[upload], self._reading[upload] = 0, client, None
            self._clients.setdefault(client, _Client()).uploads[upload] = None
        self._of[upload] += count
        self._count(self._whose[upload], count)
        return True

    def keep(self, size: int, client: str | None = None) -> UnparsedBody:
        """A body of `size` bytes has fully arrived and is to be parsed: it counts until `drop`."""
        self._kept += 1
        self._clients.setdefault(client, _Client()).kept += 1
        self._count(client, size)
        return UnparsedBody(client, size)

    def drop(self, kept: UnparsedBody) -> None:
        """The body is parsed, or not wanted any more."""
        self._kept -= 1
        self._clients[kept.client].kept -= 1
        self._gone(kept.client, kept.size)

    def end(self, upload: Upload) -> None:
        """The upload is over, in whatever way. Unknown uploads are ignored."""
        count = self._of.pop(upload, None)
        if count is None:
            return
        client = self._whose.pop(upload)
        own = self._clients[client]
        del own.uploads[upload]
        if upload in self._held_up:
            del self._held_up[upload]
            own.held -= 1
        self._reading.pop(upload, None)
        self._gone(client, count)

    def _count(self, client: str | None, count: int) -> None:
        own = self._clients[client]
        own.bytes += count
        self.bytes += count
        over = self.bytes > self._bytes_max
        if over or self._over_share(client):
            for each in list(self._reading if over else own.uploads):
                if each in self._reading and not self._may_read(each):
                    self._hold(each)

    def _gone(self, client: str | None, count: int) -> None:
        own = self._clients[client]
        own.bytes -= count
        self.bytes -= count
        if not own.uploads and not own.kept:
            del self._clients[client]
        if self._held_up:
            self._let_on()

    def _over_share(self, client: str | None) -> bool:
        return client is not None and self._clients[client].bytes > SHARE * self._bytes_max

    def _may_read(self, upload: Upload) -> bool:
        """Whether the limits let this upload read on: there is room, or its end will make room."""
        if self.bytes > self._bytes_max and (self._kept or next(iter(self._of)) is not upload):
            return False
        client = self._whose[upload]
        own = self._clients[client]
        return not self._over_share(client) or (not own.kept and next(iter(own.uploads)) is upload)

    def _let_on(self) -> None:
        """Let the oldest upload go on, unless kept bodies will make room. Let others go on as there is room, in the
        order in which they were held.
        """
        oldest = next(iter(self._of))
        if self._may_read(oldest):
            self._release(oldest)
        room = self._bytes_max - self.bytes
        for each in list(self._held_up):
            if room <= 0:
                return
            if self._may_read(each):
                self._release(each)
                room -= READ_BYTES

    def _hold(self, upload: Upload) -> None:
        del self._reading[upload]
        self._held_up[upload] = None
        self._clients[self._whose[upload]].held += 1
        upload.hold()

    def _release(self, upload: Upload) -> None:
        if upload in self._held_up:
            del self._held_up[upload]
            self._clients[self._whose[upload]].held -= 1
            self._reading[upload] = None
            upload.go_on()


def no_room_for_bodies() -> ApiError:
    """503: an upload has waited too long for its turn, or too many wait."""
    return no_room("it is reading as many bytes of bodies as it may (--uploads-bytes-max)")
