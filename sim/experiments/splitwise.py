"""Splitwise's comparison (ISCA 2024, section VI): throughput of cluster designs at equal power and at equal cost.

Designs and counts are those of splitwise-sim's ``scripts/run_throughput_isopower.sh`` and ``…_isocost.sh`` (3780880) at
a fifth of their size: 40 DGX-H100 have the power of 70 DGX-A100 and the cost of 86. Power and price of a machine are
those of its ``configs/experiment/*.yaml``: 44 and 24.8 (H100, A100), 4.76 and 2.21. The first letter of a design is the
type that prefills, the second the one that decodes; cap = power-capped. Times are its measurements (vLLM of 2023, TP 8,
`costs/profiles/splitwise.json`), lengths Azure's conversation or code trace, as in the paper.

Its nine targets, as slowdowns against a lone request on a DGX-A100: TTFT p50/p90/p99 ≤ 2/3/6, TBT and E2E ≤ 1.25/1.5/5.
Baselines batch prompts and decodes together on every machine, whole prompts as in 2023, shortest queue in tokens; a
request stays on one machine.

Different here: KV goes over the machine's network after the prompt, not layer by layer during it. Arrivals and pairs of
lengths are the trace's own. `splitwise_gap` measures the other differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.instance import Role
from costs.cost import Costs
from loadgen.report import Targets
from router.scheduler.scoring.policies import Policy
from sim.baselines.splitwise import Splitwise
from sim.experiments.goodput import steady
from sim.experiments.homes import splitwise_of
from sim.experiments.loads import Size, UnitLoad
from sim.experiments.systems import EqualInstances, Shelf, System
from sim.experiments.tuning import Best, Case, consider
from sim.fleet import SimulatedMember
from sim.result import Result

LENGTH_MAX: Final = 8192
SIZE: Final = Size(fewest=1500, most=3500, lives=4.0)
"""A p99 needs more requests than the 500 at least of other comparisons."""
BATCHED: Final = 2048
"""Prompt tokens of one batch at most (section IV-B: throughput falls beyond it)."""
POWER: Final = {"H": 44.0, "A": 24.8, "Hcap": 44.0 * 0.7}
"""The power of a machine, in splitwise-sim's unit; the cap is 70 %."""
COST: Final = {"H": 4.76, "A": 2.21, "Hcap": 4.76}
"""The relative cost of a machine."""
TTFT, TBT, E2E = (2.0, 3.0, 6.0), (1.25, 1.5, 5.0), (1.25, 1.5, 5.0)
"""The most slowdown at each of `QUANTILES`."""
QUANTILES: Final = (50, 90, 99)
FOR_SIZE: Final = Targets(2500, None, 60, None)
"""About what the nine targets come to, in ms. It decides only how long a run is, and when a request is given up."""

