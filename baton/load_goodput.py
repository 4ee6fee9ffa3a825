"""`baton load --find-goodput`: makes each trial's load, sends it, judges it; `loadgen.search` chooses the next
trial.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from baton.load_arrivals import Loads, loads_of
from baton.load_found import Goodput
from baton.load_run import asking_of, headers_of, interrupted, sender_of, sending_of, targets_of
from baton.load_sending import LoadSent, Sender
from baton.output import say
from cluster.errors import UsageError
from loadgen.arrival import Arrival
from loadgen.record import Record
from loadgen.replay import RunningLoad, Sending
from loadgen.report import CPU_SHARE, LATE_MS, Targets, met, sender_limit, spread_ms
from loadgen.search import (
    WINDOW,
    Aim,
    RunTrial,
    Search,
    SearchFinished,
    StopSearch,
    TrialDone,
    TrialTick,
    Try,
    misses_alone,
)
from loadgen.shaping import again

FLAGS: Final = ("attainment", "precision", "repeats", "trial_s", "top_rate", "search_s")
"""Flags of a search alone, by their names in the parsed arguments."""

ATTAINMENT: Final = 0.95
"""The share that must meet all targets if no flag says another."""

SETTLE_S: Final = 0.5
"""Pause after a trial, in which engines end cut requests."""

CPU_NOTICE_S: Final = 2.0
"""In a shorter trial than this the sender's share of a core means nothing."""

BEARABLE: Final = 0.25
"""Share of the promised time: a sender that is late by less does not bunch requests up enough to break a promise."""


def check(args: argparse.Namespace) -> None:
    """Refuse flags that do not fit a search.

    Raises:
        UsageError: the message names the flag.
    """
    if not targets_of(args).any:
        raise UsageError("--find-goodput needs a promise: give --ttft-ms, --tpot-ms, --tt2t-ms or --e2e-ms")
    for flag in ("sessions", "max_concurrency", "requests", "duration_s", "plot", "out"):
        if getattr(args, flag) is not None:
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} is of one load, and --find-goodput sends many: leave one out")
    if args.dry_run:
        raise UsageError("--dry-run shows one load, and --find-goodput sends many: leave one out")
    if args.fault or args.faults is not None:
        raise UsageError("--fault has its moment in one load, and --find-goodput sends many: leave one out")
    if args.speed != 1 or args.rate_scale != 1:
        raise UsageError("--find-goodput sets the rate itself: leave --speed and --rate-scale out")
    if args.top_rate is not None and args.rate is not None and args.rate > args.top_rate:
        raise UsageError(f"--rate {args.rate:g} begins above --top-rate {args.top_rate:g}")


def aim_of(args: argparse.Namespace) -> Aim:
    """The aim of the search, by the flags."""
    shape = {
        name: getattr(args, name) for name in ("precision", "repeats", "trial_s") if getattr(args, name) is not None
    }
    return Aim(
        attainment=ATTAINMENT if args.attainment is None else args.attainment,
        first_rate=args.rate or 1.0,
        top_rate=args.top_rate or math.inf,
        seconds_max=args.search_s or math.inf,
        **shape,
    )


async def find(args: argparse.Namespace, url: str) -> Goodput:
    """Search for the goodput of the endpoint `url`. Ctrl-C ends the search with the result so far.

    Raises:
        UsageError: flags cannot be used, or the endpoint does not answer.
    """
    headers = headers_of(args)
    loads = loads_of(args)
    asking, notes = await asking_of(args, url, headers)
    shell = _Shell(args, url, sending_of(args, asking, headers), loads)
    with interrupted(shell):
        finished = await shell.run()
    search = shell.search
    return Goodput(finished, tuple(search.tries), targets_of(args), search.aim.attainment, (*loads.notes, *notes))


