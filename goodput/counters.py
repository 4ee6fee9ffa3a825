"""Turns routers' cumulative counts into what came between two looks, across restarts and silence. Pure.

A router that is silent for longer than `STALE_S` makes the load unknown: its requests go on, though no router reports
them. A router that has been silent for `FORGOTTEN_S` is taken to be gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from goodput.observation import NO_COUNTS, ClassCounts, RouterCounts

STALE_S: Final = 20.0
FORGOTTEN_S: Final = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """What all routers saw since the last complete look."""

    seconds: float
    classes: dict[str, ClassCounts]
    """Counts of these seconds, by SLO class."""
    waiting: int | None
    """Requests that wait now; None: a router does not say."""
    oldest_wait_s: float | None


class Counters:
    """The last state of every router's counters."""

    def __init__(self) -> None:
        self._last: Final[dict[str, RouterCounts]] = {}
        self._complete_s: float | None = None
        """When all routers were last known."""

    def silent(self, routers: Iterable[RouterCounts], now: float) -> str:
        """Why the load is unknown now, as a sentence; empty: it is known."""
        heard = {each.router: each for each in routers}
        known = {**self._last, **heard}
        if not heard:
            return "no router's metrics could be read"
        for name, each in sorted(known.items()):
            age_s = now - each.at_s
            if STALE_S < age_s <= FORGOTTEN_S:
                return f"router {name} was last heard {age_s:.0f} s ago"
        return ""

    def read(self, routers: Iterable[RouterCounts], now: float) -> Between | None:
        """Fold one look in; None: there is no earlier look to compare with."""
        found: dict[str, ClassCounts] = {}
        heard = sorted(routers, key=lambda each: each.router)
        for each in heard:
            before = self._last.get(each.router)
            for name, counts in each.classes.items():
                was = before.classes.get(name, NO_COUNTS) if before and before.life == each.life else NO_COUNTS
                if before is None and self._complete_s is None:
                    continue  # the first look at a fleet that has served before: counts begin here
                found[name] = found.get(name, NO_COUNTS) + counts.since(was)
            self._last[each.router] = each
        self._forget(now)
        since_s, self._complete_s = self._complete_s, now
        if since_s is None or now <= since_s:
            return None
        return Between(
            seconds=now - since_s,
            classes=found,
            waiting=_sum(each.waiting for each in heard),
            oldest_wait_s=max((each.oldest_wait_s for each in heard if each.oldest_wait_s is not None), default=None),
        )

    def _forget(self, now: float) -> None:
        for name in [name for name, each in self._last.items() if now - each.at_s > FORGOTTEN_S]:
            del self._last[name]


def _sum(values: Iterable[int | None]) -> int | None:
    listed = list(values)
    return None if any(each is None for each in listed) else sum(each for each in listed if each is not None)