_GPU: Final = {"H": "H100-SXM", "Hcap": "H100-SXM", "A": "A100-80G-SXM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """A cluster: machines that prefill, machines that decode; a baseline has only machines that do both."""

    name: str
    prompt: tuple[str, int]
    token: tuple[str, int] | None = None

    def times(self, factor: int) -> Design:
        """The design with `factor` times as many machines."""
        token = None if self.token is None else (self.token[0], self.token[1] * factor)
        return Design(name=self.name, prompt=(self.prompt[0], self.prompt[1] * factor), token=token)

    @property
    def machines(self) -> list[tuple[str, int]]:
        """Types and counts of its machines."""
        return [self.prompt] if self.token is None else [self.prompt, self.token]

    @property
    def power(self) -> float:
        """The power of all machines, in splitwise-sim's unit."""
        return sum(POWER[kind] * count for kind, count in self.machines)

    @property
    def cost(self) -> float:
        """The relative cost of all machines."""
        return sum(COST[kind] * count for kind, count in self.machines)

    def splits(self, weight: Mapping[str, float], budget: float) -> list[Design]:
        """Itself first, then splits with one to three prompt machines fewer or one more, at no more than the budget."""
        if self.token is None:
            return [self]
        (kind, prompts), (other, _) = self.prompt, self.token
        found = []
        for count in (prompts, prompts - 1, prompts - 2, prompts - 3, prompts + 1):
            tokens = math.floor((budget - count * weight[kind]) / weight[other] + 1e-9)
            if count > 0 and tokens > 0:
                found.append(Design(name=self.name, prompt=(kind, count), token=(other, tokens)))
        return found


ISO_POWER: Final = (
    Design(name="Baseline-A100", prompt=("A", 14)),
    Design(name="Baseline-H100", prompt=("H", 8)),
    Design(name="Splitwise-AA", prompt=("A", 9), token=("A", 5)),
    Design(name="Splitwise-HH", prompt=("H", 5), token=("H", 3)),
    Design(name="Splitwise-HA", prompt=("H", 5), token=("A", 5)),
    Design(name="Splitwise-HHcap", prompt=("H", 5), token=("Hcap", 4)),
)
ISO_COST: Final = (
    Design(name="Baseline-A100", prompt=("A", 17)),
    Design(name="Baseline-H100", prompt=("H", 8)),
    Design(name="Splitwise-AA", prompt=("A", 10), token=("A", 7)),
    Design(name="Splitwise-HH", prompt=("H", 5), token=("H", 3)),
    Design(name="Splitwise-HA", prompt=("H", 6), token=("A", 4)),
    Design(name="Splitwise-HHcap", prompt=("H", 6), token=("Hcap", 2)),
)


def system(design: Design, model: str, *, chunked: int | None = None) -> System:
    """The design as a fleet. `chunked`: machines that do both cut prompts to this token budget, as is done today."""
    pools = [_pool(model, kind, count, chunked if design.token is None else None) for kind, count in design.machines]
    return System(name=design.name, pools=tuple(pools), make_policy=partial(_policy, design))


def _pool(model: str, kind: str, count: int, chunked: int | None) -> EqualInstances:
    variant = "/capped" if kind == "Hcap" else ""
    return EqualInstances(
        role=Role.BOTH,
        count=count,
        tp=8,
        gpu=_GPU[kind],
        profile=f"splitwise/{model}/{_GPU[kind]}/tp8{variant}",
        length_max=LENGTH_MAX,
        batched_tokens=chunked or LENGTH_MAX,
        chunked=chunked is not None,
    )


def _policy(design: Design, members: Sequence[SimulatedMember]) -> Policy:
    """Splitwise's scheduler; all machines can do both, as its mixed pool needs."""
    return scheduler(design, members)


def scheduler(design: Design, members: Sequence[SimulatedMember], known: Sequence[int] = ()) -> Splitwise:
    """Splitwise's scheduler, with the design's homes for its machines; `known`: answers' lengths by request."""
    homes = () if design.token is None else (Role.PREFILL, Role.DECODE)
    return splitwise_of(homes, members, known=known)


def reference(model: str, shelf: Shelf) -> Costs:
    """The costs of the machine that slowdowns are measured against."""
    return shelf.costs(model, _pool(model, "A", 1, None))


class Lone(Protocol):
    """The step times of a lone request."""

    def prefill_ms(self, new_tokens: int) -> float:
        """Milliseconds of its prompt."""

    def decode_step_ms(self, batch: int, sum_context: int) -> float:
        """Milliseconds of a step of its answer."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A lone request on the reference machine."""

    costs: Lone
    half: bool = True
    """Whether a step's context is the prompt and half of the answer, which is the mean; else the prompt alone."""
    whole_run: bool = False
    """Whether all requests of the run count, and time per token includes the first; else the window's requests."""

    def slowdowns(self, result: Result) -> dict[str, NDArray[Any]]:
        """TTFT, TBT (`tpot`) and E2E as multiples of a lone request's; infinite for requests that failed."""
        counted = np.ones(len(result.columns), dtype=np.bool_) if self.whole_run else steady(result)
        rows, good = result.columns[counted], result.good()[counted]
        made, prompts = rows["made_tokens"], rows["input_tokens"]
        ttft = np.array([self.costs.prefill_ms(int(each)) for each in prompts])
        contexts = prompts + made / 2 if self.half else prompts
        tbt = np.array([self.costs.decode_step_ms(1, int(each)) for each in contexts])
        alone = {"ttft": ttft, "tpot": tbt, "e2e": ttft + tbt * np.maximum(0, made - 1)}
        took = {name: result.latency_s(name)[counted] * 1000 for name in alone}
        if self.whole_run:
            took["tpot"] *= (made - 1) / np.maximum(1, made)
        return {name: np.where(good, took[name] / times, np.inf) for name, times in alone.items()}


def within(alone: Alone, result: Result) -> bool:
    """Whether all nine targets hold."""
    slow = alone.slowdowns(result)
    for name, limits in (("ttft", TTFT), ("tpot", TBT), ("e2e", E2E)):
        values = slow[name][~np.isnan(slow[name])]
        for quantile, limit in zip(QUANTILES, limits, strict=True):
            if not len(values) or np.percentile(values, quantile, method="higher") > limit:
                return False
    return True


@dataclass(frozen=True, slots=True)
class SplitwiseRow:
    """One design at its best split."""

    design: Design
    best: Best
    chunked: bool = False


def compare(
    model: str,
    designs: Sequence[Design],
    weight: Mapping[str, float],
    load: UnitLoad,
    shelf: Shelf,
    size: Size,
    tolerance: float,
) -> list[SplitwiseRow]:
    """Throughput of each design at its best split within a budget; of the baselines, also with chunked prefill.

    The budget is that of the largest design, in power or in cost: they differ by less than one machine.
    """
    budget = max(sum(weight[kind] * count for kind, count in each.machines) for each in designs)
    case = Case(
        name=load.name,
        model=model,
        load=load,
        targets=FOR_SIZE,
        size=size,
        tolerance=tolerance,
        criterion=partial(within, Alone(reference(model, shelf))),
    )
    rows = []
    for design in designs:
        best, chosen = Best(), design
        for variant in design.splits(weight, budget):
            if consider(best, case, shelf, system(variant, model)):
                chosen = variant
        rows.append(SplitwiseRow(chosen, best))
        if design.token is None:
            best = Best()
            for tokens in (512, 1024, BATCHED):
                consider(best, case, shelf, system(design, model, chunked=tokens))
            rows.append(SplitwiseRow(design, best, chunked=True))
    return rows
