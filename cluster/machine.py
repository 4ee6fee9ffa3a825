"""The one shape of every state machine in Baton (law 2).

A machine takes an event and the time, and returns effects: what its driver must do next. It never awaits, never reads a
clock, and never raises because a peer misbehaved. The same object runs live under an asyncio driver and in the
simulator on virtual time.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

Event = TypeVar("Event", contravariant=True)
Effect = TypeVar("Effect", covariant=True)


class Machine(Protocol[Event, Effect]):
    """Events in, effects out. `now` is in seconds on any monotonic clock, always the same one for one machine."""

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold one event in; return the effects to carry out, in order."""

    def next_wakeup(self) -> float | None:
        """When the driver must call `handle` with a timer event at the latest; None: no timer is needed."""
