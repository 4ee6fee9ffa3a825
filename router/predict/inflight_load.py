"""The load in flight: what the requests of this router and its peers do to the instances they run on (prompts to
compute, answers under way). Pure.

Engines' own reports are a second old; a router knows its own requests at once and exactly. Every request has one
booking, opened when it is placed and closed when it is over. By row of the fleet's columns this module keeps:

- the predicted time of prompts that are not computed yet, and since when the first of them runs;
- the answers, their context, the KV they will need (mean and variance), the strictest target among them;
- the share of time for which recent prompts have kept the engine from decoding;
- for each answer, how long prompts may still keep it waiting before it misses its target
  (`router.predict.stall_limits`).

All of it is arithmetic on predictions; `StepModel` learns from the real times.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from router.core.arrays import Floats, Ints, Mirror
from router.core.load_notes import PromptState
from router.predict.inflight_request import OF_A_PEER, InflightRequest
from router.predict.load_updates import LoadUpdates
from router.predict.margins import FIRST_AIM, PROMPTLY, Margins, TpotMargins
from router.predict.reported_prompts import EndedPrompts, ReportedPrompts, Seen
from router.predict.shared_beginnings import SharedBeginnings
from router.predict.source_delay import SourceDelay
from router.predict.stall_limits import StallLimits, end
from router.predict.step_model import UNKNOWN, Make, Speed, StepModel
from router.predict.transfer_model import TransferModel
from router.predict.tries import Tries

DUTY_S: Final = 5.0
"""The time over which prefill's share of an instance's time is averaged: the length of some answers of a 32B model, or
several of an 8B's. With a shorter time one long prompt looks like steady load; with a longer one a burst is over before
it is seen."""
IDLE_MIN: Final = 0.1
"""The least share of an instance's time that answers are assumed to have."""

SPREAD: Final = 2.0
"""Standard deviations of KV that are kept free for answers that get longer than predicted. In 2 % of the time that is
not enough, and vLLM preempts."""

REBASE_S: Final = 100 * DUTY_S
"""The time after which `RowLoad.recent` is scaled down again: by e^100, far below the largest float."""

_ONE_BY_ONE: Final = 64
"""Up to this number of rows, each is read by itself; more are read as a column."""

_MIRRORED: Final = ("ends", "opens", "uncomputed", "decoding", "step", "beside", "kv_free", "strictest", "recent")


