"""The twin's holds: `prefill.holds` and `prefill.leases`, as an engine of one rank runs them, on this clock.

All rules are theirs. This file keeps the blocks that holds own, and the memory that consumers look into.
"""

from __future__ import annotations

import math
from typing import Final

from cluster.ids import RequestId, TransferId
from engine.twin.events import Hold, HoldEnded
from kvtransfer.notes import Beat, Read
from kvtransfer.slots import CLEAR, SLOTS, Slots
from prefill.holds import REMEMBER_S
from prefill.holds import Holds as Legs
from prefill.leases import Leases, terms

NS = 1_000_000_000
TIME_UP = "its lease ended"
"""Why a hold has ended that no consumer wanted any more."""


class Holds:
    """The holds of one life of an engine. An idle engine hears its ranks within a millisecond; here it is at once."""

    def __init__(self, epoch: int, lease_s: float) -> None:
        """`epoch` is part of every mark: those of a former life vouch for nothing."""
        self._legs: Final = Legs(Slots(SLOTS, epoch.to_bytes(16, "big")), REMEMBER_S * NS)
        self._memory: Final[dict[int, bytes]] = {}
        self._leases: Final = Leases(terms(lease_s, NS), self._memory.__setitem__)
        self._blocks: Final[dict[RequestId, tuple[int, ...]]] = {}

    @property
    def held(self) -> int:
        """How many there are."""
        return len(self._blocks)

    def blocks(self) -> list[tuple[int, ...]]:
        """What each of them keeps."""
        return list(self._blocks.values())

    def next_wakeup(self) -> int | None:
        """When the next lease ends."""
        due = self._leases.next_wakeup()
        return None if due is None else math.ceil(due)

    def slot(self, index: int) -> bytes:
        """What a consumer sees that looks into this slot."""
        return self._memory.get(index, CLEAR)

    def begin(self, request: RequestId, name: str, now_ns: int) -> None:
        """A request that is to leave a hold has come."""
        self._legs.begin(request, name, now_ns)
        self._leases.step(self._legs.take_orders(), now_ns)

    def filled(
        self, request: RequestId, name: TransferId, blocks: tuple[int, ...], tokens: int, now_ns: int
    ) -> Hold | None:
        """The prompt is computed. None: nothing is held, as its name was given up."""
        if not self._legs.wanted(request):
            self.dropped(request, now_ns)
            return None
        slot = self._legs.filled(request)
        self._blocks[request] = blocks
        self._leases.step(self._legs.take_orders(), now_ns)
        return Hold(name, blocks, tokens, request, slot)

    def dropped(self, request: RequestId, now_ns: int) -> None:
        """The request will not leave a hold."""
        self._legs.dropped(request)
        self._leases.step(self._legs.take_orders(), now_ns)

    def release(self, name: str, now_ns: int) -> list[tuple[HoldEnded, tuple[int, ...]]]:
        """A router gives a name up. What has ended by it, and the blocks that are free."""
        self._legs.release(name, now_ns)
        self._leases.step(self._legs.take_orders(), now_ns)
        return self._ended("given up", now_ns)

    def heard(self, reader: str, note: Read | Beat, now_ns: int) -> list[tuple[HoldEnded, tuple[int, ...]]]:
        """A consumer speaks."""
        self._leases.heard(reader, note, now_ns)
        return self._ended("read", now_ns)

    def tick(self, now_ns: int) -> list[tuple[HoldEnded, tuple[int, ...]]]:
        """A lease has ended."""
        self._leases.expire(now_ns)
        return self._ended(TIME_UP, now_ns)

    def _ended(self, because: str, now_ns: int) -> list[tuple[HoldEnded, tuple[int, ...]]]:
        ended = []
        for request in self._leases.take_reports():
            self._legs.reported(request)
            name = RequestId(request)
            ended.append((HoldEnded(now_ns, name, because), self._blocks.pop(name)))
        return ended
