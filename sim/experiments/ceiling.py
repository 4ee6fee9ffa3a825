"""A bound on attainment that no policy can beat: a fluid relaxation with a clairvoyant scheduler.

The scheduler of the relaxation knows every arrival and every length beforehand. It runs all GPUs as one that can be cut
at will: work may stop, go on elsewhere, run in parallel with itself, and be given to a request in part (which then
counts in part). It never misses a cached prefix. Every policy on every arrangement of the same GPUs does something that
the relaxation may do as well, and pays at least as much for it; so its attainment is at most the relaxation's.

**What a request needs** (`Needs`), in GPU time, if it is to meet its targets. By `costs.step` a step that computes N
prompt tokens beside B answers takes at least `C + max(W, g·N)`, plus the attention of its prompts, where C is what B
and their contexts cost, W a step of few requests, and g the least time per prompt token at any number of tokens.

- Prompt: `g·new` and its attention. Tokens that other requests share are paid for by all who share them in equal parts;
  those that arrived before the window are free.
- Answer of n tokens after the first, at C_i each: its steps may last the target on average. Weighted by C, that is
  `Σ C·(W + C) ≤ tpot·Σ C` over the steps of an instance, so by Jensen there are at least `Σ C/(tpot − W)` steps, which
  read the weights as often: the answer costs `C_i·n·(1 + W/(tpot − W))`. Or: KV cache and `max_num_seqs` bound C by
  C_max, so that there are at least `Σ C/C_max` steps.
- A prompt's matrix products and the reading of weights overlap, so only the larger of the two counts, which is at least
  any mean of both (`HIDDEN`).

**When** (`served`). The prompt's part must be done within the TTFT target, less the front end's time; all of it
within `arrival + TTFT + n·tpot`. In any interval no more can be done of what has to begin and end in it than the GPUs'
time. Work vectors that keep this for all intervals form a polymatroid (intersecting submodular), so filling it
greedily, the requests with the least work first, serves as many as can be (fractions counted). Intervals begin and end
on a grid: fewer constraints, still a bound. Different GPUs are made one by exchange rates: for every rate it is a
bound, so the least of several is taken.

**Which requests.** Of the measured window alone (`Ceiling.attainment`; `loadgen.search.WINDOW`): a strict bound, for
which the requests after the window cost nothing, so that it has an answer's time more than there is. Of the whole run
(`Ceiling.overall`): a bound on what a run attains of all its arrivals, and so on what it attains in its window where
that is no more. Bursts after the window can make it more; each compared run says both figures
(`sim.experiments.curves.details`). Goodput is where the lesser of the two is: above it no policy attains the share in
the window and in the whole run.

What it leaves out, and so how far it is above what can be done: whole requests, batches that have to fit together,
hand-overs, hops, KV that is full, evictions, not knowing the future.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from costs.cost import Costs
from costs.step import KNEE_TOKENS, StepCost
from engine.twin.config import TwinConfig
from loadgen.arrival import Arrival
from loadgen.report import Targets
from loadgen.search import WINDOW
from router.core.arrays import Floats
from sim.experiments.systems import EqualInstances, Shelf
from sim.experiments.tuning import Case

NAME: Final = "clairvoyant fluid"
HIDDEN: Final = (0.0, 0.5, 1.0)
"""λ: the share of the prompts' matrix products that counts; 1 − λ of the weights' reading does."""
GRID: Final = 96
"""The most begins, and the most ends, of intervals."""
EXCHANGES: Final = 3
"""Rates tried between two GPU types."""
SLACK: Final = 1 - 1e-6
"""Engines count in whole nanoseconds, rounded down."""
STEP: Final = 1.03
"""The smallest factor between two rates, when goodput is looked for from above."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The least that work costs on one kind of instance, in milliseconds of the instance."""

    gpu: str
    gpus: int
    token_ms: float
    area_ms: float
    request_ms: float
    context_ms: float
    weights_ms: float
    crowd_ms: float
    """C_max: what the answers of one step cost at most; infinite where answers may share KV."""
    first_ms: float

    @classmethod
    def of(cls, costs: Costs, config: TwinConfig, pool: EqualInstances) -> Shape:
        """The least of each coefficient over the kinds of steps that may do the work."""
        prompts, answers = (costs.by_kind.prefill, costs.by_kind.mixed), (costs.by_kind.decode, costs.by_kind.mixed)
        context, request = (min(getattr(each, name) for each in answers) for name in ("context_ms", "request_ms"))
        crowd = max(each.request_ms for each in answers) * config.max_num_seqs
        crowd += max(each.context_ms for each in answers) * config.num_blocks * config.block_size
        return cls(
            gpu=pool.gpu,
            gpus=pool.tp,
            token_ms=min(least_token_ms(each, config.max_num_batched_tokens) for each in prompts) * SLACK,
            area_ms=min(each.area_ms for each in prompts) * SLACK,
            request_ms=request * SLACK,
            context_ms=context * SLACK,
            weights_ms=min(each.decode_ms for each in answers) * SLACK,
            crowd_ms=math.inf if pool.prefix_caching else crowd,
            first_ms=costs.first_token_ms,
        )


