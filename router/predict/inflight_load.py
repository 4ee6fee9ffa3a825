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
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

import numpy as np

from router.core.arrays import Bools, Floats, grow
from router.predict.fitted import TOGETHER_S
from router.predict.step_model import UNKNOWN, Make, StepModel
from router.predict.transfer_model import ExpectedTransfer, TransferModel

DUTY_S: Final = 5.0
"""The time over which prefill's share of an instance's time is averaged: the length of some answers of a 32B model, or
several of an 8B's. With a shorter time one long prompt looks like steady load; with a longer one a burst is over before
it is seen."""
IDLE_MIN: Final = 0.1

SHORT_ONES: Final = 0.3
"""The share of all answers that a short answer represents; a median answer represents the others."""

NEARLY: Final = 0.93
"""The share of a target to plan with: steps get longer during an answer, as other answers join it."""

SPREAD: Final = 2.0
"""Standard deviations of space kept for answers that get longer than predicted: in 2 % of the time it is not enough,
and vLLM preempts."""

STEP_MS_MIN: Final = 0.01
"""The shortest step assumed, whatever a cost profile says."""

REBASE_S: Final = 100 * DUTY_S
"""The time after which `InflightLoad.recent` is scaled down again: by e^100, far below the largest float."""

_COLUMNS: Final = (
    "backlog", "since", "ends", "opens", "prompts", "decoding", "answer_context", "step", "beside", "kv_mean",
    "kv_variance", "kv_free", "strictest", "recent", "stalled", "vacant",
)  # fmt: skip


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
        "began_tpot_ms", "cached_tokens", "context", "decode_life", "decode_row", "limits", "mean_tokens",
        "middle_tokens", "opened_s", "pause_ms", "plain_ms", "prefill_life", "prefill_ms", "prefill_row",
        "prompt_tokens", "pull", "sent_s", "short_tokens", "tpot_ms", "variance",
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
        self.limits: tuple[LengthLimit, ...] = ()
        """For a short answer and for a median one, if it has a target."""
        self.began_tpot_ms = 0.0
        """The expected time per token when it began to decode."""


@dataclass(slots=True)
class _Row:
    """The state of a row that does not fit a column."""

    life: int = 0
    plain_ms: float = 0.0
    observed_ms: float = 0.0
    """The sum over the prompts that ended together last."""
    limits: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    outlived: list[tuple[float, int, LengthLimit, InflightRequest]] = field(default_factory=list)
    """When answers will have become longer than their limit's length (`InflightLoad._progress`), the soonest first; the
    number breaks ties."""
    targets: dict[float, int] = field(default_factory=dict)
    pulls: TransferModel = field(default_factory=TransferModel)


