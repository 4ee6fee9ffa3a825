"""The search for goodput: the next rate to try, and when to end. Pure; a machine of events and effects.

Goodput is the highest open-loop rate at which attainment holds. For one *load* (arrivals drawn from one seed) bisection
finds it. Each trial sends requests of the same lengths in the same order, faster or slower, to a server that has
finished the trial before. Only several loads, each drawn anew, show how certain the result is. Their goodputs are
independent draws of one distribution, whatever the server's queue does inside a load.

The distribution's median lies between the lowest and the highest of six with a probability of 1 − 2/2⁶ = 96.9 %. With
more loads, order statistics further inside are enough. That holds for every distribution (W. R. Thompson, *On
confidence ranges for the median*, Ann. Math. Stat. 7, 1936). The number of loads is fixed before the first, so that a
look at the result meanwhile gains nothing.

    pilot     few seconds: twice the rate while it attains, half of it while it does not
    repeats   for each load: from the median so far, steps until one rate attains and one does not, then bisection

A trial in which the sender itself was late says nothing of the server. It is tried once more. If the sender stays late,
no rate from there on can be tried, and the rate that attains below it is a lower bound, not goodput.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from enum import StrEnum
from itertools import zip_longest
from typing import Final

import msgspec

WINDOW: Final = (0.2, 0.8)
"""The part of a trial's arrivals, by number, that counts. Before it the server fills up, after it the server runs
empty, and both flatter. The load goes on until these arrivals are answered."""

PILOT_STEP: Final = 2.0
"""Factor between two rates of the pilot, and the largest factor between two rates of a repeat."""
STEP: Final = 1.15
"""A repeat's first step from the median so far; each further step is the square of the one before, up to the
pilot's."""

PILOT_PRECISION: Final = 0.25
"""`Aim.precision` of the pilot."""

LOWEST: Final = 1 / 1024
"""Lowest rate of the pilot, as a part of the first one: if that does not attain, no rate does."""

ALONE_TRIES: Final = 2
"""After so many trials in a row with `Try.misses_alone` no lower rate is tried. Two, since one may meet a moment in
which something else happened. The trials down to `LOWEST` would take hours."""

ALONE_LEAST: Final = 5
"""Fewest requests alone on the server that say something of it."""

LOWEST_LATER: Final = 1 / 64
"""Lowest rate of a repeat, as a part of the pilot's result. Trials at low rates take long, so they must end."""

LATE_TRIES: Final = 3
"""At one rate the sender may be late this often before it counts as the limit: other programs come and go."""

CONFIDENCE: Final = 0.95


class Limit(StrEnum):
    """What ended the search, and so what its result means."""

    SERVER = "server"
    """Attainment falls at `rate`: this is goodput."""
    SENDER = "sender"
    """The sender cannot send faster: the server attains at `at_least`, and more is not known."""
    TOP = "top"
    """The server attains at the highest rate that was allowed."""
    NEVER = "never"
    """The server attains at no rate, not even when it is all but idle."""
    LOST = "lost"
    """The pilot attained at a rate, a later load at none: the server has changed or died, or loads differ too much."""
    BUDGET = "budget"
    """Time ran out: the result is what is known so far."""
    STOPPED = "stopped"
    """The user ended it: the result is what is known so far."""


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """The goal and the limits of a search."""

    attainment: float
    """The promised share, between 0 and 1."""
    first_rate: float = 1.0
    """Requests per second of the first trial."""
    top_rate: float = math.inf
    """Highest rate to try."""
    precision: float = 0.04
    """Bisection ends when a rate that does not attain is at most this share above one that does."""
    repeats: int = 6
    """Loads drawn; fewer than six have no interval."""
    pilot_requests: int = 50
    """Fewest requests of a pilot's trial."""
    pilot_s: float = 3.0
    """Shortest trial of a pilot, in seconds: a server with room for `pilot_requests` takes so few at any rate."""
    trial_s: float = 30.0
    """A trial's length at the pilot's rate, in seconds."""
    requests_least: int = 100
    """Fewest requests of a trial: with fewer, attainment is a coarse number."""
    seconds_max: float = math.inf
    """Time limit of the whole search, in seconds."""


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One trial and its result."""

    repeat: int
    """The number of the load; 0 is the pilot."""
    rate: float
    holds: bool
    """Whether attainment reached the promised share."""
    counted: int
    """Arrivals of its window."""
    attained: int
    """Of those, the arrivals that met every target; if the trial ended early, of those known by then."""
    whole: bool = True
    """False: the trial ended early, because it could no longer hold."""
    misses_alone: bool = False
    """Whether it would not hold at any lower rate either (`misses_alone`)."""
    sender_late: str = ""
    """Why the trial shows the sender's limit and not the server's; empty: it shows the server's."""


class RunTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: send a load at this rate."""

    number: int
    repeat: int
    """The number of the load, its seed. Equal numbers have equal requests at every rate."""
    requests: int
    rate: float


class SearchFinished(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: no more trials."""

    limit: Limit
    rate: float | None
    """Goodput, requests per second: the median over the loads. None if `limit` says that it was not found."""
    low: float | None
    """Low end of the interval; `high` is the other end."""
    high: float | None
    confidence: float | None
    """Probability that the interval holds the median of all such loads. None, without interval, for fewer than six
    loads."""
    at_least: float | None
    """The highest rate at which every load that was tried attained."""
    loads: tuple[tuple[float, float], ...]
    """For each load, a rate at which it attained and one at which it did not."""
    requests: int
    """Requests in each load."""
    trials: int
    late: int
    """Trials that the late sender spoilt."""
    because: str


class TrialDone(msgspec.Struct, frozen=True):
    """Event: the trial that was to be run has ended."""

    tried: Try


class TrialTick(msgspec.Struct, frozen=True):
    """Event: time has passed."""


class StopSearch(msgspec.Struct, frozen=True):
    """Event: end the search."""


Event = TrialDone | TrialTick | StopSearch
Effect = RunTrial | SearchFinished


def misses_alone(ended: Sequence[tuple[float, float, bool]], attainment: float) -> bool:
    """Whether no lower rate attains, by the requests that were alone on the server: most of them missed, and more than
    may miss. False if fewer than `ALONE_LEAST` were alone.

    Args:
        ended: for each request when it was sent, when it ended (both in seconds), and whether it missed.
        attainment: share of the requests that must meet their targets.
    """
    order, latest, alone = sorted(ended), -math.inf, list[bool]()
    for (sent_s, end_s, missed), then in zip_longest(order, order[1:]):
        if sent_s >= latest and (then is None or then[0] >= end_s):
            alone.append(missed)
        latest = max(latest, end_s)
    return len(alone) >= ALONE_LEAST and sum(alone) > len(alone) * max(0.5, 1 - attainment)


class Bisection:
    """The highest rate of one load: steps away from a guess, then halving, in logarithms."""

    def __init__(self, guess: float, step: float, precision: float, top: float) -> None:
        self.held = 0.0
        """The highest rate tried at which it attained; 0: none."""
        self.failed = math.inf
        """The lowest rate tried at which it did not; infinite: none."""
        self._rate = min(guess, top)
        self._step = step
        self._precision = precision
        self._top = top

    @property
    def done(self) -> bool:
        """Whether both ends are known and close enough."""
        return self.held > 0 and self.failed <= self.held * (1 + self._precision)

    @property
    def at_top(self) -> bool:
        """Whether the load attains at the highest rate allowed."""
        return self.held >= self._top

    @property
    def middle(self) -> float:
        """The rate between the two ends; without an upper end the lower one."""
        return math.sqrt(self.held * self.failed) if math.isfinite(self.failed) else self.held

    def next_rate(self) -> float:
        """The next rate to try."""
        return self._rate

    def take(self, rate: float, *, holds: bool) -> None:
        """A trial at this rate has ended. If it contradicts an earlier trial, the earlier one no longer counts."""
        if holds:
            self.held = rate
            self.failed = self.failed if self.failed > rate else math.inf
        else:
            self.failed = rate
            self.held = self.held if self.held < rate else 0.0
        if self.held and math.isfinite(self.failed):
            self._rate = self.middle
            return
        self._rate = min(rate * self._step, self._top) if holds else rate / self._step
        self._step = min(self._step**2, PILOT_STEP)

    def below(self, ceiling: float) -> None:
        """Stay below `ceiling`: neither it nor any higher rate can be tried."""
        self._top = min(self._top, ceiling)
        self._rate = math.sqrt(self.held * ceiling) if self.held else ceiling / PILOT_STEP


