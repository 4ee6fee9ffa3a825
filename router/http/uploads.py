"""How many bytes of request bodies a router reads at once, and whose turn it is when that is too much. Pure.

Bytes count when they have come, not when they are announced: a client that announces much and sends nothing takes no
room from others. At the bound every upload waits (its connection is not read) but the oldest one, which may always go
on: so one upload comes to its end, and its room goes to the next. Each has its own time limit, waiting or not. At any
time the bytes are at most the bound, one whole body, and one read for each upload in line.
"""

from __future__ import annotations

from typing import Final, Protocol

from cluster.errors import ApiError, no_room

READ_BYTES: Final = 1 << 18
"""What comes with one read, at most: an upload that goes on may bring so much before it is held up again."""

LINE_MAX: Final = 128
"""Uploads that wait for their turn; beyond it they are refused, since each has brought its first bytes already."""


class Upload(Protocol):
    """A body that is being read."""

    def hold(self) -> None:
        """Read no more of it."""

    def go_on(self) -> None:
        """Read on."""


class Uploads:
    """Of one router."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: how many bytes of bodies there may be before uploads wait."""
        self._bytes_max: Final = bytes_max
        self._of: Final[dict[Upload, int]] = {}
        """Bytes of each, oldest first."""
        self._held_up: Final[dict[Upload, None]] = {}
        self._reading: Final[dict[Upload, None]] = {}
        """Those that are not held up."""
        self.bytes = 0
        """Of all that are being read."""

    @property
    def waiting(self) -> int:
        """Uploads that are held up."""
        return len(self._held_up)

    def waits(self, upload: Upload) -> bool:
        """Whether this one is held up."""
        return upload in self._held_up

    def add(self, upload: Upload, count: int) -> bool:
        """So many more bytes of its body have come. False: it is a new one, and too many are in line already."""
        if upload not in self._of:
            if len(self._held_up) >= LINE_MAX:
                return False
            self._reading[upload] = None
        self._of[upload] = self._of.get(upload, 0) + count
        self.bytes += count
        if self.bytes > self._bytes_max:
            oldest = next(iter(self._of))
            for each in list(self._reading):
                if each is not oldest:
                    del self._reading[each]
                    self._held_up[each] = None
                    each.hold()
        return True

    def end(self, upload: Upload) -> None:
        """It is over, in whatever way. One that is not known is none of these."""
        count = self._of.pop(upload, None)
        if count is None:
            return
        self.bytes -= count
        self._held_up.pop(upload, None)
        self._reading.pop(upload, None)
        if self._held_up:
            self._let_on()

    def _let_on(self) -> None:
        """The oldest in any case; others as there is room, in the order in which they were held up."""
        self._release(next(iter(self._of)))
        room = self._bytes_max - self.bytes
        for each in list(self._held_up):
            if room <= 0:
                return
            self._release(each)
            room -= READ_BYTES

    def _release(self, upload: Upload) -> None:
        if upload in self._held_up:
            del self._held_up[upload]
            self._reading[upload] = None
            upload.go_on()


def no_room_for_bodies() -> ApiError:
    """503: an upload has waited in vain for its turn, or too many do."""
    return no_room("it is reading as many bytes of bodies as it may (--uploads-bytes-max)")