class RowLoad:
    """The load in flight of one row. It has many attributes: one for each column that choices in a large fleet read
    (`InflightLoad.column`), and those from which they are computed.
    """

    __slots__ = (
        "answer_context", "backlog", "beside", "decoding", "ended", "ends", "kv_free", "kv_mean", "kv_variance",
        "life", "limits", "opens", "peers_ended", "peers_left", "peers_prompts", "prompts", "pulls", "recent",
        "reported", "shared", "since", "stalled", "step", "strictest", "targets", "timed_s", "uncomputed",
    )  # fmt: skip

    def __init__(self, life: int = 0) -> None:
        self.life: Final = life
        self.backlog: float = 0.0
        """Predicted milliseconds of the prompts that are placed on the row and not computed."""
        self.ends: float = -math.inf
        """The predicted time, in milliseconds, at which all of them are computed; minus infinity: there are none."""
        self.opens: float = -math.inf
        """The time, in milliseconds, from which one more prompt could be computed at once. Minus infinity with fewer
        than two prompts; else `ends` less the front end's part of a first token (`Speed.first`). With what was learned
        of it besides (`Speed.lead`), prompts that wait in engines' queues can no longer be put in order: tried, and
        fewer requests of an overload were in time (0.38 for 0.45 and more, tests/sim/test_admission_sim.py)."""
        self.prompts = 0
        """The number of these prompts."""
        self.uncomputed: float = 0.0
        """Their tokens that are not expected to be cached; of peers' prompts, all tokens."""
        self.peers_prompts = 0
        """The number of these prompts that are of router peers."""
        self.peers_left = 0
        """The number of peers' prompts that have left the row, computed or not."""
        self.peers_ended = 0
        """The number of peers' prompts that were computed there."""
        self.since: float = 0.0
        """The time, in seconds, at which the first of them began, or the last prompt before them ended."""
        self.decoding = 0
        """The number of answers that are under way on the row, or have a place there."""
        self.answer_context: float = 0.0
        """Their tokens of context in all, each answer half made."""
        self.step: float = 0.0
        """The time of a decode step with these answers, in ms."""
        self.beside: float = 0.0
        """What they add to each step of a prompt, in ms."""
        self.kv_mean: float = 0.0
        self.kv_variance: float = 0.0
        """Mean and variance of the KV that they will have at their ends, in tokens and tokens². What several of them
        share counts once."""
        self.shared: Final = SharedBeginnings()
        self.kv_free: float = math.inf
        """KV tokens that they leave free, with `SPREAD` as margin. Infinite without answers: one always fits."""
        self.strictest: float = math.inf
        """The least TPOT target among them that one answer alone would meet there, in ms; infinite: there is none."""
        self.recent: float = 0.0
        """The share of the row's time that recent prompts take, scaled to the time `InflightLoad._base_s`. Times
        `InflightLoad.faded`, it is the share now: so one factor fades all rows."""
        self.stalled: float = 0.0
        """Milliseconds for which all prompts ever placed there keep answers waiting: what an answer had to wait is a
        difference of two readings."""
        self.ended: Final = EndedPrompts()
        self.timed_s: float = -math.inf
        """The time at which a prompt there was last timed, in seconds."""
        self.reported: Final = ReportedPrompts()
        self.limits: Final = StallLimits()
        self.targets: Final[dict[float, int]] = {}
        """The number of answers by TPOT target, in ms."""
        self.pulls: Final = TransferModel()

    def add_prompt(self, sent_s: float, ms: float, tokens: int, speed: Speed) -> None:
        """One more prompt is placed on the row: it can begin at `sent_s` (seconds), takes `ms`, and computes `tokens`
        tokens.
        """
        if not self.prompts:
            self.since = sent_s
            self.backlog = self.uncomputed = 0.0
        self.prompts += 1
        self.uncomputed += tokens
        self.backlog += ms
        self.expect_ends(speed)

    def expect_ends(self, speed: Speed) -> None:
        """Compute `ends` and `opens` again: the prompts there have changed."""
        if not self.prompts:
            self.ends = self.opens = -math.inf
            return
        self.ends = self.since * 1000.0 + self.backlog
        self.opens = self.ends - speed.first if self.prompts >= 2 else -math.inf

    def count(self, booking: InflightRequest, sign: int, speed: Speed) -> None:
        """One more request's answer is there (`sign` 1), or one less (-1). Several answers hold their prompt once."""
        self.decoding += sign * booking.answers
        if self.decoding:
            self.answer_context = max(0.0, self.answer_context + sign * booking.context)
            own = sign * (booking.prompt_tokens + booking.answers * booking.mean_tokens)
            self.kv_mean = max(0.0, self.kv_mean + own + self._share(booking, sign))
            self.kv_variance = max(0.0, self.kv_variance + sign * booking.answers * booking.variance)
        else:  # sums of floats do not come back to nothing by themselves
            self.answer_context = self.kv_mean = self.kv_variance = 0.0
            self.shared.clear()
        self.leave_free(speed)
        self.expect_steps(speed)
        target_ms = booking.tpot_ms
        if math.isfinite(target_ms):
            self.targets[target_ms] = self.targets.get(target_ms, 0) + sign
            if not self.targets[target_ms]:
                del self.targets[target_ms]
            self.keep_targets(speed)

    def _share(self, booking: InflightRequest, sign: int) -> float:
        """What sharing adds to the KV that all need: an answer that joins brings less, one that ends takes less. The
        last one with a beginning that another has brought may take more (`SharedBeginnings.drop`).
        """
        of = booking.beginnings
        if of is None:
            return 0.0
        return -self.shared.add(of) if sign > 0 else self.shared.drop(of)

    def leave_free(self, speed: Speed) -> None:
        """Compute `kv_free` again: the answers there have changed, or the size of the cache."""
        needed = self.kv_mean + SPREAD * math.sqrt(self.kv_variance)
        self.kv_free = speed.capacity - needed if self.decoding else math.inf

    def expect_steps(self, speed: Speed) -> None:
        """Compute `step` and `beside` again: the answers there have changed, or the speed."""
        self.step = speed.decode_ms(self.decoding, self.answer_context)
        self.beside = speed.beside_ms(self.decoding, self.answer_context) if self.decoding else 0.0

    def keep_targets(self, speed: Speed) -> None:
        """Compute `strictest` again. A target that one answer alone would miss there keeps no other answer out."""
        least_ms = speed.least_ms()
        self.strictest = min([target for target in self.targets if target >= least_ms], default=math.inf)

    def tpot_ms(self, faded: float) -> float:
        """The expected time per token of an answer there; `faded`: `InflightLoad.faded`."""
        return self.step / max(1.0 - self.recent * faded, IDLE_MIN)

    def progress(self, now: float) -> float:
        """A clock, in milliseconds, that stands while prompts keep answers waiting: answers make one token per step."""
        return now * 1000.0 - self.stalled

    def outlive(self, now: float) -> None:
        """Bring the limits up to date (`StallLimits.outlive`).

        This happens before any change of the values it depends on (the row's step, its clock), and for each answer at
        its own time. So results do not depend on earlier reads, and a choice may read as little as it needs.
        """
        if self.limits.outlived:
            self.limits.outlive(self.progress(now), self.step)

    def limit(self, booking: InflightRequest, now: float) -> None:
        """Set how much longer prompts there may make this answer wait, from now on, if it has a target."""
        if not math.isfinite(booking.tpot_ms):
            return
        self.outlive(now)
        end(booking.limits)
        lengths = (booking.short_tokens, booking.middle_tokens)
        booking.limits = self.limits.begin(lengths, self.stalled, self.step, booking.tpot_ms, booking.pause_ms)
        if booking.opened_s >= 0:
            for limit in booking.limits:
                self.limits.expect_longer(limit, self.progress(now), limit.tokens, self.step)


