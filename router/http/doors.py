"""The number of connections that clients may have open, and which one is closed at the limit. Pure.

Descriptors are few, and engines, the registry and logs need some, too, so there is a limit. At the limit, the
connection that has been idle for longest is closed: no request is under way on it, and its client can connect again. If
no connection is idle, the new one is refused with an answer; if too many are being refused, without one.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, Protocol

CLIENTS_MAX: Final = 16384
"""The limit of connections where descriptors are ample: one process cannot serve more streams."""

SPARE: Final = 24
"""Descriptors that are reserved for the registry, probes, the admin side, logs and refusals."""

REFUSALS_MAX: Final = 8
"""The number of connections above the limit that may get an answer."""

IDLE_S: Final = 1.0
"""A connection counts as idle only after so many seconds: a request may be on its way."""

_LOOKS: Final = 8
"""The number of candidates that are checked for a new connection."""


class Guest(Protocol):
    """A client's connection."""

    def make_room(self) -> bool:
        """Close, if no request is under way. False: one is."""


class ConnectionPlace(Enum):
    """What a new connection gets."""

    TAKEN = auto()
    """A place."""
    REFUSAL = auto()
    """A refusal with an answer."""
    NONE = auto()
    """A refusal without an answer."""


class Doors:
    """The connections of one port."""

    def __init__(self, guests_max: int) -> None:
        """`guests_max`: the number of connections that may be open."""
        self.guests_max: Final = guests_max
        self.guests: Final[set[Guest]] = set()
        self._idle: Final[dict[Guest, float]] = {}
        """Idle connections, and since when, in seconds; in this order."""
        self.closed = 0
        """The number of idle connections that were closed for new ones."""
        self.refused = 0
        self.handshakes: Final[dict[str, int]] = {}
        """TLS handshakes by outcome (`router.http.tls`); empty without TLS."""

    def enter(self, guest: Guest, now: float) -> ConnectionPlace:
        """A connection arrives. It must `leave` again, whatever it gets."""
        self.guests.add(guest)
        if len(self.guests) <= self.guests_max or self._one_makes_room(now):
            self._idle[guest] = now
            return ConnectionPlace.TAKEN
        self.refused += 1
        return ConnectionPlace.REFUSAL if len(self.guests) <= self.guests_max + REFUSALS_MAX else ConnectionPlace.NONE

    def _one_makes_room(self, now: float) -> bool:
        for _ in range(_LOOKS):
            oldest = next(iter(self._idle), None)
            if oldest is None or now - self._idle[oldest] < IDLE_S:
                return False
            del self._idle[oldest]
            if oldest.make_room():
                self.closed += 1
                self.guests.discard(oldest)
                return True
            self._idle[oldest] = now  # checked again later
        return False

    def idles(self, guest: Guest, now: float) -> None:
        """No request is known to be under way on the connection, from now on."""
        self._idle.pop(guest, None)
        if guest in self.guests:
            self._idle[guest] = now

    def busy(self, guest: Guest) -> None:
        """A request has arrived on the connection."""
        self._idle.pop(guest, None)

    def leave(self, guest: Guest) -> None:
        """The connection is closed."""
        self.guests.discard(guest)
        self._idle.pop(guest, None)


def guests_of(descriptors: int, used: int) -> int:
    """The number of connections that clients may have with `descriptors`, of which `used` are in use already: half of
    the rest, as each request needs a connection to an engine, too.
    """
    return max(1, min(CLIENTS_MAX, (descriptors - used - SPARE) // 2))
