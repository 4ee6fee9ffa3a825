"""Turns routers' cumulative counts into what came between two looks, across restarts and silence. Pure.

A router in the registry whose counters are older than `STALE_S` makes the load unknown, and so does a fleet without
routers. A router that said goodbye has no load any more. A router that is not in the registry any more and said no
goodbye is *missing*: it may have died, or it serves on and only the registry is lost to it. So its load is unknown, and
what the other routers count is the least that there is. That is enough to start instances, not to end any. A router is
missing until it is heard again, another one starts at its address, its clients have come to the others (`failover`),
or for `FORGOTTEN_S`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from goodput.failover import RecentArrivals
from goodput.observation import NO_COUNTS, ClassCounts, RouterCounts

STALE_S: Final = 20.0
"""A router that was heard so many seconds ago, or later, counts as heard."""
FORGOTTEN_S: Final = 900.0
"""A router is missing for so many seconds at most."""
REMEMBERED_S: Final = 86400.0
"""The counts of a router that is not heard are remembered for so many seconds: if it comes back, only what grows from
then on is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """What all routers saw since the last complete look."""

    seconds: float
    classes: dict[str, ClassCounts]
    """Counts of these seconds, by SLO class."""
    waiting: int | None
    """Requests that wait now; None: a router does not say."""
    oldest_wait_s: float | None


@dataclass(frozen=True, slots=True)
class _Known:
    """A router that was heard at a complete look."""

    since_s: float
    """When it was heard first."""
    counts: RouterCounts


class Counters:
    """The last state of every router's counters."""

    def __init__(self) -> None:
        self.silent = "no router was heard yet"
        """Why the load is unknown since the last look, as a sentence; empty: it is known."""
        self.missing = ""
        """The routers that may serve although they are not heard, as a sentence; empty: there are none."""
        self._known: Final[dict[str, _Known]] = {}
        self._parted: Final[dict[str, ClassCounts]] = {}
        """Counts of routers that have left since the last complete look, by SLO class."""
        self._recent: Final = RecentArrivals()
        self._came: Final[dict[str, int]] = {}
        """Arrivals since the last complete look, by router."""
        self._dead: Final[set[str]] = set()
        """Routers that are not heard, and whose clients have come to others."""
        self._complete_s: float | None = None
        """When all routers of the registry were last known."""

    def see(self, routers: Iterable[RouterCounts], now: float) -> Between | None:
        """Fold one look in; None: the load is unknown (`silent`), or there is no earlier look to compare with."""
        heard = sorted(routers, key=lambda each: each.router)
        staying = [each for each in heard if not each.left]
        for each in heard:
            if each.left:
                self._part(each)
        self.silent = _silent(staying, now)
        if self.silent:
            return None
        found, since_s = dict(self._parted), self._complete_s
        self._parted.clear()
        for each in staying:
            self._add(each, found)
        if since_s is not None:
            self._recent.add(self._came, since_s, now)
        self._came.clear()
        self._forget({each.router for each in staying}, now)
        self._complete_s = now
        if since_s is None or now <= since_s:
            return None
        return Between(
            seconds=now - since_s,
            classes=found,
            waiting=_sum(each.waiting for each in staying),
            oldest_wait_s=max((each.oldest_wait_s for each in staying if each.oldest_wait_s is not None), default=None),
        )

    def _part(self, last: RouterCounts) -> None:
        """Take the last counts of a router that said goodbye."""
        self._add(last, self._parted)
        del self._known[last.router]

    def _add(self, heard: RouterCounts, to: dict[str, ClassCounts]) -> None:
        """Add what a router has counted since it was last heard."""
        known = self._known.get(heard.router)
        self._known[heard.router] = _Known(heard.at_s if known is None else known.since_s, heard)
        if self._complete_s is None:
            return  # the first look at a fleet that has served before: counts begin here
        before = None if known is None or known.counts.life != heard.life else known.counts
        served_s = heard.began_s if before is None else before.at_s
        if served_s is not None and self._complete_s - served_s > STALE_S:
            return  # it served without being heard: nothing says when its requests came, so counts begin here
        for name, counts in heard.classes.items():
            was = NO_COUNTS if before is None else before.classes.get(name, NO_COUNTS)
            new = counts.since(was)
            to[name] = to.get(name, NO_COUNTS) + new
            self._came[heard.router] = self._came.get(heard.router, 0) + new.arrivals

    def _forget(self, heard: set[str], now: float) -> None:
        """Note which routers are missing; forget those that others have replaced, or that were heard too long ago."""
        newest: dict[str, float] = {}
        for each in (self._known[name] for name in heard):
            newest[each.counts.address] = max(each.since_s, newest.get(each.counts.address, each.since_s))
        missing: dict[str, float] = {}
        for name, known in sorted(self._known.items()):
            if name in heard:
                continue
            last_s, address = known.counts.at_s, known.counts.address
            age_s, replaced = now - last_s, bool(address) and newest.get(address, last_s) > last_s
            if replaced or age_s > REMEMBERED_S:
                del self._known[name]
            elif STALE_S < age_s <= FORGOTTEN_S and name not in self._dead:
                missing[name] = last_s
        self._dead.difference_update(heard)
        self._dead.intersection_update(self._known)
        if missing and self._recent.taken_over(missing, now):
            self._dead.update(missing)
            missing = {}
        self.missing = f"{', '.join(missing)} left without a goodbye and may still serve" if missing else ""


def _silent(staying: Iterable[RouterCounts], now: float) -> str:
    ages = {each.router: now - each.at_s for each in staying}
    if not ages:
        return "no router's metrics could be read"
    stale = ((name, age_s) for name, age_s in ages.items() if age_s > STALE_S)
    return next((f"router {name} was last heard {age_s:.0f} s ago" for name, age_s in stale), "")


def _sum(values: Iterable[int | None]) -> int | None:
    listed = list(values)
    return None if any(each is None for each in listed) else sum(each for each in listed if each is not None)
