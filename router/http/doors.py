"""How many connections clients may have open, and which of them ends when that is reached. Pure.

Descriptors are few, and engines, the registry and logs need some, too. So there is a bound. At the bound, the
connection that has been idle for longest is closed: no request is under way on it, and its client connects anew to send
one. Where no connection is idle, the new one is refused with an answer; where too many are refused, without one.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, Protocol

CLIENTS_MAX: Final = 16384
"""Where there are more descriptors than a router needs: one process cannot serve as many streams."""

SPARE: Final = 24
"""Descriptors that neither clients nor their legs get: the registry, probes, the admin side, logs, refusals."""

REFUSALS_MAX: Final = 8
"""Connections beyond the bound that may be told so."""

IDLE_S: Final = 1.0
"""So long a connection is not taken for idle: its request may be on the way."""

_LOOKS: Final = 8
"""Candidates that are looked at for one that comes."""


class Guest(Protocol):
    """A client's connection."""

    def make_room(self) -> bool:
        """Close, if no request is under way. False: one is."""


class Place(Enum):
    """What a connection that comes is given."""

    TAKEN = auto()
    REFUSAL = auto()
    """It may hear that there is none."""
    NONE = auto()


class Doors:
    """Of one port."""

    def __init__(self, guests_max: int) -> None:
        """`guests_max`: connections that may be open."""
        self.guests_max: Final = guests_max
        self.guests: Final[set[Guest]] = set()
        self._idle: Final[dict[Guest, float]] = {}
        """And since when, in seconds; in this order."""
        self.closed = 0
        """Idle ones that had to make room."""
        self.refused = 0

    def enter(self, guest: Guest, now: float) -> Place:
        """One comes. It is to `leave` again, whatever it is given."""
        self.guests.add(guest)
        if len(self.guests) <= self.guests_max or self._one_makes_room(now):
            self._idle[guest] = now
            return Place.TAKEN
        self.refused += 1
        return Place.REFUSAL if len(self.guests) <= self.guests_max + REFUSALS_MAX else Place.NONE

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
            self._idle[oldest] = now  # looked at again later
        return False

    def idles(self, guest: Guest, now: float) -> None:
        """Nothing is under way on it, as far as is known, from now on."""
        self._idle.pop(guest, None)
        if guest in self.guests:
            self._idle[guest] = now

    def busy(self, guest: Guest) -> None:
        """A request has come on it."""
        self._idle.pop(guest, None)

    def leave(self, guest: Guest) -> None:
        """It is closed."""
        self.guests.discard(guest)
        self._idle.pop(guest, None)


def guests_of(descriptors: int, used: int) -> int:
    """How many connections clients may have with so many descriptors, of which so many are in use already: half of what
    is left, as each request needs one to an engine, too.
    """
    return max(1, min(CLIENTS_MAX, (descriptors - used - SPARE) // 2))