class InflightLoad:
    """Columns, one entry per row of `router.fleet.columns`.

    The class is long because one event changes several columns of a row together, and one class keeps them consistent.
    """

    def __init__(self) -> None:
        self.step_model: Final = StepModel()
        self.backlog: Floats = np.zeros(0)
        """Predicted milliseconds of prompts that are placed there and not computed."""
        self.ends: Floats = np.zeros(0)
        """When all of them will be computed, as predicted, in milliseconds; minus infinity if there are none."""
        self.opens: Floats = np.zeros(0)
        """When one more prompt could be computed at once, in milliseconds: minus infinity with fewer than two prompts,
        else when all of them are computed, without the front end's time for a first token."""
        self.prompts: Floats = np.zeros(0)
        """The number of these prompts."""
        self.since: Floats = np.zeros(0)
        """When the first of them began, or the last one ended, in seconds."""
        self.decoding: Floats = np.zeros(0)
        """Answers under way there, or promised."""
        self.vacant: Bools = np.zeros(0, dtype=np.bool_)
        """Whether there are none."""
        self.answer_context: Floats = np.zeros(0)
        """The context tokens of these answers, halfway through."""
        self.step: Floats = np.zeros(0)
        """The time of a decode step with these answers, in ms."""
        self.beside: Floats = np.zeros(0)
        """The time that they add to each step of a prompt, in ms."""
        self.kv_mean: Floats = np.zeros(0)
        self.kv_variance: Floats = np.zeros(0)
        """Tokens of KV that they will have at their ends."""
        self.kv_free: Floats = np.zeros(0)
        """The cache that they leave, with `SPREAD` of margin. Infinite without answers: one answer always fits."""
        self.strictest: Floats = np.zeros(0)
        """The smallest TPOT target among them, in ms; infinite if none has one."""
        self.answers = 0
        """The number of all answers."""
        self.turn = 0
        """Counts events: values read under an earlier count are stale."""
        self.recent: Floats = np.zeros(0)
        """The share of time that recently placed prompts take, each scaled as if at `_base_s`: so one factor gives what
        is left of all of them now (`faded`)."""
        self._base_s = 0.0
        self.stalled: Floats = np.zeros(0)
        """Milliseconds of all prompts ever placed there: an answer's wait is a difference of two values."""
        self._rows: Final[list[_Row]] = []
        self._numbered = 0

    def reach(self, rows: int) -> None:
        """Extend the columns to the rows of the fleet's columns."""
        former = len(self._rows)
        more = rows - former
        if more <= 0:
            return
        grow(self, _COLUMNS, rows)
        self._empty(slice(former, rows))
        self._rows.extend(_Row() for _ in range(more))
        self.step_model.reach(rows)

    def know(self, row: int, make: Make | None) -> None:
        """A new instance has this row: drop the bookings of the former one."""
        self.reach(row + 1)
        life = self._rows[row].life
        self.answers -= int(self.decoding[row])
        self._rows[row] = _Row(life=life + 1)
        for name in _COLUMNS:
            getattr(self, name)[row] = 0
        self._empty(row)
        self.step_model.know(row, make or UNKNOWN)
        self._steps(row)

    def _empty(self, rows: int | slice) -> None:
        """Set the values that are not zero for an empty row."""
        self.strictest[rows] = self.kv_free[rows] = math.inf
        self.ends[rows] = self.opens[rows] = -math.inf
        self.vacant[rows] = True

    def holds(self, row: int, kv_tokens: int) -> None:
        """The instance's engine has reported its KV cache's size in tokens."""
        self.step_model.capacity[row] = kv_tokens
        self._free(row)

    # --- what policies read -------------------------------------------------------------------------------------------

    def waits_ms(self, now: float) -> Floats:
        """How long a prompt placed now waits for the prompts before it, by row. Overdue prompts will probably take as
        long again as they are late: so an engine that has become slow, or hangs, shows before any prompt ends there.
        """
        left = np.abs(self.ends - now * 1000.0)
        left[np.isinf(left)] = 0.0
        return left

    def idle(self, now: float) -> Floats:
        """The share of each instance's time that recent prompts have left to answers, at least `IDLE_MIN`."""
        share = self.recent * -self.faded(now)
        share += 1.0
        return np.maximum(share, IDLE_MIN, out=share)

    def faded(self, now: float) -> float:
        """The factor by which `recent` has faded."""
        return math.exp((self._base_s - now) / DUTY_S)

    def _rebase(self, now: float) -> None:
        if now - self._base_s > REBASE_S:
            self.recent *= self.faded(now)
            self._base_s = now

    def harmed(self, row: int, ms: float, now: float) -> float:
        """The number of answers there that would probably miss their TPOT target if a prompt took `ms` of their
        time.
        """
        self._outlive(row, now)
        (short, middle), stalled = self._rows[row].limits, self.stalled.item(row)
        until = stalled + ms
        of_short = bisect_right(short, until) - bisect_right(short, stalled)
        of_middle = bisect_right(middle, until) - bisect_right(middle, stalled)
        return SHORT_ONES * of_short + (1 - SHORT_ONES) * of_middle

    # --- what happens -------------------------------------------------------------------------------------------------

    def prompt_placed(self, booking: InflightRequest, row: int, ms: float, stall_ms: float, now: float) -> None:
        """A prompt goes to this row and will take `ms`."""
        self.prompt_over(booking, now, done=False)
        self.turn += 1
        at = self._rows[row]
        booking.prefill_row, booking.prefill_life, booking.prefill_ms = row, at.life, ms
        booking.plain_ms = ms / float(self.step_model.prefill_factor[row])
        booking.sent_s = now + float(self.step_model.first[row]) / 1000.0
        if not self.prompts[row]:
            self.since[row] = booking.sent_s
            self.backlog[row] = 0.0
        self.prompts[row] += 1
        self.backlog[row] += ms
        self._ends(row)
        self._outlive(row, now)
        self.stalled[row] += stall_ms
        self._rebase(now)
        self.recent[row] += stall_ms * (0.001 / DUTY_S) / self.faded(now)

    def _ends(self, row: int) -> None:
        if not self.prompts.item(row):
            self.ends[row] = self.opens[row] = -math.inf
            return
        ends = self.since.item(row) * 1000.0 + self.backlog.item(row)
        self.ends[row] = ends
        self.opens[row] = ends - self.step_model.first.item(row) if self.prompts.item(row) >= 2 else -math.inf

    def prompt_over(self, booking: InflightRequest, now: float, *, done: bool) -> None:
        """The request's prompt is computed, or will not be (`done` false)."""
        row, ms = booking.prefill_row, booking.prefill_ms
        booking.prefill_ms = 0.0
        if ms <= 0 or self._rows[row].life != booking.prefill_life:
            return
        self.turn += 1
        self.prompts[row] -= 1
        self.backlog[row] = max(0.0, float(self.backlog[row]) - ms) if self.prompts[row] else 0.0
        if done:
            self._time_prompt(row, booking, now)
            self.since[row] = now
            if booking.pull is not None and booking.decode_row >= 0:
                self._rows[booking.decode_row].pulls.begin(booking.pull, now)
        self._ends(row)

    def _time_prompt(self, row: int, booking: InflightRequest, now: float) -> None:
        """Learn from the time since the prompt before. Prompts of one step end together, and are one observation."""
        at = self._rows[row]
        if now - float(self.since[row]) < TOGETHER_S:
            at.plain_ms += booking.plain_ms
            return
        if at.plain_ms > 0:
            self.step_model.prompt_took(row, at.plain_ms, at.observed_ms)
        at.plain_ms = booking.plain_ms
        at.observed_ms = (now - max(float(self.since[row]), booking.sent_s)) * 1000.0

    def pulls(self, row: int) -> TransferModel:
        """The transfer model of this row."""
        return self._rows[row].pulls

    def told(self, booking: InflightRequest, now: float, prompt_ms: float, token_ms: float) -> None:
        """An engine reports its time for the prompt, and for each token after the first; 0: not reported.

        It comes with an answer in one piece, whose times the router cannot see. Each prompt of a step is reported with
        the whole step's time. Such steps are rare, as no prompt is sent to an instance where some wait
        (`router.scheduler.flow_control.queue.Gate`).
        """
        row = booking.prefill_row
        if prompt_ms > 0 and self._rows[row].life == booking.prefill_life:
            self.step_model.prompt_took(row, booking.plain_ms, prompt_ms)
        row = booking.decode_row
        if token_ms > 0 and row >= 0 and self._rows[row].life == booking.decode_life:
            self.step_model.steps_took(row, self._tpot_ms(row, now), token_ms)

    def answer_placed(self, booking: InflightRequest, row: int, now: float) -> None:
        """The request's answer is promised a place there."""
        self.answer_over(booking, now)
        at = self._rows[row]
        booking.decode_row, booking.decode_life = row, at.life
        booking.context = booking.prompt_tokens + booking.mean_tokens / 2
        booking.opened_s = -1.0
        self._outlive(row, now)
        self._count(booking, row, 1)
        if math.isfinite(booking.tpot_ms):
            at.targets[booking.tpot_ms] = at.targets.get(booking.tpot_ms, 0) + 1
            self.strictest[row] = min(at.targets)
        # Also for prompts that come while its own is computed: their order is unknown.
        self._limit(booking, row, now)

    def opened(self, booking: InflightRequest, now: float) -> None:
        """The first token of the request's answer has arrived: from now on prompts make it wait."""
        row = booking.decode_row
        if row < 0 or self._rows[row].life != booking.decode_life or booking.opened_s >= 0:
            return
        if booking.pull is not None:
            self._rows[row].pulls.end(booking.pull, now, done=True)
        booking.opened_s = now
        booking.began_tpot_ms = self._tpot_ms(row, now)
        self._limit(booking, row, now)

    def _limit(self, booking: InflightRequest, row: int, now: float) -> None:
        """Set how much longer its instance's prompts may make it wait, from now on."""
        if not math.isfinite(booking.tpot_ms):
            return
        at, stalled = self._rows[row], self.stalled.item(row)
        self._outlive(row, now)
        self._unlimit(booking)
        lengths = (booking.short_tokens, booking.middle_tokens)
        booking.limits = tuple(LengthLimit(*each, stalled) for each in zip(at.limits, lengths, strict=True))
        for limit in booking.limits:
            self._limit_to(limit, booking, row)
            if booking.opened_s >= 0:
                self._expect_longer(limit, booking, row, self._progress(row, now), limit.tokens)

    def _limit_to(self, limit: LengthLimit, booking: InflightRequest, row: int) -> None:
        """Set the limit for an answer of this length."""
        spare_ms = (NEARLY * booking.tpot_ms - self.step.item(row)) * max(limit.tokens - 1, 1.0) - booking.pause_ms
        limit.until_ms = limit.from_ms + max(0.0, spare_ms)
        insort(limit.among, limit.until_ms)

    def _expect_longer(
        self, limit: LengthLimit, booking: InflightRequest, row: int, progress: float, tokens: float
    ) -> None:
        """The answer will be longer than the limit's length after `tokens` more tokens."""
        self._numbered += 1
        when = progress + tokens * max(self.step.item(row), STEP_MS_MIN)
        heappush(self._rows[row].outlived, (when, self._numbered, limit, booking))

    def _progress(self, row: int, now: float) -> float:
        """A clock in milliseconds that stands still while prompts make answers wait: answers make one token a step of
        it.
        """
        return now * 1000.0 - self.stalled.item(row)

    def _outlive(self, row: int, now: float) -> None:
        """Answers that have become longer than their limit's length get a limit for twice the length. Their wait is
        spread over all of their tokens: most answers that pass a limit have long passed its length, too.

        This happens before any change of the values it depends on (the row's step, its clock), and for each answer at
        its own time. So results do not depend on earlier reads, and a choice may read as little as it needs.
        """
        outlived, progress = self._rows[row].outlived, self._progress(row, now)
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
        at = self._rows[row]
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
            self.strictest[row] = min(at.targets, default=math.inf)
        self._unlimit(booking)

    def _learn(self, booking: InflightRequest, row: int, now: float, tokens: int) -> None:
        """Learn from its mean time per token, compared with the predictions made when it began and now."""
        predicted = (booking.began_tpot_ms + self._tpot_ms(row, now)) / 2
        self.step_model.steps_took(row, predicted, (now - booking.opened_s) * 1000.0 / (tokens - 1))

    def _tpot_ms(self, row: int, now: float) -> float:
        return self.step.item(row) / max(1.0 - self.recent.item(row) * self.faded(now), IDLE_MIN)

    def _count(self, booking: InflightRequest, row: int, sign: int) -> None:
        self.turn += 1
        self.decoding[row] += sign
        self.answers += sign
        self.answer_context[row] = max(0.0, self.answer_context[row] + sign * booking.context)
        self.kv_mean[row] = max(0.0, self.kv_mean[row] + sign * (booking.prompt_tokens + booking.mean_tokens))
        self.kv_variance[row] = max(0.0, self.kv_variance[row] + sign * booking.variance)
        self.vacant[row] = vacant = not self.decoding.item(row)
        if vacant:  # sums of floats do not return to exactly zero by themselves
            self.answer_context[row] = self.kv_mean[row] = self.kv_variance[row] = 0.0
        self._free(row)
        self._steps(row)

    def _free(self, row: int) -> None:
        needed = self.kv_mean.item(row) + SPREAD * math.sqrt(self.kv_variance.item(row))
        self.kv_free[row] = math.inf if self.vacant.item(row) else self.step_model.capacity.item(row) - needed

    def _steps(self, row: int) -> None:
        batch, context = int(self.decoding[row]), float(self.answer_context[row])
        self.step[row] = self.step_model.decode_ms(row, batch, context)
        self.beside[row] = self.step_model.beside_ms(row, batch, context) if batch else 0.0
