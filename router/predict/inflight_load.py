"""The load in flight: what this router's requests do to the instances they run on (prompts to compute, answers under
way). Pure.

Engines' own reports are a second old; a router knows its own requests at once and exactly. Every request has one
booking, opened when it is placed and closed when it is over. By row of the fleet's columns this module keeps

- the predicted time of prompts that are not computed yet, and since when the first of them runs;
- the answers, their context, the KV they will need (mean and variance), the strictest target among them;
- the share of time for which recent prompts have kept the engine from decoding;
- for each answer, how much more of that it can take and still meet its target: so the harm that a prompt would do to
  the answers there is a count of requests and not a guess.

All of it is arithmetic on predictions; `StepModel` learns from the real times.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from heapq import heappop, heappush
from typing import Final

import numpy as np

from router.core.arrays import Floats, Ints, Mirror
from router.predict.fitted import TOGETHER, TOGETHER_S
from router.predict.margins import FIRST_AIM, PROMPTLY, Margins
from router.predict.reported_prompts import ReportedPrompts, Seen
from router.predict.source_delay import SourceDelay
from router.predict.step_model import UNKNOWN, Make, StepModel
from router.predict.transfer_model import ExpectedTransfer, TransferModel
from router.predict.tries import Tries

DUTY_S: Final = 5.0
"""The time over which prefill's share of an instance's time is averaged: the length of some answers of a 32B model, or
several of an 8B's. With a shorter time one long prompt looks like steady load; with a longer one a burst is over before
it is seen."""
IDLE_MIN: Final = 0.1

SHORT_ONES: Final = 0.3
"""The share of all answers that a short answer represents; a median answer represents the others."""

STEPS_WITHIN: Final = 0.1
"""How far the time that an answer still decodes may be from what is predicted, as a share: predictions here are right
within some 10 % (docs/policy.md)."""

NEARLY: Final = 0.93
"""The share of a target to plan with: steps get longer during an answer, as other answers join it."""

SPREAD: Final = 2.0
"""Standard deviations of space kept for answers that get longer than predicted: in 2 % of the time it is not enough,
and vLLM preempts."""

STEP_MS_MIN: Final = 0.01
"""The shortest step assumed, whatever a cost profile says."""

REBASE_S: Final = 100 * DUTY_S
"""The time after which `InflightLoad.recent` is scaled down again: by e^100, far below the largest float."""

_ONE_BY_ONE: Final = 64
"""More rows are read by a column."""

_MIRRORED: Final = ("ends", "opens", "decoding", "step", "beside", "kv_free", "strictest", "recent")


class LengthLimit:
    """The wait up to which an answer of a given length meets its target. Once the answer is longer, the limit is for
    twice the length.
    """

    __slots__ = ("among", "from_ms", "over", "tokens", "until_ms")

    def __init__(self, among: list[float], tokens: float, from_ms: float) -> None:
        self.among = among
        """All limits of this kind at the instance, sorted."""
        self.tokens = tokens
        self.from_ms = from_ms
        """The instance's `stalled` when the answer began."""
        self.until_ms = 0.0
        """The value of `stalled` from which the target is missed."""
        self.over = False
        """The limit is not needed any more."""


