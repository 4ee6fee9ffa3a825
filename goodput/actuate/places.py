"""Which GPUs and cores of one machine are free for another engine. Pure.

In a fleet that is resized, an engine does not share its GPUs. If a fleet begins with more engines than GPUs, they share
as `engine.vllm.placement` says, and no GPU is free for another engine. Mocks take neither GPUs nor cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from engine.vllm.placement import CudaGpu, MachineShare, emptiest, of_type, split


class Places:
    """GPUs and cores of one machine, and which engines have them."""

    def __init__(self, gpus: Sequence[CudaGpu], cores: Sequence[int], most: int) -> None:
        """`most`: the largest number of engines at a time; without GPUs the cores are split among so many."""
        self._gpus: Final = tuple(gpus)
        self._cores: Final = tuple(cores)
        self._parts: Final = split(cores, most) if cores and most <= len(cores) else ()
        self._most: Final = most
        self._taken: Final[dict[str, MachineShare]] = {}
        self._failures: Final = dict.fromkeys((gpu.id for gpu in gpus), 0)
        """Engines that have failed for good on each GPU, by its id."""

    def taken(self, shares: Mapping[str, MachineShare]) -> None:
        """Set what engines have now, by their names."""
        self._taken.clear()
        self._taken.update(shares)

    def failed(self, share: MachineShare) -> None:
        """An engine has failed for good there. Its GPUs may be broken: they are given to another engine last."""
        for gpu in share.gpus:
            self._failures[gpu] = self._failures.get(gpu, 0) + 1

    def part(
        self, gpus_each: int, others: Mapping[str, int] | None = None, wanted: str | None = None
    ) -> MachineShare | str:
        """A free part of the machine for an engine of so many GPUs, or why there is none.

        `others`: MiB of each GPU's memory that is in use, by id; a GPU on which other programs have more than an idle
        driver's is not free. `wanted`: the type of its GPUs (`engine.vllm.placement.of_type`).
        """
        return self._gpu_part(gpus_each, others or {}, wanted) if self._gpus else self._core_part()

    def _busy(self) -> set[str]:
        return {gpu for share in self._taken.values() for gpu in share.gpus}

    def _gpu_part(self, count: int, others: Mapping[str, int], wanted: str | None) -> MachineShare | str:
        busy = self._busy()
        fits = of_type(self._gpus, wanted)
        ours = [gpu for gpu in fits if gpu.id not in busy]
        free = [gpu for gpu in ours if others.get(gpu.id, 0) <= IDLE_MIB]
        if len(free) >= count:
            return MachineShare(gpus=emptiest(free, count, self._failures))
        theirs = f", {len(ours) - len(free)} used by other programs" if len(free) < len(ours) else ""
        which = "GPU" if len(fits) == len(self._gpus) else f"GPU of type {wanted}"
        return f"no {which} is free: {len(fits) - len(ours)} of {len(fits)} in use{theirs}, {count} wanted"

    def _core_part(self) -> MachineShare | str:
        if len(self._taken) >= self._most:
            return f"no core is free: {len(self._taken)} engines share {len(self._cores)} already"
        if not self._parts:
            return MachineShare(threads=1) if self._cores else MachineShare()
        taken = {core for share in self._taken.values() for core in share.cores}
        for part in self._parts:
            if not taken.intersection(part):
                return MachineShare(cores=part)
        return f"no core is free: {len(taken)} of {len(self._cores)} are in use"


IDLE_MIB: Final = 1024
"""A GPU on which less is in use has no other program's model: CUDA contexts take some 300 to 600 MiB."""
