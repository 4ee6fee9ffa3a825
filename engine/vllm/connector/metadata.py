"""The messages between the two halves of Baton's connector in each step. Runs inside vLLM's processes."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from decode.early_reads import PartRead
from kvtransfer.asks import Introduce
from kvtransfer.hold_marks import Slot
from prefill.orders import Orders

TABLE: str = "baton_slot_table"
"""Baton's key in vLLM's agent metadata, a msgpack map whose unknown keys vLLM skips: ``[address, slots]``."""

DIGESTS: str = "baton_digests"
"""As `TABLE`: ``[address, blocks]`` of the block digests, if the engine has them (`kvtransfer.block_digests`)."""


class ExpectedHold(NamedTuple):
    """What a pulling request must find at its producer."""

    slot: Slot | None
    names: tuple[bytes, ...] = ()
    """With digests: the name of each of the prompt's blocks."""
    tells: bool = True
    """Whether the ranks give the hold back; else the scheduler half does (`decode.early`, told late)."""


class BatonMetadata(NixlConnectorMetadata):  # type: ignore[misc]
    """vLLM's metadata with Baton's. It goes from the scheduler half to every worker, in order and without gaps."""

    def __init__(self, stock: NixlConnectorMetadata) -> None:
        super().__init__()
        self.__dict__.update(stock.__dict__)
        self.introductions: tuple[Introduce, ...] = ()
        self.forgotten: tuple[str, ...] = ()
        """Engine ids."""
        self.orders = Orders()
        """Orders about holds: each rank's work on its leases before any token of this step is computed. vLLM's own
        lists of the same (`reqs_in_batch`, `reqs_to_send`, `reqs_not_processed`) are empty, as `prefill.table` has the
        rules."""
        self.reqs_in_batch: set[str] = set()
        self.reqs_to_send: dict[str, float] = {}
        self.reqs_not_processed: set[str] = set()
        self.expected: dict[str, ExpectedHold] = {}
        """By request of `reqs_to_recv`: what it must find at its producer."""
        self.vouched: dict[str, tuple[tuple[int, ...], tuple[bytes, ...]]] = {}
        """Prefill legs whose prompts this step completes: their blocks, and each block's name."""
        self.parts: dict[str, PartRead] = {}
        """By early leg: blocks to be read now, before their hold is there."""
        self.parts_over: dict[str, PartRead] = {}
        """By early leg: blocks that get no more reads. The ranks report the leg once those under way have ended."""
        self.number = 0
        """This step's number, if its end is to be reported; else 0."""
        self.patient = False
        """Whether the engine does nothing in this step but wait for pulls."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what is not empty travels: a step that only decodes has next to nothing to say, and every step pays for
        each field that is packed and unpacked.
        """
        return _unpacked, ({name: value for name, value in self.__dict__.items() if value},)


def _unpacked(fields: dict[str, Any]) -> BatonMetadata:
    metadata = BatonMetadata(NixlConnectorMetadata())
    metadata.__dict__.update(fields)
    return metadata


class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' reports to the scheduler half since the last one, all ranks together."""

    def __init__(
        self,
        counts: Counter[str],
        peers: dict[str, dict[int, str]],
        ended: dict[str, str],
        took: dict[str, tuple[int, float]] | None = None,
        step: int = 0,
        refused: frozenset[str] = frozenset(),
    ) -> None:
        self.counts = counts
        self.peers = peers
        """By engine id: the state of the link of each rank that tells one (`decode.rank_links`)."""
        self.ended = ended
        """Ended pulls by request: why their blocks cannot be used; empty: they can."""
        self.took = took or {}
        """By engine id: the blocks that were read from it, and the seconds on the wire."""
        self.step = step
        """The step with which this report comes, if its end was to be reported (`BatonMetadata.number`)."""
        self.refused = refused
        """Requests whose pull has not begun: a rank refused it, or could not post it."""

    def __bool__(self) -> bool:
        return bool(self.counts or self.peers or self.ended or self.took or self.step or self.refused)

    def aggregate(self, other: Any) -> WorkerReport:
        """Combine the reports of several ranks: blocks that one rank cannot use are not used."""
        ended = {
            request: self.ended.get(request) or other.ended.get(request, "") for request in self.ended | other.ended
        }
        peers = {
            engine: {**self.peers.get(engine, {}), **other.peers.get(engine, {})} for engine in self.peers | other.peers
        }
        took = dict(self.took)
        for engine, (blocks, seconds) in other.took.items():
            mine = took.get(engine, (0, 0.0))
            took[engine] = (max(blocks, mine[0]), max(seconds, mine[1]))  # ranks read beside each other
        step, refused = min(self.step, other.step), self.refused | other.refused
        return WorkerReport(self.counts + other.counts, peers, ended, took, step, refused)
