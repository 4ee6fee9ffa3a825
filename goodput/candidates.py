"""Fleets worth considering: kinds of instances and their arrangements, without those that vLLM refuses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Final

from cluster.instance import Role
from cluster.spec.pairing import refused_pair
from costs.bounds import does_not_fit
from costs.hardware import Gpu
from costs.model import ModelShape
from costs.shape import Spans

TENSOR_PARALLEL: Final = (1, 2, 4, 8)
"""Sizes that are tried: powers of two divide most models (`ModelShape.splits`), and each other."""

BUDGETS_WHOLE: Final = (1024, 2048, 8192)
"""Token budgets that are tried where prompts and answers share an instance: a small one keeps steps short, a large one
computes prompts sooner. A prefill instance has no answers to slow down, and keeps vLLM's own default."""

BUDGET_MIXED: Final = 2048
"""Token budget of instances that do both beside instances of one role: either speed that they lack, the others have."""

POWER_CAPS: Final = (1.0, 0.75, 0.5)
"""Power caps that are tried where energy or a power budget counts, as shares of the TDP. 0.5 is the lowest for which
there is a measurement (`costs.power`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceKind:
    """The role, hardware and settings of one instance."""

    role: Role
    gpu: Gpu
    tp: int = 1
    batched_tokens: int | None = None
    """``max_num_batched_tokens``; None: vLLM's default on this GPU."""
    power_cap: float = 1.0
    """What each GPU draws at most, as a share of its TDP; 1: no cap."""

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.tp

    @property
    def power_cap_w(self) -> float:
        """The most that one GPU draws, in watts."""
        return self.gpu.tdp_w * self.power_cap

    def __str__(self) -> str:
        """`prefill H100-SXM tp2`."""
        budget = f" {self.batched_tokens} tokens a step" if self.batched_tokens else ""
        cap = f" capped at {self.power_cap_w:g} W" if self.power_cap < 1 else ""
        return f"{self.role.value} {self.gpu.name} tp{self.tp}{budget}{cap}"


Arrangement = tuple[InstanceKind, ...]
"""Kinds of the instances of one fleet; the counts are open."""


def shapes(model: ModelShape, gpu: Gpu, available: int | None = None) -> list[int]:
    """Tensor parallel sizes on which the model fits, within one node and `available` GPUs; empty: it does not fit."""
    most = gpu.node_gpus if available is None else min(gpu.node_gpus, available)
    return [
        tp
        for tp in TENSOR_PARALLEL
        if tp <= most and model.splits(tp) and does_not_fit(model, gpu, Spans(tp=tp)) is None
    ]


def arrangements(
    model: ModelShape, gpus: Sequence[tuple[Gpu, int | None]], caps: Sequence[float] = (1.0,)
) -> Iterator[Arrangement]:
    """All fleets that are worth trying.

    Three forms: instances that do both, of one to three GPU types; prefill and decode apart, of which one role may have
    two GPU types; instances that do both beside prefill or decode instances, one type each. Two types in both roles at
    once, and several types in a mixed fleet, are not tried: they would multiply the space several times.

    Args:
        model: what is served.
        gpus: types, and how many there are of each; None: no limit.
        caps: power caps to try, as shares of the TDP.
    """
    sizes = [(gpu, tp) for gpu, available in gpus for tp in shapes(model, gpu, available)]
    plain = {role: [InstanceKind(role=role, gpu=gpu, tp=tp) for gpu, tp in sizes] for role in Role}
    prefills, decodes = (_pools(plain[role], caps, 2) for role in (Role.PREFILL, Role.DECODE))
    pools = _pools(plain[Role.BOTH], caps, 3)
    wholes = [tuple(replace(kind, batched_tokens=BUDGET_MIXED) for kind in pool) for pool in pools]
    yield from ((replace(pool[0], batched_tokens=size),) for pool in pools if len(pool) == 1 for size in BUDGETS_WHOLE)
    yield from (pool for pool in wholes if len(pool) > 1 and _pairs_well(model, pool, pool))
    for givers, takers, most in ((prefills, decodes, 3), (prefills, wholes, 2), (wholes, decodes, 2)):
        for giver, taker in product(givers, takers):
            if len(giver) + len(taker) <= most and _pairs_well(model, giver, taker):
                yield (*giver, *taker)


def _pools(kinds: Sequence[InstanceKind], caps: Sequence[float], types_max: int) -> list[Arrangement]:
    """Pools of one role: of one GPU type with each cap, or of several types without a cap."""
    alone = [(replace(kind, power_cap=cap),) for kind in kinds for cap in caps]
    several = [
        chosen
        for count in range(2, types_max + 1)
        for chosen in combinations(kinds, count)
        if len({kind.gpu.name for kind in chosen}) == count
    ]
    return [*alone, *several]


def _pairs_well(model: ModelShape, givers: Sequence[InstanceKind], takers: Sequence[InstanceKind]) -> bool:
    """Whether vLLM refuses no hand-over between them."""
    latent = model.latent is not None
    return not any(
        refused_pair(giver.tp, taker.tp, model.kv_heads, latent=latent)
        for giver, taker in product(givers, takers)
        if giver is not taker
    )
