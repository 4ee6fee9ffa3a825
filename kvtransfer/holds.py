"""The holds of one producer by the names routers gave them, and what was given up before it was held. Pure.

A router may give a hold up before it knows of it: its client left, the leg runs on, and whatever it then holds nobody
wants. So a name that is given up is remembered, and a hold under it is never made. An event for what is not there
changes nothing and is counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from kvtransfer.alarms import Memory
from kvtransfer.slots import Slot, Slots

REMEMBER_S: Final = 600.0
"""How long a name stays given up: a prompt that is not computed by then never will be (`Terms.fill_s_max`)."""
REMEMBERED_MAX: Final = 65_536
"""A hundred abandoned legs a second. When full, the newest are held to the end of their lease: counted."""


@dataclass(slots=True)
class _Leg:
    """One prefill leg that has not ended, or whose blocks are held."""

    name: str | None
    slot: Slot | None
    held: bool = False
    given_up: bool = False


@dataclass(slots=True)
class Holds:
    """Prefill legs and holds of one engine, by vLLM's request ids."""

    slots: Slots
    counts: Counter[str] = field(default_factory=Counter)
    """Since the start, by what happened."""
    _legs: dict[str, _Leg] = field(default_factory=dict)
    _named: dict[str, set[str]] = field(default_factory=dict)
    _over: Memory[str] = field(default_factory=lambda: Memory(REMEMBERED_MAX))

    def open(self, request: str, name: str | None) -> Slot | None:
        """A leg that is to leave a hold has come. Its slot is to be marked before anything of it is computed."""
        if request in self._legs:
            self.counts["opened twice"] += 1
            return self._legs[request].slot
        slot = self.slots.take(name or request)
        if slot is None:
            self.counts["no slot"] += 1
        self._legs[request] = _Leg(name, slot)
        if name is not None:
            self._named.setdefault(name, set()).add(request)
        return slot

    def wanted(self, request: str, now: float) -> bool:
        """A leg has ended: whether its blocks are to be held. Its name may have been given up meanwhile."""
        leg = self._legs.get(request)
        return leg is not None and not leg.given_up and (leg.name is None or not self._over.knows(leg.name, now))

    def hold(self, request: str) -> Slot | None:
        """Its blocks are held from now on, until `end`."""
        leg = self._legs[request]
        leg.held = True
        self.counts["held"] += 1
        return leg.slot

    def end(self, request: str) -> None:
        """Nothing is held for it, or no more."""
        leg = self._legs.pop(request, None)
        if leg is None:
            self.counts["ended unknown"] += 1
            return
        if leg.slot is not None:
            self.slots.give_back(leg.slot)
        if leg.name is not None:
            same = self._named[leg.name]
            same.discard(request)
            if not same:
                del self._named[leg.name]

    def release(self, name: str, now: float) -> tuple[str, ...]:
        """A router gives up what is held under a name, now or later. Returns what the workers are to give back."""
        requests = [(request, self._legs[request]) for request in sorted(self._named.get(name, ()))]
        held = tuple(request for request, leg in requests if leg.held and not leg.given_up)
        self.counts["released"] += len(held)
        self.counts["released before held"] += not requests or any(not leg.held for _, leg in requests)
        for _, leg in requests:
            leg.given_up = True
        if not self._over.remember(name, now + REMEMBER_S, now):
            self.counts["could not be remembered"] += 1
        return held

    @property
    def open_legs(self) -> int:
        """Legs that still run."""
        return sum(not leg.held for leg in self._legs.values())

    @property
    def held(self) -> int:
        """Holds that were not given back."""
        return sum(leg.held for leg in self._legs.values())
