"""Random tasks for `baton plan`, small enough to try every fleet, and the search that tries every fleet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import msgspec
import numpy as np

from baton.planning import Planner, Task
from cluster.instance import Role
from cluster.spec import Model, Pools
from costs import shipped
from costs.hardware import Gpu, gpu_named
from costs.shape import Spans
from costs.shipped import model_named
from goodput.bounds import EngineBounds, answer_ms, first_token_least_ms, prompt_ms, token_least_ms
from goodput.candidates import Arrangement, arrangements
from goodput.search import Counts
from loadgen.arrival import Arrival
from loadgen.arrivals import poisson
from loadgen.report import Targets
from router.core.values import Promise
from sim.engine_args import engine_of, read_words
from sim.evaluate import Goal

MODELS = ("Llama-3.1-8B", "Qwen3-8B", "Qwen3-14B")
TYPES = ("A100-80G-SXM", "H100-SXM", "H200", "L40S", "B200")
COUNTS = ((3,), (4,), (2, 2), (3, 1), (1, 3), (5,), (2, 3))
"""How many GPUs of each type a task has. With more GPUs, some tasks would have a thousand fleets. Small tasks have one
of the first five."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The result of trying every fleet."""

    price: float
    """The price of the cheapest fleet that keeps the promises; infinite: no fleet does."""
    tried: int


def random_task(seed: int, *, small: bool = False) -> Task:
    """A task with a random model, GPUs with random prices and speeds, a random load and random promises.

    The rate is drawn as a share of the GPUs' highest rate. Promises are drawn as multiples of the times of a request
    that is alone on the best GPU. So most tasks have an answer, and few a trivial one.
    """
    rng = np.random.default_rng(seed)
    name = str(rng.choice(MODELS))
    classes = ("interactive", "batch") if rng.random() < 0.3 else ("interactive",)
    drawn = Task(
        model=Model(name=f"x/{name}", served_name=None, pools=Pools()),
        shape=model_named(name),
        gpus=_gpus(rng, COUNTS[:5] if small else COUNTS),
        arrivals=_requests(rng, int(rng.integers(20, 40) if small else rng.integers(40, 70)), classes),
        goals={each: goal(1e6, 1e6, 0.9) for each in classes},
        usual="interactive",
        objective=str(rng.choice(["cost", "cost", "gpus"])),
        survive=int(rng.random() < 0.15),
    )
    first_ms, token_ms, request_ms = _alone(drawn)
    gpus = sum(most or 0 for _, most in drawn.gpus)
    times = poisson(float(rng.uniform(0.1, 0.6)) * gpus * 1000 / request_ms, rng)
    goals = {}
    for each in classes:
        scale = 4.0 if each == "batch" else 1.0
        ttft_ms, tpot_ms = (ms * scale * float(np.exp(rng.uniform(*np.log([3, 15])))) for ms in (first_ms, token_ms))
        goals[each] = goal(ttft_ms, tpot_ms, float(rng.choice([0.8, 0.9, 0.95])))
    arrivals = tuple(msgspec.structs.replace(each, at_s=next(times)) for each in drawn.arrivals)
    return replace(drawn, arrivals=arrivals, goals=goals)


def goal(ttft_ms: float, tpot_ms: float, attainment: float) -> Goal:
    """The goal of a class."""
    return Goal(
        targets=Targets(ttft_ms, None, tpot_ms, None),
        attainment=attainment,
        promise=Promise(ttft_ms=ttft_ms, tpot_ms=tpot_ms),
    )


