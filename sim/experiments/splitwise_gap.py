"""Why our figures for Splitwise differ from the paper's: its simulator's assumptions, taken over one after the other.

The assumptions are those of Mutinifni/splitwise-sim at 3780880, read in its source: ``performance_model.py`` (step
times), ``instance.py`` (batches), ``request.py`` and ``task.py`` (memory), ``mixed_pool.yml`` (links),
``generate_trace.py`` (load), ``notebooks/plots.ipynb`` (how it counts) and ``scripts/run_throughput_iso*.sh`` (fleets).
They are wrappers in this module around parts of our simulator, which they do not change.

Only what decides about three ratios is taken over. Not taken over: at most 2,048 prompt tokens in a batch of prompts
(ours: 8,192; at these loads two prompts seldom meet), how often a decode stalls behind prompts (the last step
stands for it), rates in steps of ten a second.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final

import numpy as np

from costs.model import ModelShape
from costs.step import StepWork
from loadgen.arrival import Arrival
from sim.baselines import follow
from sim.experiments.goodput import highest
from sim.experiments.loads import UnitLoad
from sim.experiments.splitwise import BATCHED, COST, POWER, Alone, Design, reference, scheduler, system, within
from sim.experiments.systems import Shelf
from sim.fleet import SimulatedMember
from sim.settings import SimSettings
from sim.world import World

MIXED: Final = 1.1
"""``get_iteration_duration``: a batch with prompts and decodes takes this many times its tokens' prompt time."""
WEIGHTS: Final = {"bigscience/bloom": 329_000_000_000}
"""``configs/model_repo/sizes``: bytes; all other memory of the GPUs is for KV."""
GPU_BYTES: Final = 80 * 2**30
SEQS: Final = 512
"""``max_batch_size``."""
LINK_GB_S: Final = 200 * 2**30 / 1e9
"""``transfer_bandwidth`` 200, in GiB/s, for each flow whatever others do."""
FULL_SIZE: Final = 5
"""Times as many machines as our designs have."""
PEAK_S: Final = 10.0
"""A request without a first token after so long has failed: far beyond every target."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Their step times: by the number of tokens in a batch alone, straight lines between measured points and beyond."""

    tokens: tuple[int, ...]
    prompt: tuple[float, ...]
    """ms of a step that computes so many prompt tokens."""
    token: tuple[float, ...]
    """ms of a decode step *after prompts of so many tokens together*. They look it up with the batch's tokens, one for
    each request that decodes: below the first point, so that neither batch nor context make a step longer."""

    def prompt_ms(self, tokens: int) -> float:
        """Milliseconds of a step with prompts."""
        return self._at(self.prompt, tokens)

    def token_ms(self, tokens: int) -> float:
        """Milliseconds of a step without prompts."""
        return self._at(self.token, tokens)

    def _at(self, values: Sequence[float], tokens: int) -> float:
        at = min(max(bisect_right(self.tokens, tokens) - 1, 0), len(self.tokens) - 2)
        slope = (values[at + 1] - values[at]) / (self.tokens[at + 1] - self.tokens[at])
        return values[at] + slope * (tokens - self.tokens[at])


_THEIR_MODEL: Final = {"bloom-176b": "bigscience/bloom", "llama2-70b": "meta-llama/Llama-2-70b-hf"}
_THEIR_GPU: Final = {"a100-80gb": "A", "h100-80gb": "H", "h100-80gb-pcap": "Hcap"}


def lookups(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], Lookup]:
    """The rows of their ``data/perf_model.csv`` at TP 8: medians by prompt tokens times batch, for each machine."""
    points: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["tensor_parallel"] == "8" and row["model"] in _THEIR_MODEL and row["hardware"] in _THEIR_GPU:
            key = _THEIR_MODEL[row["model"]], _THEIR_GPU[row["hardware"]]
            tokens = int(row["prompt_size"]) * int(row["batch_size"])
            points[key][tokens].append((float(row["prompt_time"]), float(row["token_time"])))
    return {
        key: Lookup(
            tuple(sorted(found)),
            tuple(median(prompt for prompt, _ in found[tokens]) for tokens in sorted(found)),
            tuple(median(token for _, token in found[tokens]) for tokens in sorted(found)),
        )
        for key, found in points.items()
    }


