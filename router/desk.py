"""Who of a router's requests has which place, and who waits for one. Pure: sockets and simulator use the same desk.

What always holds: a request has at most one place for its answer, from the moment it was chosen until the request is
over, so that a hold never waits for a place on D; a place that is given back is offered to the line.

Whoever is *called* (the methods' results) is to be asked again: its driver feeds `journey.FleetChanged`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cluster.ids import InstanceId
from router.journey import Choose, Chosen, Lost
from router.policy.candidates import Wanted
from router.view import Fleet, View
from router.waiting import Waiting

HANDSHAKE_S = 0.5
"""What a first handshake between two engines takes, with room (0.1 to 0.3 s on loopback)."""

Calls = tuple[object, ...]


@dataclass(slots=True, eq=False)
class Seat:
    """One request at the desk."""

    wanted: Wanted
    decode: InstanceId | None = None
    """Where its answer has a place."""


class Desk:
    """The places of one router."""

    def __init__(self, view: View, policy: Callable[[Fleet, Wanted], Chosen]) -> None:
        self.view: Final = view
        self.policy: Final = policy
        self.waiting: Final = Waiting()

    def choose(self, seat: Seat, effect: Choose) -> tuple[Chosen, Calls]:
        """Ask the policy, and take D's place before P begins. Without a place, the seat stands in line."""
        mine = seat.wanted
        wanted = Wanted(
            model=mine.model,
            hand_over=effect.hand_over,
            prefill_only=mine.prefill_only,
            excluded=effect.excluded,
            routers=self.view.routers,
            prompt_tokens=mine.prompt_tokens,
            prefix=mine.prefix,
            prefix_block_tokens=mine.prefix_block_tokens,
        )
        calls = self.occupy(seat, None)
        chosen = self.policy(self.view.all(), wanted)
        if chosen.wait:
            self.waiting.enter(seat, wanted.kind)
        else:
            calls += self.waiting.leave(seat, placed=chosen.decode is not None)
        return chosen, calls + self.occupy(seat, chosen.decode)

    def found_none(self, seat: Seat) -> Calls:
        """It waits (`journey.AwaitFleet`): if it was called, the call was for somebody else."""
        return self.waiting.found_none(seat)

    def occupy(self, seat: Seat, instance: InstanceId | None) -> Calls:
        """Count its answering leg at this instance, and nowhere else."""
        if instance == seat.decode:
            return ()
        former, seat.decode = seat.decode, instance
        calls = self.leg_ended(former) if former is not None else ()
        if instance is not None:
            self.view.leg_started(instance)
        return calls

    def leg_ended(self, instance: InstanceId) -> Calls:
        """A place is free again."""
        self.view.leg_ended(instance)
        return self.waiting.call_first()

    def finish(self, seat: Seat) -> Calls:
        """The request is over."""
        return self.occupy(seat, None) + self.waiting.leave(seat, placed=False)

    def fleet_changed(self) -> Calls:
        """Somebody came, left, or said something new."""
        return self.waiting.call_all()

    def pins(self, seat: Seat) -> bool:
        """Whether D's engine can be told which token its answer begins with."""
        known = seat.decode is not None and self.view.knows(seat.decode)
        return known and seat.decode is not None and self.view.get(seat.decode).instance.pins

    def turned_away(self, instance: InstanceId) -> Lost | None:
        """What an answering leg hears instead of being sent to an instance that takes none any more."""
        if self.view.knows(instance) and self.view.get(instance).ready:
            return None
        return Lost("it went away while the prompt was prefilled", untouched=True)  # draining, down, or a new epoch
