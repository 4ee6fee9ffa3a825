"""Prefill legs and holds of one engine: the scheduler's view (`prefill.table.LEGS`). Pure.

A router may give a hold up before the engine has made it: the client has left, the leg runs on, and its hold is not
wanted. So `Holds` remembers a name that was given up, and never makes a hold under it. An event for an unknown leg
changes nothing and is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvtransfer.hold_marks import Slot, Slots
from kvtransfer.timers import TimedKeys
from prefill.orders import Orders
from prefill.table import LEGS, HoldAct, HoldCause, LegState

REMEMBER_S: Final = 600.0
"""Seconds for which a name stays given up: a prompt that is not computed by then will never be."""
REMEMBERED_MAX: Final = 65_536
"""The limit of names given up: a hundred abandoned legs a second. At the limit a new name is not remembered, but
counted; its hold then lasts until its lease ends."""


class _HeldLeg:
    """One leg."""

    __slots__ = ("name", "slot", "state")

    def __init__(self, name: str | None, slot: Slot | None, state: LegState) -> None:
        self.name, self.slot, self.state = name, slot, state


class Holds:
    """Legs and holds by the engine's request ids. `now` and `remember` are in the same unit of time."""

    def __init__(self, slots: Slots, remember: float = REMEMBER_S) -> None:
        self.slots: Final = slots
        self.counts: Final[Counter[str]] = Counter()
        """Counts since the start, by event."""
        self._remember: Final = remember
        self._legs: Final[dict[str, _HeldLeg]] = {}
        self._named: Final[dict[str, list[str]]] = {}
        self._given_up: Final[TimedKeys[str]] = TimedKeys(REMEMBERED_MAX)
        self._orders = Orders()

    def begin(self, request: str, name: str | None, now: float) -> Slot | None:
        """A leg that is to leave a hold has arrived."""
        if request in self._legs:
            self.counts["opened twice"] += 1
            return self._legs[request].slot
        slot = self.slots.take(name or request)
        if slot is None:
            self.counts["no slot"] += 1
        unwanted = name is not None and self._given_up.knows(name, now)
        self._legs[request] = _HeldLeg(name, slot, LegState.UNWANTED if unwanted else LegState.COMPUTING)
        self._orders.opened[request] = slot
        if name is not None:
            self._named.setdefault(name, []).append(request)
        return slot

    def wanted(self, request: str) -> bool:
        """Whether the leg's blocks are to be held once it has ended well."""
        leg = self._legs.get(request)
        return leg is not None and leg.state is LegState.COMPUTING

    def filled(self, request: str) -> Slot | None:
        """A leg that is `wanted` has ended well: its blocks are held from now on. Returns the slot that confirms the
        hold.
        """
        leg = self._legs[request]
        assert leg.state is LegState.COMPUTING, f"{request} is {leg.state}"
        self.counts["held"] += 1
        self._move(request, leg, HoldCause.FILLED)
        return leg.slot

    def dropped(self, request: str) -> None:
        """The leg has ended without a hold: it was aborted, or is not wanted."""
        leg = self._legs.get(request)
        self.counts["given up before held"] += leg is not None and leg.state is LegState.UNWANTED
        self._tell(request, HoldCause.DROPPED)

    def reported(self, request: str) -> None:
        """Every rank has ended the hold: the engine frees its blocks after this."""
        self._tell(request, HoldCause.REPORTED)

    def release(self, name: str, now: float) -> None:
        """A router gives up the hold under this name, now or in advance."""
        requests = self._named.get(name, ())
        early = not requests
        for request in sorted(requests):
            leg = self._legs[request]
            if leg.state is LegState.HELD:
                self.counts["released"] += 1
            early = early or leg.state in {LegState.COMPUTING, LegState.UNWANTED}
            self._move(request, leg, HoldCause.GIVEN_UP)
        self.counts["released before held"] += early
        if not self._given_up.remember(name, now + self._remember, now):
            self.counts["could not be remembered"] += 1

    def take_orders(self) -> Orders:
        """The orders for the ranks, once."""
        orders, self._orders = self._orders, Orders()
        return orders

    @property
    def has_orders(self) -> bool:
        """Whether there are orders for the ranks."""
        return bool(self._orders)

    @property
    def any(self) -> bool:
        """Whether there is a leg that runs, or a hold."""
        return bool(self._legs)

    @property
    def open_legs(self) -> int:
        """The number of legs that still run."""
        return sum(leg.state in {LegState.COMPUTING, LegState.UNWANTED} for leg in list(self._legs.values()))

    @property
    def held(self) -> int:
        """The number of holds whose end not every rank has reported."""
        return sum(leg.state in {LegState.HELD, LegState.RELEASED} for leg in list(self._legs.values()))

    def _tell(self, request: str, cause: HoldCause) -> None:
        leg = self._legs.get(request)
        if leg is None:
            self.counts["ended unknown"] += 1
        else:
            self._move(request, leg, cause)

    def _move(self, request: str, leg: _HeldLeg, cause: HoldCause) -> None:
        row = LEGS[leg.state].get(cause)
        if row is None:
            self.counts["out of turn"] += cause is not HoldCause.GIVEN_UP
            return
        leg.state = row.state
        for act in row.acts:
            if act is HoldAct.OFFER:
                self._orders.held.append(request)
            elif act is HoldAct.RELEASE:
                self._orders.released.append(request)
            elif act is HoldAct.DROP:
                if request in self._orders.opened:  # the ranks have not been told of it yet
                    del self._orders.opened[request]
                else:
                    self._orders.dropped.append(request)
            else:
                self._free(request, leg)

    def _free(self, request: str, leg: _HeldLeg) -> None:
        del self._legs[request]
        if leg.slot is not None:
            self.slots.give_back(leg.slot)
        if leg.name is not None:
            same = self._named[leg.name]
            same.remove(request)
            if not same:
                del self._named[leg.name]
