"""The twin's holds: `prefill.holds` and `prefill.leases`, as an engine of one rank runs them, on the twin's clock.

Those modules have all the rules. This file keeps the blocks that holds own, and the memory that consumers read.
"""

from __future__ import annotations

import math
from typing import Final

from cluster.ids import RequestId
from engine.twin.config import TwinConfig
from engine.twin.events import Hold, HoldEnded
from engine.twin.request import Sequence
from kvtransfer.hold_marks import CLEAR, SLOTS, Slots
from kvtransfer.notes import Beat, ReadNote
from prefill.holds import REMEMBER_S
from prefill.holds import Holds as Legs
from prefill.leases import Leases, terms

NS = 1_000_000_000
TIME_UP = "its lease ended"
"""Why a hold has ended that no consumer wanted any more."""


class TwinHolds:
    """The holds of one life of an engine. A real idle engine takes its ranks' reports within a millisecond; here it
    does so at once.
    """

    def __init__(self, config: TwinConfig, epoch: int) -> None:
        """`epoch` is part of every mark, so marks of a former life match nothing."""
        self._config: Final = config
        self._legs: Final = Legs(Slots(SLOTS, epoch.to_bytes(16, "big")), REMEMBER_S * NS)
        self._memory: Final[dict[int, bytes]] = {}
        self._leases: Final = Leases(terms(config.lease_s, NS), self._memory.__setitem__)
        self._blocks: Final[dict[RequestId, tuple[int, ...]]] = {}

    @property
    def held(self) -> int:
        """The number of holds."""
        return len(self._blocks)

    def blocks(self) -> list[tuple[int, ...]]:
        """The blocks of each hold."""
        return list(self._blocks.values())

    def next_wakeup(self) -> int | None:
        """The time at which the next lease ends."""
        due = self._leases.next_wakeup()
        return None if due is None else math.ceil(due)

    def slot(self, index: int) -> bytes:
        """What a consumer reads in this slot."""
        return self._memory.get(index, CLEAR)

    def begin(self, request: RequestId, name: str, now_ns: int) -> None:
        """A request that is to leave a hold has arrived."""
        self._legs.begin(request, name, now_ns)
        self._leases.step(self._legs.take_orders(), now_ns)

    def left_by(self, sequence: Sequence, reason: str, now_ns: int) -> Hold | None:
        """The request has ended with this reason: its hold takes the blocks of the prompt. None: it leaves no hold, as
        it was to leave none, did not end properly, or the hold's name was given up.
        """
        request, name = sequence.id, sequence.request.hold
        if name is None:
            return None
        if reason not in {"stop", "length"} or not self._legs.wanted(request):
            self._legs.dropped(request)
            self._leases.step(self._legs.take_orders(), now_ns)
            return None
        tokens = sequence.computed - sequence.sampling
        if sequence.request.cached_only:
            tokens -= tokens % self._config.block_size
        kept = self._config.blocks_for(tokens)
        blocks = tuple(sequence.blocks[:kept])
        sequence.blocks = sequence.blocks[kept:]
        slot = self._legs.filled(request)
        self._blocks[request] = blocks
        self._leases.step(self._legs.take_orders(), now_ns)
        return Hold(name, blocks, tokens, request, slot)

    def release(self, name: str, now_ns: int) -> list[tuple[HoldEnded, tuple[int, ...]]]:
        """A router gives a name up. Returns the holds that ended by it, and their freed blocks."""
        self._legs.release(name, now_ns)
        self._leases.step(self._legs.take_orders(), now_ns)
        return self._ended("given up", now_ns)

    def heard(self, reader: str, note: ReadNote | Beat, now_ns: int) -> list[tuple[HoldEnded, tuple[int, ...]]]:
        """A consumer's notice has arrived. Returns the holds that ended by it, and their freed blocks."""
        self._leases.heard(reader, note, now_ns)
        return self._ended("read", now_ns)

    def tick(self, now_ns: int) -> list[tuple[HoldEnded, tuple[int, ...]]]:
        """A lease has ended. Returns the holds that ended with it, and their freed blocks."""
        self._leases.expire(now_ns)
        return self._ended(TIME_UP, now_ns)

    def _ended(self, because: str, now_ns: int) -> list[tuple[HoldEnded, tuple[int, ...]]]:
        ended = []
        for request in self._leases.take_reports():
            self._legs.reported(request)
            name = RequestId(request)
            ended.append((HoldEnded(now_ns, name, because), self._blocks.pop(name)))
        return ended
