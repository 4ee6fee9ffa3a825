"""How often each prefill instance handed over to each decode instance, and how often that failed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cluster.ids import InstanceId

PAIRS_MAX: Final = 4096
"""The number of pairs that are counted; the pair used longest ago goes first."""


@dataclass(slots=True)
class PairCounts:
    """The counts of one pair."""

    prefill: InstanceId
    decode: InstanceId
    handed_over: int = 0
    failed: int = 0
    last_failure: str = ""


class Pairs:
    """The pairs of one router."""

    def __init__(self) -> None:
        self._pairs: Final[dict[tuple[InstanceId, InstanceId], PairCounts]] = {}

    def tried(self, prefill: InstanceId, decode: InstanceId, failure: str | None) -> None:
        """A decode leg that pulls has begun to answer (`failure` None), or why it failed."""
        pair = self._pairs.pop((prefill, decode), None) or PairCounts(prefill, decode)
        self._pairs[prefill, decode] = pair
        if len(self._pairs) > PAIRS_MAX:
            del self._pairs[next(iter(self._pairs))]
        if failure is None:
            pair.handed_over += 1
        else:
            pair.failed += 1
            pair.last_failure = failure[:200]

    def __iter__(self) -> Iterator[PairCounts]:
        return iter(self._pairs.values())
