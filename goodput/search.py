"""Finds the cheapest fleet that holds with few trials: over arrangements, and over counts of instances in each. Pure.

A *space* is one arrangement with its kinds of instances fixed; only how many of each is open. Two things are presumed:

- more instances never hold less: a fleet that fails rules out every fleet that is part of it;
- slower instances never hold more: it rules out the same counts of kinds that are no better in anything (`Space.kinds`,
  `weaker`).

Neither always holds near the edge, where a router may choose worse among more. `neighbours` are therefore tried at the
end, among them fleets that the presumptions ruled out; `SearchState.contradicted` says what they showed.

The search has two parts. *Where*: each space has a least fleet by bounds; how many times that a fleet must be to hold
(its scale) is learned as trials end, and the space whose fleet of that scale is cheapest is tried next. *Proof*: of all
fleets that are cheaper than the best one and not ruled out, the one of the largest scale is tried next, which rules out
most, until none is left (`SearchState.proven`) or the effort is spent.

What a fleet costs is the sum of its instances, and a constant (`Space.base`). Where the objective has to be measured
(energy), that sum is a lower bound, `TrialVerdict.cost` is the real cost, and it is presumed to grow with the fleet.

`search` is a generator: it yields the fleets that it would try, the most wanted one first, and is sent the verdict of
that first one. So what it learns does not depend on how many are simulated at a time, where, or how fast.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Final

import numpy as np
from numpy.typing import NDArray

Counts = tuple[int, ...]
"""How many instances of each kind."""

TOLERANCE: Final = 0.01
"""The search does not look for a fleet that is cheaper than the best by less than this share: measured intervals are
wider."""

AHEAD: Final = 16
"""Most fleets that `search` yields at a time: the first is wanted, the others are likely to be next."""

EQUALS: Final = 6
"""Most trials of fleets that cost the same as the best and may attain more."""

EQUALS_SHARE: Final = 0.2
"""These trials may spend this share of the effort on top of it."""

_ROUND: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """One arrangement: counts of its kinds are open."""

    name: str
    prices: tuple[float, ...]
    """The price of one instance of each kind; above 0."""
    least: Counts
    """Lower bounds: a fleet with fewer of any kind cannot hold."""
    most: Counts
    """The available GPUs allow no more of each kind."""
    limits: tuple[tuple[tuple[float, ...], float], ...] = ()
    """Resources that the kinds share: the weight of one instance of each kind, and the largest sum allowed."""
    floors: tuple[tuple[tuple[float, ...], float], ...] = ()
    """The same with the smallest sum: a fleet with less cannot hold."""
    base: float = 0.0
    """The constant part of a fleet's cost, which does not depend on its instances."""
    survive: int = 0
    """Instances that a fleet must be able to lose: bounds hold for what is left."""
    kinds: tuple[str, ...] = ()
    """Names of the kinds, for `weaker`."""
    family: str = ""
    """Spaces of one family are expected to need the same scale, and to cost as many times their least price."""
    make: str = ""
    """Spaces of one make are the same machines with other settings (token budget, power cap)."""
    gpus: tuple[int, ...] = ()
    """GPUs of one instance of each kind; empty: one each."""

    def price(self, counts: Counts) -> float:
        """The price of a fleet."""
        return self.base + sum(price * count for price, count in zip(self.prices, counts, strict=True))

    def allows(self, counts: Counts) -> bool:
        """Whether the available GPUs and shared resources are enough for a fleet."""
        return all(few <= many for few, many in zip(counts, self.most, strict=True)) and all(
            _dot(weights, counts) <= bound + _ROUND for weights, bound in self.limits
        )

    def suffices(self, counts: Counts) -> bool:
        """Whether a fleet passes every lower bound."""
        return all(count >= few for count, few in zip(counts, self.least, strict=True)) and self.scale(counts) >= 1

    def scale(self, counts: Counts) -> float:
        """The size of a fleet over what its bounds ask for, after the worst loss that it must survive. A fleet of 1 or
        more may hold.
        """
        if not self.floors:
            return math.inf
        found = math.inf
        for lost in losses(counts, self.survive):
            left = [count - gone for count, gone in zip(counts, lost, strict=True)]
            found = min(found, *(_dot(weights, left) / bound for weights, bound in self.floors))
        return found + _ROUND

    @property
    def empty(self) -> bool:
        """Whether no fleet of this space is both allowed and large enough."""
        return not self.allows(self.least) or self.scale(self.most) < 1

    @property
    def bound(self) -> float:
        """A lower bound of the price: each floor is met by the kind that meets it cheapest, and the dearest floor
        counts.
        """
        floors = [
            bound * min(price / weight for price, weight in zip(self.prices, weights, strict=True) if weight > 0)
            for weights, bound in self.floors
            if max(weights) > 0
        ]
        return max(self.price(self.least), self.base + max(floors, default=0.0))