@lru_cache
def least_token_ms(cost: StepCost, budget: int) -> float:
    """g: the least time per token of the matrix products of up to `budget` tokens.

    Beyond the knee it falls to where the line begins to rise above the knee, and is monotonic from there.
    """
    turn = (cost.knee_ms - cost.start_ms) / cost.token_ms if cost.token_ms else budget
    beyond = {min(budget, max(KNEE_TOKENS, each)) for each in (math.floor(turn), math.ceil(turn), budget)}
    every: set[int] = {*range(1, min(budget, KNEE_TOKENS) + 1), *beyond}
    return float(min(cost.matrices_ms(each) / each for each in every))


# --- what requests need -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needs:
    """The window's requests, one row each: what they bring, whatever serves them."""

    at_s: Floats
    """Arrival in seconds, at a mean rate of 1 a second."""
    prompt: Floats
    """Tokens of the whole prompt: the context of its answer."""
    new: Floats
    """Prompt tokens to compute; shared ones by part."""
    area: Floats
    """Σ(L² − p²) of these."""
    alone: Floats
    """Those of `new` that no other request shares."""
    more: Floats
    """Answer tokens after the first."""

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], window: tuple[float, float], *, caches: bool) -> Needs:
        """The needs of the requests in this part of a run. `caches`: engines keep prefixes."""
        count = len(arrivals)
        low, high = math.floor(window[0] * count), math.ceil(window[1] * count)
        shared = _shared(arrivals, low)[low:high] if caches else None
        rows = []
        for number, each in enumerate(arrivals[low:high]):
            tokens = max(1, each.input_tokens)
            work = shared[number] if shared else (tokens, float(tokens) ** 2, tokens)
            rows.append((each.at_s, tokens, *work, max(0, each.output_tokens - 1)))
        return cls(*np.array(rows, dtype=np.float64).T)


def _shared(arrivals: Sequence[Arrival], low: int) -> list[tuple[float, float, float]]:
    """By request: new tokens, area, tokens that no other request has. Blocks of requests before `low` are cached."""
    users: dict[int, float] = {}
    nodes: dict[tuple[int, int], int] = {}
    chains = []
    for number, each in enumerate(arrivals):
        at, chain = 0, []
        for name in each.prefix:
            at = nodes.setdefault((at, name), len(nodes) + 1)
            chain.append(at)
            users[at] = math.inf if number < low else users.get(at, 0.0) + 1
        chains.append(chain)
    return [_work(each, [users[at] for at in chain]) for each, chain in zip(arrivals, chains, strict=True)]


