"""DistServe's comparison (OSDI 2024, section 6): goodput per GPU over colocated serving as the targets tighten.

Its models, targets, placements and baseline, on its own coefficients (A100-80G, `costs/profiles/distserve.json`):

- targets: table 1. Lengths: figure 7's means (ShareGPT 755.5 in, 200.3 out; HumanEval 171.3, 98.2; LongBench 1738.3,
  90.7), lognormal around them, as the datasets are not ours to ship; prompt and answer are cut to OPT's 2,048
  positions.
- placements: table 3 of its appendix, for OPT-66B with TP 4 to decode instead of TP 2 × PP 2: the twin has no
  pipelines.
- colocated, 2023: vLLM with the paper's tensor parallelism (1 and 4), whole prompts in steps of their own (`Serial`),
  and with the coefficients that DistServe's simulator has for vLLM: their baseline was a slower engine too (prompts by
  38 and 41 %, decodes by 18 and 29 %).
- colocated, same engine: the same scheduling with DistServe's own coefficients: what separating the phases does by
  itself.
- colocated, today: the same costs with chunked prefill, its token budget swept.
- KV goes over NVLink, as their placement has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from cluster.instance import Role
from costs.profile import Profile
from costs.step import StepCost
from loadgen.lengths import LogNormal, parse
from loadgen.report import Targets
from sim.experiments.loads import Size, UnitLoad, made_up
from sim.experiments.systems import EqualInstances, Shelf, System
from sim.experiments.tuning import Best, Case, aggregated, best_of, best_split

SEED: Final = 1
LENGTH_MAX: Final = 2048
GPU: Final = "A100-80G-SXM"
SCALES: Final = (2.0, 1.0, 0.75, 0.5)
BUDGETS: Final = (512, 1024, 256, 2048)

VLLM_2023: Final = {
    ("facebook/opt-13b", 1): {
        "floor_ms": 36.7, "start_ms": 22.052, "token_ms": 0.140509, "area_ms": 8.0766e-06,
        "decode_ms": 23.475, "context_ms": 5.9293e-04, "request_ms": 0.060727, "crowd_ms": 0.059276, "crowd_from": 95.0,
    },
    ("facebook/opt-66b", 4): {
        "floor_ms": 62.8, "start_ms": 42.965, "token_ms": 0.212866, "area_ms": 4.6010e-05,
        "decode_ms": 39.582, "context_ms": 6.9457e-04, "request_ms": 0.135809, "crowd_ms": 0.059275, "crowd_from": 95.0,
    },
}  # fmt: skip
"""vLLM's steps as DistServe's authors measured them:
``simdistserve/estimators/profile_data/profiler-a100-80g.vllm.json`` of LLMServe/DistServe at 82831f1 (Apache-2.0). The
floor, which their form lacks, is DistServe's times the ratio of decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """One row of the paper's table 1."""

    name: str
    model: str
    ttft_ms: float
    tpot_ms: float
    inputs: tuple[float, float]
    """Mean tokens and coefficient of variation (the latter is ours: read off the shape of figure 7)."""
    outputs: tuple[float, float]
    colocated_tp: int
    prefill_tp: int
    decode_tp: int
    gpus: int
    theirs: str
    """What the paper reports: rate over vLLM, and how much tighter the targets may be."""

    def load(self, count: int) -> UnitLoad:
        """The application's requests."""
        inputs, outputs = (_lognormal(*each) for each in (self.inputs, self.outputs))
        return made_up(self.name, inputs, outputs, SEED, count, LENGTH_MAX)

    def targets(self, scale: float) -> Targets:
        """Both targets times `scale`, so tighter below 1."""
        return Targets(self.ttft_ms * scale, None, self.tpot_ms * scale, None)


def _lognormal(mean: float, cv: float) -> LogNormal:
    found = parse(f"lognormal:mean={mean},cv={cv}")
    assert isinstance(found, LogNormal)
    return found


_OPT13, _OPT66 = "facebook/opt-13b", "facebook/opt-66b"

