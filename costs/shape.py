"""How the GPUs of one instance share the work, as far as costs depend on it.

Any object with these four numbers will do: the `Shape` of the cluster file (`cluster.spec`) is one. It is not imported
here, because a caller that asks for a cost should not load the reader of a file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class CostShape(Protocol):
    """`tp` × `pp` × `dp` GPUs; costs are those of one data-parallel rank."""

    @property
    def tp(self) -> int:
        """GPUs that compute each layer together."""

    @property
    def pp(self) -> int:
        """Stages of layers, one after the other."""

    @property
    def dp(self) -> int:
        """Copies of the attention layers behind one address."""

    @property
    def ep(self) -> int:
        """Ranks that hold whole experts of a mixture: 1, or `tp` × `dp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """A `CostShape` of plain numbers."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        assert min(self.tp, self.pp, self.dp, self.ep) >= 1, f"every span is at least 1: {self}"
        assert self.ep in {1, self.tp * self.dp}, f"vLLM spreads experts over all ranks or over none: {self}"


ONE_GPU = Spans()


def gpus(shape: CostShape) -> int:
    """GPUs of one instance."""
    return shape.tp * shape.pp * shape.dp


def expert_ranks(shape: CostShape) -> int:
    """Ranks that a layer's experts are split over: as whole experts with `ep`, as slices of each without.

    Data-parallel ranks of a mixture share its experts either way (vLLM 0.32, `FusedMoEParallelConfig.make`).
    """
    return shape.tp * shape.dp


def shown(shape: CostShape) -> str:
    """The shape for people: ``tp2``, ``tp8 dp2 ep16``."""
    spans = (("tp", shape.tp), ("pp", shape.pp), ("dp", shape.dp), ("ep", shape.ep))
    return " ".join(f"{name}{count}" for name, count in spans if count > 1 or name == "tp")