def _work(arrival: Arrival, users: Sequence[float]) -> tuple[float, float, float]:
    tokens, done = max(1, arrival.input_tokens), 0
    new = area = alone = 0.0
    for each in users:
        end = min(tokens, done + arrival.block_tokens)
        new += (end - done) / each
        area += (end**2 - done**2) / each
        alone += (end - done) * (each == 1)
        done = end
    rest = tokens - done
    return new + rest, area + tokens**2 - done**2, alone + rest


# --- the relaxation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The bound for one load, one set of GPUs and one pair of targets."""

    shapes: tuple[Shape, ...]
    counts: tuple[tuple[str, int], ...]
    """GPUs by type."""
    needs: Needs
    """The needs of the window's requests."""
    every: Needs
    """The needs of all requests."""
    targets: Targets

    @classmethod
    def of(cls, case: Case, shelf: Shelf, pools: Sequence[EqualInstances], arrivals: Sequence[Arrival]) -> Ceiling:
        """For arrangements of instances like `pools`; `arrivals` at a mean rate of 1."""
        shapes = []
        for pool in dict.fromkeys(pools):
            member = shelf.member(case.model, pool)
            shapes.append(Shape.of(shelf.costs(case.model, pool), member.config, pool))
        counts: dict[str, int] = {}
        for pool in pools:
            counts[pool.gpu] = max(counts.get(pool.gpu, 0), pool.gpus)
        caches = any(pool.prefix_caching for pool in pools)
        needs, every = (Needs.of(arrivals, window, caches=caches) for window in (WINDOW, (0.0, 1.0)))
        return cls(tuple(dict.fromkeys(shapes)), tuple(counts.items()), needs, every, case.targets)

    def attainment(self, rate: float, enough: float = 0.0) -> float:
        """No policy attains more at this rate, in requests a second. A bound below `enough` need not be the least."""
        able = self._able()
        whole = len(self.needs.at_s)
        found = float(able.sum())
        for exchange in self._exchanges():
            capacity = sum(exchange[gpu] * count for gpu, count in self.counts) * 1000
            for work, ends_s in self._loads(exchange, rate):
                found = min(found, served(self.needs.at_s[able] / rate, ends_s[able], work[able], capacity))
                if found < enough * whole:
                    return found / whole
        return found / whole

    def overall(self, rate: float, enough: float = 0.0) -> float:
        """The same bound for all arrivals of a run."""
        return replace(self, needs=self.every).attainment(rate, enough)

    def least(self, rate: float, enough: float = 0.0) -> float:
        """The lesser bound: no policy attains more of the window's requests without attaining less of all."""
        found = self.attainment(rate, enough)
        return found if found < enough else min(found, self.overall(rate, enough))

    def goodput(self, share: float, start: float) -> float:
        """The highest rate at which the lesser bound is `share`; 0: no rate has it.

        Looked for from above, beginning near `start`.
        """
        if float(self._able().mean()) < share:
            return 0.0
        rate = start
        while self.least(rate, share) >= share:
            rate *= STEP**6
        while self.least(rate, share) < share:
            rate /= STEP**3
            if rate < start / 100:
                return 0.0
        while self.least(rate, share) >= share:
            rate *= STEP
        return rate

    def _able(self) -> NDArray[np.bool_]:
        """Requests that an idle instance serves within the targets."""
        needs, first_ms, tpot_ms = self.needs, self._ttft_ms(), self._tpot_ms()
        prompt_ms = np.min([each.token_ms * needs.alone for each in self.shapes], axis=0)
        step_ms = np.min(
            [each.weights_ms + each.request_ms + each.context_ms * needs.prompt for each in self.shapes], axis=0
        )
        able: NDArray[np.bool_] = (prompt_ms <= first_ms) & ((needs.more == 0) | (step_ms <= tpot_ms))
        return able

    def _ttft_ms(self) -> float:
        return (self.targets.ttft_ms or math.inf) - min(each.first_ms for each in self.shapes)

    def _tpot_ms(self) -> float:
        return self.targets.tpot_ms or math.inf

    def _exchanges(self) -> Iterator[dict[str, float]]:
        """By GPU type, the worth of one second in seconds of the first type."""
        first, *others = [gpu for gpu, _ in self.counts]
        if not others:
            yield {first: 1.0}
            return
        assert len(others) == 1, "exchange rates of two types only"
        worth = [self._least(first, name) / self._least(others[0], name) for name in ("token_ms", "context_ms")]
        for each in np.linspace(min(worth), max(worth), EXCHANGES).tolist():
            yield {first: 1.0, others[0]: each}

    def _least(self, gpu: str, name: str) -> float:
        return min(float(getattr(each, name)) * each.gpus for each in self.shapes if each.gpu == gpu)

    def _loads(self, exchange: dict[str, float], rate: float) -> Iterator[tuple[Floats, Floats]]:
        """Work of each request in milliseconds, and the second at which it has to be done."""
        needs, begun_s = self.needs, self.needs.at_s / rate
        first_s = begun_s + self._ttft_ms() / 1000
        yield self._prompts(exchange, 1.0), first_s
        ends_s = first_s + needs.more * self._tpot_ms() / 1000
        if not np.isfinite(ends_s).all():
            return
        for hidden in HIDDEN:
            prompts = self._prompts(exchange, hidden)
            for crowded in (False, True) if hidden < 1 else (False,):
                yield prompts + self._answers(exchange, hidden, crowded=crowded), ends_s

    def _prompts(self, exchange: dict[str, float], hidden: float) -> Floats:
        needs = self.needs
        found = [
            exchange[each.gpu] * each.gpus * (hidden * each.token_ms * needs.new + each.area_ms * needs.area)
            for each in self.shapes
        ]
        return np.asarray(np.min(found, axis=0))

    def _answers(self, exchange: dict[str, float], hidden: float, *, crowded: bool) -> Floats:
        needs, tpot_ms = self.needs, self._tpot_ms()
        found = []
        for each in self.shapes:
            begun = needs.more * (each.request_ms + each.context_ms * needs.prompt)
            grown = begun + each.context_ms * needs.more * np.maximum(0.0, needs.more - 1) / 2
            if tpot_ms <= each.weights_ms:
                found.append(np.where(needs.more > 0, np.inf, 0.0))
                continue
            steps = grown / each.crowd_ms if crowded else begun / (tpot_ms - each.weights_ms)
            found.append(exchange[each.gpu] * each.gpus * (grown + (1 - hidden) * each.weights_ms * steps))
        return np.asarray(np.min(found, axis=0))


