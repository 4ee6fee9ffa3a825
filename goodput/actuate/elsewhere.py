"""GPUs that other models' instances use: a budget is of all models, and each has a controller of its own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from cluster.ids import InstanceId
from goodput.actuate.existing import Existing, InstanceLife
from goodput.budget import Footprint

UNSEEN_S: Final = 60.0
"""Seconds for which a start that no look has seen yet counts."""


class OtherModels:
    """What the instances of each model use, for the controllers of the others."""

    def __init__(self, footprints: Mapping[str, Mapping[str, Footprint]]) -> None:
        """`footprints`: by model and pool."""
        self._of_pool: Final = {
            pool: (model, each) for model, pools in footprints.items() for pool, each in pools.items()
        }
        self._begun: Final[dict[InstanceId, tuple[str, float]]] = {}
        """Pool and time of starts that no look has seen yet."""

    def began(self, instance: InstanceId, pool: str, now: float) -> None:
        """An instance was started: the look under way has not seen it."""
        self._begun[instance] = (pool, now)

    def see(self, existing: Iterable[Existing], now: float) -> None:
        """Forget the starts that a look has seen, or that have been unseen for too long."""
        seen = {each.instance for each in existing}
        for name, (_, at_s) in [*self._begun.items()]:
            if name in seen or now - at_s > UNSEEN_S:
                del self._begun[name]

    def gpus(self, model: str, existing: Iterable[Existing]) -> dict[str, int]:
        """GPUs by type that instances of all other models use; one that has failed holds none."""
        pools = [each.pool for each in existing if each.life is not InstanceLife.FAILED]
        pools += [pool for pool, _ in self._begun.values()]
        used: dict[str, int] = {}
        for pool in pools:
            owner, footprint = self._of_pool.get(pool, (model, None))
            if owner != model and footprint is not None:
                used[footprint.gpu] = used.get(footprint.gpu, 0) + footprint.gpus
        return used