def _alone(task: Task) -> tuple[float, float, float]:
    """Least times in ms of the median request on the best GPU: first token, each later token, and its mean work."""
    demand = task.demand()
    found = []
    for gpu, _ in task.gpus:
        words = read_words([])
        costs, config = engine_of(Role.BOTH, task.shape, gpu, Spans(), words, profiles=shipped.profiles())
        engine = EngineBounds(
            costs=costs,
            batched_tokens=config.max_num_batched_tokens,
            seqs_max=config.max_num_seqs,
            kv_tokens=config.num_blocks * config.block_size,
        )
        work = sum(float(part.mean()) for part in (*prompt_ms(engine, demand), *answer_ms(engine, demand)))
        first, token = first_token_least_ms(engine, demand), token_least_ms(engine, demand)
        found.append((float(np.median(first)), float(np.median(token)), work))
    return min(found)


def _gpus(rng: np.random.Generator, choices: tuple[tuple[int, ...], ...]) -> tuple[tuple[Gpu, int | None], ...]:
    counts = choices[int(rng.integers(len(choices)))]
    drawn = [gpu_named(str(each)) for each in rng.choice(TYPES, size=len(counts), replace=False)]
    return tuple((_priced(rng, gpu), most) for gpu, most in zip(drawn, counts, strict=True))


def _priced(rng: np.random.Generator, gpu: Gpu) -> Gpu:
    """The GPU with a drawn price; one in three also gets drawn speeds, for which no profile exists."""
    priced = replace(gpu, usd_per_hour=round(gpu.usd_per_hour * float(rng.lognormal(0.0, 0.5)), 2))
    if rng.random() < 0.67:
        return priced
    speed, width = (float(each) for each in rng.lognormal(0.0, 0.4, size=2))
    return replace(
        priced,
        name=f"{gpu.name}-drawn",
        aka=(),
        bf16_tflops=gpu.bf16_tflops * speed,
        bandwidth_gb_s=gpu.bandwidth_gb_s * width,
    )


def _requests(rng: np.random.Generator, count: int, classes: tuple[str, ...]) -> tuple[Arrival, ...]:
    """Requests that all arrive at 0 s. Their times are drawn later, when it is known how long a request takes."""
    prompt, answer = math.log(float(rng.uniform(200, 4000))), math.log(float(rng.uniform(10, 120)))
    spread = float(rng.uniform(0.1, 1.1))
    return tuple(
        Arrival(
            at_s=0.0,
            input_tokens=min(16_000, int(rng.lognormal(prompt, spread)) + 1),
            output_tokens=min(400, int(rng.lognormal(answer, spread)) + 1),
            slo_class=str(rng.choice(classes)),
        )
        for _ in range(count)
    )


def fleets(task: Task, planner: Planner) -> Iterator[tuple[float, Arrangement, Counts]]:
    """Every fleet that the available GPUs allow, with its price, including fleets that bounds rule out."""
    available = {gpu.name: most for gpu, most in task.gpus}
    for each in arrangements(task.shape, task.gpus):
        if any(planner.member(kind) is None for kind in each):
            continue
        ranges = [range(1, (available[kind.gpu.name] or 0) // kind.gpus + 1) for kind in each]
        for counts in product(*ranges):
            used = dict.fromkeys(available, 0)
            for kind, count in zip(each, counts, strict=True):
                used[kind.gpu.name] += kind.gpus * count
            if all(used[name] <= (most or 0) for name, most in available.items()):
                yield price_of(task, each, counts), each, counts


def price_of(task: Task, arrangement: Arrangement, counts: Counts) -> float:
    """What the task minimises: the price per hour, or the number of GPUs."""
    each = [kind.gpu.usd_per_hour if task.objective == "cost" else 1.0 for kind in arrangement]
    return sum(price * kind.gpus * count for price, kind, count in zip(each, arrangement, counts, strict=True))


def optimum(task: Task) -> Optimum:
    """Try every fleet, cheapest first, until one keeps the promises."""
    planner = Planner(task)
    tried = 0
    for price, arrangement, counts in sorted(fleets(task, planner), key=lambda each: each[0]):
        tried += 1
        if planner.holds(arrangement, counts):
            return Optimum(price, tried)
    return Optimum(math.inf, tried)