class Search:
    """One search. `start()` gives the first trial; `handle` gives the next one, or the end."""

    def __init__(self, aim: Aim) -> None:
        assert 0 < aim.attainment < 1
        self.aim: Final = aim
        self.tries: list[Try] = []
        self.requests = aim.pilot_requests
        self._began = 0.0
        self._number = 0
        self._repeat = 0
        self._bisection = Bisection(aim.first_rate, PILOT_STEP, PILOT_PRECISION, aim.top_rate)
        self._loads: list[Bisection] = []
        self._lowest = aim.first_rate * LOWEST
        self._late_at: dict[float, int] = {}
        self._ceiling = math.inf
        self._why_late = ""
        self._ended = False

    def start(self, now: float) -> tuple[Effect, ...]:
        """The first trial."""
        self._began = now
        return self._run(self._bisection.next_rate())

    def next_wakeup(self) -> float | None:
        """The moment when time runs out, on the clock of `now`; None without a time limit, or after the end."""
        return None if self._ended or math.isinf(self.aim.seconds_max) else self._began + self.aim.seconds_max

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """The next effects. There are none after `SearchFinished`."""
        if self._ended:
            return ()
        if isinstance(event, StopSearch):
            return self._end(Limit.STOPPED, "it was stopped")
        if isinstance(event, TrialDone):
            self.tries.append(event.tried)
            effects = self._late(event.tried) if event.tried.sender_late else self._tried(event.tried)
            if isinstance(effects[0], SearchFinished) or not self._time_is_up(now):
                return effects
            self._number -= 1  # there is no time for this trial
        return self._end(Limit.BUDGET, f"{self.aim.seconds_max:g} s were allowed") if self._time_is_up(now) else ()

    # -- after a trial

    def _late(self, tried: Try) -> tuple[Effect, ...]:
        """The sender could not keep to the moments of this trial."""
        rate = tried.rate
        self._late_at[rate] = self._late_at.get(rate, 0) + 1
        if self._late_at[rate] < LATE_TRIES:
            return self._run(rate)
        self._ceiling, self._why_late = min(self._ceiling, rate), tried.sender_late
        self._bisection.below(self._ceiling)
        return self._go_on()

    def _tried(self, tried: Try) -> tuple[Effect, ...]:
        self._bisection.take(tried.rate, holds=tried.holds)
        return self._go_on()

    def _go_on(self) -> tuple[Effect, ...]:
        """The next trial of this load, the next load, or the end."""
        now = self._bisection
        if now.done:
            return self._next_load()
        if not now.held and (now.failed <= self._lowest or self._misses_alone()):
            return self._attains_never()
        bound = now.at_top or self._ceiling <= now.held * (1 + self.aim.precision)
        if now.held and bound and self._repeat == 0:
            return self._next_load()  # a pilot's few requests show too high a rate: a whole load is to show it
        if now.held and self._ceiling <= now.held * (1 + self.aim.precision):
            return self._end(Limit.SENDER, self._why_late)
        if not now.held and self._ceiling <= self._lowest:
            return self._end(Limit.SENDER, self._why_late)
        if now.at_top:
            if self._ceiling <= self.aim.top_rate:
                return self._end(Limit.SENDER, self._why_late)
            return self._end(Limit.TOP, f"it attains at {now.held:.3g} requests per second, the highest rate allowed")
        rate = now.next_rate()
        if rate >= self._ceiling:
            now.below(self._ceiling)
            rate = now.next_rate()
        return self._run(rate)

    def _misses_alone(self) -> bool:
        """Whether this load does not attain with one request at a time either."""
        last = [each for each in self.tries if not each.sender_late][-ALONE_TRIES:]
        return len(last) == ALONE_TRIES and all(each.misses_alone and each.repeat == self._repeat for each in last)

    def _attains_never(self) -> tuple[Effect, ...]:
        """The end: this load attains at no rate."""
        last = self.tries[-1]
        seen = f"at {last.rate:.3g} requests per second {last.attained} of {last.counted}"
        if self._repeat == 0:
            return self._end(Limit.NEVER, seen)
        why = f"load {self._repeat} attains at no rate, though the pilot did: is the server up? ({seen})"
        return self._end(Limit.LOST, why)

    def _next_load(self) -> tuple[Effect, ...]:
        if self._repeat:
            self._loads.append(self._bisection)
        if len(self._loads) >= self.aim.repeats:
            return self._end(Limit.SERVER, "every load was bisected")
        if self._repeat == 0:
            wanted = math.ceil(self._bisection.middle * self.aim.trial_s)
            self.requests = max(wanted, self.aim.requests_least)
            self._lowest = self._bisection.middle * LOWEST_LATER
        self._repeat += 1
        guess = statistics.median([each.middle for each in self._loads] or [self._bisection.middle])
        self._bisection = Bisection(guess, STEP, self.aim.precision, self.aim.top_rate)
        return self._go_on()

    def _time_is_up(self, now: float) -> bool:
        return now - self._began >= self.aim.seconds_max

    # -- effects

    def _run(self, rate: float) -> tuple[Effect, ...]:
        number, self._number = self._number, self._number + 1
        requests = self.requests if self._repeat else max(self.requests, math.ceil(rate * self.aim.pilot_s))
        return (RunTrial(number=number, repeat=self._repeat, requests=requests, rate=rate),)

    def _end(self, limit: Limit, because: str) -> tuple[Effect, ...]:
        self._ended = True
        loads = tuple((each.held, each.failed) for each in self._loads)
        known = limit in {Limit.SERVER, Limit.BUDGET, Limit.STOPPED} and loads
        low, high, confidence = interval(loads) if known else (None, None, None)
        rate = statistics.median(math.sqrt(held * failed) for held, failed in loads) if known else None
        return (
            SearchFinished(
                limit=limit,
                rate=0.0 if limit is Limit.NEVER else rate,
                low=low,
                high=high,
                confidence=confidence,
                at_least=held_at(self.tries),
                loads=loads,
                requests=self.requests,
                trials=len(self.tries),
                late=sum(bool(each.sender_late) for each in self.tries),
                because=because,
            ),
        )


def held_at(tries: list[Try]) -> float | None:
    """The highest rate that attained and is below all rates that did not; None: there is no such rate. Pilots, whose
    loads are short, count only where there are no others.
    """
    heard = [each for each in tries if not each.sender_late]
    told = [each for each in heard if each.repeat] or heard
    failed = min((each.rate for each in told if not each.holds), default=math.inf)
    return max((each.rate for each in told if each.holds and each.rate < failed), default=None)


def interval(loads: tuple[tuple[float, float], ...]) -> tuple[float | None, float | None, float | None]:
    """Low end, high end and confidence of the median of all such loads, by order statistics; three Nones with too few.

    The probability that the median lies outside the j-th smallest and the j-th largest of k is twice that of fewer than
    j heads in k throws of a coin. The low end is of the loads' lower ends, the high end of their upper ends.
    """
    count = len(loads)
    inside: tuple[float | None, float | None, float | None] = (None, None, None)
    outside = 0.0
    for at in range(count // 2):
        outside += 2 * math.comb(count, at) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        held, failed = sorted(each[0] for each in loads), sorted(each[1] for each in loads)
        inside = (held[at], failed[-1 - at], 1 - outside)
    return inside
