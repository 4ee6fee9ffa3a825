"""The requests of the steady loads. Pure: chance comes from the given generator.

The runs of vLLM 0.15.1 were loaded by inference-perf (kubernetes-sigs/inference-perf), data type `shared_prefix`, load
type `constant`. What that does is taken from its source, and its settings from those published with the runs
(inference-sim/tektonc-data-collection, ``blis-campaign/campaign/*/values.yaml``; as resolved by inference-perf itself:
inference-sim/training, ``default_args/*/results/config.yaml``):

- arrivals of a stage are Poisson, n = rate × duration of them, stretched to end with the stage (`ConstantLoadTimer`);
- ten system prompts, ten questions to each: a hundred texts in random order, sent over and over. With prefix caching
  all but the last, partly filled block of a text is found from the second time on;
- every answer has the same length (``ignore_eos``).

The settings ask for multi-turn chat and for other numbers of prompts, by names that inference-perf did not know then:
its resolved configuration has neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.errors import UsageError
from engine.twin.tokens import Prompt, Segment


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: when it comes, its prompt, and the tokens of its answer."""

    at_ns: int
    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A steady load: stages of (requests per second, seconds), and lengths in tokens."""

    stages: tuple[tuple[float, float], ...]
    system_tokens: int
    question_tokens: int
    output_tokens: int


WORKLOADS: Final = {
    "general": Workload(
        stages=((8.0, 600.0), (20.0, 600.0)), system_tokens=100, question_tokens=447, output_tokens=248
    ),
    "codegen": Workload(
        stages=((5.0, 600.0), (10.0, 600.0)), system_tokens=100, question_tokens=466, output_tokens=247
    ),
    "roleplay": Workload(stages=((6.0, 1200.0),), system_tokens=150, question_tokens=600, output_tokens=251),
}

GROUPS: Final = 10
"""System prompts."""
QUESTIONS: Final = 10
"""Questions to each system prompt."""
TEXTS: Final = GROUPS * QUESTIONS
"""Different prompts."""


def workload_named(name: str) -> Workload:
    """The load of this name.

    Raises:
        UsageError: no load has this name.
    """
    if name not in WORKLOADS:
        raise UsageError(f"workload {name!r} is not known; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def warm_up(share: float) -> int:
    """The number of requests before a shortened load, which its figures leave out.

    The first sight of each text, which no cache knows, would otherwise be a larger part of it than of the whole load.
    """
    return round(TEXTS * (1 - share))


def steady(
    workload: Workload, rng: np.random.Generator, *, share: float = 1.0, repeated: bool = True
) -> list[PlannedRequest]:
    """The requests of a steady load, after those of its warm-up, which come at the first stage's rate.

    Args:
        workload: the load.
        rng: decides order and times.
        share: each stage lasts this part of its time; rates stay.
        repeated: questions are sent again and again, as the load generator does. Otherwise each is new, and only the
            system prompts are found in the prefix cache: to see how much depends on it.
    """
    first, warm = workload.stages[0][0], warm_up(share)
    stages = [
        (warm, warm / first),
        *((int(rate * whole_s * share), whole_s * share) for rate, whole_s in workload.stages),
    ]
    order = rng.permutation(TEXTS).tolist()
    planned: list[PlannedRequest] = []
    start_s = 0.0
    for count, duration_s in stages:
        gaps = rng.exponential(1.0, count)
        for at_s in (start_s + np.cumsum(gaps) * (duration_s / gaps.sum() if count else 0)).tolist():
            text = order[len(planned) % TEXTS]
            question = text if repeated else TEXTS + len(planned)
            prompt = (
                Segment(1 + text // QUESTIONS, workload.system_tokens),
                Segment(1 + GROUPS + question, workload.question_tokens),
            )
            planned.append(PlannedRequest(round(at_s * 1e9), prompt, workload.output_tokens))
        start_s += duration_s
    return planned