class InflightLoad:
    """The load in flight by row of `router.fleet.columns`: each event changes it, and the models that learn from it.
    Long, as one event changes most of it.
    """

    def __init__(self) -> None:
        self.step_model: Final = StepModel()
        self.margins: Final = TpotMargins()
        self.first_margins: Final = Margins(PROMPTLY, FIRST_AIM)
        """The margins of TTFT targets of classes that refuse; `margins` has those of TPOT targets."""
        self.tries: Final = Tries()
        self.answers = 0
        """The number of answers on all rows."""
        self.turn = 0
        """Counts changes: a result that was computed at an earlier turn is out of date."""
        self.rows: Final[list[RowLoad]] = []
        self.source_delay: Final = SourceDelay()
        self._base_s: float = 0.0
        """The time that `RowLoad.recent` is scaled to, in seconds."""
        self._mirror: Final = Mirror(_MIRRORED)
        self.updates: LoadUpdates | None = None
        """Takes what router peers are to know of this router's bookings; None: this router sends no notes."""

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
        self.rows[row].expect_steps(self.step_model.rows[row])
        self._mirror.changed(row)

    def holds(self, row: int, kv_tokens: int) -> None:
        """The row's engine has reported the size of its KV cache, in tokens."""
        speed = self.step_model.rows[row]
        speed.capacity = float(kv_tokens)
        self.rows[row].leave_free(speed)
        self._mirror.changed(row)

    def column(self, name: str) -> Floats:
        """One attribute of every row (of those in `_MIRRORED`), as a column."""
        return self._mirror.read(self.rows, name)

    # --- what policies ask --------------------------------------------------------------------------------------------

    def waits_ms(self, now: float) -> Floats:
        """By row: how long a prompt placed now waits for the prompts before it, in ms. Overdue prompts will probably
        take as long again as they are late: so an engine that is slow now, or hangs, shows before a prompt ends there.
        """
        left = np.abs(self.column("ends") - now * 1000.0)
        left[np.isinf(left)] = 0.0
        return left

    def opens_ms(self, rows: Ints) -> float:
        """The earliest time, in ms, at which one of these rows can compute one more prompt at once; infinite: none."""
        if len(rows) > _ONE_BY_ONE:
            return float(self.column("opens")[rows].min())
        return min([self.rows[row].opens for row in rows.tolist()], default=math.inf)

    def idle(self, now: float) -> Floats:
        """By row: the share of its time that recent prompts have left to answers, at least `IDLE_MIN`."""
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
        and would meet it otherwise (`StallLimits.pushed_over`).

        Args:
            row: the row of the fleet.
            ms: for how long the prompt's steps keep answers waiting.
            short: tokens of a short answer; the answers there are taken to be as long as this request's.
            middle: tokens of a median answer.
            now: the time in seconds.
        """
        if ms <= 0.0:
            return 0.0
        at = self.rows[row]
        at.outlive(now)
        busy = min(at.recent * self.faded(now), 1.0 - IDLE_MIN)
        return at.limits.pushed_over(ms, at.stalled, at.step, busy / (1.0 - busy), (short, middle))

    # --- what happens -------------------------------------------------------------------------------------------------

    def prompt_placed(self, booking: InflightRequest, row: int, ms: float, stall_ms: float, now: float) -> None:
        """A prompt goes to this row: it will take `ms`, and keep answers there waiting for `stall_ms`."""
        self.prompt_over(booking, now, done=False)
        self.turn += 1
        at, speed = self.rows[row], self.step_model.rows[row]
        booking.prefill_row, booking.prefill_life, booking.prefill_ms = row, at.life, ms
        booking.plain_ms = ms / speed.prefill_factor
        booking.placed_s, booking.stall_ms = now, stall_ms
        booking.sent_s = now + speed.first / 1000.0
        booking.begins_s = max(booking.sent_s, at.ends / 1000.0)
        if booking.number != OF_A_PEER:  # the engine reports to the router that sent it
            at.reported.open[booking] = booking.sent_s * 1000.0
            if self.updates is not None:
                self.updates.placed(booking, ms, stall_ms, now)
        booking.uncomputed = max(1, booking.prompt_tokens - booking.cached_tokens)
        at.add_prompt(booking.sent_s, ms, booking.uncomputed, speed)
        at.peers_prompts += booking.number == OF_A_PEER
        at.outlive(now)
        at.stalled += stall_ms
        at.limits.prompts += 1
        booking.nth_prompt = at.limits.prompts
        self._rebase(now)
        at.recent += stall_ms * (0.001 / DUTY_S) / self.faded(now)
        self._mirror.changed(row)

    def prompt_over(self, booking: InflightRequest, now: float, *, done: bool, presumed: bool = False) -> None:
        """The request's prompt is computed, or will not be (`done` false). `presumed`: it counts as computed, although
        no engine has said when.
        """
        row, ms = booking.prefill_row, booking.prefill_ms
        booking.prefill_ms = 0.0
        seen: list[Seen] = []
        if row >= 0 and not presumed and self.rows[row].life == booking.prefill_life:
            seen = self.rows[row].reported.left(booking, now * 1000.0)
        if ms > 0:
            seen = [*seen, *self._take_prompt(booking, ms, now, done=done, presumed=presumed)]
        self._learn_prompts(row, seen)  # last: an error in learning leaves no prompt behind

    def _take_prompt(
        self, booking: InflightRequest, ms: float, now: float, *, done: bool, presumed: bool
    ) -> list[Seen]:
        """The prompt, of `ms`, leaves its row (`prompt_over`). Returns what there is to learn from it."""
        row = booking.prefill_row
        if self.updates is not None and booking.number != OF_A_PEER:
            state = PromptState.DONE if done else PromptState.PRESUMED if presumed else PromptState.DROPPED
            self.updates.ended(booking, state, now)
        at = self.rows[row]
        seen: list[Seen] = []
        if at.life != booking.prefill_life:
            return seen
        self.turn += 1
        if not done and not presumed:
            self._take_back(booking, at, ms, now)
        if booking.number == OF_A_PEER:
            at.peers_prompts -= 1
            at.peers_left += 1
            at.peers_ended += done
        at.prompts -= 1
        at.backlog = max(0.0, at.backlog - ms) if at.prompts else 0.0
        at.uncomputed = max(0.0, at.uncomputed - booking.uncomputed) if at.prompts else 0.0
        if done:
            at.timed_s = now
            seen = at.ended.add(booking.plain_ms, ms, booking.sent_s, at.since, now)
            at.since = max(at.since, now)  # a peer's prompt may have ended before one that is known already
            if booking.seeded:
                booking.first_s = now
            if booking.pull is not None and self.answers_at(booking):
                self.rows[booking.decode_row].pulls.begin(booking.pull, now)
        elif presumed:  # the next prompt began at this one's predicted end, or at `now` less the lead if that is later
            at.since = min(now, max(at.since + ms / 1000.0, now - self.step_model.rows[row].lead / 1000.0))
        at.expect_ends(self.step_model.rows[row])
        self._mirror.changed(row)
        return seen

    def _take_back(self, booking: InflightRequest, at: RowLoad, ms: float, now: float) -> None:
        """The prompt will not be computed there: answers do not wait for the rest of it."""
        began_s = max(at.since, booking.sent_s)
        if at.prompts > 1:  # those before it may not have ended
            began_s = max(began_s, booking.begins_s)
        left_ms = booking.stall_ms * (1.0 - min(1.0, max(0.0, (now - began_s) * 1000.0 / ms)))
        at.outlive(now)
        at.limits.take_back(booking.nth_prompt, left_ms)
        at.stalled -= left_ms
        faded = math.exp((booking.placed_s - self._base_s) / DUTY_S)
        at.recent = max(0.0, at.recent - left_ms * (0.001 / DUTY_S) * faded)

    def answers_at(self, booking: InflightRequest) -> bool:
        """Whether the instance that the request's answer is promised a place on still has its row."""
        return booking.decode_row >= 0 and self.rows[booking.decode_row].life == booking.decode_life

    def pulls(self, row: int) -> TransferModel:
        """The transfer model of this row."""
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
            plain_ms = booking.counted_ms(self.step_model.make(row), prompt_tokens)
            self._learn_prompts(row, self.rows[row].reported.add(booking, plain_ms, prompt_ms, ended_ms))
        row = booking.decode_row
        if token_ms > 0 and row >= 0 and self.rows[row].life == booking.decode_life:
            predicted_ms = self.rows[row].tpot_ms(self.faded(now))
            self.step_model.steps_took(row, predicted_ms, token_ms, booking.sent_s, now)
            self._restate(now)

    def _learn_prompts(self, row: int, seen: list[Seen]) -> None:
        for plain_ms, observed_ms in seen:
            self.step_model.prompt_took(row, plain_ms, observed_ms)

    def answer_placed(self, booking: InflightRequest, row: int, now: float) -> None:
        """The request's answer is promised a place on this row."""
        self.answer_over(booking, now)
        at = self.rows[row]
        booking.decode_row, booking.decode_life = row, at.life
        booking.context = booking.prompt_tokens + booking.answers * booking.mean_tokens / 2
        booking.opened_s = -1.0
        at.outlive(now)
        self._count(booking, row, 1)
        # The prompts that come while its own is computed count, too: their order is not known.
        at.limit(booking, now)
        self._update(booking)

    def opened(self, booking: InflightRequest, now: float) -> None:
        """The first token of the request's answer has arrived: from now on prompts make it wait."""
        row = booking.decode_row
        if row < 0 or self.rows[row].life != booking.decode_life or booking.opened_s >= 0:
            return
        at = self.rows[row]
        if booking.pull is not None:
            at.pulls.end(booking.pull, now, done=True)
        booking.opened_s = now
        if booking.first_s < 0:
            booking.first_s = now
        booking.began_tpot_ms, booking.began_batch = at.tpot_ms(self.faded(now)), at.decoding
        at.limit(booking, now)
        self._update(booking)

    def answer_over(self, booking: InflightRequest, now: float, tokens: int = 0) -> None:
        """The request's answer has ended after `tokens` tokens; 0: it will not come from there, or its tokens were not
        counted.
        """
        row = booking.decode_row
        if row < 0:
            return
        booking.decode_row = -1
        self._update(booking)
        at = self.rows[row]
        if booking.pull is not None:
            at.pulls.end(booking.pull, now, done=False)
        if at.life != booking.decode_life:
            return
        at.outlive(now)
        try:
            if tokens > 2 and booking.opened_s >= 0:
                self._learn(booking, row, now, tokens)
        finally:  # an answer that stayed there for a bug in learning would take its room for ever
            self._count(booking, row, -1)
            end(booking.limits)
            booking.limits = ()

    def _update(self, booking: InflightRequest) -> None:
        """Router peers are to know of a change of the request's answer."""
        if self.updates is not None and booking.number != OF_A_PEER:
            self.updates.changed(booking)

    def _learn(self, booking: InflightRequest, row: int, now: float, tokens: int) -> None:
        """Learn from the answer's mean time per token, compared with the predictions made when it began and now."""
        predicted = (booking.began_tpot_ms + self.rows[row].tpot_ms(self.faded(now))) / 2
        token_ms = (now - booking.opened_s) * 1000.0 / (tokens - 1)
        self.step_model.steps_took(row, predicted, token_ms, booking.opened_s, now)
        at = self.rows[row]
        idle = max(1.0 - at.recent * self.faded(now), IDLE_MIN)
        self.step_model.batch_took(row, (booking.began_batch + at.decoding) / 2, token_ms * idle)
        self._restate(now)

    def _restate(self, now: float) -> None:
        """A leg was timed: compute again the rows whose decode factor has changed by it."""
        self.turn += 1
        for row in self.step_model.restated():
            at, speed = self.rows[row], self.step_model.rows[row]
            at.outlive(now)
            at.keep_targets(speed)
            at.expect_steps(speed)
            self._mirror.changed(row)

    def _count(self, booking: InflightRequest, row: int, sign: int) -> None:
        self.turn += 1
        self.answers += sign * booking.answers
        self.rows[row].count(booking, sign, self.step_model.rows[row])
        self._mirror.changed(row)
