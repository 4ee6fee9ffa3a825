"""What early legs cost against pulls, as one router sees it: when a decode leg that could be sent early is better sent
after P's answer. Pure: the router and the simulator run this module.

A hand-over's *delay* is the time from its prompt's predicted end to D's first own token. It contains all that the
client pays for the way: also that P answers later while an early leg waits. An early leg may slow all prompts of its
P, not its own alone. So ways are compared by *runs*: several requests in a row go the other way, and the middle of
their delays is compared with the middles of the delays just before and just after. A request that was placed while legs
of the other way were under way does not count. A comparison with both neighbours also leaves out what changes slowly:
the load, and what predictions learn.

Nothing is random: runs begin by counts of requests. Until enough runs were compared, early legs are the usual way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from cluster.ids import InstanceId

RUN: Final = 8
"""The requests of a run that count, and of its neighbours on each side. With fewer, the middle of them is one request's
luck."""

RUN_MOST: Final = 256
"""A run ends after so many requests, also if fewer than `RUN` count: where more requests than this are always under
way, no request is alone with its way, and the usual way is not compared."""

SOON: Final = 3
"""For each request of a run, so many go the usual way before the next run, until `ENOUGH` runs were compared: the first
verdict comes after 136 requests, if they come one at a time."""

LATER: Final = 31
"""The same afterwards, and after a run that told nothing: one request of 32 goes the other way. A verdict that has
become wrong stands for some 600 requests; if the ways differ by 5 ms, runs cost a request 0.16 ms on average."""

ENOUGH: Final = 4
"""With fewer comparisons early legs are the usual way: they are faster in most places that were measured."""

KEPT: Final = 16
"""The newest comparisons, which the verdict is made of."""

SIGMAS: Final = 3.0
"""Standard errors by which early legs must be dearer: with `ENOUGH` comparisons, chance alone is so far off in 3 % of
cases (Student's distribution, three degrees of freedom), with `KEPT` in 0.5 %."""

LEAST_MS: Final = 2.0
"""A smaller loss does not count. The next quiet moment returns it: alone, an early leg was 4 to 5 ms faster than a pull
(docs/decisions/0015-early-leg.md)."""

DEARER: Final = "dearer"
COMPARED: Final = "compared"
"""Why a leg that could be early is not: by the verdict, or as a part of a run."""

_TRIES_PULL: Final = "pulls, to compare with early legs"
_TRIES_EARLY: Final = "an early leg, to compare with pulls"


class HandOverTrial:
    """One request that is under way, and that may count in a comparison."""

    __slots__ = ("_counts", "_due_s", "_early", "_place", "_run", "_tried")

    def __init__(self, place: EarlyLegPlace, due_s: float, run: int, *, early: bool, tried: bool, counts: bool) -> None:
        """`due_s`: the predicted end of its prompt; `tried`: it is part of a run; `counts`: no leg of the other way was
        under way.
        """
        self._place: Final = place
        self._due_s: Final = due_s
        self._run: Final = run
        self._early: Final = early
        self._tried: Final = tried
        self._counts: Final = counts

    def over(self, now: float | None) -> None:
        """D's first own token is here. None: the request is over without it, or was placed again, and tells nothing."""
        delay_ms = (now - self._due_s) * 1000.0 if now is not None and self._counts else None
        self._place.over(self._run, delay_ms, early=self._early, tried=self._tried)


class LegChoice(NamedTuple):
    """How a decode leg is sent that could be early."""

    early: bool
    because: str
    """Why it is not sent as usual; empty: it is an early leg as usual."""
    trial: HandOverTrial | None
    """What is to be told of the request's outcome; None: the request tells nothing."""


class EarlyLegPlace:
    """Hand-overs of one P in like circumstances: what is compared, and the verdict. It has many attributes:
    the counts of the present run, the delays of both ways, and what was found.
    """

    __slots__ = (
        "_because", "_before_ms", "_delays", "_found", "_left", "_placed", "_run", "_tried", "_tried_early", "_trying",
        "_under_way", "dearer", "extra_ms",
    )  # fmt: skip

    def __init__(self) -> None:
        self.dearer = False
        """The verdict: early legs cost more here, so legs that pull are the usual way."""
        self.extra_ms = 0.0
        """By how many milliseconds the delay is longer with early legs, over the comparisons kept; below 0: shorter."""
        self._because = ""
        self._found: Final[list[float]] = []
        """The comparisons: early less pull, in milliseconds, oldest first."""
        self._trying = False
        """A run is being placed."""
        self._run = 0
        """Grows when a run begins and ends, and with each new verdict: delays of former times do not count."""
        self._left = SOON * RUN
        """The requests until the next run; during a run, those that it lacks."""
        self._placed = 0
        """The requests of the last run."""
        self._tried: list[float] = []
        """The run's delays, until they are compared."""
        self._tried_early = False
        """The way of the run."""
        self._delays: list[float] = []
        """The newest delays of the usual way since the last run began, `RUN` at most."""
        self._before_ms = 0.0
        """The middle of these when the run began."""
        self._under_way: Final = [0, 0]
        """The requests under way: by pull, and with an early leg."""

    @property
    def compared(self) -> int:
        """The number of comparisons that the verdict is made of."""
        return len(self._found)

    def choose(self, due_s: float, *, counts: bool) -> LegChoice:
        """The way of one request with a prompt that is predicted to end at `due_s`. `counts`: its first token of D will
        be seen.
        """
        if self._left <= 0 and not self._trying and len(self._delays) >= RUN:
            self._begin_run()
        early, trying = self.dearer == self._trying, self._trying
        because = self._because if not trying else _TRIES_EARLY if early else _TRIES_PULL
        if not counts:
            return LegChoice(early, because, None)
        alone = not self._under_way[0 if early else 1]
        trial = HandOverTrial(self, due_s, self._run, early=early, tried=trying, counts=alone)
        self._under_way[1 if early else 0] += 1
        if trying:
            self._placed += 1
            self._left -= 1 if alone else 0
            if self._left <= 0 or self._placed >= RUN_MOST:
                self._end_run()
        else:
            self._left -= 1
        return LegChoice(early, because, trial)

    def _begin_run(self) -> None:
        self._trying, self._left, self._placed = True, RUN, 0
        self._run += 1
        self._before_ms, self._delays, self._tried = _middle(self._delays), [], []
        self._tried_early = self.dearer

    def _end_run(self) -> None:
        self._trying, self._left = False, LATER * self._placed
        self._run += 1

    def over(self, run: int, delay_ms: float | None, *, early: bool, tried: bool) -> None:
        """A request is over. `delay_ms`: its delay; None: it does not count."""
        self._under_way[1 if early else 0] -= 1
        if tried:
            if delay_ms is not None:
                self._tried.append(delay_ms)
        elif delay_ms is not None and run == self._run:
            self._delays.append(delay_ms)
            del self._delays[:-RUN]
            if len(self._delays) == RUN and 2 * len(self._tried) >= RUN and not self._trying:
                self._compare()

    def _compare(self) -> None:
        """The usual way counts again, so all requests of the run are over. Its neighbours on both sides are known.
        Where delays rise or fall evenly, the mean of both is what the usual way would have taken in the run's place.
        """
        usual_ms = (self._before_ms + _middle(self._delays)) / 2.0
        found, more_ms = self._found, _middle(self._tried) - usual_ms
        self._tried = []
        found.append(more_ms if self._tried_early else -more_ms)
        if len(found) >= ENOUGH + 2:
            mean_ms, error_ms = _mean(found[:-2])
            if abs(mean_ms) > SIGMAS * error_ms and max(each * mean_ms for each in found[-2:]) <= 0:
                del found[:-2]  # the newest two contradict a clear result: something has changed
        del found[:-KEPT]
        self._judge()
        if len(found) < ENOUGH:
            self._left -= (LATER - SOON) * self._placed

    def _judge(self) -> None:
        self.extra_ms, error_ms = _mean(self._found)
        errors = 1.0 if self.dearer else SIGMAS  # a verdict holds a little longer than it takes to be reached
        dearer = len(self._found) >= ENOUGH and self.extra_ms > max(LEAST_MS, errors * error_ms)
        self._because = f"pulls: early legs took {self.extra_ms:.0f} ms longer here" if dearer else ""
        if dearer != self.dearer:
            self.dearer, self._delays = dearer, []
            self._run += 1


class EarlyLegCosts:
    """What one router has found, by place."""

    def __init__(self) -> None:
        self._places: Final[dict[tuple[InstanceId, bool, bool], EarlyLegPlace]] = {}
        self.pulled: Final = {DEARER: 0, COMPARED: 0}
        """Decode legs that could be early and were not, by why."""

    def choose(self, prefill: InstanceId, due_s: float, *, near: bool, queued: bool, counts: bool) -> LegChoice:
        """The way of one request, as `EarlyLegPlace.choose`.

        Args:
            prefill: its prefill instance. The place is the P and not the pair, as it is P that early legs may slow.
            due_s: the predicted end of its prompt, or the present time if none is predicted.
            near: whether its decode instance is on P's machine: then both may share cores.
            queued: whether P has other requests to compute first: then an early leg waits for longer.
            counts: whether its first token of D will be seen.
        """
        key = (prefill, near, queued)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = EarlyLegPlace()
        choice = place.choose(due_s, counts=counts)
        if not choice.early:
            self.pulled[DEARER if place.dearer else COMPARED] += 1
        return choice

    def forget(self, knows: Callable[[InstanceId], bool]) -> None:
        """Drop what was found of instances that have left."""
        for key in [each for each in self._places if not knows(each[0])]:
            del self._places[key]

    def found(self) -> Iterator[tuple[InstanceId, bool, bool, float]]:
        """Prefill instance, `near`, `queued`, and by how many milliseconds early legs take longer; with fewer than
        `ENOUGH` comparisons a place is left out.
        """
        for (prefill, near, queued), place in self._places.items():
            if place.compared >= ENOUGH:
                yield prefill, near, queued, place.extra_ms


def _middle(values: list[float]) -> float:
    """The median: an engine that stood still for a moment is one late request."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2.0


def _mean(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error; infinite if there is one value."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, math.inf
    return mean, math.sqrt(sum((each - mean) ** 2 for each in values) / (count - 1) / count)
