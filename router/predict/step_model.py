"""The step model: how fast each instance is. A prompt's time and a decode step's, for all rows of the fleet's columns.
Pure.

The formula is that of `costs.step`. Instances of one make (model, GPU, shape, settings) have the same coefficients, so
a prompt is priced once for each make and spread over the rows. Two factors for each instance follow the real times of
its legs: wrong costs, or missing ones, become right within a few dozen legs. Predictions are compared with each other
(which instance?) and with targets (in time?); the first needs only ratios, the second needs the factors.

Without costs, an instance whose own legs have not been timed has the factors of another one. Engines of one fleet
rarely differ by as much as all of them differ from what is assumed: an instance that nothing is known of would look
like the fastest, or the slowest. An instance that gets no more legs follows the others of its make after a while
(`router.predict.siblings`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from costs.cost import Costs
from costs.step import StepCost
from router.core.arrays import Floats, Ints, Mirror
from router.predict.batch_slope import BatchSlope
from router.predict.fitted import Fitted
from router.predict.level_shift import CONFIRMED, LevelShift
from router.predict.siblings import Siblings

OFF_KNOWN, OFF_UNKNOWN = 2.0, 200.0
"""How far legs may move a prediction either way: with known costs, and without (from a tiny model on a fast GPU to a
large one on a CPU)."""
OFF_LEARNED, ENOUGH = 8.0, 50
"""The same for known costs once `ENOUGH` legs were timed, of the instance or of each instance of its make on average:
then the costs are of another engine. With costs 0.4 times the real ones the bound of 2 kept predictions a fifth too
short for ever, and admission let in what it could not keep."""
FACTOR_RATE = 0.05
"""The weight of one observation in the logarithm of the factor, once there are more than twenty."""
CLIP = math.log(3.0)
"""After the first `FEW`, one observation counts as at most three times longer or shorter than predicted."""
FEW = 4
"""So many timed answers make a decode step's time *learned*."""
SURE = 20
"""After so many prompts, speeds without a cost profile are trusted."""

