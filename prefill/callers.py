"""The producer's side of early legs (`decode.early`): consumers that ask for a hold before it is made. Pure.

A consumer asks for a hold by its name, before or after the prompt is computed. The producer answers when the prompt is
computed, or at once if the hold stands. If no hold is ever made (the leg was aborted, or given up), the producer does
not answer: the router, which sees why, ends the waiting leg.
"""

from __future__ import annotations

from typing import Final

from kvtransfer.early_notes import Ready
from kvtransfer.timers import Alarms

REMEMBER_S: Final = 600.0
"""Seconds for which a question is remembered: as long as a name that was given up (`prefill.holds`)."""
NAMES_MAX: Final = 16_384
"""Names that are asked for at one time; further questions are not remembered, and come again (`decode.early`)."""
CALLERS_MAX: Final = 4
"""Consumers that may ask for one name: a router sends a leg to one at a time."""


class Callers:
    """The questions at one producer, by name. `now` in seconds times `unit`."""

    def __init__(self, unit: float = 1.0) -> None:
        """`unit`: ticks of the caller's clock in a second."""
        self._remember: Final = REMEMBER_S * unit
        self._asked: Final[dict[str, tuple[str, ...]]] = {}
        self._until: Final[Alarms[str]] = Alarms()
        self._standing: Final[dict[str, Ready]] = {}
        """By name, the holds that stand."""
        self._names: Final[dict[str, str]] = {}
        """By request, the name of its hold."""

    @property
    def asked(self) -> int:
        """The number of names that are asked for and have no hold."""
        return len(self._asked)

    def wanted(self, caller: str, name: str, now: float) -> Ready | None:
        """A consumer asks for a name: the answer, if the hold stands."""
        standing = self._standing.get(name)
        if standing is not None:
            return standing
        while (old := self._until.pop(now)) is not None:
            del self._asked[old]
        callers = self._asked.get(name, ())
        if caller not in callers and len(callers) < CALLERS_MAX and (callers or len(self._asked) < NAMES_MAX):
            self._asked[name] = (*callers, caller)
            self._until.set(name, now + self._remember)
        return None

    def asking(self, name: str) -> tuple[str, ...]:
        """The consumers that have asked for a name before its hold stands."""
        return self._asked.get(name, ())

    def filled(self, request: str, ready: Ready) -> tuple[str, ...]:
        """A prompt is computed and held. Returns the consumers to tell."""
        self._standing[ready.name], self._names[request] = ready, ready.name
        self._until.drop(ready.name)
        return self._asked.pop(ready.name, ())

    def over(self, request: str) -> str | None:
        """The hold has ended, or was given up: no consumer is told of it any more. Returns its name, if it had one."""
        name = self._names.pop(request, None)
        if name is not None:
            self._standing.pop(name, None)
        return name
