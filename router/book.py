"""What this router's requests do to the instances they are at: prompts still to be computed, answers under way. Pure.

The engines' own reports are a second old; what a router has sent itself it knows at once and exactly. Every request has
one booking, opened when it is placed and closed when it is over. By row of the fleet's columns the book keeps

- the prompts' predicted time that is not worked off yet, and since when the first of them runs;
- the answers, their context, the KV they will come to need (mean and variance), the strictest target among them;
- by how much prompts of late have kept the engine from decoding;
- for each answer, how much more of that it can take and still keep its target: so that what a prompt would do to those
  who decode there is a count of requests, not a guess.

All of it is arithmetic on what was predicted; `Speeds` learns from what it really took.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.columns import Floats
from router.speeds import UNKNOWN, Make, Speeds

DUTY_S: Final = 5.0
"""Over which prefill's part of an instance's time is averaged: some answers' length of a 32B model, several of an 8B's.
Shorter, and one long prompt looks like steady load; longer, and a burst is over before it is seen."""
IDLE_MIN: Final = 0.1

SHORT_ONES: Final = 0.3
"""Part of all answers that a short one stands for; one in the middle stands for the others."""

NEARLY: Final = 0.93
"""Of a target: steps grow while an answer is made, as others join it."""

SPREAD: Final = 2.0
"""Standard deviations of room kept for answers that turn out longer than predicted: 2 % of the time it is not enough,
and vLLM preempts."""

TOGETHER_S: Final = 0.001
"""Ends of one engine step are no further apart than this."""

_COLUMNS: Final = (
    "backlog", "since", "ends", "prompts", "decoding", "answer_context", "step", "beside", "kv_mean", "kv_variance",
    "kv_needed", "strictest", "recent", "recent_at", "stalled",
)  # fmt: skip


@dataclass(slots=True, kw_only=True, eq=False)
class Booking:
    """One request's entries."""

    prompt_tokens: int
    mean_tokens: float
    """Expected length of its answer."""
    short_tokens: float
    """Length of a short one."""
    middle_tokens: float
    """And of one in the middle."""
    variance: float
    tpot_ms: float = math.inf
    """Its target."""
    prefill_row: int = -1
    prefill_life: int = -1
    prefill_ms: float = 0.0
    """Predicted time of its prompt; 0 once that is done."""
    plain_ms: float = 0.0
    """The same by the costs alone."""
    sent_s: float = 0.0
    """When it can begin, its engine's front end passed."""
    cached_tokens: int = 0
    """Of its prompt, where it is prefilled, as expected."""
    decode_row: int = -1
    decode_life: int = -1
    context: float = 0.0
    pause_ms: float = 0.0
    """Between its first and its second token, where it is handed over."""
    opened_s: float = -1.0
    """When its answer's first token was here."""
    limits_ms: tuple[float, float] | None = None
    """Of its instance's `stalled`, up to which its target holds: for a short answer, and for one in the middle."""
    began_tpot_ms: float = 0.0
    """Time per token that was to be expected when it began to decode."""


@dataclass(slots=True)
class _Row:
    """What does not fit a column."""

    life: int = 0
    plain_ms: float = 0.0
    observed_ms: float = 0.0
    """Of the prompts that ended last, together."""
    limits: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    targets: dict[float, int] = field(default_factory=dict)


