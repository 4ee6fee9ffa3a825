"""How fast an engine loads KV from the tiers below its cache, by vLLM's own counts of bytes and seconds. Pure.

vLLM counts what its workers load from host memory into the KV cache, with the time of these copies, and what its
scheduler reads from files into host memory. What is on disk takes both. Loads of few bytes are slow for their size, so
a rate holds for loads as large as those that were seen. The time in which a prompt waits for a step of the engine is in
none of these counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from cluster.instance import TIER_GB_S_MAX, TIER_GB_S_MIN, Tier

DECAY: Final = 0.9
"""What a reading with new loads leaves of the weight of earlier ones: half of the figure is from the last seven."""

LEAST_BYTES: Final = 1 << 20
"""Loads of fewer bytes say nothing: most of their time is the start of a copy."""


class TierCounts(NamedTuple):
    """What one engine has loaded since its start, of all of its workers together."""

    host_bytes: float = 0.0
    host_s: float = 0.0
    """Seconds of each worker's copies, added up, though workers copy at the same time."""
    disk_bytes: float = 0.0
    disk_s: float = 0.0
    worker_token_bytes: float = 0.0
    """What one worker loads of one token; 0: not told."""
    token_bytes: float = 0.0
    """What all workers have of one token; 0: not told."""


class TierSpeeds:
    """The rates at which one engine loads KV, by tier."""

    def __init__(self) -> None:
        self.token_bytes = 0
        """Bytes of one token's KV; 0: not told."""
        self._before = TierCounts()
        self._host, self._disk = _Rate(), _Rate()

    def restart(self) -> None:
        """The engine starts anew and counts from 0. What was measured stays: it is the same machine."""
        self._before = TierCounts()

    def hear(self, counts: TierCounts) -> None:
        """Take one reading of the engine's counts."""
        before = self._before
        if counts.host_bytes < before.host_bytes or counts.disk_bytes < before.disk_bytes:
            before = TierCounts()  # it has started anew
        self._before = counts
        self.token_bytes = round(counts.token_bytes) or self.token_bytes
        workers = counts.token_bytes / counts.worker_token_bytes if counts.worker_token_bytes > 0 else 1.0
        self._host.add((counts.host_bytes - before.host_bytes) * max(1.0, workers), counts.host_s - before.host_s)
        self._disk.add(counts.disk_bytes - before.disk_bytes, counts.disk_s - before.disk_s)

    @property
    def gb_s(self) -> Mapping[Tier, float]:
        """GB/s (10⁹ bytes) by tier, from the tier into the KV cache; a tier that was not measured is left out."""
        host, disk = self._host.gb_s, self._disk.gb_s
        found: dict[Tier, float] = {}
        if host > 0:
            found["host"] = _bounded(host)
            if disk > 0:
                found["disk"] = _bounded(1.0 / (1.0 / disk + 1.0 / host))
        return found


class _Rate:
    """A mean rate in which later loads count more."""

    def __init__(self) -> None:
        self.gb_s = 0.0
        """0: not measured."""
        self._bytes = self._seconds = 0.0

    def add(self, moved: float, seconds: float) -> None:
        """Loads of so many bytes took so many seconds."""
        if not (moved > 0 and seconds > 0):
            return
        self._bytes = DECAY * self._bytes + moved
        self._seconds = DECAY * self._seconds + seconds
        if self._bytes >= LEAST_BYTES:
            self.gb_s = self._bytes / self._seconds * 1e-9


def _bounded(gb_s: float) -> float:
    """To three digits, within what a heartbeat may say."""
    return min(TIER_GB_S_MAX, max(TIER_GB_S_MIN, float(f"{gb_s:.3g}")))
