"""What no fleet can do with fewer instances: bounds from costs alone, before anything is simulated. Pure.

Every bound is optimistic: no queue, no overhead, every batch as large as pays best, every reusable prefix found, and
the requests that may miss their promise are those that cost most. So what a bound rules out, no policy can serve; what
it lets pass has to be simulated.

Work of a request, in milliseconds of one instance:

    prompt = new tokens · least time a token + attention over the prompt
    answer = tokens · least share of a step + reading the context that each token sees

In a stretch of time, work of the prompts that come in it must fit into the stretch and the longest wait that their
promises allow. All stretches of the load count, from the whole to such that are hardly longer than that wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from costs.cost import Costs
from costs.step import KNEE_TOKENS, StepCost
from goodput.demand import Demand, Floats

SHORTEST: Final = 2.0
"""The shortest stretch that is looked at, in waits that the promises allow."""

PATIENCES: Final = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Quantiles of the waits that promises allow: any part of the requests must fit into its own longest wait, and those
that may wait long are mostly few."""

STRETCHES_MAX: Final = 1 << 12
"""At the finest level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What bounds need to know of one kind of instance."""

    costs: Costs
    batched_tokens: int
    """Most prompt tokens in a step."""
    seqs_max: int
    """Most requests that decode at once."""
    kv_tokens: int
    """Tokens that its KV cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The least that a load needs of one kind of instance."""

    instances: int
    because: str
    """Which term says so."""
    exact: float = 0.0
    """The same before it is rounded up to whole instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """No number of instances keeps the promise."""

    because: str


def prompt_ms(engine: Engine, demand: Demand) -> tuple[Floats, Floats]:
    """Of each request: least time for its prompt's matrix products, and for its attention."""
    cost = engine.costs.now.prefill
    new = demand.inputs - demand.cached
    return new * _token_ms(cost, engine.batched_tokens), cost.area_ms * (demand.inputs**2 - demand.cached**2)


def _token_ms(cost: StepCost, batched_tokens: int) -> float:
    """Of a prompt token in the step in which it costs least: matrix products fall with the knee, and may rise again."""
    return min(cost.matrices_ms(size) / size for size in (1, min(KNEE_TOKENS, batched_tokens), batched_tokens))


def answer_ms(engine: Engine, demand: Demand) -> tuple[Floats, Floats]:
    """Of each request: least time for its answer's share of decode steps, and for reading its context.

    The first token is the prompt's.
    """
    cost = engine.costs.now.decode
    steps = np.maximum(0.0, demand.outputs - 1)
    contexts = steps * (demand.inputs + demand.outputs / 2)
    return steps * _request_ms(engine, demand), cost.context_ms * contexts


