"""How many bytes are under way on each link, and whose part goes next. Pure.

A link that is filled by one transfer of 100,000 tokens makes everybody behind it wait for all of it. So transfers are
posted in parts, the parts of a link's transfers take turns (whoever has been given least goes next, a new one begins
level with the least of those there), and no transfer may fill a link alone: what a lone large one leaves free is where
a small one starts at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

L = TypeVar("L", bound=Hashable)
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes. A part larger than a limit goes alone: nothing is too large to be moved."""

    part_bytes: int = 16 << 20
    """One part of a transfer. At 3 GB/s, which two processes of one machine reach, it takes 5 ms; at 50 GB/s it takes
    0.3 ms, far more than posting it costs."""
    link_bytes: int = 128 << 20
    """Under way on one link: four times what a link of 50 GB/s carries in half a millisecond, between two looks."""
    share: float = 0.75
    """Of that, what one transfer may have under way."""
    all_bytes: int = 512 << 20
    """Under way on all links together."""

    def __post_init__(self) -> None:
        if min(self.part_bytes, self.link_bytes, self.all_bytes) < 1 or not 0 < self.share <= 1:
            raise ValueError("limits are positive, and a share at most 1")


@dataclass(slots=True)
class _Transfer(Generic[T]):
    key: T
    waiting: deque[tuple[int, int]]
    """Parts that were not given out: number and bytes."""
    under_way: dict[int, int] = field(default_factory=dict)
    given: int = 0
    """Bytes that were given out, and a newcomer's handicap."""


@dataclass(slots=True)
class _Link(Generic[T]):
    transfers: dict[T, _Transfer[T]] = field(default_factory=dict)
    under_way: int = 0


class Pacer(Generic[L, T]):
    """Transfers by link, their parts, and turns."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.under_way = 0
        """Bytes, over all links."""
        self._links: dict[L, _Link[T]] = {}

    def __len__(self) -> int:
        """Transfers that have parts waiting or under way."""
        return sum(len(link.transfers) for link in self._links.values())

    def add(self, link: L, key: T, parts: Sequence[int]) -> None:
        """A transfer of parts of so many bytes each, numbered from 0.

        Raises:
            ValueError: it is there already, or has no parts.
        """
        at = self._links.setdefault(link, _Link())
        if key in at.transfers or not parts:
            raise ValueError("a transfer is added once, and has parts")
        level = min((each.given for each in at.transfers.values()), default=0)
        at.transfers[key] = _Transfer(key, deque(enumerate(parts)), given=level)

    def take(self) -> Iterator[tuple[L, T, int, int]]:
        """Parts to be posted now, as link, transfer, number, bytes. What was taken counts as under way at once.

        Links take turns, so one full link delays no other.
        """
        open_links = list(self._links)
        while open_links:
            for name in tuple(open_links):
                at = self._links.get(name)  # whoever takes a part may end it, or drop others, before the next
                found = self._next(at) if at is not None else None
                if at is None or found is None:
                    open_links.remove(name)
                    continue
                number, size = found.waiting.popleft()
                found.under_way[number] = size
                found.given += size
                at.under_way += size
                self.under_way += size
                yield name, found.key, number, size

    def ended(self, link: L, key: T, number: int) -> None:
        """A part is not under way any more. Unknown ones are no fault."""
        at = self._links.get(link)
        found = at.transfers.get(key) if at else None
        if at is None or found is None or number not in found.under_way:
            return
        size = found.under_way.pop(number)
        at.under_way -= size
        self.under_way -= size
        self._tidy(link, at, found)

    def drop(self, link: L, key: T) -> tuple[int, ...]:
        """Give up what was not taken yet; the numbers of those parts. What is under way stays so until it has ended."""
        at = self._links.get(link)
        found = at.transfers.get(key) if at else None
        if at is None or found is None:
            return ()
        dropped = tuple(number for number, _ in found.waiting)
        found.waiting.clear()
        self._tidy(link, at, found)
        return dropped

    def _next(self, link: _Link[T]) -> _Transfer[T] | None:
        limits = self.limits
        ready = [each for each in link.transfers.values() if each.waiting]
        for found in sorted(ready, key=lambda each: each.given):
            size = found.waiting[0][1]
            mine = sum(found.under_way.values())
            if mine and mine + size > limits.share * limits.link_bytes:
                continue
            if link.under_way and link.under_way + size > limits.link_bytes:
                return None  # its turn: it is not overtaken by whoever is smaller
            if self.under_way and self.under_way + size > limits.all_bytes:
                return None
            return found
        return None

    def _tidy(self, link: L, at: _Link[T], found: _Transfer[T]) -> None:
        if not found.waiting and not found.under_way:
            del at.transfers[found.key]
            if not at.transfers:
                del self._links[link]