TOLD: Final = "told"
LEARNED: Final = "learned"
ASSUMED: Final = "assumed"
"""The sources of a prediction: a cost profile, legs that were timed, default numbers (`router.admin.basis`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """What instances of one kind have in common."""

    prefill: StepCost
    decode: StepCost
    beside: float = 1.0
    """How many times more an answer's context costs beside a prompt's step than in a decode step."""
    first_ms: float = 0.0
    """The wait of a first token besides the engine's steps."""
    capacity_tokens: int = 400_000
    """The KV cache's size. If unknown: an 8B model on 80 GB."""
    budget_tokens: int = 8192
    """The tokens of one step: `max_num_batched_tokens`; vLLM 0.32's default on GPUs of 70 GB and more."""
    kv_bytes: float = 0.0
    """Bytes of one token's KV; 0: a hand-over is assumed to cost nothing."""
    kv_gb_s: float = 0.0
    """The rate at which an instance sends or takes KV."""
    kv_near_gb_s: float = 0.0
    """The rate between two instances on one machine; 0: as between any two."""
    off_max: float = OFF_KNOWN

    def prompt_ms(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """The engine's time for a prompt alone, in steps of its budget."""
        tokens = max(1, round(new_tokens))
        budget = min(self.budget_tokens, tokens)
        full, last = divmod(tokens, budget)
        cost = self.prefill
        ms = full * cost.matrices_ms(budget) + (cost.matrices_ms(last) if last else 0.0)
        return ms + cost.area_ms * tokens * (tokens + 2.0 * cached_tokens) + self._reading_ms(tokens, cached_tokens)

    def _reading_ms(self, tokens: int, cached_tokens: float) -> float:
        """How much longer the steps of a prompt take because each reads the prompt's earlier tokens in sequence."""
        cost, budget = self.prefill, min(self.budget_tokens, tokens)
        if not cost.cached_ms:
            return 0.0
        full, last = divmod(tokens, budget)
        ms = cost.beyond_area_ms(last, cached_tokens + full * budget) if last else 0.0
        if cost.cached_ms > 2.0 * cost.area_ms * budget:  # else arithmetic takes longer in every full step
            ms += sum(cost.beyond_area_ms(budget, cached_tokens + at * budget) for at in range(full))
        return ms

    def steps(self, new_tokens: float) -> float:
        """The number of steps that a prompt takes part in."""
        return math.ceil(max(1.0, new_tokens) / self.budget_tokens)


TIER_GB_S: Final = {"host": 20.0, "disk": 3.0}
"""Assumed rates at which an instance loads KV from the tiers below its cache, upper ones first, until its engine has
measured them (`Speed.tiers`): PCIe 4.0 with 16 lanes (32 GB/s by its name) in practice, and one NVMe disk on four
lanes."""

TIER_WORTH: Final = 0.9
"""`Speed.tier_worth` where a token's bytes, or the times of prompts, are not known. Where costs are learned from legs,
it is the most that a tier is worth: it has the wait for the step that computes the rest, too, which no rate has. Seen
with vLLM 0.32 on CPU and a model of 2 KiB a token: 1,800 tokens came back in 0.11 to 0.16 of their prefill's time from
host memory, in 0.14 to 0.26 from disk, and in 0.05 to 0.10 from the KV cache itself (docs/tiers.md)."""


def _unknown() -> Make:
    """Roughly an 8B model on an H100: without a cost profile, factors correct it to the real speed."""
    cost = StepCost(
        floor_ms=8.0, start_ms=0.0, token_ms=0.03, area_ms=0.0, decode_ms=8.0, context_ms=0.0, request_ms=0.05
    )
    return Make(prefill=cost, decode=cost, off_max=OFF_UNKNOWN)


UNKNOWN: Final = _unknown()

FLATTEST: Final = UNKNOWN.decode.request_ms / UNKNOWN.decode.requests_ms(0)
"""The part of a step without answers by which an answer lengthens it, as long as nothing was learned."""


def make_of(costs: Costs, *, capacity_tokens: int = 0, budget_tokens: int = 0) -> Make:
    """A make from the cost model; capacity and budget are used if the engine has reported them."""
    decode, mixed = costs.by_kind.decode, costs.by_kind.mixed
    return Make(
        prefill=costs.by_kind.prefill,
        decode=decode,
        beside=mixed.context_ms / decode.context_ms if decode.context_ms > 0 else 1.0,
        first_ms=costs.first_token_ms,
        capacity_tokens=capacity_tokens or costs.kv_capacity_tokens,
        budget_tokens=budget_tokens or UNKNOWN.budget_tokens,
        kv_bytes=costs.kv_bytes_per_token,
        kv_gb_s=costs.gpu.nic_gb_s * costs.shape.tp,
        kv_near_gb_s=costs.gpu.link_gb_s * costs.shape.tp,
    )


_MIRRORED: Final = ("kind", "prefill_factor", "request", "context", "floor", "floor_least", "lead")


class Speed:
    """One row's speed. It has many attributes: one for each column that choices in a large fleet read
    (`StepModel.column`), and what was timed.
    """

    __slots__ = (
        "by_batch", "capacity", "context", "decode_factor", "first", "floor", "floor_least", "kind", "lead", "make",
        "overhead", "plain_floor", "plain_request", "prefill_factor", "prompts", "prompts_shift", "request",
        "steps_seen", "steps_shift", "steps_since", "tiers", "token_bytes",
    )  # fmt: skip

    def __init__(self, make: Make, kind: int) -> None:
        self.make: Final = make
        self.kind: Final = kind
        """The number of the make."""
        self.prefill_factor: float = 1.0
        self.decode_factor: float = 1.0
        self.plain_request: float = make.decode.request_ms
        self.plain_floor: float = make.decode.requests_ms(0)
        """`request` and `floor` without the factor."""
        self.by_batch: Final = BatchSlope(FLATTEST)
        """Steps by their number of answers, as they were timed; learned only where costs are unknown."""
        self.request: float = make.decode.request_ms
        """Milliseconds that one more answer adds to a decode step, its context apart; factor included."""
        self.context: float = make.decode.context_ms
        """Milliseconds that one token of context adds to a decode step; factor included."""
        self.floor: float = make.decode.requests_ms(0)
        """Milliseconds of a decode step without answers; factor included. With `request`, it is the least that an
        answer's token takes there."""
        self.floor_least: float = self.floor
        """The least that `floor` may be: less only where costs are unknown (`BatchSlope.most`). A busy engine of
        unknown costs looks too slow for a target that it would keep with fewer answers; if it got no limit for that, it
        would stay as busy, and look so for ever."""
        self.first: float = make.first_ms
        """Milliseconds that a first token takes besides the engine's steps."""
        self.overhead: float = 0.0
        """Milliseconds that prompts were seen to take besides their work, such as the step under way when they came.
        They delay a first token, but are no time of the engine that other requests could use."""
        self.lead: float = make.first_ms
        """`first` and `overhead` together."""
        self.capacity: float = float(make.capacity_tokens)
        self.steps_seen = 0
        """The number of timed answers."""
        self.steps_since = 0
        """The same since the instance became faster or slower."""
        self.steps_shift: Final = LevelShift()
        self.prompts_shift: Final = LevelShift()
        self.prompts: Final = Fitted(trusted=make.off_max < OFF_UNKNOWN)
        self.tiers: dict[str, float] = {}
        """The tiers below the KV cache, and the measured rate of loads from each, in GB/s; 0: not measured yet."""
        self.token_bytes = 0
        """Bytes of one token's KV, as the engine tells; 0: it does not. Used where the make does not say."""

    def decode_ms(self, batch: int, context_tokens: float) -> float:
        """Milliseconds of a step that makes one token for each of `batch` answers, with so much context in all."""
        cost, learned_ms = self.make.decode, self.plain_floor + self.plain_request * batch
        plain_ms = learned_ms if self.make is UNKNOWN else cost.requests_ms(batch)
        return (plain_ms + cost.context_ms * context_tokens) * self.decode_factor

    def take_shape(self, ratio: float) -> None:
        """One more answer lengthens a lone answer's step by this part of its floor: for an engine of unknown costs.
        A lone answer's step stays as it is.
        """
        alone_ms = self.plain_floor + self.plain_request
        self.plain_floor = alone_ms / (1.0 + ratio)
        self.plain_request = alone_ms - self.plain_floor

    def least_ms(self) -> float:
        """The least milliseconds that a step with one answer alone may take, without its context."""
        return self.floor_least + self.request

    def beside_ms(self, batch: int, context_tokens: float) -> float:
        """Milliseconds that `batch` answers that decode there add to each step of a prompt."""
        cost = self.make.decode
        added = self.plain_request * batch + cost.context_ms * self.make.beside * context_tokens
        return added * self.decode_factor

    def tier_worth(self, tier: str) -> float:
        """The share of a prefill that a token saves that is loaded from a tier, 0 to 1: loading takes time, too."""
        cost_ms, bytes_each = self.make.prefill.token_ms * self.prefill_factor, self.make.kv_bytes or self.token_bytes
        if not (cost_ms > 0 and bytes_each > 0) or self.prompts_from() == ASSUMED:
            return TIER_WORTH
        load_ms = bytes_each / (self.tiers.get(tier) or TIER_GB_S[tier]) * 1e-6
        worth = max(0.0, 1.0 - load_ms / cost_ms)
        return worth if self.make is not UNKNOWN else min(worth, TIER_WORTH)

    def tiers_from(self) -> str:
        """The source of the time to load from its tiers."""
        measured = bool(self.tiers) and all(self.tiers.values())
        return TOLD if measured and (self.make.kv_bytes or self.token_bytes) else ASSUMED

    def prompts_from(self) -> str:
        """The source of a prompt's time there."""
        if self.make is not UNKNOWN:
            return TOLD
        return LEARNED if self.prompts.count >= SURE else ASSUMED

    def steps_from(self) -> str:
        """The source of a decode step's time there."""
        if self.make is not UNKNOWN:
            return TOLD
        return LEARNED if self.steps_seen >= FEW else ASSUMED


class StepModel:
    """Makes and factors, by row of the columns. Long, as prompts and decode steps are learned in the same ways."""

    def __init__(self) -> None:
        self.makes: Final[list[Make]] = [UNKNOWN]
        self._alike: int | None = 0
        """The number of the one make that all rows have; None: they differ, or were not looked at since a change."""
        self._unknown = True
        """Whether some row may have the make `UNKNOWN`."""
        self.rows: Final[list[Speed]] = []
        self._mirror: Final = Mirror(_MIRRORED)
        self._prompts_of: Final = Siblings()
        self._steps_of: Final = Siblings()
        self._shape = FLATTEST
        """What was learned last of how a step grows with its answers, where costs are unknown (`Speed.take_shape`)."""
        self._restated: Final[set[int]] = set()

    def restated(self) -> list[int]:
        """The rows whose decode factor has changed since the last call. A leg may change it on other rows, too."""
        rows = sorted(self._restated)
        self._restated.clear()
        return rows

    def reach(self, rows: int) -> None:
        """Have as many rows as the fleet's columns."""
        while len(self.rows) < rows:
            self.rows.append(Speed(UNKNOWN, 0))
            self._begin(len(self.rows) - 1)
            self._alike, self._unknown = None, True

    def _begin(self, row: int) -> None:
        """The row has another instance."""
        unknown = self.rows[row].make is UNKNOWN
        self._prompts_of.begin(row, unknown=unknown)
        self._steps_of.begin(row, unknown=unknown)
        if unknown:
            self._take_prompts(row, *self._prompts_of.lately)
            self.rows[row].take_shape(self._shape)
            self._take_steps(row, self._steps_of.lately[0])
        self._mirror.changed(row)

    def _take_prompts(self, row: int, factor: float, overhead: float) -> None:
        at = self.rows[row]
        at.prefill_factor, at.overhead, at.lead = factor, overhead, overhead + at.first
        self._mirror.changed(row)

    def _take_steps(self, row: int, factor: float) -> None:
        at = self.rows[row]
        at.decode_factor, at.context = factor, at.make.decode.context_ms * factor
        at.request, at.floor = at.plain_request * factor, at.plain_floor * factor
        at.floor_least = at.floor
        if at.make is UNKNOWN:
            batch = at.by_batch.batch
            at.floor_least *= (1.0 + at.plain_request / at.plain_floor * batch) / (1.0 + at.by_batch.most() * batch)
        self._restated.add(row)
        self._mirror.changed(row)

    def know(self, row: int, make: Make) -> None:
        """This make is the row's; what was learned of a former instance of the row is dropped."""
        self.reach(row + 1)
        if make not in self.makes:
            self.makes.append(make)
        self._alike, self._unknown = None, True  # until they are looked at
        self.rows[row] = Speed(make, self.makes.index(make))
        self._begin(row)

    def column(self, name: str) -> Floats:
        """One attribute of every row (of those in `_MIRRORED`), as a column."""
        return self._mirror.read(self.rows, name)

    @property
    def make_of_row(self) -> Ints:
        """The number of each row's make."""
        found: Ints = self.column("kind").astype(np.int64)
        return found

    def look(self, rows: Ints) -> None:
        """Take the rows of all present instances, and find out whether they are alike."""
        kinds: dict[int, list[int]] = {}
        for row in rows.tolist():
            kinds.setdefault(self.rows[row].kind, []).append(row)
        self._unknown = any(self.makes[kind] is UNKNOWN for kind in kinds)
        self._alike = next(iter(kinds)) if len(kinds) == 1 else None
        self._prompts_of.look(kinds)
        self._steps_of.look(kinds)

    def present(self) -> list[Make]:
        """The makes that rows have, or may have."""
        return self.makes if self._alike is None else [self.makes[self._alike]]

    def kind(self, row: int) -> int:
        """The number of the row's make."""
        return self.rows[row].kind

    def make(self, row: int) -> Make:
        """The row's make."""
        return self.rows[row].make

    def sure(self, rows: Ints) -> bool:
        """Whether times are trusted: there is a cost profile, or enough legs were timed. Until then no request is
        refused because of them.
        """
        if not self._unknown:
            return True
        return all(self.rows[row].prompts_from() != ASSUMED for row in rows.tolist())

    def known(self, prompt_row: int, answer_row: int) -> str:
        """The source of the times of a prompt on one row and an answer on the other: the less certain of the two."""
        both = (self.rows[prompt_row].prompts_from(), self.rows[answer_row].steps_from())
        return ASSUMED if ASSUMED in both else LEARNED if LEARNED in both else TOLD

    # --- times in ms --------------------------------------------------------------------------------------------------

    def of_prompt(self, tokens: int, cached_tokens: int = 0) -> tuple[Any, Any, Any]:
        """The times of a prompt of `tokens` tokens, some of them cached: each by row, or one number if all rows are
        alike. Times are in ms, without the row's `prefill_factor`.

        Returns the prompt's time without answers beside it; the part of that time for which it keeps answers waiting
        (the other part costs them nothing: weights are read once for both); and the number of steps that compute it.
        """
        if self._alike is not None:
            return _of_prompt(self.makes[self._alike], tokens, cached_tokens)
        found = [_of_prompt(make, tokens, cached_tokens) for make in self.makes]
        times, stalls, steps = (np.array(each)[self.make_of_row] for each in zip(*found, strict=True))
        return times, stalls, steps

    def of_prompt_by_make(self, tokens: int, cached_tokens: int = 0) -> list[tuple[float, float, float]]:
        """As `of_prompt`, by make (`make_of_row`). If all rows are alike, every make has theirs."""
        if self._alike is not None:
            return [_of_prompt(self.makes[self._alike], tokens, cached_tokens)] * len(self.makes)
        return [_of_prompt(make, tokens, cached_tokens) for make in self.makes]

    def handoff_ms(self, tokens: float, source: int, target: int, *, near: bool = False) -> float:
        """The time to move the KV of `tokens` tokens between two rows, in ms, at the slower row's rate. `near`: they
        are on one machine.
        """
        one, other = self.make(source), self.make(target)
        rate = min(one.kv_near_gb_s, other.kv_near_gb_s) if near else 0.0
        rate = rate or min(one.kv_gb_s, other.kv_gb_s)
        return one.kv_bytes * tokens / rate * 1e-6 if rate > 0 else 0.0

    # --- learning -----------------------------------------------------------------------------------------------------

    def prompt_took(self, row: int, plain_ms: float, observed_ms: float) -> None:
        """The prompts of one step took `observed_ms`; by the costs alone they take `plain_ms`."""
        at = self.rows[row]
        observed_ms = max(observed_ms, 0.0)
        expected_ms = at.prefill_factor * plain_ms + at.overhead
        off = math.log(observed_ms / expected_ms) if expected_ms > 0 and observed_ms > 0 else 0.0
        if at.prompts_shift.seen(off):
            at.prompts.times(at.prompts_shift.times, CONFIRMED)
            expected_ms *= at.prompts_shift.times
        if expected_ms > 0 and at.prompts.count >= FEW:  # an engine may have stood still for seconds
            observed_ms = min(observed_ms, math.exp(CLIP) * expected_ms)
        at.prompts.add(plain_ms, observed_ms)
        self._take_fit(row)
        other = self._prompts_of.timed(row, math.log(at.prefill_factor), at.overhead)
        if other >= 0:
            self._follow_prompts(other)
        if at.make is UNKNOWN:
            for other in self._prompts_of.unknown_timed(
                row, at.prefill_factor, at.overhead, first=at.prompts.count <= SURE
            ):
                self._take_prompts(other, at.prefill_factor, at.overhead)

    def _take_fit(self, row: int) -> None:
        """Predict prompts there by what is fitted."""
        at = self.rows[row]
        slope, rest = at.prompts.fit(self._prompts_of.base(row))
        bound = _off_max(at.make, max(at.prompts.count, self._prompts_of.legs(row)))
        self._take_prompts(row, min(bound, max(1 / bound, slope)), rest)

    def _follow_prompts(self, row: int) -> None:
        """If the row had no prompts for too long, move what was seen there towards the others (`Siblings.strays`)."""
        at = self.rows[row]
        others = self._prompts_of.others(row)
        if not at.prompts.count:
            if others is not None:
                self._take_prompts(row, *others)
            return
        plain_ms = at.prompts.plain
        level = math.log(at.prefill_factor + at.overhead / plain_ms) if plain_ms > 0 else math.log(at.prefill_factor)
        times = self._prompts_of.strays(row, level, at.prompts.count, plain_ms)
        if times != 1.0:
            at.prompts.times(times, FEW)
            self._take_fit(row)

    def _follow_steps(self, row: int) -> None:
        """As `_follow_prompts`, for decode steps."""
        at = self.rows[row]
        others = self._steps_of.others(row)
        if not at.steps_seen:
            if others is not None:
                self._take_steps(row, others[0])
            return
        times = self._steps_of.strays(row, math.log(at.decode_factor), at.steps_seen)
        if times != 1.0:
            at.steps_since = min(at.steps_since, FEW)
            bound = _off_max(at.make, max(at.steps_seen, self._steps_of.legs(row)))
            self._take_steps(row, min(bound, max(1 / bound, at.decode_factor * times)))

    def batch_took(self, row: int, batch: float, step_ms: float) -> None:
        """Steps with so many answers took so long on average, prompts beside them left out: where costs are unknown,
        learn which part of a step grows with its answers. What is predicted for this batch stays as it is.

        Without it, a busy engine of unknown costs looks as slow to a lone answer as it is, and no admission by time per
        token can work: one answer more or less makes no difference.
        """
        at = self.rows[row]
        if at.make is not UNKNOWN or not (batch >= 1.0 and step_ms > 0):
            return
        before = at.plain_floor + at.plain_request * batch
        at.by_batch.add(batch, step_ms)
        self._shape = at.by_batch.ratio()
        at.take_shape(self._shape)
        self._take_steps(row, at.decode_factor * before / (at.plain_floor + at.plain_request * batch))

    def steps_took(
        self, row: int, predicted_ms: float, observed_ms: float, began_s: float = 0.0, ended_s: float = 0.0
    ) -> None:
        """An answer's mean time per token, with the prediction by the current factor.

        Args:
            row: where it was decoded.
            predicted_ms: the predicted time per token.
            observed_ms: the measured time per token.
            began_s: when its first token came, in seconds.
            ended_s: when its last token came. Both left out: answers came one after the other.
        """
        if not (predicted_ms > 0 and observed_ms > 0):
            return
        at = self.rows[row]
        seen = at.steps_seen
        at.steps_seen = seen + 1
        off = math.log(observed_ms / predicted_ms)
        rate, before = max(FACTOR_RATE, 1.0 / (at.steps_since + 2)), at.decode_factor
        shifted = at.steps_shift.seen(off, began_s, ended_s)
        if shifted:
            off, rate, at.steps_since = math.log(at.steps_shift.times), 1.0, CONFIRMED
        elif at.steps_since >= FEW:
            off = min(CLIP, max(-CLIP, off))
        at.steps_since += 1
        factor = at.decode_factor * math.exp(rate * off)
        bound = _off_max(at.make, max(seen, self._steps_of.legs(row)))
        self._take_steps(row, min(bound, max(1 / bound, factor)))
        if shifted:  # by what the bound lets through: a shift at the bound is seen again and again
            at.by_batch.times(at.decode_factor / before)
        other = self._steps_of.timed(row, math.log(at.decode_factor))
        if other >= 0:
            self._follow_steps(other)
        if at.make is UNKNOWN:
            for other in self._steps_of.unknown_timed(row, at.decode_factor, 0.0, first=seen < SURE):
                self.rows[other].take_shape(self._shape)
                self._take_steps(other, at.decode_factor)


def _off_max(make: Make, legs: float) -> float:
    """The largest factor, either way, by which so many timed legs may move a prediction of this make."""
    return max(make.off_max, OFF_LEARNED) if legs >= ENOUGH else make.off_max


def _of_prompt(make: Make, tokens: int, cached_tokens: int) -> tuple[float, float, float]:
    new_tokens = tokens - cached_tokens
    ms, steps = make.prompt_ms(new_tokens, cached_tokens), make.steps(new_tokens)
    return ms, max(0.0, ms - steps * make.decode.decode_ms), steps