class InflightRequest:
    """The bookings of one request."""

    __slots__ = (
        "began_tpot_ms", "cached_tokens", "context", "decode_life", "decode_row", "first_margin", "first_s", "limits",
        "margin", "mean_tokens", "middle_tokens", "opened_s", "pause_ms", "plain_ms", "prefill_life", "prefill_ms",
        "prefill_row", "prompt_tokens", "pull", "seeded", "sent_s", "short_tokens", "tpot_ms", "tried",
        "ttft_ms", "variance",
    )  # fmt: skip

    def __init__(
        self,
        *,
        prompt_tokens: int,
        mean_tokens: float,
        short_tokens: float,
        middle_tokens: float,
        variance: float,
        tpot_ms: float = math.inf,
    ) -> None:
        """A request that is not placed yet. `tpot_ms`: its target."""
        self.prompt_tokens = prompt_tokens
        self.mean_tokens = mean_tokens
        """The expected length of its answer."""
        self.short_tokens = short_tokens
        """The length of a short answer."""
        self.middle_tokens = middle_tokens
        """The length of a median answer."""
        self.variance = variance
        self.tpot_ms = tpot_ms
        self.prefill_row = -1
        self.prefill_life = -1
        self.prefill_ms = 0.0
        """The predicted time of its prompt; 0 once the prompt is computed."""
        self.plain_ms = 0.0
        """The same by the cost profile alone."""
        self.sent_s = 0.0
        """The time at which it can begin, after its engine's front end."""
        self.cached_tokens = 0
        """The expected number of cached prompt tokens at the prefill instance."""
        self.decode_row = -1
        self.decode_life = -1
        self.context = 0.0
        self.pause_ms = 0.0
        """The expected pause between its first and second token, if it is handed over."""
        self.pull: ExpectedTransfer | None = None
        """The same for the transfer model; None if D's prompts delay the move as well."""
        self.opened_s = -1.0
        """The time of its answer's first token."""
        self.seeded = False
        """Its client has the first token from the instance that computes the prompt."""
        self.first_s = -1.0
        """The time at which its client had the first token."""
        self.margin = 0.0
        """The share of its target up to which predictions had room when it was let in (`Margins`); 0: it was let in for
        another reason, or has no target."""
        self.first_margin = 0.0
        """The same of its TTFT target; 0 again once its first token has come."""
        self.tried = False
        """It was let in as a try (`Tries`), and its first token has not come."""
        self.ttft_ms = 0.0
        """That target."""
        self.limits: tuple[LengthLimit, ...] = ()
        """For a short answer and for a median one, if it has a target."""
        self.began_tpot_ms = 0.0
        """The expected time per token when it began to decode."""


class RowLoad:
    """What is placed on one row. Of a large fleet choices read columns of it (`InflightLoad.column`)."""

    __slots__ = (
        "answer_context", "backlog", "beside", "decoding", "ends", "kv_free", "kv_mean", "kv_variance", "life",
        "limits", "observed_ms", "opens", "outlived", "plain_ms", "prompts", "pulls", "recent", "reported", "since",
        "stalled", "step", "strictest", "targets", "timed_s",
    )  # fmt: skip

    def __init__(self, life: int = 0) -> None:
        self.life: Final = life
        self.backlog: float = 0.0
        """Predicted milliseconds of prompts placed there and not done."""
        self.ends: float = -math.inf
        """Milliseconds; when all of them will be done, as predicted; minus infinity where there are none."""
        self.opens: float = -math.inf
        """Milliseconds; when one more prompt could be computed at once: minus infinity where fewer than two are there,
        else when all of them are done but for what the front end takes of a first token."""
        self.prompts = 0
        """How many these are."""
        self.since: float = 0.0
        """Seconds; when the first of them began, or the last one ended."""
        self.decoding = 0
        """Answers under way there, or promised."""
        self.answer_context: float = 0.0
        """Their tokens of context, halfway through."""
        self.step: float = 0.0
        """A decode step with these, ms."""
        self.beside: float = 0.0
        """What they add to each step of a prompt, ms."""
        self.kv_mean: float = 0.0
        self.kv_variance: float = 0.0
        """Tokens of KV they will have at their ends."""
        self.kv_free: float = math.inf
        """What these leave of the cache, with `SPREAD` of room. Infinite without answers: one always fits."""
        self.strictest: float = math.inf
        """The least TPOT target among them that an answer alone would keep there, ms; infinite where there is none."""
        self.recent: float = 0.0
        """Part of its time that prompts placed of late take, each told as what it would have been at
        `InflightLoad._base_s`: what is left of all of them now is one factor (`InflightLoad.faded`)."""
        self.stalled: float = 0.0
        """Milliseconds of prompts ever placed there: what its answers had to wait for is a difference of two."""
        self.plain_ms: float = 0.0
        self.observed_ms: float = 0.0
        """Of the prompts that ended last, together."""
        self.timed_s: float = -math.inf
        """When a prompt's time was seen last."""
        self.reported: Final = ReportedPrompts()
        self.limits: Final[tuple[list[float], list[float]]] = ([], [])
        self.outlived: Final[list[tuple[float, int, LengthLimit, InflightRequest]]] = []
        """When answers will have become longer than what a limit is for (`InflightLoad._progress`), the soonest first;
        and a number that tells equals apart."""
        self.targets: Final[dict[float, int]] = {}
        self.pulls: Final = TransferModel()