@dataclass(frozen=True, slots=True)
class ByTokens:
    """Step costs from a lookup, as a twin needs them (`engine.twin.config.StepCosts`)."""

    lookup: Lookup
    prompts_first: bool = False
    """Decodes that find no place among `BATCHED` tokens beside prompts wait for the next step: both steps in one."""
    stalled: bool = False
    """No decode finds a place beside prompts."""

    def step_ns(self, work: StepWork) -> int:
        """Nanoseconds of any step."""
        if not work.new_tokens:
            return self._decode_ns(work.batch)
        if not work.batch:
            return _ns(self.lookup.prompt_ms(work.new_tokens))
        if self.stalled or (self.prompts_first and work.new_tokens + work.batch > BATCHED):
            return _ns(self.lookup.prompt_ms(work.new_tokens)) + self._decode_ns(work.batch)
        return _ns(MIXED * self.lookup.prompt_ms(work.new_tokens + work.batch))

    def decode_run_ns(self, batch: int, sum_context: int, steps: int) -> int:
        """Nanoseconds of `steps` equal decode steps."""
        return self._decode_ns(batch) * steps

    def decode_steps_for(self, batch: int, sum_context: int, duration_ns: int) -> int:
        """The fewest decode steps that take at least `duration_ns`."""
        return max(0, -(-duration_ns // self._decode_ns(batch)))

    def prefill_ms(self, tokens: int) -> float:
        """Milliseconds of a lone request's prompt."""
        return self.lookup.prompt_ms(tokens)

    def decode_step_ms(self, batch: int, sum_context: int) -> float:
        """Milliseconds of a lone request's step, as they count: by its prompt's tokens, which are the context here."""
        return self.lookup.token_ms(sum_context)

    def _decode_ns(self, batch: int) -> int:
        return _ns(self.lookup.token_ms(batch))


def _ns(ms: float) -> int:
    return max(1, round(ms * 1e6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Which of their assumptions a run takes over; by default none."""

    own_split: bool = False
    """Machines as in their scripts, instead of the best split."""
    by_tokens: bool = False
    prompts_first: bool = False
    plenty: bool = False
    """All memory for KV, unshared links, no time in a router or a server."""
    known: bool = False
    """The scheduler knows how long answers will be."""
    drawn: bool = False
    """Prompts and answers drawn apart from each other, Poisson arrivals; and `Alone.whole_run`."""
    full_size: bool = False
    stalled: bool = False
    """No decode advances in a step with prompts. In theirs, decodes that fit in advance, and the others may stall
    behind several batches of prompts in turn (``max_preemptions`` 4). A cost of steps cannot say that; this
    stands for it."""


_SAID: Final = (
    ("own_split", "their splits"),
    ("by_tokens", "a step takes what its number of tokens says"),
    ("prompts_first", "decodes wait where prompts fill a batch"),
    ("plenty", "all memory for KV, links that nobody shares, no router"),
    ("known", "answers' lengths are known"),
    ("drawn", "their load, and their way to count"),
    ("full_size", "five times as many machines"),
    ("stalled", "no decode advances beside a prompt"),
)


def _steps() -> Iterator[tuple[str, Assumed]]:
    assumed = Assumed()
    yield "ours", assumed
    for name, said in _SAID:
        assumed = replace(assumed, **{name: True})
        yield f"+ {said}", assumed


STEPS: Final = tuple(_steps())
"""Each has one assumption more than the one before."""


def drawn(load: UnitLoad, count: int, seed: int) -> UnitLoad:
    """Their load: lengths of prompts and of answers drawn apart, with replacement; Poisson arrivals."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0, count)).tolist()
    prompts = rng.choice([each.input_tokens for each in load.arrivals], count).tolist()
    answers = rng.choice([each.output_tokens for each in load.arrivals], count).tolist()
    found = [
        Arrival(at_s=at_s, input_tokens=prompt, output_tokens=answer)
        for at_s, prompt, answer in zip(times, prompts, answers, strict=True)
    ]
    return UnitLoad(f"{load.name}, drawn", found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What all runs of a waterfall share."""

    model: str
    load: UnitLoad
    """The load; already `drawn` for runs with `Assumed.drawn`."""
    shelf: Shelf
    lookups: dict[tuple[str, str], Lookup]
    requests: int
    tolerance: float

    def alone(self, assumed: Assumed) -> Alone:
        """A lone request on the reference machine."""
        if assumed.by_tokens:
            return Alone(ByTokens(self.lookups[self.model, "A"]), half=False, whole_run=assumed.drawn)
        return Alone(reference(self.model, self.shelf), whole_run=assumed.drawn)

    def members(self, design: Design, assumed: Assumed) -> list[SimulatedMember]:
        """The design's machines as assumed."""
        kinds = [kind for kind, count in design.machines for _ in range(count)]
        plain = self.shelf.members(self.model, system(design, self.model).pools)
        return [self._as_assumed(each, kind, assumed) for each, kind in zip(plain, kinds, strict=True)]

    def _as_assumed(self, member: SimulatedMember, kind: str, assumed: Assumed) -> SimulatedMember:
        if assumed.by_tokens:
            costs = ByTokens(self.lookups[self.model, kind], assumed.prompts_first, assumed.stalled)
            member = replace(member, costs=costs)
        if assumed.plenty:
            token_bytes = _their_kv_bytes(self.shelf.models[self.model])
            blocks = (GPU_BYTES * 8 - WEIGHTS[self.model]) // (token_bytes * member.config.block_size)
            member = replace(
                member,
                config=replace(member.config, num_blocks=blocks, max_num_seqs=SEQS),
                nic_gb_s=math.inf,
                latency_ns=round(token_bytes * self.load.mean_input() / LINK_GB_S),
            )
        return member

    def holds(self, design: Design, assumed: Assumed, rate: float) -> bool:
        """Whether all nine targets hold at this rate."""
        arrivals = self.load.at_rate(rate, self.requests)
        members = self.members(design, assumed)
        settings = SimSettings(checks=False, first_token_s=PEAK_S)
        if assumed.plenty:
            settings = replace(settings, router_us=0.0, hop_us=0.0, pull_front_ms=0.0)
        policy = scheduler(design, members, [each.output_tokens for each in arrivals] if assumed.known else ())
        world = World(members, settings, policy=policy, model=self.model)
        follow(world, policy)
        return within(self.alone(assumed), world.run(arrivals))


def _their_kv_bytes(sizes: ModelShape) -> int:
    """The KV bytes of one token: ``estimate_kv_cache_size`` knows no grouped heads."""
    return 2 * sizes.hidden * sizes.layers * 2


MODEL: Final = "bigscience/bloom"
"""The model of the paper's figures."""
A100: Final = Design(name="Baseline-A100", prompt=("A", 14))
H100: Final = Design(name="Baseline-H100", prompt=("H", 8))
AA_POWER: Final = Design(name="AA, power", prompt=("A", 9), token=("A", 5))
AA_COST: Final = Design(name="AA, cost", prompt=("A", 10), token=("A", 7))
HA_POWER: Final = Design(name="HA, power", prompt=("H", 5), token=("A", 5))
POWER_MAX: Final = H100.power
COST_MAX: Final = H100.cost
"""All designs get what eight DGX-H100 have; 14 and 17 DGX-A100 have a little less."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One of the paper's headlines."""

    said: str
    name: str
    over: Design
    theirs: float


RATIOS: Final = (
    Ratio("AA / A100 at equal power", AA_POWER.name, A100, 2.15),
    Ratio("AA / H100 at equal cost", AA_COST.name, H100, 1.4),
    Ratio("HA / H100 at equal power", HA_POWER.name, H100, 1.18),
)


@dataclass(frozen=True, slots=True)
class Rate:
    """The best of a design's splits, and its rate in requests a second."""

    design: Design
    rate: float


def waterfall(ground: Ground, assumed: Assumed) -> dict[str, Rate]:
    """The best rate of each design of `RATIOS` by its name: one row of the table."""
    wanted = ((A100, POWER, 0.0), (H100, POWER, 0.0), (AA_POWER, POWER, POWER_MAX))
    more = ((AA_COST, COST, COST_MAX), (HA_POWER, POWER, POWER_MAX))
    return {
        design.name: best(ground, [design] if assumed.own_split else design.splits(weight, budget), assumed)
        for design, weight, budget in (*wanted, *more)
    }


def best(ground: Ground, designs: Sequence[Design], assumed: Assumed) -> Rate:
    """The highest rate within the nine targets of any of these splits."""
    found = Rate(designs[0], 0.0)
    for each in designs:
        design = each.times(FULL_SIZE) if assumed.full_size else each
        holds = partial(ground.holds, design, assumed)
        start = found.rate * (1 + ground.tolerance) or _guess(design)
        if found.rate and not holds(start):
            continue
        rate = highest(holds, start, ground.tolerance).rate
        if rate > found.rate:
            found = Rate(design, rate)
    return found


def _guess(design: Design) -> float:
    """Where a search begins: a request a second for each H100 machine, half of that for each A100."""
    return sum(count * (0.5 if kind == "A" else 1.0) for kind, count in design.machines)
