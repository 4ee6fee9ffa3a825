"""Blocks that a worker of D reads before their hold is there (`decode.early_reads`), until the pull of the rest joins
them. Runs inside vLLM's workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from decode.early_reads import PartRead
from decode.reads import PullOutcome, Reads
from engine.vllm.connector.links import NotServed
from engine.vllm.connector.metadata import BatonMetadata, ExpectedHold, WorkerReport
from engine.vllm.connector.slot_reads import Follower
from kvtransfer.hold_marks import CLEAR

logger = logging.getLogger("vllm.baton.worker")

NOT_HELD: Final = "what was read early is not the hold's"
BROKEN: Final = "an early read could not begin"
NOT_AWAITED: Final = "its hold was not awaited"
"""The leg has ended, or pulls anew, or is computed here: who decided that has said so."""


@dataclass(slots=True)
class EarlyRead:
    """What was read early for one request."""

    first: int
    """The index in the prompt of its first block."""
    engine: str
    """Its producer."""
    remote: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    """All its reads. Each may be under way, or have ended."""
    broken: bool = False
    """Whether a read could not begin: the others may be under way, so nothing is read into its blocks any more."""
    refused: bool = False
    """Whether nothing can be read early here."""

    def joins(self, meta: Any) -> str:
        """Let a pull read only what was not read early. Returns why it cannot; empty: it can."""
        if self.broken:
            return BROKEN
        (cached,), (local,), remote = meta.local_num_computed_blocks, meta.local_block_ids, meta.remote.block_ids[0]
        many = len(self.remote)
        if many and (
            cached != self.first
            or list(remote[cached : cached + many]) != self.remote
            or list(local[:many]) != self.local
            or len(local) <= many
        ):
            return NOT_HELD
        meta.local_block_ids = (list(local[many:]),)
        meta.local_num_computed_blocks = (cached + many,)
        return ""


class EarlyReadsHere:
    """The early reads of one rank, by request."""

    def __init__(self) -> None:
        self._reads: Final[dict[str, EarlyRead]] = {}
        self.joined: Final[set[str]] = set()
        """Pulls of which some was read early: the time of those reads says nothing of the wire."""

    def open(self, request: str, part: PartRead) -> EarlyRead | None:
        """What was read for the request, which this part continues; None: the part is not to be read."""
        read = self._reads.setdefault(request, EarlyRead(part.first, part.engine))
        if read.broken or read.refused or part.first != read.first + len(read.remote):
            return None
        return read

    def producers(self) -> set[str]:
        """The engines from which reads may be under way."""
        return {read.engine for read in self._reads.values() if read.handles}

    def take(self, request: str) -> EarlyRead | None:
        """What was read for the request; its reads are the caller's from now on. None: nothing was."""
        return self._reads.pop(request, None)


def wanted(part: PartRead) -> ReqMeta:
    """A part as vLLM's connector takes a pull."""
    remote = RemoteMeta(block_ids=(list(part.remote),), host="", port=0, engine_id=part.engine, request_id=part.request)
    local = (list(part.local),)
    return ReqMeta(local, local, 1, local_num_computed_blocks=(0,), remote=remote, awaiting_kvs=True)


class PartsWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """The worker's part in early reads: vLLM's worker reads blocks, and `decode.reads` follows all reads of a pull."""

    _parts: EarlyReadsHere
    _reads: Reads
    _follower: Follower
    _expected: dict[str, ExpectedHold]
    _told: WorkerReport
    _cut: Callable[[Any], bool]
    _read: Callable[[str, Any, ExpectedHold, Sequence[Any]], None]

    def _begin_parts(self, metadata: BatonMetadata) -> None:
        """Read what is complete of prompts that their producers still compute, and end what is not awaited any more."""
        for request, part in metadata.parts.items():
            self._read_part(request, part)
        for request, part in metadata.parts_over.items():
            read = self._parts.take(request)
            self._end_early(request, wanted(part), [] if read is None else read.handles, NOT_AWAITED)

    def _read_part(self, req_id: str, part: Any) -> None:
        """Read blocks before their hold is there. What cannot be read now is read with the rest."""
        read, engine_id = self._parts.open(req_id, part), part.engine
        if read is None:
            return
        if engine_id not in self._remote_agents or engine_id in self._invalid_remote_engines or not self._alike():
            read.refused = True
            return
        meta = wanted(part)
        try:
            read.refused = not self._cut(meta)
            if read.refused:
                return
            ratio = self._physical_blocks_per_logical_kv_block
            meta.local_physical_block_ids = self._logical_to_kernel_block_ids(meta.local_block_ids, ratio)
            self._recving_metadata[req_id] = meta  # vLLM keeps the peer as long as it is here
            with self.nixl_wrapper.pulling_early():
                super()._read_blocks_for_req(req_id, meta)
        except NotServed:  # the pull of all will say why
            read.refused = True
            return
        except Exception:  # one read that cannot begin: the leg's pull fails once the others have ended
            logger.exception("%s cannot be read early", req_id)
            read.broken = True
        read.handles += self._recving_transfers.pop(req_id, [])  # vLLM reports a request without reads under way
        read.broken |= req_id in self._recv_failures
        self._recv_failures.discard(req_id)
        read.remote += part.remote
        read.local += part.local

    def _engines_with_inflight_transfers(self) -> set[str]:
        """vLLM's, with the producers of early reads: it drops what it knows of no such engine."""
        engines: set[str] = super()._engines_with_inflight_transfers()
        return engines | self._parts.producers()

    def _alike(self) -> bool:
        """Whether blocks arrive as attention wants them, without work on all of a pull's blocks at its end."""
        return not (self.use_host_buffer or self.enable_permute_local_kv or self.enable_heterogeneous_attn_post_process)

    def _end_early(self, req_id: str, meta: Any, handles: list[Any], because: str) -> None:
        """The blocks of `meta` are not used: report the request as failed once none of its reads is under way."""
        self._recving_metadata[req_id] = meta
        self._recving_transfers[req_id] = handles
        self._reads.add(req_id, list(handles), (), CLEAR, wrong=lambda: because, tells=False)
        self._follower.wake()

    def _join(self, req_id: str, meta: Any, early: EarlyRead) -> None:
        """Read the rest of a pull after its early reads. All reads are followed together, then the mark."""
        whole, engine_id = meta.local_block_ids, meta.remote.engine_id
        met = engine_id in self._remote_agents and engine_id not in self._invalid_remote_engines
        because = early.joins(meta) if met else "its producer has gone"
        ratio = self._physical_blocks_per_logical_kv_block
        try:
            if not because:
                meta.local_physical_block_ids = self._logical_to_kernel_block_ids(meta.local_block_ids, ratio)
                self._read(req_id, meta, self._expected.get(req_id, ExpectedHold(None)), early.handles)
        except NotServed as error:
            because = str(error)
        except Exception:  # as above
            logger.exception("%s cannot be pulled", req_id)
            because = BROKEN
        meta.local_block_ids = whole  # all of them are lost if the pull fails
        meta.local_physical_block_ids = self._logical_to_kernel_block_ids(whole, ratio)
        self._expected.pop(req_id, None)
        if self._reads.under_way(req_id):
            if early.remote:
                self._parts.joined.add(req_id)
            return
        handles = early.handles + self._recving_transfers.pop(req_id, [])
        self._end_early(req_id, meta, handles, because or BROKEN)

    def _time(self, request: str, outcome: PullOutcome) -> None:
        """Report how long the blocks of an ordinary pull were on the wire."""
        meta = self._recving_metadata.get(request)
        if request in self._parts.joined:
            self._parts.joined.discard(request)
        elif outcome.good and outcome.telemetry and meta is not None:
            engine, blocks = meta.remote.engine_id, len(meta.local_block_ids[0])
            ranks = len(self.tp_mappings[engine].all_source_ranks) if engine in self.tp_mappings else 1
            seconds = sum(each.postDuration + each.xferDuration for each in outcome.telemetry) / 1e6 / ranks
            before, took = self._told.took.get(engine, (0, 0.0))
            self._told.took[engine] = (before + blocks, took + seconds)
