"""Which engines of one machine start one after the other: those that share a GPU. Pure.

While vLLM starts, it compares the GPU's free memory before its weights and after its largest step, and takes the whole
difference for its own (vLLM 0.32, `vllm/utils/mem_utils.py`, ``total_consumed``). What another engine allocates in
between makes its KV cache smaller, or leaves none, so that it ends. If another engine frees more than that, it ends,
too ("Error in memory profiling"). An engine that is ready allocates and frees nothing of that size.

Not covered: an engine that dies while its neighbour starts, and two that die together. Their agents start them again by
themselves.
"""

from __future__ import annotations

from typing import Final

from baton.plan import PlacedEngine
from engine.vllm.spec import given


def mislead(one: PlacedEngine, other: PlacedEngine) -> bool:
    """Whether one of two engines could measure the other's memory as its own, if they start at the same time."""
    return bool({*one.placed.gpus} & {*other.placed.gpus}) and (_measures(one) or _measures(other))


def _measures(engine: PlacedEngine) -> bool:
    """Whether it measures memory: not if its KV cache has a given size, or no model runs in it."""
    return engine.wanted.engine == "vllm" and not given(engine.wanted.vllm_args, "--kv-cache-memory-bytes")


class Turns:
    """The engines whose start or restart is under way, by name."""

    def __init__(self) -> None:
        self._starting: Final[dict[str, PlacedEngine]] = {}

    def before(self, engine: PlacedEngine) -> str:
        """The name of an engine that must be ready, or have ended, before this one starts; empty: it may start."""
        name = engine.wanted.name
        return next((each for each, other in self._starting.items() if each != name and mislead(engine, other)), "")

    def begin(self, engine: PlacedEngine) -> None:
        """Its start begins now."""
        self._starting[engine.wanted.name] = engine

    def settled(self, name: str) -> None:
        """It is ready, or has ended."""
        self._starting.pop(name, None)