APPLICATIONS: Final = (
    Application(
        name="chatbot OPT-13B",
        model=_OPT13,
        ttft_ms=250,
        tpot_ms=100,
        inputs=(755.5, 0.8),
        outputs=(200.3, 0.8),
        colocated_tp=1,
        prefill_tp=2,
        decode_tp=1,
        gpus=6,
        theirs="2.0 to 4.6 × over three sizes; 1.8 to 3.2 × tighter",
    ),
    Application(
        name="chatbot OPT-66B",
        model=_OPT66,
        ttft_ms=2500,
        tpot_ms=150,
        inputs=(755.5, 0.8),
        outputs=(200.3, 0.8),
        colocated_tp=4,
        prefill_tp=4,
        decode_tp=4,
        gpus=24,
        theirs="2.0 to 4.6 × over three sizes; 1.8 to 3.2 × tighter",
    ),
    Application(
        name="code completion OPT-66B",
        model=_OPT66,
        ttft_ms=125,
        tpot_ms=200,
        inputs=(171.3, 0.4),
        outputs=(98.2, 0.6),
        colocated_tp=4,
        prefill_tp=4,
        decode_tp=4,
        gpus=24,
        theirs="5.7 ×; 1.4 × tighter",
    ),
    Application(
        name="summarisation OPT-66B",
        model=_OPT66,
        ttft_ms=15_000,
        tpot_ms=150,
        inputs=(1738.3, 0.4),
        outputs=(90.7, 0.6),
        colocated_tp=4,
        prefill_tp=4,
        decode_tp=4,
        gpus=24,
        theirs="4.3 ×; 12.6 × tighter",
    ),
)


@dataclass(frozen=True, slots=True)
class DistServeRow:
    """One application at one tightness."""

    application: Application
    scale: float
    old: Best
    """Colocated as in 2023, with vLLM's steps of then."""
    same: Best
    """The same with DistServe's own steps."""
    chunked: Best
    """Colocated, chunked prefill, tuned."""
    apart: Best

    @property
    def over_old(self) -> float | None:
        """Goodput per GPU over the paper's baseline; None where that serves nothing."""
        return self.apart.per_gpu / self.old.per_gpu if self.old.per_gpu else None

    @property
    def over_same(self) -> float | None:
        """Goodput per GPU over the same scheduling on an equal engine."""
        return self.apart.per_gpu / self.same.per_gpu if self.same.per_gpu else None

    @property
    def over_chunked(self) -> float | None:
        """Goodput per GPU over chunked prefill, tuned."""
        return self.apart.per_gpu / self.chunked.per_gpu if self.chunked.per_gpu else None


def pool(application: Application, role: Role, tp: int) -> EqualInstances:
    """A pool of one instance of 2023."""
    return EqualInstances(
        role=role,
        count=1,
        tp=tp,
        gpu=GPU,
        profile=f"distserve/{application.model}/{GPU}/tp{tp}",
        length_max=LENGTH_MAX,
        chunked=False,
        nvlink=True,
    )


def vllm_profiles(profiles: Sequence[Profile]) -> list[Profile]:
    """vLLM's steps, as profiles beside DistServe's own: the variant `vllm`."""
    return [
        replace(each, variant="vllm", cost=StepCost(**VLLM_2023[each.model, each.tp]))
        for each in profiles
        if each.origin.name == "distserve" and (each.model, each.tp) in VLLM_2023
    ]


def compare(
    application: Application,
    load: UnitLoad,
    shelf: Shelf,
    size: Size,
    tolerance: float,
    scales: Sequence[float] = SCALES,
) -> list[DistServeRow]:
    """All four systems at each tightness, each at its best split and token budget."""
    one = pool(application, Role.BOTH, application.colocated_tp)
    count = application.gpus // application.colocated_tp
    whole = replace(one, count=count, serial=True)
    same = System(name="colocated, same engine", pools=(whole,))
    old = System(name="colocated, 2023", pools=(replace(whole, profile=f"{whole.profile}/vllm"),))
    chunked = aggregated(
        replace(one, chunked=True), application.gpus, (application.colocated_tp,), BUDGETS, "least_requests"
    )
    prefill = pool(application, Role.PREFILL, application.prefill_tp)
    decode = pool(application, Role.DECODE, application.decode_tp)
    rows = []
    for scale in scales:
        case = Case(
            name=f"{application.name} × {scale:g}",
            model=application.model,
            load=load,
            targets=application.targets(scale),
            loosest=application.targets(max(SCALES)),
            size=size,
            tolerance=tolerance,
        )
        apart = best_split(case, shelf, (prefill, decode), application.gpus, "distserve")
        first, second, third = (best_of(case, shelf, each) for each in ([old], [same], chunked))
        rows.append(DistServeRow(application, scale, first, second, third, apart))
    return rows
