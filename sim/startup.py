"""How long an engine takes to start, and whether its start fails: drawn for each start from a seed. Pure.

    delay = median · exp(sigma · z),  z standard normal

A log-normal has the shape that starts have: a hard lower end (weights have to be read), a long upper one (a cold disk,
a slow registry, a compile that was not cached). Two numbers that operators know fix it: the median and the 95th
percentile.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from cluster.ids import InstanceId
from engine.twin.tokens import mix
from sim.kernel import NS

Z_95: Final = NormalDist().inv_cdf(0.95)
_PARTS: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """The distribution of one kind of instance's starts."""

    median_s: float
    """From the start of the process to the first token."""
    p95_s: float | None = None
    """19 of 20 starts are ready within it; None: every start takes the median."""
    fails: float = 0.0
    """Share of starts that end before the engine is ready: a GPU that does not answer, weights that cannot be read."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and the fix."""
        if self.median_s < 0:
            raise ValueError(f"median_s is {self.median_s:g}: must be 0 or more")
        if self.p95_s is not None and self.p95_s < self.median_s:
            raise ValueError(f"p95_s is {self.p95_s:g}: must be median_s ({self.median_s:g}) or more")
        if not 0 <= self.fails <= 1:
            raise ValueError(f"fails is {self.fails:g}: must be a share from 0 to 1")

    def draw(self, seed: int, instance: InstanceId, epoch: int) -> tuple[int, bool]:
        """Nanoseconds that this start takes, and whether it fails at their end.

        The same for the same seed, name and epoch, whatever else happens in a run: two fleets that are compared start
        their common instances alike (common random numbers).
        """
        name = int.from_bytes(hashlib.blake2b(instance.encode(), digest_size=8).digest())
        fails = mix(seed, name, epoch, 1) % _PARTS < self.fails * _PARTS
        if self.p95_s is None or not self.median_s:
            return round(self.median_s * NS), fails
        sigma = math.log(self.p95_s / self.median_s) / Z_95
        z = NormalDist().inv_cdf((mix(seed, name, epoch, 2) % _PARTS + 0.5) / _PARTS)
        return round(self.median_s * math.exp(sigma * z) * NS), fails
