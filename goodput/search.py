"""The cheapest fleet that holds, found with few trials: branch and bound over counts of instances. Pure.

A *space* is one arrangement with its kinds of instances fixed; only how many of each is open. Two things are presumed:
a fleet costs the sum of its instances, and more instances never hold less. The second makes one trial say much: if a
fleet fails, every fleet that is part of it fails too; if it holds, so does every fleet that it is part of.

So each space is looked at from above. The largest fleets that are cheaper than the best one so far form its *frontier*:
if each of them fails, no cheaper fleet of this space holds. If one holds, it is the best so far, is made as small as it
can be, and the frontier is drawn anew. Spaces whose least fleet costs as much as the best so far are never tried.

`search` is a generator: it yields fleets to try, several at once where they do not depend on each other, and is sent
what came of them. Who simulates, in how many processes, and when a person has waited long enough is its caller's
business: what it has found so far is there at any time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

Counts = tuple[int, ...]
"""How many instances of each kind."""

TOLERANCE: Final = 0.01
"""A fleet that is cheaper by less than this share of the best one is not looked for: intervals are wider."""

_ROUND: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """One arrangement: counts of its kinds are open."""

    name: str
    prices: tuple[float, ...]
    """Of one instance of each kind; above 0."""
    least: Counts
    """With fewer of any kind nothing holds: from bounds."""
    most: Counts
    """More than these there cannot be: from the GPUs there are."""
    limits: tuple[tuple[Counts, float], ...] = ()
    """What the kinds share: weights of one instance of each kind, and what their sum may be at most."""
    floors: tuple[tuple[tuple[float, ...], float], ...] = ()
    """The same with what their sum must be at least; with less nothing holds."""

    def price(self, counts: Counts) -> float:
        """Of a fleet."""
        return sum(price * count for price, count in zip(self.prices, counts, strict=True))

    def allows(self, counts: Counts) -> bool:
        """Whether there is enough for a fleet."""
        return all(few <= many for few, many in zip(counts, self.most, strict=True)) and all(
            sum(weight * count for weight, count in zip(weights, counts, strict=True)) <= bound + _ROUND
            for weights, bound in self.limits
        )

    def suffices(self, counts: Counts) -> bool:
        """Whether a fleet has what is needed of kinds that can stand in for each other."""
        return all(
            sum(weight * count for weight, count in zip(weights, counts, strict=True)) >= bound - _ROUND
            for weights, bound in self.floors
        )

    @property
    def empty(self) -> bool:
        """Whether what is needed is more than what there is."""
        return not self.allows(self.least)


@dataclass(frozen=True, slots=True)
class Trial:
    """A fleet to try."""

    space: Space
    counts: Counts

    @property
    def price(self) -> float:
        """Of all its instances."""
        return self.space.price(self.counts)


@dataclass(slots=True)
class Found:
    """What a search knows so far."""

    best: Trial | None = None
    trials: int = 0
    proven: bool = False
    """Whether nothing cheaper (by more than `TOLERANCE`) is left to try."""
    open_spaces: int = 0
    """Spaces that may still hold something cheaper."""
    held: list[Trial] = field(default_factory=list)
    failed: list[Trial] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """What a fleet has to be cheaper than to be worth a trial."""
        return math.inf if self.best is None else self.best.price * (1 - TOLERANCE)


Search = Generator[tuple[Trial, ...], Sequence[bool], None]


def search(spaces: Sequence[Space], found: Found, *, width: int = 1, ceiling: float = math.inf) -> Search:
    """Look for the cheapest fleet that holds.

    Args:
        spaces: arrangements.
        found: gets what is known, as it becomes known.
        width: how many fleets are tried at a time, at most.
        ceiling: fleets that cost more are not wanted.

    Yields fleets to try, and is sent for each whether it holds, in the same order.
    """
    known = {id(space): _Known(space) for space in spaces if not space.empty}
    ordered = sorted(known.values(), key=lambda each: each.space.price(each.space.least))
    for number, each in enumerate(ordered):
        found.open_spaces = len(ordered) - number
        while True:
            limit = min(found.limit, ceiling + _ROUND, each.space.price(each.space.most) + 2 * _ROUND)
            todo = (each.first(limit) if found.best is None else []) or each.frontier(limit)
            if not todo:
                break
            for batch in _batches(todo, width):
                verdicts = yield tuple(Trial(each.space, counts) for counts in batch)
                if _learn(each, found, batch, verdicts):
                    break
    found.open_spaces = 0
    found.proven = True


def _learn(known: _Known, found: Found, batch: Sequence[Counts], verdicts: Sequence[bool]) -> bool:
    """Fold what came of some trials in; whether the best has changed."""
    changed = False
    for counts, holds in zip(batch, verdicts, strict=True):
        trial = Trial(known.space, counts)
        found.trials += 1
        known.learn(counts, holds=holds)
        (found.held if holds else found.failed).append(trial)
        if holds and (found.best is None or trial.price < found.best.price - _ROUND):
            found.best, changed = trial, True
    return changed


class _Known:
    """What is known of one space."""

    def __init__(self, space: Space) -> None:
        self.space: Final = space
        self.held: Final[list[Counts]] = []
        self._failed: Final[list[Counts]] = []

    def learn(self, counts: Counts, *, holds: bool) -> None:
        """One trial."""
        (self.held if holds else self._failed).append(counts)

    def fails(self, counts: Counts) -> bool:
        """Whether it is part of a fleet that failed."""
        return not self.space.suffices(counts) or any(_within(counts, failed) for failed in self._failed)

    def first(self, limit: float) -> list[Counts]:
        """Where to begin as long as nothing holds anywhere: the least fleet, and from there larger and larger ones.
        None where the next one is more than there is, or costs more than the limit.
        """
        last = max(self._failed, key=sum, default=None)
        next_ = self.space.least if last is None else _grown(last)
        while not self.space.suffices(next_) and self.space.allows(next_):
            next_ = _grown(next_)
        return [next_] if self.space.allows(next_) and self.space.price(next_) <= limit else []

    def frontier(self, limit: float) -> list[Counts]:
        """The largest fleets that cost less than the limit and of which it is not known that they fail,
        balanced ones first.
        """
        edge = [counts for counts in self._maximal(limit) if not self.fails(counts)]
        return sorted(dict.fromkeys(edge), key=self._promise)

    def _promise(self, counts: Counts) -> tuple[float, Counts]:
        """Balanced fleets first: those that are the same multiple of the least in every kind are the likeliest to
        hold, and one that holds moves the limit for all others.
        """
        ratios = [count / max(1, least) for count, least in zip(counts, self.space.least, strict=True)]
        return -min(ratios), counts

    def _maximal(self, limit: float) -> Iterator[Counts]:
        """For every choice of all kinds but the last, the most of the last that is within the limit; of these those
        that are part of no other.
        """
        *others, last = range(len(self.space.prices))
        ranges = [range(self.space.least[each], self.space.most[each] + 1) for each in others]
        former: dict[tuple[int, ...], Counts] = {}
        for counts in product(*ranges):
            spent = sum(self.space.prices[each] * counts[each] for each in others)
            count = min(self.space.most[last], math.floor((limit - _ROUND - spent) / self.space.prices[last]))
            for weights, bound in self.space.limits:
                left = bound + _ROUND - sum(weights[each] * counts[each] for each in others)
                if left < 0:
                    count = -1
                elif weights[last]:
                    count = min(count, math.floor(left / weights[last]))
            if count >= self.space.least[last]:
                former[counts] = (*counts, count)
        for counts, cell in former.items():
            larger = (former.get(_plus(counts, each)) for each in others)
            if not any(other is not None and other[-1] >= cell[-1] for other in larger):
                yield cell


GROWTH: Final = 1.25
"""Until something holds, each try has so many times the instances of the last one."""


def _grown(counts: Counts) -> Counts:
    return tuple(max(count + 1, math.ceil(count * GROWTH)) for count in counts)


def _plus(counts: tuple[int, ...], each: int) -> tuple[int, ...]:
    return (*counts[:each], counts[each] + 1, *counts[each + 1 :])


def _within(part: Counts, whole: Counts) -> bool:
    return all(few <= many for few, many in zip(part, whole, strict=True))


def _batches(todo: Sequence[Counts], width: int) -> Iterator[Sequence[Counts]]:
    for at in range(0, len(todo), width):
        yield todo[at : at + width]