def _request_ms(engine: Engine, demand: Demand) -> float:
    """Of one request's part of a decode step at the batch that pays best within the loosest promise and the memory."""
    cost = engine.costs.now.decode
    loosest = float(demand.target_ms("tpot_ms").max())
    smallest = float(demand.inputs.min())
    low, high = 1, max(1, min(engine.seqs_max, int(engine.kv_tokens // max(1.0, smallest))))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost.requests_ms(middle) <= loosest else (low, middle - 1)
    # A request's part falls as the batch grows, but for what more experts and a crowd cost: it is least at one end.
    sizes = (low, *(size for size in (math.floor(cost.crowd_from), math.ceil(cost.crowd_from)) if 1 <= size <= low))
    return min(cost.requests_ms(size) / size for size in sizes)


def first_token_least_ms(engine: Engine, demand: Demand) -> Floats:
    """Of each request alone on an idle instance: no first token comes sooner."""
    matrices, attention = prompt_ms(engine, demand)
    return matrices + attention


def token_least_ms(engine: Engine, demand: Demand) -> Floats:
    """Of each request alone: the mean time per token after the first is at least this."""
    cost = engine.costs.now.decode
    found: Floats = cost.requests_ms(1) + cost.context_ms * (demand.inputs + demand.outputs / 2)
    return found


def impossible(prefill: Engine, decode: Engine, demand: Demand) -> Impossible | None:
    """Why no number of these instances keeps the promises, naming the term; None where that cannot be told."""
    first, token = first_token_least_ms(prefill, demand), token_least_ms(decode, demand)
    late = first > demand.target_ms("ttft_ms")
    slow = (token > demand.target_ms("tpot_ms")) & (demand.outputs > 1)
    whole = first + token * np.maximum(0.0, demand.outputs - 1) > demand.target_ms("e2e_ms")
    for number, promise in enumerate(demand.promises):
        here = demand.classes == number
        if not here.any():
            continue
        missed = (late | slow | whole) & here
        if missed.sum() <= math.floor((1 - promise.attainment) * here.sum() + 1e-9):
            continue
        terms = (("TTFT", promise.ttft_ms, first, late), ("TPOT", promise.tpot_ms, token, slow))
        name, target, least, over = max(terms, key=lambda term: int((term[3] & here).sum()))
        share = float((over & here).sum() / here.sum())
        costs = prefill.costs if name == "TTFT" else decode.costs
        quantile = float(np.quantile(least[here], min(1.0, promise.attainment)))
        return Impossible(
            because=f"{name} {target:g} ms: {share:.1%} of the requests take longer alone on idle {costs.gpu.name} "
            f"tp{costs.shape.tp}; {promise.attainment:.1%} of them need {quantile:.1f} ms"
        )
    return None


def least_prefills(engine: Engine, demand: Demand) -> Need:
    """Fewest prefill instances of this kind."""
    matrices, attention = prompt_ms(engine, demand)
    return _least(matrices + attention, _patience_s(demand), demand, "prompts")


def least_decodes(engine: Engine, demand: Demand) -> Need:
    """Fewest decode instances of this kind."""
    shares, reading = answer_ms(engine, demand)
    return _least(shares + reading, _answering_s(demand), demand, "answers")


def least_wholes(engine: Engine, demand: Demand) -> Need:
    """Fewest instances that do both: a step reads the weights once for prompts and answers alike."""
    matrices, attention = prompt_ms(engine, demand)
    shares, reading = answer_ms(engine, demand)
    patience = _answering_s(demand)
    both = [
        _least(matrices + attention + reading, patience, demand, "prompts and contexts"),
        _least(shares + attention + reading, patience, demand, "answers and contexts"),
        least_prefills(engine, demand),
    ]
    return max(both, key=lambda need: need.instances)


def _patience_s(demand: Demand) -> Floats:
    """How long after its arrival each request's prompt may be computed at the latest; infinite: no promise says."""
    found: Floats = np.minimum(demand.target_ms("ttft_ms"), demand.target_ms("e2e_ms")) / 1000
    return found


def _answering_s(demand: Demand) -> Floats:
    """How long after its arrival each answer may be complete at the latest."""
    tokens = demand.target_ms("tpot_ms") * np.maximum(1.0, demand.outputs - 1)
    found: Floats = np.minimum(demand.target_ms("ttft_ms") + tokens, demand.target_ms("e2e_ms")) / 1000
    return found


def _least(work_ms: Floats, patience_s: Floats, demand: Demand, what: str) -> Need:
    """The most that any stretch of the load asks for."""
    spare, most, told = demand.may_miss(), 0.0, f"at least one instance for {what}"
    for rows, length_s in _stretches(demand, patience_s):
        work, patience = work_ms[rows], patience_s[rows]
        for longest_s in np.unique(np.quantile(patience, PATIENCES, method="lower")).tolist():
            kept = np.sort(work[patience <= longest_s])
            needed_s = float(kept[: max(0, len(kept) - spare)].sum()) / 1000
            seconds = length_s + longest_s
            if seconds > 0 and needed_s / seconds > max(most, 1.0):
                told = f"{needed_s:,.0f} s of {what} come within {length_s:,.0f} s and have {seconds:,.0f} s"
            most = max(most, needed_s / seconds if seconds > 0 else 0.0)
    return Need(instances=max(1, math.ceil(most - 1e-9)), because=told, exact=most)


def dearest(
    engine: Engine, other: Engine, demand: Demand, work: Callable[[Engine, Demand], tuple[Floats, Floats]]
) -> float:
    """How many instances of `engine` one of `other` can stand in for at most: at the request where that is most.

    `work`: `prompt_ms` or `answer_ms`.
    """
    here, there = (sum(work(each, demand)) for each in (engine, other))
    return float(np.max(np.where(there > 0, here / np.maximum(there, 1e-12), 0.0)))


def _stretches(demand: Demand, patience_s: Floats) -> Iterator[tuple[slice, float]]:
    """The whole load, its halves, quarters …: rows that come in each, and its seconds."""
    span_s, begin_s = demand.span_s, float(demand.at_s[0])
    finite = patience_s[np.isfinite(patience_s)]
    shortest_s = SHORTEST * float(finite.max()) if len(finite) else math.inf
    parts = 1
    while parts <= STRETCHES_MAX and (parts == 1 or span_s / parts >= shortest_s):
        edges = np.searchsorted(demand.at_s, begin_s + span_s * np.arange(parts + 1) / parts)
        edges[-1] = len(demand)
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if high > low:
                yield slice(low, high), span_s / parts
        parts *= 2