def served(begun_s: Floats, ends_s: Floats, work_ms: Floats, capacity_ms: float) -> float:
    """The most requests that can be done, fractions counted. Each request's work lies between its begin and its end.
    All GPUs together do `capacity_ms` of work a second.
    """
    if not len(begun_s):
        return 0.0
    begins, ends = _grid(begun_s), _grid(-ends_s)[::-1] * -1
    slack = capacity_ms * np.maximum(0.0, ends[None, :] - begins[:, None])
    slack[ends[None, :] <= begins[:, None]] = np.inf  # nothing begins and ends in there
    rows, columns = np.searchsorted(begins, begun_s, "right"), np.searchsorted(ends, ends_s, "left")
    found = 0.0
    for at in np.argsort(work_ms, kind="stable").tolist():
        work, inside = float(work_ms[at]), slack[: rows[at], columns[at] :]
        if work <= 0:
            found += 1
            continue
        if not math.isfinite(work):
            break
        done = min(work, float(inside.min()))
        inside -= done
        found += done / work
    return found


def _grid(times_s: Floats) -> Floats:
    """Up to `GRID` of these times, the least among them, spread evenly by rank."""
    ordered = np.unique(times_s)
    return ordered[np.unique(np.linspace(0, len(ordered) - 1, min(GRID, len(ordered))).round().astype(np.int64))]
