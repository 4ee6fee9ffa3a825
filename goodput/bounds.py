"""Lower bounds on the number of instances, from costs alone, before anything is simulated. Pure.

Every bound is optimistic: no queue, no overhead, every batch of the cheapest size, every reusable prefix found, and the
requests that may miss their promise are those that cost most. So no policy can serve the load on a fleet that a bound
rules out; a fleet that passes has to be simulated.

Work of a request, in milliseconds of one instance:

    prompt = new tokens · least time a token + attention over the prompt
    answer = tokens · least share of a step + reading the context that each token sees

The work of the prompts that arrive in a stretch of time must fit into that stretch plus the longest wait that their
promises allow. Stretches of all lengths are checked, from the whole load down to `SHORTEST` times that wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.instance import Role
from costs.cost import Costs
from costs.step import KNEE_TOKENS, StepCost
from engine.twin.config import TwinConfig
from goodput.demand import Demand, Floats

SHORTEST: Final = 2.0
"""The shortest stretch of the load that is checked, as a multiple of the longest wait that the promises allow."""

PATIENCES: Final = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Quantiles of the waits that promises allow. The requests up to each quantile are bounded by themselves, within their
own longest wait: requests that may wait long are mostly few, and would weaken one bound for all."""

STRETCHES_MAX: Final = 1 << 12
"""Most stretches at the finest level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """One kind of instance, as far as bounds need it."""

    costs: Costs
    batched_tokens: int
    """Most prompt tokens in a step."""
    seqs_max: int
    """Most requests that decode at once."""
    kv_tokens: int
    """Tokens that its KV cache holds."""

    @classmethod
    def of(cls, costs: Costs, config: TwinConfig) -> EngineBounds:
        """The bounds of an engine with these settings."""
        return cls(
            costs=costs,
            batched_tokens=config.max_num_batched_tokens,
            seqs_max=config.max_num_seqs,
            kv_tokens=config.num_blocks * config.block_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KindNeed:
    """The least that a load needs of one kind of instance."""

    instances: int
    because: str
    """The term that needs them, for people."""
    exact: float = 0.0
    """The number before it is rounded up to whole instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """No number of instances keeps the promise."""

    because: str
    short_by: float = math.inf
    """The time that the requests need over their target, above 1; the smallest of several is the nearest to
    possible."""


def prompt_ms(engine: EngineBounds, demand: Demand) -> tuple[Floats, Floats]:
    """The least time, in ms, of each request for its prompt's matrix products, and for its attention."""
    cost = engine.costs.by_kind.prefill
    new = demand.inputs - demand.cached
    return new * _token_ms(cost, engine.batched_tokens), cost.area_ms * (demand.inputs**2 - demand.cached**2)


def _token_ms(cost: StepCost, batched_tokens: int) -> float:
    """Milliseconds of a prompt token in its cheapest step: matrix products cost least at the knee, or at the budget."""
    return min(cost.matrices_ms(size) / size for size in (1, min(KNEE_TOKENS, batched_tokens), batched_tokens))


def answer_ms(engine: EngineBounds, demand: Demand) -> tuple[Floats, Floats]:
    """The least time, in ms, of each request for its answer's share of decode steps, and for reading its context.

    The first token is left out: the prompt's last step makes it.
    """
    cost = engine.costs.by_kind.decode
    steps = np.maximum(0.0, demand.outputs - 1)
    contexts = steps * (demand.inputs + demand.outputs / 2)
    return steps * _request_ms(engine, demand), cost.context_ms * contexts