class InflightLoad:
    """By row of `router.fleet.columns`.

    Long, as one event changes several numbers of a row together, and one class keeps them in step.
    """

    def __init__(self) -> None:
        self.step_model: Final = StepModel()
        self.margins: Final = Margins()
        self.first_margins: Final = Margins(PROMPTLY, FIRST_AIM)
        """Of TTFT targets."""
        self.tries: Final = Tries()
        self.answers = 0
        """The number of all answers."""
        self.turn = 0
        """Counts what happens: what was read before is not true any more."""
        self.rows: Final[list[RowLoad]] = []
        self.source_delay: Final = SourceDelay()
        self._base_s: float = 0.0
        """The time that `RowLoad.recent` is told for."""
        self._mirror: Final = Mirror(_MIRRORED)
        self._numbered = 0

    def reach(self, rows: int) -> None:
        """Have as many rows as the fleet's columns."""
        while len(self.rows) < rows:
            self._mirror.changed(len(self.rows))
            self.rows.append(RowLoad())
        self.step_model.reach(rows)

    def know(self, row: int, make: Make | None) -> None:
        """A new instance has this row: drop the bookings of the former one."""
        self.reach(row + 1)
        former = self.rows[row]
        self.answers -= former.decoding
        self.rows[row] = RowLoad(former.life + 1)
        self.step_model.know(row, make or UNKNOWN)
        self._steps(row)

    def holds(self, row: int, kv_tokens: int) -> None:
        """Its engine has said how many tokens its KV cache has."""
        self.step_model.rows[row].capacity = float(kv_tokens)
        self._free(row)

    def column(self, name: str) -> Floats:
        """One number of every row."""
        return self._mirror.read(self.rows, name)

    # --- what policies ask --------------------------------------------------------------------------------------------

    def waits_ms(self, now: float) -> Floats:
        """How long a prompt placed now waits for the prompts before it, by row. Overdue prompts will probably take as
        long again as they are late: so an engine that has become slow, or hangs, shows before any prompt ends there.
        """
        left = np.abs(self.column("ends") - now * 1000.0)
        left[np.isinf(left)] = 0.0
        return left

    def opens_ms(self, rows: Ints) -> float:
        """When one more prompt could be computed at once at the first of these; infinite where there are none."""
        if len(rows) > _ONE_BY_ONE:
            return float(self.column("opens")[rows].min())
        return min([self.rows[row].opens for row in rows.tolist()], default=math.inf)

    def idle(self, now: float) -> Floats:
        """Part of each instance's time that prompts have left to answers of late, `IDLE_MIN` at least."""
        share = self.column("recent") * -self.faded(now)
        share += 1.0
        return np.maximum(share, IDLE_MIN, out=share)

    def faded(self, now: float) -> float:
        """The factor by which `recent` has faded."""
        return math.exp((self._base_s - now) / DUTY_S)

    def _rebase(self, now: float) -> None:
        if now - self._base_s > REBASE_S:
            faded = self.faded(now)
            for row, at in enumerate(self.rows):
                at.recent *= faded
                self._mirror.changed(row)
            self._base_s = now

    def harmed(self, row: int, ms: float, short: float, middle: float, now: float) -> float:
        """The expected number of answers there that miss their TPOT target because a prompt takes `ms` of their time,
        and would meet it otherwise.

        What they will wait for besides is not known: prompts that come later, as many as of late, and steps that take
        longer than predicted. `_likely` says where each answer's wait will probably end.

        Args:
            row: of the fleet.
            ms: by which the prompt's steps keep answers waiting.
            short: tokens of a short answer; those there are taken to be like this request's.
            middle: tokens of a median answer.
            now: in seconds.
        """
        if ms <= 0.0:
            return 0.0
        self._outlive(row, now)
        at = self.rows[row]
        busy = min(at.recent * self.faded(now), 1.0 - IDLE_MIN)
        waits, per_token_ms = busy / (1.0 - busy), max(at.step, STEP_MS_MIN)
        of_short = _likely(at.limits[0], at.stalled, ms, per_token_ms * short, waits)
        of_middle = _likely(at.limits[1], at.stalled, ms, per_token_ms * middle, waits)
        return SHORT_ONES * of_short + (1 - SHORT_ONES) * of_middle

    # --- what happens -------------------------------------------------------------------------------------------------

    def prompt_placed(self, booking: InflightRequest, row: int, ms: float, stall_ms: float, now: float) -> None:
        """A prompt goes to this row and will take `ms`."""
        self.prompt_over(booking, now, done=False)
        self.turn += 1
        at, speed = self.rows[row], self.step_model.rows[row]
        booking.prefill_row, booking.prefill_life, booking.prefill_ms = row, at.life, ms
        booking.plain_ms = ms / speed.prefill_factor
        booking.sent_s = now + speed.first / 1000.0
        at.reported.open[booking] = booking.sent_s * 1000.0
        if not at.prompts:
            at.since = booking.sent_s
            at.backlog = 0.0
        at.prompts += 1
        at.backlog += ms
        self._ends(row)
        self._outlive(row, now)
        at.stalled += stall_ms
        self._rebase(now)
        at.recent += stall_ms * (0.001 / DUTY_S) / self.faded(now)
        self._mirror.changed(row)

    def _ends(self, row: int) -> None:
        self._mirror.changed(row)
        at = self.rows[row]
        if not at.prompts:
            at.ends = at.opens = -math.inf
            return
        at.ends = at.since * 1000.0 + at.backlog
        at.opens = at.ends - self.step_model.rows[row].first if at.prompts >= 2 else -math.inf

    def prompt_over(self, booking: InflightRequest, now: float, *, done: bool, presumed: bool = False) -> None:
        """The request's prompt is computed, or will not be (`done` false). `presumed`: it counts as computed, although
        no engine has said when.
        """
        row, ms = booking.prefill_row, booking.prefill_ms
        booking.prefill_ms = 0.0
        if row >= 0 and not presumed and self.rows[row].life == booking.prefill_life:
            self._reported(row, self.rows[row].reported.left(booking, now * 1000.0))
        if ms <= 0:
            return
        at = self.rows[row]
        if at.life != booking.prefill_life:
            return
        self.turn += 1
        at.prompts -= 1
        at.backlog = max(0.0, at.backlog - ms) if at.prompts else 0.0
        if done:
            self._time_prompt(row, booking, ms, now)
            at.since = now
            if booking.seeded:
                booking.first_s = now
            if booking.pull is not None and booking.decode_row >= 0:
                self.rows[booking.decode_row].pulls.begin(booking.pull, now)
        elif presumed:  # the next one began when this one was to end; it had ended before its front end told of it
            at.since = min(now, max(at.since + ms / 1000.0, now - self.step_model.rows[row].lead / 1000.0))
        self._ends(row)

    def _time_prompt(self, row: int, booking: InflightRequest, ms: float, now: float) -> None:
        """Learn from the time since the one before. Prompts of one step end together, and are one observation. Their
        first tokens come one after the other, some milliseconds apart where a front end is busy.
        """
        at = self.rows[row]
        at.timed_s = now
        apart_s = now - at.since
        if apart_s < TOGETHER_S or (
            booking.sent_s < at.since and apart_s * 1000.0 < TOGETHER * min(at.observed_ms, ms)
        ):
            at.plain_ms += booking.plain_ms
            return
        if at.plain_ms > 0:
            self.step_model.prompt_took(row, at.plain_ms, at.observed_ms)
        at.plain_ms = booking.plain_ms
        at.observed_ms = (now - max(at.since, booking.sent_s)) * 1000.0

    def pulls(self, row: int) -> TransferModel:
        """What it pulls."""
        return self.rows[row].pulls

    def told(
        self,
        booking: InflightRequest,
        now: float,
        prompt_ms: float,
        token_ms: float,
        first_ms: float = 0.0,
        prompt_tokens: int = 0,
    ) -> None:
        """An engine reports its time for the prompt, for each token after the first, and from the request's arrival to
        the first token; and the prompt's tokens. 0: not reported.

        It comes with an answer in one piece, whose times the router cannot see.
        """
        row = booking.prefill_row
        if prompt_ms > 0 and booking.plain_ms > 0 and self.rows[row].life == booking.prefill_life:
            ended_ms = booking.sent_s * 1000.0 + max(first_ms, prompt_ms)
            self.rows[row].timed_s = now
            plain_ms = self._plain_ms(booking, prompt_tokens)
            self._reported(row, self.rows[row].reported.add(booking, plain_ms, prompt_ms, ended_ms))
        row = booking.decode_row
        if token_ms > 0 and row >= 0 and self.rows[row].life == booking.decode_life:
            self.step_model.steps_took(row, self._tpot_ms(row, now), token_ms, booking.sent_s, now)
            self._restate(now)

    def _reported(self, row: int, seen: list[Seen]) -> None:
        for plain_ms, observed_ms in seen:
            self.step_model.prompt_took(row, plain_ms, observed_ms)

    def _plain_ms(self, booking: InflightRequest, tokens: int) -> float:
        """What its prompt takes by the costs alone, now that its tokens are counted. The first estimates, from bytes,
        may be wrong by a factor of four: a speed that was learned from them would be as wrong.
        """
        foretold, cached = booking.prompt_tokens, booking.cached_tokens
        if tokens <= 0 or foretold <= 0 or tokens == foretold:
            return booking.plain_ms
        make, now_cached = self.step_model.make(booking.prefill_row), cached * tokens / foretold
        was_ms = make.prompt_ms(foretold - cached, cached)
        return booking.plain_ms * make.prompt_ms(tokens - now_cached, now_cached) / was_ms if was_ms > 0 else 0.0

    def answer_placed(self, booking: InflightRequest, row: int, now: float) -> None:
        """The request's answer is promised a place there."""
        self.answer_over(booking, now)
        at = self.rows[row]
        booking.decode_row, booking.decode_life = row, at.life
        booking.context = booking.prompt_tokens + booking.mean_tokens / 2
        booking.opened_s = -1.0
        self._outlive(row, now)
        self._count(booking, row, 1)
        if math.isfinite(booking.tpot_ms):
            at.targets[booking.tpot_ms] = at.targets.get(booking.tpot_ms, 0) + 1
            self._strictest(row)
        # Also of prompts that come while its own is computed: their order is not known.
        self._limit(booking, row, now)

    def opened(self, booking: InflightRequest, now: float) -> None:
        """The first token of the request's answer has arrived: from now on prompts make it wait."""
        row = booking.decode_row
        if row < 0 or self.rows[row].life != booking.decode_life or booking.opened_s >= 0:
            return
        if booking.pull is not None:
            self.rows[row].pulls.end(booking.pull, now, done=True)
        booking.opened_s = now
        if booking.first_s < 0:
            booking.first_s = now
        booking.began_tpot_ms = self._tpot_ms(row, now)
        self._limit(booking, row, now)

    def _strictest(self, row: int) -> None:
        """Targets that are missed there whatever else comes keep nothing out."""
        at, least_ms = self.rows[row], self.step_model.rows[row].least_ms()
        at.strictest = min([target for target in at.targets if target >= least_ms], default=math.inf)

    def _limit(self, booking: InflightRequest, row: int, now: float) -> None:
        """Set how much longer its instance's prompts may make it wait, from now on."""
        if not math.isfinite(booking.tpot_ms):
            return
        at = self.rows[row]
        stalled = at.stalled
        self._outlive(row, now)
        self._unlimit(booking)
        short, middle = at.limits
        booking.limits = (
            LengthLimit(short, booking.short_tokens, stalled),
            LengthLimit(middle, booking.middle_tokens, stalled),
        )
        for limit in booking.limits:
            self._limit_to(limit, booking, row)
            if booking.opened_s >= 0:
                self._expect_longer(limit, booking, row, self._progress(row, now), limit.tokens)

    def _limit_to(self, limit: LengthLimit, booking: InflightRequest, row: int) -> None:
        """An answer of so many tokens keeps its target up to here."""
        spare_ms = (NEARLY * booking.tpot_ms - self.rows[row].step) * max(limit.tokens - 1, 1.0) - booking.pause_ms
        limit.until_ms = limit.from_ms + max(0.0, spare_ms)
        insort(limit.among, limit.until_ms)

    def _expect_longer(
        self, limit: LengthLimit, booking: InflightRequest, row: int, progress: float, tokens: float
    ) -> None:
        """The answer will be longer than the limit's length after `tokens` more tokens."""
        self._numbered += 1
        when = progress + tokens * max(self.rows[row].step, STEP_MS_MIN)
        heappush(self.rows[row].outlived, (when, self._numbered, limit, booking))

    def _progress(self, row: int, now: float) -> float:
        """A clock that stands while prompts keep answers waiting, in milliseconds: they make a token a step of it."""
        return now * 1000.0 - self.rows[row].stalled

    def _outlive(self, row: int, now: float) -> None:
        """Answers that have become longer than their limit's length get a limit for twice the length. Their wait is
        spread over all of their tokens: most answers that pass a limit have long passed its length, too.

        This happens before any change of the values it depends on (the row's step, its clock), and for each answer at
        its own time. So results do not depend on earlier reads, and a choice may read as little as it needs.
        """
        outlived, progress = self.rows[row].outlived, self._progress(row, now)
        while outlived and outlived[0][0] <= progress:
            when, _, limit, booking = heappop(outlived)
            if limit.over:
                continue
            del limit.among[bisect_left(limit.among, limit.until_ms)]
            more = limit.tokens
            limit.tokens *= 2
            self._limit_to(limit, booking, row)
            self._expect_longer(limit, booking, row, when, more)

    @staticmethod
    def _unlimit(booking: InflightRequest) -> None:
        for limit in booking.limits:
            del limit.among[bisect_left(limit.among, limit.until_ms)]
            limit.over = True
        booking.limits = ()

    def answer_over(self, booking: InflightRequest, now: float, tokens: int = 0) -> None:
        """The request's answer has ended after `tokens` tokens; 0: it will not come from there, or its tokens were not
        counted.
        """
        row = booking.decode_row
        if row < 0:
            return
        booking.decode_row = -1
        at = self.rows[row]
        if booking.pull is not None:
            at.pulls.end(booking.pull, now, done=False)
        if at.life != booking.decode_life:
            return
        self._outlive(row, now)
        if tokens > 2 and booking.opened_s >= 0:
            self._learn(booking, row, now, tokens)
        self._count(booking, row, -1)
        if booking.tpot_ms in at.targets:
            at.targets[booking.tpot_ms] -= 1
            if not at.targets[booking.tpot_ms]:
                del at.targets[booking.tpot_ms]
            self._strictest(row)
        self._unlimit(booking)

    def _learn(self, booking: InflightRequest, row: int, now: float, tokens: int) -> None:
        """Learn from its mean time per token, compared with the predictions made when it began and now."""
        predicted = (booking.began_tpot_ms + self._tpot_ms(row, now)) / 2
        token_ms = (now - booking.opened_s) * 1000.0 / (tokens - 1)
        self.step_model.steps_took(row, predicted, token_ms, booking.opened_s, now)
        self._restate(now)

    def _restate(self, now: float) -> None:
        """A leg was timed: steps of its row, and of rows that follow it, have another factor."""
        self.turn += 1
        for row in self.step_model.restated():
            self._outlive(row, now)
            self._strictest(row)
            self._steps(row)

    def _tpot_ms(self, row: int, now: float) -> float:
        return self.rows[row].step / max(1.0 - self.rows[row].recent * self.faded(now), IDLE_MIN)

    def _count(self, booking: InflightRequest, row: int, sign: int) -> None:
        self.turn += 1
        at = self.rows[row]
        at.decoding += sign
        self.answers += sign
        if at.decoding:
            at.answer_context = max(0.0, at.answer_context + sign * booking.context)
            at.kv_mean = max(0.0, at.kv_mean + sign * (booking.prompt_tokens + booking.mean_tokens))
            at.kv_variance = max(0.0, at.kv_variance + sign * booking.variance)
        else:  # sums of floats do not come back to nothing by themselves
            at.answer_context = at.kv_mean = at.kv_variance = 0.0
        self._free(row)
        self._steps(row)

    def _free(self, row: int) -> None:
        at = self.rows[row]
        needed = at.kv_mean + SPREAD * math.sqrt(at.kv_variance)
        at.kv_free = self.step_model.rows[row].capacity - needed if at.decoding else math.inf
        self._mirror.changed(row)

    def _steps(self, row: int) -> None:
        at, speed = self.rows[row], self.step_model.rows[row]
        at.step = speed.decode_ms(at.decoding, at.answer_context)
        at.beside = speed.beside_ms(at.decoding, at.answer_context) if at.decoding else 0.0
        self._mirror.changed(row)


def _likely(limits: list[float], stalled: float, ms: float, decodes_ms: float, waits: float) -> float:
    """The expected number of answers that are pushed over these limits by `ms` of a prompt.

    Halfway through, an answer still decodes for half of `decodes_ms` and waits for `waits` times that, on average. Its
    wait is taken as equally likely anywhere in a span around that, as wide as this mean, `STEPS_WITHIN` of what it
    decodes, and the prompt. A limit in the span is passed with a probability of the prompt's part of the span.
    """
    mean_ms = waits * decodes_ms / 2
    wide_ms = mean_ms + STEPS_WITHIN * decodes_ms + ms
    low = stalled + max(0.0, mean_ms - wide_ms / 2)
    return _between(limits, low, low + wide_ms) * ms / wide_ms


def _between(limits: list[float], above: float, up_to: float) -> int:
    """How many of these sorted limits lie there."""
    return bisect_right(limits, up_to) - bisect_right(limits, above)
