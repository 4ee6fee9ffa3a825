"""Lower bounds of a fleet of several kinds, however requests are spread over it. Pure.

`goodput.bounds` says what one kind alone would need. Kinds that can replace each other share the work: a decode
instance may compute prompts, and two GPU types of one role split the requests. For each resource

    Σ over kinds of (weight of the kind · instances of the kind)  ≥  what one reference kind alone would need

where a kind's weight is the most reference instances that one of its instances can replace, over all requests. Each
kind is the reference once. The bounds are optimistic, as in `goodput.bounds`: no policy can serve the load on a fleet
that a floor rules out.

Resources: time for prompts; time for answers; both together (every step pays for attention and context, but reads
weights once for prompts and answers alike); KV cache and batch places of answers while they are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.instance import Role
from costs.power import BASE_SHARE, COMPUTE_SHARE, MEMORY_SHARE
from goodput.bounds import (
    EngineBounds,
    Impossible,
    KindNeed,
    answer_ms,
    answering_s,
    dearest,
    impossible_on,
    most_asked,
    patience_s,
    prompt_ms,
    token_least_ms,
)
from goodput.demand import Demand, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFloor:
    """One bound of a fleet."""

    weights: tuple[float, ...]
    """One instance's weight, by kind."""
    least: float
    """The least weighted sum of the counts."""
    because: str


@dataclass(frozen=True, slots=True)
class _Resource:
    """Work that adds up: parts of a request, each of which some roles can do."""

    name: str
    prompts: tuple[str, ...]
    """Parts that any instance can do."""
    answers: tuple[str, ...]
    """Parts that only instances that generate can do."""
    waits: Callable[[Demand], Floats]


_RESOURCES: Final = (
    _Resource("prompts", ("prompt",), (), patience_s),
    _Resource("answers", (), ("shares", "reading"), answering_s),
    _Resource("prompts and contexts", ("prompt",), ("reading",), answering_s),
    _Resource("attention, answers and contexts", ("attention",), ("shares", "reading"), answering_s),
    _Resource("KV cache of answers", (), ("memory",), answering_s),
    _Resource("places for answers", (), ("places",), answering_s),
)


class Floors:
    """Bounds for one demand. Kinds are told apart by identity: use one `EngineBounds` object for each kind."""

    def __init__(self, demand: Demand) -> None:
        self.demand: Final = demand
        self._parts: Final[dict[int, dict[str, Floats]]] = {}
        self._needs: Final[dict[tuple[int, int], KindNeed]] = {}
        self._ratios: Final[dict[tuple[int, int, str], float]] = {}
        self._waits: Final = [each.waits(demand) for each in _RESOURCES]
        self._cannot: Final[dict[tuple[tuple[int, ...], ...], Impossible | None]] = {}
        self._above_idle: Final[dict[int, dict[str, Floats]]] = {}
        self._kept: Final[list[EngineBounds]] = []

    def of(self, roles: Sequence[Role], engines: Sequence[EngineBounds]) -> tuple[FleetFloor, ...]:
        """Every bound of a fleet with these kinds, in which each kind may do what its role allows."""
        found = []
        decodes = [role.decodes for role in roles]
        for number, resource in enumerate(_RESOURCES):
            for at, engine in enumerate(engines):
                if resource.answers and not decodes[at]:
                    continue
                need = self._need(number, engine)
                weights = tuple(
                    self._weight(resource, engine, other, decodes=can)
                    for other, can in zip(engines, decodes, strict=True)
                )
                if need.exact > 0:
                    found.append(FleetFloor(weights=weights, least=need.exact, because=need.because))
        return tuple(found)

    def impossible(self, roles: Sequence[Role], engines: Sequence[EngineBounds]) -> Impossible | None:
        """Why no number of these instances keeps the promises; None: no bound says so."""
        answers = tuple(engine for engine, role in zip(engines, roles, strict=True) if role.decodes)
        key = (tuple(map(id, engines)), tuple(map(id, answers)))
        if key not in self._cannot:
            self._cannot[key] = impossible_on(engines, answers, self.demand)
        return self._cannot[key]

    def dynamic_j(self, roles: Sequence[Role], engines: Sequence[EngineBounds]) -> float:
        """Least joules above idle that the load takes: each part of a request on the kind where it takes least. The
        dearest requests, which may miss, are left out. A step reads its weights once for prompts and answers, so only
        the dearer of their matrix products counts.
        """
        answering = [engine for engine, role in zip(engines, roles, strict=True) if role.decodes]
        prompts = np.min([self._joules(each, "matrices", "attention") for each in engines], axis=0)
        answers = np.min([self._joules(each, "shares", "reading") for each in answering], axis=0)
        attention = np.min([self._joules(each, "attention") for each in engines], axis=0)
        reading = np.min([self._joules(each, "reading") for each in answering], axis=0)
        kept = max(0, len(self.demand) - self.demand.may_miss())
        return float(max(np.sort(total)[:kept].sum() for total in (prompts + reading, attention + answers)))

    def _joules(self, engine: EngineBounds, *parts: str) -> Floats:
        if id(engine) not in self._above_idle:
            self._above_idle[id(engine)] = _above_idle_j(engine, self.demand)
            self._kept.append(engine)
        found: Floats = np.sum([self._above_idle[id(engine)][part] for part in parts], axis=0)
        return found

    def _need(self, number: int, engine: EngineBounds) -> KindNeed:
        key = (number, id(engine))
        if key not in self._needs:
            resource = _RESOURCES[number]
            work = sum(self._part(engine, part) for part in (*resource.prompts, *resource.answers))
            assert not isinstance(work, int)
            self._needs[key] = most_asked(work, self._waits[number], self.demand, resource.name)
        return self._needs[key]

    def _weight(self, resource: _Resource, engine: EngineBounds, other: EngineBounds, *, decodes: bool) -> float:
        """How many instances of `engine` one instance of `other` can replace, at the part that it does best."""
        parts = (*resource.prompts, *(resource.answers if decodes else ()))
        return max((self._ratio(engine, other, part) for part in parts), default=0.0)

    def _ratio(self, engine: EngineBounds, other: EngineBounds, part: str) -> float:
        if engine is other:
            return 1.0
        key = (id(engine), id(other), part)
        if key not in self._ratios:
            self._ratios[key] = dearest(self._part(engine, part), self._part(other, part))
        return self._ratios[key]

    def _part(self, engine: EngineBounds, part: str) -> Floats:
        if id(engine) not in self._parts:
            self._parts[id(engine)] = _parts(engine, self.demand)
            self._kept.append(engine)  # an `id` is unique only while its object is kept
        return self._parts[id(engine)][part]