@dataclass(frozen=True, slots=True)
class Trial:
    """A fleet to try."""

    space: Space
    counts: Counts

    @property
    def price(self) -> float:
        """The price of all its instances; where the objective is measured, a lower bound of it."""
        return self.space.price(self.counts)

    @property
    def gpus(self) -> int:
        """The GPUs of all its instances."""
        return sum(
            gpus * count for gpus, count in zip(self.space.gpus or (1,) * len(self.counts), self.counts, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialVerdict:
    """The result of a trial."""

    holds: bool
    cost: float | None = None
    """The measured objective; None: the price of the fleet."""
    attained: float = 0.0
    """The share of requests that met their targets: it decides between fleets of equal cost."""
    spent: int = 0
    """The requests that were simulated for it."""


@dataclass(slots=True)
class SearchState:
    """What a search knows so far."""

    best: Trial | None = None
    cost: float = math.inf
    """The best one's cost."""
    attained: float = 0.0
    """The best one's attainment."""
    trials: int = 0
    spent: int = 0
    """Requests that were simulated."""
    proven: bool = False
    """Whether no fleet that is cheaper by more than `TOLERANCE` is left to try, if the presumptions are true."""
    open_spaces: int = 0
    """Number of spaces with an untried fleet that is cheaper than the best."""
    open_scale: float = 0.0
    """The largest scale of these untried fleets."""
    held: list[Trial] = field(default_factory=list)
    failed: list[Trial] = field(default_factory=list)
    scales: dict[str, float] = field(default_factory=dict)
    """By family, the scale at which a fleet is expected to hold. A later search that is given them begins there."""
    contradicted: list[str] = field(default_factory=list)
    """Trials whose result contradicts a presumption."""

    @property
    def limit(self) -> float:
        """A fleet is worth a trial only if it costs less than this."""
        return math.inf if self.best is None else self.cost * (1 - TOLERANCE)


Search = Generator[tuple[Trial, ...], TrialVerdict, None]


def search(
    spaces: Sequence[Space],
    found: SearchState,
    *,
    effort: float = math.inf,
    weaker: Mapping[str, Collection[str]] | None = None,
    failed: Sequence[Trial] = (),
    known: Sequence[tuple[Trial, TrialVerdict]] = (),
    equals: int = EQUALS,
) -> Search:
    """Look for the cheapest fleet that holds.

    Args:
        spaces: arrangements.
        found: the search writes its results here while it runs.
        effort: requests that may be simulated; a search without any fleet that holds may use `PATIENCE` times as many.
            0: use `known` and `failed` alone.
        weaker: by kind, the kinds that are better in no respect; None: unknown.
        failed: fleets that are already known to fail.
        known: fleets of these spaces that were tried before, with their results.
        equals: most trials of fleets that cost the same as the best, or are the same machines with other settings.
    """
    state = _State(spaces, found, weaker or {})
    for trial in failed:
        state.rule_out(trial)
    for trial, verdict in known:
        state.learn(trial, verdict)
    while found.spent < effort or (found.best is None and found.spent < effort * PATIENCE):
        todo = state.todo()
        if not todo:
            found.proven = not state.cut
            break
        state.learn(todo[0], (yield todo))
    if found.best is not None and effort > 0:
        looked = found.best
        yield from _look_around(state, looked)
        yield from _among_equals(state, equals, found.spent + effort * EQUALS_SHARE)
        if found.best is not looked:
            yield from _look_around(state, found.best)  # the answer is another now, and has neighbours of its own
    state.summarise()


PATIENCE: Final = 1.5
"""As long as no fleet holds, the effort may be exceeded by this factor."""


def _among_equals(state: _State, trials: int, effort: float) -> Search:
    """Try fleets that cost the same as the best and may attain more, and its machines with other settings."""
    for _ in range(trials):
        todo = state.equals()
        if not todo or state.found.spent >= effort:
            return
        state.learn(todo[0], (yield todo))


def _look_around(state: _State, best: Trial) -> Search:
    """Try the best one's neighbours, also those that the presumptions rule out. A cheaper one that holds becomes the
    best.
    """
    found, seen = state.found, {(id(best.space), best.counts)}
    for _ in range(LOOKS):
        near = [each for each in neighbours(found.best or best) if (id(each.space), each.counts) not in seen]
        untried = [each for each in near if not _tried(found, each)]
        if not untried:
            return
        trial = untried[0]
        seen.add((id(trial.space), trial.counts))
        former = found.best
        state.learn(trial, (yield tuple(untried[:AHEAD])), presumed=_presumed(found, trial))
        if found.best is former and trial is untried[-1]:
            return


LOOKS: Final = 16
"""The most neighbours that are tried: a fleet of four kinds has that many."""


def _presumed(found: SearchState, trial: Trial) -> bool | None:
    """Whether a trial was presumed to hold; None: nothing was presumed."""
    for known, holds in ((found.failed, False), (found.held, True)):
        for each in known:
            part, whole = (each, trial) if holds else (trial, each)
            if each.space is trial.space and _within(part.counts, whole.counts):
                return holds
    return None


def _tried(found: SearchState, trial: Trial) -> bool:
    return any(each == trial for each in (*found.held, *found.failed))


def neighbours(best: Trial) -> list[Trial]:
    """Fleets that bounds allow with one instance less, one more, or one of another kind: cheaper ones first."""
    steps = [step for step in product((-1, 0, 1), repeat=len(best.counts)) if sum(map(abs, step)) in {1, 2}]
    near = [tuple(count + more for count, more in zip(best.counts, step, strict=True)) for step in steps]
    fits = [
        Trial(best.space, counts)
        for counts, step in zip(near, steps, strict=True)
        if min(counts) >= 0 and best.space.allows(counts) and best.space.suffices(counts) and abs(sum(step)) <= 1
    ]
    cheaper = [each for each in fits if each.price < best.price]
    more = [each for each in fits if sum(each.counts) > sum(best.counts)]
    return sorted(cheaper, key=lambda each: -each.price) + sorted(more, key=lambda each: each.price)


class _State:
    """All spaces, and the results so far."""

    def __init__(self, spaces: Sequence[Space], found: SearchState, weaker: Mapping[str, Collection[str]]) -> None:
        self.found: Final = found
        self._weaker: Final = weaker
        self._known: Final = {id(space): _KnownSpace(space) for space in spaces}
        self._listed: Final = list(self._known.values())
        self._cheapest: Final[dict[int, tuple[float, int, Counts | None]]] = {}
        """By space, its cheapest fleet of the expected scale, with the scale and the number of facts it was computed
        for.
        """
        self._dearer: Final[dict[str, float]] = {}
        """By family, measured cost over least price; empty: costs are prices."""

    def todo(self) -> tuple[Trial, ...]:
        """Fleets to try, the most wanted one first; empty: no cheaper fleet is left."""
        limit = self.found.limit
        leap = self._leap()
        if leap is not None:
            return (leap,)
        likely = sorted(self._likely(limit), key=lambda each: (each[0], each[1]))
        if likely:
            return tuple(trial for _, _, trial in likely[:AHEAD])
        last = sorted(self._last(limit), key=lambda each: (-each[0], each[1]))
        return tuple(trial for _, _, trial in last[:AHEAD])

    def _leap(self) -> Trial | None:
        """Every `LEAP_EVERY` trials, where bounds rule out nothing: a fleet at twice the price of any failed one.

        Without a target for first tokens a request may wait as long as it likes, so that no bound holds and there is no
        scale to learn: the search would climb through every arrangement from the cheapest fleet on. Of such fleets the
        one of fewest GPUs is taken, and of these the one of fewest instances: what is dear is mostly fast, as is what
        spans several. Where there are none, it is the largest instances, as many as there may be. Once one holds,
        single instances that cost less are tried in between, for the same reason.
        """
        found = self.found
        if "" in found.scales or not found.failed or found.trials % LEAP_EVERY:
            return None
        if found.best is not None:
            alone = (self._of_price(known.space, 0.0) for known in self._listed if len(known.space.prices) == 1)
            cheaper = (each for each in alone if each is not None and each.price < found.limit)
            return min(cheaper, key=lambda each: (each.gpus, -each.price), default=None)
        wanted = LEAP * max(trial.price for trial in found.failed)
        fleets = [
            fleet
            for known in self._listed
            if len(known.space.prices) == 1 and (fleet := self._of_price(known.space, wanted)) is not None
        ]
        dear = [fleet for fleet in fleets if fleet.price >= wanted - _ROUND]
        if dear:
            return min(dear, key=lambda each: (each.gpus, each.price, each.counts))
        return min(fleets, key=lambda each: (-each.gpus / each.counts[0], -each.price), default=None)

    def _of_price(self, space: Space, price: float) -> Trial | None:
        """The cheapest fleet of one kind that costs at least this, else the largest allowed one; None: it was tried."""
        count = max(space.least[0], math.ceil((price - space.base) / space.prices[0] - _ROUND))
        trial = Trial(space, (min(count, space.most[0]),))
        return trial if self._known[id(space)].untried(trial.counts, math.inf) else None

    def _likely(self, limit: float) -> Iterator[tuple[float, int, Trial]]:
        """Fleets of the scale that their spaces are expected to need, if they are cheaper than the limit.

        Spaces are looked into in the order of what such a fleet costs at least, and no further than needed.
        """
        hopes = sorted((self._hope(known), number) for number, known in enumerate(self._listed) if known.lowest < limit)
        nearest: list[float] = []
        for hope, number in hopes:
            if hope >= limit or (len(nearest) >= AHEAD and hope >= nearest[AHEAD - 1]):
                return
            known = self._listed[number]
            counts = self._of_scale(known, limit)
            if counts is None:
                continue
            cost = known.space.price(counts) * self._dearness(known.space.family)
            if cost < limit:
                insort(nearest, cost)
                yield cost, number, Trial(known.space, counts)

    def _dearness(self, family: str) -> float:
        """Expected cost over least price; for a new family, the least of the others."""
        return self._dearer.get(family, min(self._dearer.values(), default=1.0))

    def _scale(self, family: str) -> float:
        """The scale at which a family's fleets are expected to hold: learned from the family, else from all others."""
        scales = self.found.scales
        return scales.get(family, scales.get("", SCALE))

    def _hope(self, known: _KnownSpace) -> float:
        """The least cost of a fleet of the expected scale."""
        space = known.space
        scale = known.expected(self._scale(space.family))
        return max(known.lowest, space.base + (space.bound - space.base) * min(scale, SCALES_MAX))

    def _of_scale(self, known: _KnownSpace, limit: float) -> Counts | None:
        scale = known.expected(self._scale(known.space.family))
        key, (was_scale, was_facts, was) = id(known), self._cheapest.get(id(known), (0.0, -1, None))
        if was_scale != scale or was_facts != known.facts:
            was = known.cheapest(scale, limit)
            self._cheapest[key] = scale, known.facts, was
        return was

    def _last(self, limit: float) -> Iterator[tuple[float, int, Trial]]:
        for number, known in enumerate(self._listed):
            if known.lowest < limit:
                scale, counts = known.largest(limit)
                if counts is not None:
                    yield scale / self._scale(known.space.family), number, Trial(known.space, counts)

    def learn(self, trial: Trial, verdict: TrialVerdict, *, presumed: bool | None = None) -> None:
        """Take the result of a trial into account."""
        found, known = self.found, self._known[id(trial.space)]
        found.trials += 1
        found.spent += verdict.spent
        if presumed is not None and presumed != verdict.holds:
            was, now = ("fail", "holds") if verdict.holds else ("hold", "fails")
            found.contradicted.append(f"{trial.space.name} {trial.counts} was presumed to {was} and {now}")
        known.learn(trial.counts, holds=verdict.holds)
        self._learn_scale(trial, known, holds=verdict.holds)
        if not verdict.holds:
            found.failed.append(trial)
            self.rule_out(trial)
            return
        found.held.append(trial)
        cost = trial.price if verdict.cost is None else verdict.cost
        if verdict.cost is not None:
            self._dearer[trial.space.family] = max(1.0, verdict.cost / trial.price)
        if self._better(trial, cost, verdict.attained):
            found.best, found.cost, found.attained = trial, cost, verdict.attained

    def _better(self, trial: Trial, cost: float, attained: float) -> bool:
        """Whether it costs less than the best; of equal cost, attains more; of equal attainment, takes fewer GPUs."""
        found = self.found
        if found.best is None or abs(cost - found.cost) > _ROUND * max(1.0, cost):
            return cost < found.cost
        return (attained, -trial.gpus) > (found.attained, -found.best.gpus)

    def equals(self) -> tuple[Trial, ...]:
        """Fleets that may be better than the best at no higher cost, likeliest first: its machines set otherwise (where
        the objective is measured, the least by expectation first); where costs are prices, any of the same price, the
        largest by bounds first.
        """
        found = self.found
        best = found.best
        assert best is not None
        near: list[tuple[bool, float, int, Trial]] = []
        for number, known in enumerate(self._listed):
            space = known.space
            same = bool(space.make) and space.make == best.space.make
            set_otherwise = best.counts if same and known.untried(best.counts, found.cost) else None
            of_the_price = None if self._dearer else known.costing(found.cost)
            for counts in dict.fromkeys(each for each in (set_otherwise, of_the_price) if each is not None):
                trial = Trial(space, counts)
                if self._dearer or found.attained < 1 - _ROUND or trial.gpus < best.gpus:
                    scale = space.scale(counts) / self._scale(space.family)
                    hope = trial.price * self._dearness(space.family) if self._dearer else -scale
                    near.append((counts is not set_otherwise, hope, number, trial))
        return tuple(trial for *_, trial in sorted(near, key=lambda each: each[:3]))[:AHEAD]

    def _learn_scale(self, trial: Trial, known: _KnownSpace, *, holds: bool) -> None:
        """A family's scale follows what its fleets showed last: what holds lowers it, what fails raises it slowly."""
        scale, family = trial.space.scale(trial.counts), trial.space.family
        if not math.isfinite(scale):
            return
        for name in (family, ""):
            was = self._scale(name)
            self.found.scales[name] = min(was, scale) if holds else max(was, (was + scale * STEP) / 2)
        known.learn_scale(scale, holds=holds)

    def rule_out(self, trial: Trial) -> None:
        """A fleet fails: so does the same of weaker kinds, wherever it is."""
        if not trial.space.kinds:
            known = self._known.get(id(trial.space))
            if known is not None:
                known.rule_out(trial.counts)
            return
        for known in self._known.values():
            for counts in _covered(known.space, trial, self._weaker):
                known.rule_out(counts)

    @property
    def cut(self) -> bool:
        """Whether something cheaper than the best may be in a part of a space that no grid reaches."""
        return any(known.lowest < self.found.limit and known.cut for known in self._known.values())

    def summarise(self) -> None:
        """Note how many spaces are open, and the largest scale in them."""
        left = [known.largest(self.found.limit) for known in self._known.values() if known.lowest < self.found.limit]
        scales = [scale for scale, counts in left if counts is not None]
        self.found.open_spaces, self.found.open_scale = len(scales), max(scales, default=0.0)


def _covered(space: Space, trial: Trial, weaker: Mapping[str, Collection[str]]) -> Iterator[Counts]:
    """The largest fleets of a space that are no better than the trial's: each kind is the same or a weaker one."""
    of, here = trial.space.kinds, space.kinds
    if len(here) > len(of):
        return
    for chosen in permutations(range(len(of)), len(here)):
        if all(of[at] == name or name in weaker.get(of[at], ()) for at, name in zip(chosen, here, strict=True)):
            yield tuple(trial.counts[at] for at in chosen)


LEAP: Final = 2.0
LEAP_EVERY: Final = 6
"""Where bounds rule out nothing and no fleet holds, every `LEAP_EVERY`th trial costs `LEAP` times the dearest failed
one."""

SCALE: Final = 1.25
"""The scale at which a fleet is expected to hold before the first trial."""

STEP: Final = 1.2
"""After a failure, the next scale is this many times the failed one."""

SCALES_MAX: Final = 100.0
"""The largest scale that is asked for: a fleet that fails there fails for another reason than its size."""

CELLS_MAX: Final = 65**3
"""The most fleets of one space in a grid: 64 instances of each of three kinds. The smallest ones are kept."""

AMPLE: Final = 3.0
"""Before any fleet holds, a grid reaches to this many times what a kind would need alone. Each larger grid reaches this
many times as far as the one before."""

Numbers = NDArray[np.float64]


class _KnownSpace:
    """The results of one space: a grid of its fleets from the smallest on."""

    def __init__(self, space: Space) -> None:
        self.space: Final = space
        self.facts = 0
        """Number of results; a cached value is of one such number."""
        self._failed: Final[list[Counts]] = []
        self._held: Final[list[Counts]] = []
        self._low, self._high = 1.0, math.inf
        """The largest scale that failed, and the smallest that held."""
        self._bound: Final = space.bound
        self._ample = AMPLE
        self.cut = False
        """Whether its cheapest open fleet is beyond the largest grid (`CELLS_MAX`): it is not looked into."""
        self._grid: _Grid | None = None

    @property
    def lowest(self) -> float:
        """A lower bound of the cost of its open fleets; infinite: there is none."""
        if self._grid is None:
            return self._bound
        while not math.isfinite(self._grid.lowest) and math.isfinite(self._grid.beyond):
            self._ample *= AMPLE
            wider = self._new(math.inf)
            if wider.beyond <= self._grid.beyond:
                self.cut = True
                break
            self._grid = wider
        return min(self._grid.lowest, self._grid.beyond)

    def expected(self, family: float) -> float:
        """The scale at which its fleets are expected to hold."""
        return min(max(family, self._low * STEP if self._low > 1 else 1.0), self._high)

    def learn_scale(self, scale: float, *, holds: bool) -> None:
        """Take the scale of a trial into account."""
        if holds:
            self._high = min(self._high, scale)
        else:
            self._low = max(self._low, scale)
            self._high = max(self._high, self._low)

    def learn(self, counts: Counts, *, holds: bool) -> None:
        """Take the result of a fleet into account. One that holds closes every fleet that it is part of: they cost
        more.
        """
        if holds:
            self._held.append(counts)
            self.facts += 1
            if self._grid is not None:
                self._grid.without_larger(counts)
        else:
            self.rule_out(counts)

    def rule_out(self, counts: Counts) -> None:
        """Close a fleet that fails, and every part of it."""
        if any(_within(counts, each) for each in self._failed):
            return
        self._failed.append(counts)
        if self._grid is not None and self._grid.without_smaller(counts):
            self.facts += 1

    def _made(self, limit: float) -> _Grid:
        if self._grid is None or (math.isfinite(limit) and self._grid.beyond < limit):
            self._grid = self._new(limit)
        return self._grid

    def _new(self, limit: float) -> _Grid:
        grid = _Grid(self.space, _ends(self.space, limit, self._ample))
        for counts in self._failed:
            grid.without_smaller(counts)
        for counts in self._held:
            grid.without_larger(counts)
        return grid

    def untried(self, counts: Counts, cost: float) -> bool:
        """Whether a fleet is untried, not ruled out, allowed, and may cost no more than this."""
        space = self.space
        return (
            counts not in self._held
            and not any(_within(counts, each) for each in self._failed)
            and space.allows(counts)
            and space.suffices(counts)
            and space.price(counts) <= cost * (1 + _ROUND)
        )

    def costing(self, price: float) -> Counts | None:
        """The open fleet of this price with the largest scale, or None."""
        if self.lowest > price * (1 + _ROUND):
            return None
        grid = self._made(price * (1 + TOLERANCE))
        inside = grid.alive & (np.abs(grid.price - price) <= _ROUND * max(1.0, price))
        return grid.at(np.where(inside, -grid.scale_finite, np.inf)) if inside.any() else None

    def cheapest(self, scale: float, limit: float) -> Counts | None:
        """The cheapest open fleet of at least this scale. Without one, and as long as no fleet holds: the largest."""
        grid = self._made(limit)
        inside = grid.alive & (grid.scale >= scale - _ROUND)
        if not inside.any() and not math.isfinite(limit):
            return self.largest(limit)[1]
        return grid.at(np.where(inside, grid.price - _ROUND * grid.scale_finite, np.inf))

    def largest(self, limit: float) -> tuple[float, Counts | None]:
        """The fleet of the largest scale that costs less than the limit; of these the cheapest."""
        grid = self._made(limit)
        inside = grid.alive & (grid.price < limit - _ROUND)
        if not inside.any():
            return 0.0, None
        best = float(grid.scale_finite[inside].max())
        counts = grid.at(np.where(inside & (grid.scale_finite >= best - _ROUND), -grid.price, np.inf))
        return best, counts


class _Grid:
    """The fleets of a space from the smallest to given counts: price, scale, and whether each is open."""

    def __init__(self, space: Space, ends: Sequence[int]) -> None:
        self._least: Final = np.array(space.least)
        self.beyond: Final = _beyond(space, ends)
        """A lower bound of the price of the fleets outside this grid."""
        axes = [np.arange(low, high + 1) for low, high in zip(space.least, ends, strict=True)]
        counts = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).astype(np.float64)
        self.price: Final[Numbers] = space.base + counts @ np.array(space.prices)
        self.scale: Final[Numbers] = _scales(space, counts)
        self.scale_finite: Final[Numbers] = np.minimum(self.scale, 1e6)
        alive = self.scale >= 1
        for weights, bound in space.limits:
            alive = alive & (counts @ np.array(weights) <= bound + _ROUND)
        self.alive: Final = alive & (counts.sum(axis=-1) > space.survive)
        self.lowest = self._lowest()

    def _lowest(self) -> float:
        return float(self.price[self.alive].min()) if self.alive.any() else math.inf

    def without_smaller(self, counts: Counts) -> bool:
        """Close every part of a fleet; returns whether any was open."""
        ends = [count - int(low) + 1 for count, low in zip(counts, self._least, strict=True)]
        return min(ends) > 0 and self._close(tuple(slice(0, end) for end in ends))

    def without_larger(self, counts: Counts) -> bool:
        """Close every fleet that this one is part of, and itself."""
        begins = [max(0, count - int(low)) for count, low in zip(counts, self._least, strict=True)]
        return self._close(tuple(slice(begin, None) for begin in begins))

    def _close(self, part: tuple[slice, ...]) -> bool:
        if not self.alive[part].any():
            return False
        self.alive[part] = False
        self.lowest = self._lowest()
        return True

    def at(self, cost: Numbers) -> Counts | None:
        """The fleet of the least cost; None: every cost is infinite."""
        if not np.isfinite(cost).any():
            return None
        place = np.unravel_index(int(np.argmin(cost)), cost.shape)
        return tuple(int(low + offset) for low, offset in zip(self._least, place, strict=True))


def _ends(space: Space, limit: float, ample: float) -> list[int]:
    """The largest count of each kind in a grid: limited by the GPUs, by the price limit, or by `ample`."""
    ends = []
    spare = limit - space.price(space.least)
    for at, (least, most) in enumerate(zip(space.least, space.most, strict=True)):
        alone = max((bound / weights[at] for weights, bound in space.floors if weights[at] > 0), default=1.0)
        end = least + math.floor(spare / space.prices[at]) if math.isfinite(limit) else math.ceil(ample * (alone + 1))
        ends.append(max(least, min(most, end)))
    while math.prod(end - least + 1 for end, least in zip(ends, space.least, strict=True)) > CELLS_MAX:
        spans = [end - least for end, least in zip(ends, space.least, strict=True)]
        ends[spans.index(max(spans))] -= 1
    return ends


def _beyond(space: Space, ends: Sequence[int]) -> float:
    """The price of the cheapest fleet with more of a kind than these; infinite: there is none."""
    least = space.price(space.least)
    more = [
        least + price * (end + 1 - low)
        for price, end, low, most in zip(space.prices, ends, space.least, space.most, strict=True)
        if end < most
    ]
    return min(more, default=math.inf)


def _scales(space: Space, counts: Numbers) -> Numbers:
    """`Space.scale` of every fleet of a grid."""
    found = np.full(counts.shape[:-1], np.inf)
    for lost in losses((1,) * len(space.prices), space.survive):
        left = np.maximum(counts - np.array(lost), 0.0)
        for weights, bound in space.floors:
            found = np.minimum(found, left @ np.array(weights) / bound)
    scaled: Numbers = found + _ROUND
    return scaled


def losses(counts: Counts, survive: int) -> list[Counts]:
    """Every way to lose as many instances as a fleet must survive."""
    if not survive:
        return [tuple(0 for _ in counts)]
    return [lost for lost in product(*(range(min(count, survive) + 1) for count in counts)) if sum(lost) == survive]


def _dot(weights: Sequence[float], counts: Sequence[float]) -> float:
    return sum(weight * count for weight, count in zip(weights, counts, strict=True))


def _within(part: Counts, whole: Counts) -> bool:
    return all(few <= many for few, many in zip(part, whole, strict=True))