class _Shell:
    """Carries the search out: sends the trials that `loadgen.search` asks for."""

    def __init__(self, args: argparse.Namespace, url: str, sending: Sending, loads: Loads) -> None:
        self.search = Search(aim_of(args))
        self._targets = targets_of(args)
        self._sending = replace(sending, token_times=False)
        self._sender: Sender = sender_of(args, url)
        self._loads = loads
        self._stopped = False

    def stop(self) -> None:
        """End the search with the result so far; the trial under way does not count."""
        self._stopped = True
        self._sender.cut()

    def cut(self) -> None:
        """As `stop`."""
        self.stop()

    async def run(self) -> SearchFinished:
        """Run trials until the search has its result."""
        began = time.perf_counter()
        effects = self.search.start(0.0)
        while isinstance(effects[0], RunTrial):
            tried = await self._try(effects[0], began)
            now = time.perf_counter() - began
            if self._stopped:
                effects = self.search.handle(StopSearch(), now)
            elif tried is None:
                effects = self.search.handle(TrialTick(), now)
            else:
                self._say(tried)
                effects = self.search.handle(TrialDone(tried), now)
        assert isinstance(effects[0], SearchFinished)
        return effects[0]

    async def _try(self, trial: RunTrial, began: float) -> Try | None:
        """Run one trial; None if it does not count: time ran out in it, or the search was stopped. Its texts are new:
        a server that has cached those of the trial before would seem to be faster.
        """
        arrivals = again(self._loads.load(trial.repeat, trial.requests, trial.rate), trial.number)
        asking = self._sending.asking
        sending = replace(self._sending, asking=replace(asking, salt=f"{asking.salt} {trial.number}"))
        longest = tokens_asked(asking.extra)
        judge = _Judge(arrivals, self._targets, self.search.aim.attainment, self._sender, longest)
        ends = self.search.next_wakeup()

        def tick(load: RunningLoad) -> None:
            if ends is not None and time.perf_counter() - began >= ends:
                judge.out_of_time = True
                self._sender.cut()
            judge.tick(load)
            self._show(trial, load)

        sent = await self._sender.send(arrivals, sending, judge.take, tick)
        await asyncio.sleep(SETTLE_S)
        if judge.out_of_time or self._stopped:
            return None
        return judge.verdict(trial, sent)

    def _show(self, trial: RunTrial, load: RunningLoad) -> None:
        if sys.stderr.isatty():
            which = f"load {trial.repeat} of {self.search.aim.repeats}" if trial.repeat else "pilot"
            told = f"\r{which}: {trial.rate:.4g} req/s, {load.sent}/{trial.requests} sent, {load.open} open   "
            sys.stderr.write(told)
            sys.stderr.flush()

    def _say(self, tried: Try) -> None:
        which = f"load {tried.repeat} of {self.search.aim.repeats}" if tried.repeat else "pilot"
        share = f"{tried.attained}/{tried.counted} in time" + ("" if tried.whole else " when it was certain to miss")
        told = tried.sender_late or f"{share}: {'holds' if tried.holds else 'does not hold'}"
        say(("\r" if sys.stderr.isatty() else "") + f"{which}: {tried.rate:.4g} req/s, {told}")


NEVER_SENT: Final = 0.5
"""Share of a load's length: a sender that was later than this sent at a much lower rate than the trial's."""


