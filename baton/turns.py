"""Which engines of one machine start one after the other: those that share a GPU. Pure.

While vLLM starts, it compares the GPU's free memory before its weights and after its largest step, and takes the whole
difference for its own (vLLM 0.32, `vllm/utils/mem_utils.py`, ``total_consumed``). What another engine allocates in
between makes its KV cache smaller, or leaves none, so that it ends. If another engine frees more than that, it ends,
too ("Error in memory profiling"). An engine that is ready allocates and frees nothing of that size.

Not covered: an engine that dies or is told to leave frees its memory while a neighbour starts, and the agent of one
that died starts it again at once. The neighbour may then end ("Error in memory profiling"). If it was ready before,
its agent starts it again, too. In its first start it has failed for good: `baton up` ends, or leaves it to the
controller if there is one. The same holds beside an engine whose restarts fail one after the other: no engine waits
for these, as they may go on for ever.
"""

from __future__ import annotations

from typing import Final

from baton.plan import PlacedEngine
from engine.vllm.placement import measures_memory, share_gpu


def must_start_apart(one: PlacedEngine, other: PlacedEngine) -> bool:
    """Whether one of two engines could measure the other's memory as its own, if they start at the same time."""
    return share_gpu(one.placed.gpus, other.placed.gpus) and (_measures(one) or _measures(other))


def _measures(engine: PlacedEngine) -> bool:
    return engine.wanted.engine == "vllm" and measures_memory(engine.wanted.vllm_args)


class Turns:
    """The engines whose start or restart is under way, by name."""

    def __init__(self) -> None:
        self._starting: Final[dict[str, PlacedEngine]] = {}
        self._failing: Final[set[str]] = set()
        """Names of engines with a restart that failed, and that were not ready since."""

    def before(self, engine: PlacedEngine) -> str:
        """The name of an engine that must be ready, or have ended, before this one starts; empty: it may start."""
        name = engine.wanted.name
        waits = (each for each, other in self._starting.items() if each != name and must_start_apart(engine, other))
        return next(waits, "")

    def begin(self, engine: PlacedEngine) -> None:
        """Its start begins now."""
        self._starting[engine.wanted.name] = engine

    def restarts(self, engine: PlacedEngine) -> None:
        """Its agent starts it again. Others wait for the first try only: an engine may fail, slowly, for ever."""
        name = engine.wanted.name
        if self._starting.pop(name, None) is not None:
            self._failing.add(name)
        elif name not in self._failing:
            self.begin(engine)

    def settled(self, name: str) -> None:
        """It is ready, or has ended."""
        self._starting.pop(name, None)
        self._failing.discard(name)
