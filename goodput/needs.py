"""Computes from arrivals how many instances of each role are needed: now, ahead, and before one may end. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from cluster.instance import Role
from goodput.control_rules import ControlRules
from goodput.counters import Between
from goodput.demand import ClassPromise
from goodput.forecast import RECORD_S, Forecast, Forecasting
from goodput.forecasters import SEASONAL, History
from goodput.margin import Margin, missed_first, missed_later
from goodput.observation import ClassCounts
from goodput.pools import Kinds
from goodput.sizing import LoadToServe, RecentLengths
from goodput.swings import kept_rate
from goodput.traffic import Traffic

SOON_S: Final = 15.0
"""Horizon, in seconds, of the rate that counts as present: a flip takes a few seconds."""
LASTS_S: Final = 1.0
"""Seconds that prompts must wait to be a backlog: shorter waits come from the chance in arrivals."""
AGAIN: Final = 1.5
"""Start-up times ahead for which capacity is kept if the seasonal forecaster is in use."""
KNOWN: Final = 300
"""Least arrivals of a steady stretch whose needs are remembered: they give its level to some 6 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The load and what it needs. Needs are instances by role, each with its reason."""

    rate: float
    """Present arrivals a second."""
    ahead: Forecast
    """The load after the start-up time; its `upper` is the quantile that adds capacity."""
    keep_rate: float
    """Arrivals a second for which capacity is kept: the most between now and the start-up time, or a swing's return."""
    now: Mapping[Role, tuple[int, str]]
    """Needs of the present load and of waiting prompts within `flip_clear_s`: what flips are worth."""
    lasting: Mapping[Role, tuple[int, str]]
    """The same within `clear_s`: what starts are worth."""
    then: Mapping[Role, tuple[int, str]]
    """Needs of the forecast load."""
    keep: Mapping[Role, tuple[int, str]]
    """Needs of `keep_rate` and the rules' `room`: with fewer left, no instance ends."""
    load: LoadToServe
    """The load at the present rate, without waiting prompts."""