def _request_ms(engine: EngineBounds, demand: Demand) -> float:
    """The time, in ms, of one request's part of a decode step, in the best batch that the loosest TPOT and the memory
    allow. Requests share what may be cached of their prompts, so each needs memory of its own for the rest alone.
    """
    cost = engine.costs.by_kind.decode
    loosest = float(demand.target_ms("tpot_ms").max())
    smallest = float((demand.inputs - demand.cached).min())
    low, high = 1, max(1, min(engine.seqs_max, int(engine.kv_tokens // max(1.0, smallest))))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost.requests_ms(middle) <= loosest else (low, middle - 1)
    # A request's part falls as the batch grows, except for the costs of more experts and of a crowd (`crowd_from`): it
    # is least at one of these sizes.
    sizes = (low, *(size for size in (math.floor(cost.crowd_from), math.ceil(cost.crowd_from)) if 1 <= size <= low))
    return min(cost.requests_ms(size) / size for size in sizes)


def first_token_least_ms(engine: EngineBounds, demand: Demand) -> Floats:
    """The TTFT, in ms, of each request alone on an idle instance: no first token comes sooner."""
    matrices, attention = prompt_ms(engine, demand)
    return matrices + attention


def token_least_ms(engine: EngineBounds, demand: Demand) -> Floats:
    """The least TPOT, in ms, of each request alone on an idle instance."""
    cost = engine.costs.by_kind.decode
    found: Floats = cost.requests_ms(1) + cost.context_ms * (demand.inputs + demand.outputs / 2)
    return found


def second_token_least_ms(engine: EngineBounds, demand: Demand) -> Floats:
    """The least time, in ms, from the first token to the second, of each request alone on an idle instance."""
    cost = engine.costs.by_kind.decode
    found: Floats = cost.requests_ms(1) + cost.context_ms * demand.inputs
    return found


def impossible(prefill: EngineBounds, decode: EngineBounds, demand: Demand) -> Impossible | None:
    """Why no number of these instances keeps the promises, naming the term; None: no bound says so."""
    return impossible_on((prefill,), (decode,), demand)


def impossible_on(
    prompts: Sequence[EngineBounds], answers: Sequence[EngineBounds], demand: Demand
) -> Impossible | None:
    """The same for a fleet of several kinds, where each request is served on those that are fastest for it.

    Args:
        prompts: kinds that compute prompts.
        answers: kinds that generate.
        demand: what is to be served.
    """
    first = np.min([first_token_least_ms(each, demand) for each in prompts], axis=0)
    token = np.min([token_least_ms(each, demand) for each in answers], axis=0)
    second = np.min([second_token_least_ms(each, demand) for each in answers], axis=0)
    several = demand.outputs > 1
    terms = (
        ("TTFT", first, first > demand.target_ms("ttft_ms"), prompts),
        ("TT2T", second, (second > demand.target_ms("tt2t_ms")) & several, answers),
        ("TPOT", token, (token > demand.target_ms("tpot_ms")) & several, answers),
        (
            "E2E",
            whole := first + token * (demand.outputs - 1),
            whole > demand.target_ms("e2e_ms"),
            (*prompts, *answers),
        ),
    )
    for number, promise in enumerate(demand.promises):
        here = demand.classes == number
        missed = np.logical_or.reduce([late for _, _, late, _ in terms]) & here
        if missed.sum() <= math.floor((1 - promise.attainment) * here.sum() + _ROUND):
            continue
        name, least, late, kinds = max(terms, key=lambda term: int((term[2] & here).sum()))
        target = getattr(promise, f"{name.lower()}_ms")
        share = float((late & here).sum() / here.sum())
        quantile = float(np.quantile(least[here], min(1.0, promise.attainment)))
        on = " and ".join(dict.fromkeys(f"{each.costs.gpu.name} tp{each.costs.shape.tp}" for each in kinds))
        return Impossible(
            because=f"{name} {target:g} ms: {share:.1%} of the requests take longer alone on idle {on}; "
            f"{promise.attainment:.1%} of them need {quantile:.1f} ms",
            short_by=quantile / target,
        )
    return None


_ROUND: Final = 1e-9


def least_prefills(engine: EngineBounds, demand: Demand) -> KindNeed:
    """Fewest prefill instances of this kind."""
    matrices, attention = prompt_ms(engine, demand)
    return most_asked(matrices + attention, patience_s(demand), demand, "prompts")


def least_decodes(engine: EngineBounds, demand: Demand) -> KindNeed:
    """Fewest decode instances of this kind."""
    shares, reading = answer_ms(engine, demand)
    return most_asked(shares + reading, answering_s(demand), demand, "answers")


def least_wholes(engine: EngineBounds, demand: Demand) -> KindNeed:
    """Fewest instances that do both: a step reads the weights once for prompts and answers alike."""
    matrices, attention = prompt_ms(engine, demand)
    shares, reading = answer_ms(engine, demand)
    patience = answering_s(demand)
    both = [
        most_asked(matrices + attention + reading, patience, demand, "prompts and contexts"),
        most_asked(shares + attention + reading, patience, demand, "answers and contexts"),
        least_prefills(engine, demand),
    ]
    return max(both, key=lambda need: need.instances)


def least_counts(pools: Mapping[str, tuple[Role, EngineBounds]], demand: Demand) -> dict[str, KindNeed]:
    """Least counts by pool for this demand, if every pool does the work of its own role alone.

    A fleet with fewer prefill instances can still hold if its decode instances compute prompts, too: `goodput.floors`
    has the bounds of a whole fleet.

    Args:
        pools: role and kind of instance, by name of the pool.
        demand: what is to be served; its requests may miss as often as its promises allow.
    """
    of = {Role.PREFILL: least_prefills, Role.DECODE: least_decodes, Role.BOTH: least_wholes}
    return {name: of[role](engine, demand) for name, (role, engine) in pools.items()}


def patience_s(demand: Demand) -> Floats:
    """Seconds after its arrival within which each request's prompt must be computed; infinite without a promise."""
    found: Floats = np.minimum(demand.target_ms("ttft_ms"), demand.target_ms("e2e_ms")) / 1000
    return found


def answering_s(demand: Demand) -> Floats:
    """Seconds after its arrival within which each answer must be complete; infinite without a promise."""
    tokens = demand.target_ms("tpot_ms") * np.maximum(1.0, demand.outputs - 1)
    found: Floats = np.minimum(demand.target_ms("ttft_ms") + tokens, demand.target_ms("e2e_ms")) / 1000
    return found


def most_asked(work_ms: Floats, waits_s: Floats, demand: Demand, what: str) -> KindNeed:
    """The most instances that any stretch of the load needs.

    Args:
        work_ms: least time of one instance for each request.
        waits_s: how long after its arrival each request's work may end at the latest.
        demand: the load; the requests that cost most are left out, as many as its promises let miss.
        what: the work's name, for people.
    """
    spare, most, told = demand.may_miss(), 0.0, f"at least one instance for {what}"
    finite = waits_s[np.isfinite(waits_s)]
    for longest_s in np.unique(np.quantile(finite, PATIENCES, method="lower")).tolist() if len(finite) else ():
        counted = np.where(waits_s <= longest_s, work_ms, 0.0)
        sums, sizes = (
            np.concatenate([[0.0], np.cumsum(counted)]),
            np.concatenate([[0], np.cumsum(waits_s <= longest_s)]),
        )
        for edges, length_s in _levels(demand, float(finite.max())):
            low, high = edges[:-1], edges[1:]
            asked = (sums[high] - sums[low]) / 1000 / (length_s + longest_s)
            worth = np.flatnonzero((asked > most) & (sizes[high] - sizes[low] > spare))
            for at in worth[np.argsort(-asked[worth])].tolist():
                if asked[at] <= most:
                    break
                needed_s = _without_dearest(counted[low[at] : high[at]], spare) / 1000
                if needed_s / (length_s + longest_s) > most:
                    most = needed_s / (length_s + longest_s)
                    told = f"{needed_s:,.3g} s of {what} come within {length_s:,.3g} s"
                    told += f" and have to be done after {length_s + longest_s:,.3g} s"
    return KindNeed(instances=max(1, math.ceil(most - _ROUND)), because=told, exact=most)


def _without_dearest(work: Floats, spare: int) -> float:
    """The sum without the `spare` largest."""
    if not spare:
        return float(work.sum())
    kept = len(work) - spare
    return float(np.partition(work, kept - 1)[:kept].sum()) if kept > 0 else 0.0


def dearest(here: Floats, there: Floats) -> float:
    """The most instances of one kind that one instance of another can replace: the largest ratio over all requests.

    Args:
        here: work of each request on the kind that is replaced.
        there: the same work on the kind that replaces it.
    """
    return float(np.max(np.where(there > 0, here / np.maximum(there, 1e-12), 0.0)))


def _levels(demand: Demand, longest_s: float) -> Iterator[tuple[NDArray[np.int64], float]]:
    """The whole load, its halves, quarters …: the rows at which the parts begin and end, and one part's seconds."""
    span_s, begin_s = demand.span_s, float(demand.at_s[0])
    parts = 1
    while parts <= STRETCHES_MAX and (parts == 1 or span_s / parts >= SHORTEST * longest_s):
        edges = np.searchsorted(demand.at_s, begin_s + span_s * np.arange(parts + 1) / parts)
        edges[-1] = len(demand)
        yield edges, span_s / parts
        parts *= 2