class _Judge:
    """One running trial: whether the requests that count attain; ends the trial as soon as that is certain."""

    def __init__(
        self, arrivals: Sequence[Arrival], targets: Targets, share: float, sender: Sender, longest: int = 0
    ) -> None:
        """`longest`: tokens that answers may have though the load asks for fewer (`tokens_asked`)."""
        first, last = math.floor(WINDOW[0] * len(arrivals)), math.ceil(WINDOW[1] * len(arrivals))
        self._window = {number: _deadline_s(arrivals[number], targets, longest) for number in range(first, last)}
        """Requests that count and have not ended: the second of the load from which each has missed for certain."""
        self._counted = len(self._window)
        self._span_s = arrivals[-1].at_s if arrivals else 0.0
        self._share = share
        self._may_miss = math.floor((1 - share) * self._counted + 1e-9)
        self._targets, self._sender = targets, sender
        self._missed = self._missed_sent = self._overdue = 0
        self._ended: list[tuple[float, float, bool]] = []
        """When each request was sent, when it ended (seconds of the load), and whether it missed; also of those that do
        not count."""
        self._late_s: list[float] = []
        self._cut = False
        self.out_of_time = False

    def take(self, record: Record) -> None:
        """Take the record of a request that has ended."""
        missed = not self._cut and not met(record, self._targets)
        self._ended.append((record.sent_s, record.end_s, missed))
        if self._cut:
            return
        self._late_s.append(record.sent_s - record.at_s)
        if self._window.pop(record.request, None) is not None:
            self._missed += missed
            self._missed_sent += not met(record, self._targets, from_sent=True)

    def tick(self, load: RunningLoad) -> None:
        """End the trial when nothing in it can change the verdict any more."""
        if self._cut:
            return
        overdue = sum(load.elapsed_s > deadline_s for deadline_s in self._window.values())
        if not self._window or self._missed + overdue > self._may_miss:
            self._cut = True
            self._overdue = overdue
            self._sender.cut()

    def verdict(self, trial: RunTrial, sent: LoadSent) -> Try:
        """The trial's result."""
        holds = not self._window and self._missed <= self._may_miss
        return Try(
            repeat=trial.repeat,
            rate=trial.rate,
            holds=holds,
            counted=self._counted,
            attained=self._counted - len(self._window) - self._missed,
            whole=not self._window,
            misses_alone=misses_alone(self._ended, self._share),
            sender_late=self._spoilt(sent, holds=holds),
        )

    def _spoilt(self, sent: LoadSent, *, holds: bool) -> str:
        """Why this trial shows the sender's limit; empty: it shows the server's.

        A load that attains with a late sender would also attain without the lateness. A load that does not attain is
        the server's fault only on two conditions: it misses also if latencies count from the moment of sending, and the
        lateness was too small to bunch requests up.
        """
        if sent.notes:
            return sent.notes[0]
        late = spread_ms(self._late_s)
        share = sent.cpu_s / sent.load.elapsed_s if sent.load.elapsed_s > 0 else 0.0
        if holds:  # without a target for the first token a load attains at a rate that was never sent
            return sender_limit(late, share) if (late.p99 or 0.0) > NEVER_SENT * 1000 * self._span_s else ""
        if share > CPU_SHARE and sent.load.elapsed_s > CPU_NOTICE_S:
            return f"the sender used {share:.0%} of a core: its own delays are inside the latencies; use --senders"
        promised_ms = min(self._targets.ttft_ms or math.inf, self._targets.e2e_ms or math.inf)
        bearable_ms = max(LATE_MS, BEARABLE * promised_ms if math.isfinite(promised_ms) else 0.0)
        forgiven = self._missed_sent + self._overdue <= self._may_miss
        return sender_limit(late, share) if forgiven or (late.p99 or 0.0) > bearable_ms else ""


def tokens_asked(extra: Mapping[str, Any]) -> int:
    """The most tokens of an answer that the fields of `--extra-body` ask for; 0: they say nothing of it."""
    names = ("max_tokens", "max_completion_tokens", "min_tokens")
    return max((said for name in names if type(said := extra.get(name)) is int), default=0)


def _deadline_s(arrival: Arrival, targets: Targets, longest: int) -> float:
    """The second of the load from which a request that has not ended has missed; infinite if no target bounds its end.

    An answer of n tokens that keeps both targets has ended after TTFT + (n - 1) TPOT.
    """
    limits_ms = [] if targets.e2e_ms is None else [targets.e2e_ms]
    if targets.ttft_ms is not None and targets.tpot_ms is not None:
        limits_ms.append(targets.ttft_ms + targets.tpot_ms * max(0, arrival.output_tokens - 1, longest - 1))
    return arrival.at_s + min(limits_ms, default=math.inf) / 1000