class Needs:
    """Traffic, its forecasts, and the instances that it needs."""

    def __init__(self, kinds: Kinds, promises: Mapping[str, ClassPromise], rules: ControlRules) -> None:
        self._kinds: Final = kinds
        self.promises = promises
        """By SLO class, its targets; others after an edit of the cluster file."""
        self._rules: Final = rules
        self.traffic: Final = Traffic()
        self._up: Final = Forecasting(rules.quantile)
        self._keep: Final = Forecasting(rules.keep_quantile)
        self.margins: Final = {role: Margin() for role in kinds.roles}
        self._most: Final[dict[Role, deque[tuple[float, int]]]] = {}
        """By role: times and needs since the load last changed, each need larger than all later ones."""
        self._waiting: Final[deque[tuple[float, int | None]]] = deque()
        self.answers = 0
        """Complete answers seen."""

    @property
    def aim(self) -> float:
        """Share of the requests that the fleet of a steady load must serve in time."""
        strictest = max((each.attainment for each in self.promises.values()), default=0.95)
        return 1 - (1 - strictest) * self._rules.spent

    @property
    def allowed(self) -> float:
        """Share of the requests that may miss."""
        return 1 - min((each.attainment for each in self.promises.values()), default=0.95)

    def add(self, between: Between, now: float) -> None:
        """Fold in what came since the last look."""
        self.traffic.add(between, now)
        self._waiting.append((now, between.waiting))
        while len(self._waiting) > 1 and self._waiting[1][0] <= now - LASTS_S:
            self._waiting.popleft()
        for counts in between.classes.values():
            self.answers += counts.answers.count
            for role, margin in self.margins.items():
                margin.add(counts.ended, _missed(role, counts))

    def too_few(self) -> str:
        """Why nothing can be decided yet; empty: it can."""
        if self.traffic.counted < self._rules.samples:
            return f"{self.traffic.counted} of {self._rules.samples} arrivals seen that a decision takes"
        if self.answers < self._rules.answers:
            return f"{self.answers} of {self._rules.answers} complete answers seen that a decision takes"
        return ""

    def look(self, now: float, horizon_s: float, ready: Mapping[Role, float]) -> Outlook | None:
        """What is needed; None: there is too little history.

        Args:
            now: seconds of the controller's clock.
            horizon_s: how long a start takes, until its instance serves.
            ready: instances that serve now, by role.
        """
        history = self._up.look(self.traffic, now, horizon_s)
        self._keep.look(self.traffic, now, horizon_s)
        present, ahead = Forecasting.present(history), self._up.forecast(history, horizon_s)
        if present is None or ahead is None:
            return None
        lengths = self.traffic.lengths()
        soon = self._up.forecast(history, SOON_S)
        rate = present.mean if soon is None else soon.mean
        load = LoadToServe(
            rate=rate,
            lengths=lengths,
            promises=self.promises,
            dispersion=history.dispersion,
            clear_s=self._rules.clear_s,
        )
        keep_rate = max(self._kept_rate(history, horizon_s, rate), self._swings(history, ahead, rate))
        backlog_s = self._backlog_s(load, ready, now)
        then = self._of(_at(load, ahead.upper, backlog_s))
        self._remember(history, then if not backlog_s else self._of(_at(load, ahead.upper, 0.0)), horizon_s, now)
        return Outlook(
            rate=rate,
            ahead=ahead,
            keep_rate=keep_rate,
            now=self._of(
                replace(_at(load, rate, backlog_s), clear_s=self._rules.flip_clear_s),
                self._hands_over(load, backlog_s, ready),
            ),
            lasting=self._of(_at(load, rate, backlog_s)),
            then=then,
            keep=self._kept(self._of(_at(load, keep_rate * (1 + self._rules.room), backlog_s))),
            load=load,
        )

    def _kept_rate(self, history: History, horizon_s: float, rate: float) -> float:
        """The highest forecast between now and the end of a start; of the seasonal forecaster, until half a start
        later. An instance that is needed by then would be started again before its end had paid.
        """
        found = [rate]
        for part in (0.5, 1.0, AGAIN):
            forecast = self._keep.forecast(history, horizon_s * part)
            if forecast is not None and (part <= 1.0 or forecast.who == SEASONAL):
                found.append(forecast.upper)
        return max(found)

    def _swings(self, history: History, ahead: Forecast, rate: float) -> float:
        """The rate to which a load that fell may return before a new instance could serve. The seasonal forecaster
        foresees a return: if it is in use, nothing is kept.
        """
        if ahead.who == SEASONAL:
            return 0.0
        share = self.allowed * (1 - self._rules.spent)
        return kept_rate(history.coarse, history.coarse_s, ahead.horizon_s, history.dispersion, share, rate)

    def _remember(self, history: History, then: Mapping[Role, tuple[int, str]], horizon_s: float, now: float) -> None:
        """Remember the largest needs since arrivals or lengths last changed significantly. Forecasts of a steady load
        waver: an instance that one forecast needed does not end because the next one does not.
        """
        found = history.level
        if found is None:
            return
        steady_s = self.traffic.lengths_steady_s()
        rate, seconds = found.mean, min(found.seconds, steady_s)
        whole = found.whole and math.isinf(steady_s)
        for role, (count, _) in then.items():
            most = self._most.setdefault(role, deque())
            while most and not whole and most[0][0] < now - seconds:
                most.popleft()
            if rate * seconds < KNOWN * history.dispersion or seconds < horizon_s + RECORD_S:
                continue  # too few arrivals, or scores of forecasts from before the change
            while most and most[-1][1] <= count:
                most.pop()
            most.append((now, count))

    def _kept(self, keep: dict[Role, tuple[int, str]]) -> dict[Role, tuple[int, str]]:
        return {
            role: (max(count, self._most[role][0][1]) if self._most.get(role) else count, because)
            for role, (count, because) in keep.items()
        }

    def prompts_wait(self, ready: Mapping[Role, float]) -> bool:
        """Whether more prompts wait now than instances compute: then the next look comes soon."""
        waiting = self._waiting[-1][1] if self._waiting else None
        return waiting is not None and waiting > self._in_steps(ready) / 2

    def _backlog_s(self, load: LoadToServe, ready: Mapping[Role, float], now: float) -> float:
        """Work of the prompts that wait and that no instance computes yet, in seconds of one rank. A prompt that was
        not there `LASTS_S` earlier is no backlog yet.
        """
        if not self._waiting or self._waiting[0][0] > now - LASTS_S:
            return 0.0
        known = [each for _, each in self._waiting if each is not None]
        waiting = min(known) - self._in_steps(ready) if len(known) == len(self._waiting) else 0.0
        if waiting <= 0 or not load.rate:
            return 0.0
        sizer = self._kinds.sizer(Role.PREFILL if Role.PREFILL in self._kinds.roles else Role.BOTH)
        tokens, shares = self.traffic.newest(math.ceil(waiting)).lengths()
        cached = sum(each.share * each.cached for each in load.lengths.values())
        return waiting * float(shares @ [sizer.prompt_s(each, cached) for each in tokens.tolist()])

    def _in_steps(self, ready: Mapping[Role, float]) -> float:
        """Prompts that instances compute now or next, two for each rank: they are no backlog."""
        return 2 * sum(ready.get(role, 0.0) * self._kinds.first(role).ranks for role in (Role.PREFILL, Role.BOTH))

    def _each_s(self, load: LoadToServe) -> float:
        """Prompt work of one request, in seconds of one instance."""
        sizer = self._kinds.sizer(Role.PREFILL if Role.PREFILL in self._kinds.roles else Role.BOTH)
        return sizer.prompt_work(_at(load, 1.0, 0.0))

    def _hands_over(self, load: LoadToServe, waiting_s: float, ready: Mapping[Role, float]) -> float:
        """Prompts a second that decode gets beside those that arrive, while prompts that wait are computed."""
        if not waiting_s:
            return 0.0
        return max(0.0, ready.get(Role.PREFILL, 0.0) / (self._each_s(load) or 1.0) - load.rate)

    def _of(self, load: LoadToServe, more: float = 0.0) -> dict[Role, tuple[int, str]]:
        """Needs by role, margins included. `more`: requests a second that decode gets in addition."""
        found = {}
        for role, margin in self.margins.items():
            rate = load.rate + (more if role is Role.DECODE else 0.0)
            found[role] = self._kinds.sizer(role).need(role, _at(load, rate * margin.factor, load.waiting_s), self.aim)
        return found


def _missed(role: Role, counts: ClassCounts) -> int:
    if role is Role.BOTH:
        return max(0, counts.ended - counts.met)
    return missed_first(counts) if role is Role.PREFILL else missed_later(counts)


def _at(load: LoadToServe, rate: float, waiting_s: float) -> LoadToServe:
    lengths: Mapping[str, RecentLengths] = load.lengths
    return LoadToServe(
        rate=rate,
        lengths=lengths,
        promises=load.promises,
        dispersion=load.dispersion,
        waiting_s=waiting_s,
        clear_s=load.clear_s,
    )
