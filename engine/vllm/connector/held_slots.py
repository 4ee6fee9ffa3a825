"""As P: the slot table that consumers read, and the leases of the holds in it (`prefill.leases`).

Runs inside vLLM's workers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from engine.vllm.connector.pages import PagedMemory
from kvtransfer.hold_marks import SLOT_BYTES, SLOTS
from kvtransfer.notes import parse
from prefill.leases import Leases, terms
from prefill.orders import Orders


class HeldSlots:
    """The table of one rank."""

    def __init__(self, lease_s: float) -> None:
        """`lease_s`: vLLM's ``kv_lease_duration``, in seconds."""
        self.memory: Final = PagedMemory(SLOTS * SLOT_BYTES)
        self._leases: Final = Leases(terms(lease_s), self._write)

    def _write(self, index: int, content: bytes) -> None:
        self.memory.view[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = content

    def step(self, orders: Orders) -> None:
        """Apply the scheduler half's orders, before a step computes anything."""
        self._leases.step(orders, time.perf_counter())

    def hear(self, notices: Mapping[str, Iterable[bytes]]) -> None:
        """Take consumers' notices, by the NIXL agent that sent them."""
        for agent, notes in notices.items():
            for note in notes:
                self._leases.heard(agent, parse(note), time.perf_counter())

    def expire(self) -> list[str]:
        """End the leases whose time is up, and return them."""
        return self._leases.expire(time.perf_counter())

    def take_reports(self) -> list[str]:
        """The holds that have ended since the last call: their slots are clear."""
        return self._leases.take_reports()

    @property
    def has_counts(self) -> bool:
        """Whether anything was counted since the last `take_counts`."""
        return bool(self._leases.counts)

    def take_counts(self) -> Counter[str]:
        """Counts since the last call."""
        counts = self._leases.counts.copy()
        self._leases.counts.clear()
        return counts
