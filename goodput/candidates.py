"""Fleets worth considering: kinds of instances and arrangements of them, without those that vLLM refuses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.instance import Role
from cluster.spec.pairing import refused_pair
from costs.bounds import does_not_fit
from costs.hardware import Gpu
from costs.model import ModelShape
from costs.shape import Spans

TENSOR_PARALLEL: Final = (1, 2, 4, 8)
"""Sizes that are tried: powers of two divide the heads of nearly every model, and each other."""

BUDGETS_WHOLE: Final = (1024, 2048, 8192)
"""Token budgets that are tried where prompts and answers share an instance: a small one keeps steps short, a large one
computes prompts sooner. A prefill instance has nobody to disturb, and keeps vLLM's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one instance is."""

    role: Role
    gpu: Gpu
    tp: int = 1
    batched_tokens: int | None = None
    """``max_num_batched_tokens``; None: vLLM's default on this GPU."""

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.tp

    def __str__(self) -> str:
        """`prefill H100-SXM tp2`."""
        budget = f" {self.batched_tokens} tokens a step" if self.batched_tokens else ""
        return f"{self.role.value} {self.gpu.name} tp{self.tp}{budget}"


Arrangement = tuple[Kind, ...]
"""Kinds of the instances of one fleet; how many of each is open."""


def shapes(model: ModelShape, gpu: Gpu, available: int | None = None) -> list[int]:
    """Tensor parallel sizes on which the model fits, within a node and what there is; none: it does not fit."""
    most = gpu.node_gpus if available is None else min(gpu.node_gpus, available)
    return [
        tp
        for tp in TENSOR_PARALLEL
        if tp <= most and model.heads % tp == 0 and does_not_fit(model, gpu, Spans(tp=tp)) is None
    ]


def arrangements(model: ModelShape, gpus: Sequence[tuple[Gpu, int | None]]) -> Iterator[Arrangement]:
    """All that may be worth a look: instances that do both; prefill and decode apart; both beside more of either.

    Args:
        model: what is served.
        gpus: types, and how many there are of each; None: as many as are wanted.
    """
    sizes = [(gpu, tp) for gpu, available in gpus for tp in shapes(model, gpu, available)]
    wholes = [Kind(role=Role.BOTH, gpu=gpu, tp=tp, batched_tokens=size) for gpu, tp in sizes for size in BUDGETS_WHOLE]
    prefills = [Kind(role=Role.PREFILL, gpu=gpu, tp=tp) for gpu, tp in sizes]
    decodes = [Kind(role=Role.DECODE, gpu=gpu, tp=tp) for gpu, tp in sizes]
    yield from ((whole,) for whole in wholes)
    for givers, takers in ((prefills, decodes), (prefills, wholes), (wholes, decodes)):
        yield from (
            (giver, taker)
            for giver in givers
            for taker in takers
            if not refused_pair(giver.tp, taker.tp, model.kv_heads, latent=model.latent is not None)
        )
