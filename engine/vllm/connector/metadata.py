"""What the two halves of our connector tell each other with every step. Runs inside vLLM's processes."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from kvtransfer.asks import Introduce
from kvtransfer.slots import Slot
from prefill.orders import Orders

TABLE: str = "baton_slot_table"
"""Our key in vLLM's agent metadata, which is a msgpack map whose unknown keys vLLM skips: ``[address, slots]``."""

DIGESTS: str = "baton_digests"
"""As `TABLE`: ``[address, blocks]`` of the digests of an engine that vouches for its blocks (`kvtransfer.vouchers`)."""


class Expected(NamedTuple):
    """What a request that is pulled is to find at its producer."""

    slot: Slot | None
    names: tuple[bytes, ...] = ()
    """Where blocks are vouched for: what the prompt is, block by block."""


class BatonMetadata(NixlConnectorMetadata):  # type: ignore[misc]
    """vLLM's, and ours beside it. From the scheduler half to every worker, in order, none left out."""

    def __init__(self, stock: NixlConnectorMetadata) -> None:
        super().__init__()
        self.__dict__.update(stock.__dict__)
        self.introductions: tuple[Introduce, ...] = ()
        self.forgotten: tuple[str, ...] = ()
        """Engine ids."""
        self.orders = Orders()
        """Of holds: what each rank is to do about its leases before anything of this step is computed. vLLM's own lists
        of the same (`reqs_in_batch`, `reqs_to_send`, `reqs_not_processed`) are empty: the rules are `prefill.table`'s.
        """
        self.reqs_in_batch: set[str] = set()
        self.reqs_to_send: dict[str, float] = {}
        self.reqs_not_processed: set[str] = set()
        self.expected: dict[str, Expected] = {}
        """For `reqs_to_recv`."""
        self.vouched: dict[str, tuple[tuple[int, ...], tuple[bytes, ...]]] = {}
        """Prefill legs whose prompts are done with this step: their blocks, and what each is."""


class Told(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler half: what was counted since the last time, all ranks together."""

    def __init__(self, counts: Counter[str], peers: dict[str, str], ended: dict[str, str]) -> None:
        self.counts = counts
        self.peers = peers
        """Engine id -> how it stands with this engine; of the rank that spoke last."""
        self.ended = ended
        """Pulls by request: why their blocks cannot be used, or nothing."""

    def __bool__(self) -> bool:
        return bool(self.counts or self.peers or self.ended)

    def aggregate(self, other: Any) -> Told:
        """Of several ranks: what one of them cannot use, nobody uses."""
        ended = {
            request: self.ended.get(request) or other.ended.get(request, "") for request in self.ended | other.ended
        }
        return Told(self.counts + other.counts, {**self.peers, **other.peers}, ended)