class Book:
    """Columns, one entry per row of `router.columns`."""

    def __init__(self) -> None:
        self.speeds: Final = Speeds()
        self.backlog: Floats = np.zeros(0)
        """Predicted milliseconds of prompts placed there and not done."""
        self.ends: Floats = np.zeros(0)
        """Milliseconds; when all of them will be done."""
        self.prompts: Floats = np.zeros(0)
        """How many these are."""
        self.since: Floats = np.zeros(0)
        """Seconds; when the first of them began, or the last one ended."""
        self.decoding: Floats = np.zeros(0)
        """Answers under way there, or promised."""
        self.answer_context: Floats = np.zeros(0)
        """Their tokens of context, halfway through."""
        self.step: Floats = np.zeros(0)
        """A decode step with these, ms."""
        self.beside: Floats = np.zeros(0)
        """What they add to each step of a prompt, ms."""
        self.kv_mean: Floats = np.zeros(0)
        self.kv_variance: Floats = np.zeros(0)
        """Tokens of KV they will have at their ends."""
        self.kv_needed: Floats = np.zeros(0)
        """The same with `SPREAD` of room."""
        self.strictest: Floats = np.zeros(0)
        """The least TPOT target among them, ms; infinite where none has one."""
        self.answers = 0
        """All of them."""
        self.turn = 0
        """Counts what happens: what was read before is not true any more."""
        self.recent: Floats = np.zeros(0)
        self.recent_at: Floats = np.zeros(0)
        """Part of its time that prompts placed of late take, decayed since; and when that was."""
        self.stalled: Floats = np.zeros(0)
        """Milliseconds of prompts ever placed there: what its answers had to wait for is a difference of two."""
        self._rows: Final[list[_Row]] = []

    def reach(self, rows: int) -> None:
        """Have as many rows as the fleet's columns."""
        former = len(self._rows)
        more = rows - former
        if more <= 0:
            return
        for name in _COLUMNS:
            column: NDArray[np.float64] = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more)]))
        self.strictest[former:] = math.inf
        self._rows.extend(_Row() for _ in range(more))
        self.speeds.reach(rows)

    def know(self, row: int, make: Make | None) -> None:
        """An instance has this row now. What was booked for another is void."""
        self.reach(row + 1)
        life = self._rows[row].life
        self.answers -= int(self.decoding[row])
        self._rows[row] = _Row(life=life + 1)
        for name in _COLUMNS:
            getattr(self, name)[row] = 0.0
        self.strictest[row] = math.inf
        self.speeds.know(row, make or UNKNOWN)
        self._steps(row)

    # --- what policies ask --------------------------------------------------------------------------------------------

    def waits_ms(self, now: float) -> Floats:
        """How long a prompt placed now waits for those before it, by row."""
        left: Floats = np.maximum(self.ends - now * 1000.0, 0.0)
        return left

    def idle(self, now: float) -> Floats:
        """Part of each instance's time that prompts have left to answers of late, `IDLE_MIN` at least."""
        decayed = self.recent * np.exp((self.recent_at - now) * (1.0 / DUTY_S))
        share: Floats = np.maximum(1.0 - decayed, IDLE_MIN)
        return share

    def harmed(self, row: int, ms: float) -> float:
        """How many answers there would probably miss their TPOT target if a prompt took so much of their time."""
        (short, middle), stalled = self._rows[row].limits, self.stalled.item(row)
        of_short = bisect_right(short, stalled + ms) - bisect_right(short, stalled)
        of_middle = bisect_right(middle, stalled + ms) - bisect_right(middle, stalled)
        return SHORT_ONES * of_short + (1 - SHORT_ONES) * of_middle

    # --- what happens -------------------------------------------------------------------------------------------------

    def prompt_placed(self, booking: Booking, row: int, ms: float, stall_ms: float, now: float) -> None:
        """A prompt goes there and will take so long."""
        self.prompt_over(booking, now, done=False)
        self.turn += 1
        at = self._rows[row]
        booking.prefill_row, booking.prefill_life, booking.prefill_ms = row, at.life, ms
        booking.plain_ms = ms / float(self.speeds.prefill_factor[row])
        booking.sent_s = now + float(self.speeds.first[row]) / 1000.0
        if not self.prompts[row]:
            self.since[row] = booking.sent_s
            self.backlog[row] = 0.0
        self.prompts[row] += 1
        self.backlog[row] += ms
        self.ends[row] = float(self.since[row]) * 1000.0 + float(self.backlog[row])
        self.stalled[row] += stall_ms
        decay = math.exp((self.recent_at.item(row) - now) / DUTY_S)
        self.recent[row] = self.recent.item(row) * decay + stall_ms * (0.001 / DUTY_S)
        self.recent_at[row] = now

    def prompt_over(self, booking: Booking, now: float, *, done: bool) -> None:
        """Its prompt is computed, or will not be (`done` false)."""
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
        self.ends[row] = float(self.since[row]) * 1000.0 + float(self.backlog[row])

    def _time_prompt(self, row: int, booking: Booking, now: float) -> None:
        """Learn from the time since the one before. Prompts of one step end together, and are one observation."""
        at = self._rows[row]
        if now - float(self.since[row]) < TOGETHER_S:
            at.plain_ms += booking.plain_ms
            return
        if at.plain_ms > 0:
            self.speeds.prompt_took(row, at.plain_ms, at.observed_ms)
        at.plain_ms = booking.plain_ms
        at.observed_ms = (now - max(float(self.since[row]), booking.sent_s)) * 1000.0

    def answer_placed(self, booking: Booking, row: int) -> None:
        """Its answer is promised a place there."""
        self.answer_over(booking)
        at = self._rows[row]
        booking.decode_row, booking.decode_life = row, at.life
        booking.context = booking.prompt_tokens + booking.mean_tokens / 2
        booking.opened_s = -1.0
        self._count(booking, row, 1)
        if math.isfinite(booking.tpot_ms):
            at.targets[booking.tpot_ms] = at.targets.get(booking.tpot_ms, 0) + 1
            self.strictest[row] = min(at.targets)
        self._limit(booking, row)  # also of prompts that come while its own is computed: nobody knows which is first

    def opened(self, booking: Booking, now: float) -> None:
        """The first token of its answer is there: from now on prompts keep it waiting."""
        row = booking.decode_row
        if row < 0 or self._rows[row].life != booking.decode_life or booking.opened_s >= 0:
            return
        booking.opened_s = now
        booking.began_tpot_ms = self._tpot_ms(row, now)
        self._limit(booking, row)

    def _limit(self, booking: Booking, row: int) -> None:
        """How much more its instance's prompts may keep it waiting, from now on."""
        if not math.isfinite(booking.tpot_ms):
            return
        at = self._rows[row]
        self._unlimit(booking, at)
        each, stalled = NEARLY * booking.tpot_ms - self.step.item(row), self.stalled.item(row)
        lengths = (booking.short_tokens, booking.middle_tokens)
        short, middle = (max(0.0, each * max(tokens - 1, 1.0) - booking.pause_ms) for tokens in lengths)
        booking.limits_ms = (stalled + short, stalled + middle)
        for limits, limit in zip(at.limits, booking.limits_ms, strict=True):
            insort(limits, limit)

    @staticmethod
    def _unlimit(booking: Booking, at: _Row) -> None:
        for limits, limit in zip(at.limits, booking.limits_ms or (), strict=False):
            del limits[bisect_left(limits, limit)]
        booking.limits_ms = None

    def answer_over(self, booking: Booking, now: float | None = None, tokens: int = 0) -> None:
        """Its answer has ended after so many tokens, or will not come from there (`now` None)."""
        row = booking.decode_row
        if row < 0:
            return
        booking.decode_row = -1
        at = self._rows[row]
        if at.life != booking.decode_life:
            return
        if now is not None and tokens > 2 and booking.opened_s >= 0:
            self._learn(booking, row, now, tokens)
        self._count(booking, row, -1)
        if booking.tpot_ms in at.targets:
            at.targets[booking.tpot_ms] -= 1
            if not at.targets[booking.tpot_ms]:
                del at.targets[booking.tpot_ms]
            self.strictest[row] = min(at.targets, default=math.inf)
        self._unlimit(booking, at)

    def _learn(self, booking: Booking, row: int, now: float, tokens: int) -> None:
        """Its mean time per token, against what was predicted when it began and would be now."""
        predicted = (booking.began_tpot_ms + self._tpot_ms(row, now)) / 2
        self.speeds.steps_took(row, predicted, (now - booking.opened_s) * 1000.0 / (tokens - 1))

    def _tpot_ms(self, row: int, now: float) -> float:
        decayed = self.recent.item(row) * math.exp((self.recent_at.item(row) - now) / DUTY_S)
        return self.step.item(row) / max(1.0 - decayed, IDLE_MIN)

    def _count(self, booking: Booking, row: int, sign: int) -> None:
        self.turn += 1
        self.decoding[row] += sign
        self.answers += sign
        self.answer_context[row] = max(0.0, self.answer_context[row] + sign * booking.context)
        self.kv_mean[row] = max(0.0, self.kv_mean[row] + sign * (booking.prompt_tokens + booking.mean_tokens))
        self.kv_variance[row] = max(0.0, self.kv_variance[row] + sign * booking.variance)
        if not self.decoding[row]:  # sums of floats do not come back to nothing by themselves
            self.answer_context[row] = self.kv_mean[row] = self.kv_variance[row] = 0.0
        self.kv_needed[row] = self.kv_mean.item(row) + SPREAD * math.sqrt(self.kv_variance.item(row))
        self._steps(row)

    def _steps(self, row: int) -> None:
        batch, context = int(self.decoding[row]), float(self.answer_context[row])
        self.step[row] = self.speeds.decode_ms(row, batch, context)
        self.beside[row] = self.speeds.beside_ms(row, batch, context) if batch else 0.0