def _above_idle_j(engine: EngineBounds, demand: Demand) -> dict[str, Floats]:
    """Joules above idle that each part of each request takes at least on instances of this kind.

    A step of s ms with parts i takes the energy `TDP · min(cap · s, base · s + Σ xᵢ)` (`costs.power`); xᵢ is the part's
    arithmetic and reading at the hardware's peaks, weighted. A step takes at least as long as its parts at their best,
    and a minimum of sums is no less than the sum of minima.
    """
    costs, peak = engine.costs, engine.costs.peak
    steps = np.maximum(0.0, demand.outputs - 1)
    times = _times(engine, demand)
    work = {
        "matrices": COMPUTE_SHARE * peak.token_ms * (demand.inputs - demand.cached),
        "attention": COMPUTE_SHARE * peak.area_ms * (demand.inputs**2 - demand.cached**2),
        "shares": COMPUTE_SHARE * peak.token_ms * steps,
        "reading": MEMORY_SHARE * peak.context_ms * steps * (demand.inputs + demand.outputs / 2),
    }
    tdp_w, idle_w, gpus = costs.gpu.tdp_w, costs.gpu.idle_w, costs.shape.tp
    return {
        name: np.maximum(0.0, tdp_w * np.minimum(costs.power_cap * ms, BASE_SHARE * ms + work[name]) - idle_w * ms)
        * (gpus / 1000)
        for name, ms in times.items()
    }


def _times(engine: EngineBounds, demand: Demand) -> dict[str, Floats]:
    """Least times of one instance, in ms."""
    matrices, attention = prompt_ms(engine, demand)
    shares, reading = answer_ms(engine, demand)
    return {"matrices": matrices, "attention": attention, "shares": shares, "reading": reading}


def _parts(engine: EngineBounds, demand: Demand) -> dict[str, Floats]:
    """Least times of one instance for each part of each request, in ms.

    A request holds `tokens / kv_tokens` of the KV cache and one of `seqs_max` batch places while its answer is
    generated, at its own least time per token.
    """
    times = _times(engine, demand)
    steps = np.maximum(0.0, demand.outputs - 1)
    lives = steps * token_least_ms(engine, demand)
    held = demand.inputs - demand.cached + demand.outputs / 2
    return {
        "prompt": times["matrices"] + times["attention"],
        **times,
        "memory": lives * held / engine.kv_tokens,
        "places": lives / engine.seqs_max,
    }
