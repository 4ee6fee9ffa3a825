"""What the two halves of our connector tell each other with every step. Runs inside vLLM's processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from kvtransfer.asks import Introduce
from kvtransfer.slots import Slot

TABLE: str = "baton_slot_table"
"""Our key in vLLM's agent metadata, which is a msgpack map whose unknown keys vLLM skips: ``[address, slots]``."""

DIGESTS: str = "baton_digests"
"""As `TABLE`: ``[address, blocks]`` of the digests of an engine that vouches for its blocks (`kvtransfer.vouchers`)."""

SLOTS: int = 16_384
"""Slots of an engine: its prefill legs that wait, run or are held. 256 KiB; with all taken, prompts are computed on D.
"""


class BatonMetadata(NixlConnectorMetadata):  # type: ignore[misc]
    """vLLM's, and ours beside it. From the scheduler half to every worker, in order, none left out."""

    def __init__(self, stock: NixlConnectorMetadata) -> None:
        super().__init__()
        self.__dict__.update(stock.__dict__)
        self.introductions: tuple[Introduce, ...] = ()
        self.forgotten: tuple[str, ...] = ()
        """Engine ids."""
        self.marks: dict[str, Slot] = {}
        """Prefill legs of this step that are new: their marks are written before anything of them is computed."""
        self.expected: dict[str, Slot] = {}
        """What is to be found in the producer's slot, for `reqs_to_recv`."""
        self.names: dict[str, tuple[bytes, ...]] = {}
        """Where blocks are vouched for: what the prompts of `reqs_to_recv` are, block by block."""
        self.vouched: dict[str, tuple[tuple[int, ...], tuple[bytes, ...]]] = {}
        """Prefill legs whose prompts are done with this step: their blocks, and what each is."""
        self.releases: tuple[str, ...] = ()
        """Holds that a router gave up."""


class Told(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler half: what was counted since the last time, all ranks together."""

    def __init__(self, counts: Counter[str], peers: dict[str, str], ended: dict[str, str]) -> None:
        self.counts = counts
        self.peers = peers
        """Engine id -> how it stands with this engine; of the rank that spoke last."""
        self.ended = ended
        """Pulls by request: why their blocks cannot be used, or nothing."""

    def aggregate(self, other: Any) -> Told:
        """Of several ranks: what one of them cannot use, nobody uses."""
        ended = {
            request: self.ended.get(request) or other.ended.get(request, "") for request in self.ended | other.ended
        }
        return Told(self.counts + other.counts, {**self.peers, **other.peers}, ended)
