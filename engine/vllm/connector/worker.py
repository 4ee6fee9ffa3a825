"""The connector's worker half: gives `prefill.leases` and `decode.reads` their memory, transport and clock.

Runs inside vLLM's workers. As P it asks `prefill.leases` which holds have ended; as D it posts reads, and
`decode.reads` decides whether the blocks may be used.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any

from vllm.platforms import current_platform

from decode.reads import PullOutcome, Reads
from engine.vllm.connector.digests import Digests
from engine.vllm.connector.held_slots import HeldSlots
from engine.vllm.connector.idling import pulled, worker_here
from engine.vllm.connector.links import Links, NotServed, SlotTable, offered
from engine.vllm.connector.links_worker import LinksWorker
from engine.vllm.connector.metadata import BatonMetadata, ExpectedHold, WorkerReport
from engine.vllm.connector.paced import NoticesKept, paced
from engine.vllm.connector.pages import regions
from engine.vllm.connector.part_reads import NOT_AWAITED, EarlyReadsHere, PartsWorker
from engine.vllm.connector.slot_reads import PATIENCE_S, Follower, SlotReads
from kvtransfer.block_digests import Region
from kvtransfer.hold_marks import SLOTS

logger = logging.getLogger("vllm.baton.worker")


class BatonWorker(PartsWorker, LinksWorker):
    """See the module. Overrides hooks of vLLM 0.32's `NixlBaseConnectorWorker`."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        from vllm.distributed.nixl_utils import NixlWrapper  # noqa: PLC0415 - vLLM loads NIXL when it is asked for

        api = sys.modules[NixlWrapper.__module__]
        with paced(api, api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        # vLLM drops a peer after an hour without reads; 0 turns that off, as agents tell which peers have gone.
        self._engine_ttl = 0.0
        self._agent: Any = vars(self)["nixl_wrapper"]
        self.nixl_wrapper = NoticesKept(self._agent)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._digests = Digests(self._logical_num_blocks) if options.get("digests") else None
        self._held = HeldSlots(int(options.get("kv_lease_duration", 30)))
        self._slots = SlotReads(self._agent)
        self._links = Links(self._digests, self._slots.readable)
        self._expected: dict[str, ExpectedHold] = {}
        """As D: the hold that each request must find, until its pull has ended."""
        self._told = WorkerReport(Counter(), {}, {})
        """The next report to the scheduler half."""
        self._parts = EarlyReadsHere()
        self._step = 0
        """This step's number, if its end is to be reported."""
        self._reads = Reads(self._agent, self._slots.landings(), self._slots.prepare)
        self._follower = Follower(
            self._reads, lambda: current_platform.set_device(self.device_id), lambda ended: pulled(engine_id, ended)
        )
        worker_here(engine_id)
        self._patient = False
        """Whether the engine does nothing in this step but wait for pulls."""

    # --- memory that peers read ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the slots before vLLM registers the KV caches, and put the slots' address into the metadata."""
        digests = () if self._digests is None else self._digests.memory
        for memory in (self._held.memory, *self._slots.memory, *digests):
            descs = self._agent.get_reg_descs([(memory.address, memory.size, 0, "")], "DRAM")
            self._agent.register_memory(descs, backends=self.nixl_backends)
            self._registered_descs.append(descs)
        super().register_kv_caches(kv_caches)
        if self._digests is not None:
            self._digests.begin(self._regions())
        stock = vars(self)["xfer_handshake_metadata"]
        self.xfer_handshake_metadata = offered(stock, SlotTable(self._held.memory.address, SLOTS), self._digests)

    def _regions(self) -> list[Region]:
        """The registered KV memory of this rank. Used on CPUs only (`served.refused`)."""
        bases = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        parts = self._physical_blocks_per_logical_kv_block
        sizes = self.block_stride_per_layer, self.block_len_per_layer
        return regions(bases, *sizes, blocks=self._logical_num_blocks, parts=parts)

    # --- as D: reads ---

    def start_load_kv(self, metadata: BatonMetadata) -> None:
        """vLLM's, after noting which hold each request must find in its slot."""
        self._expected.update(metadata.expected)
        self._begin_parts(metadata)
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        """vLLM's; any problem is a failed load, and never an error of the engine's step."""
        engine_id = meta.remote.engine_id
        if not meta.awaiting_kvs and engine_id not in self._links and engine_id not in self._remote_agents:
            self._told.counts["not told"] += 1  # the hold's producer is unknown, so no notice can be sent
            self._expected.pop(req_id, None)
            return
        early = self._parts.take(req_id) if meta.awaiting_kvs else None
        if early is not None:
            self._join(req_id, meta, early)
            return
        try:
            self._read(req_id, meta, self._expected.get(req_id, ExpectedHold(None)))
        except Exception as error:  # one failed pull: this engine computes the prompt; raising would end the engine
            if not isinstance(error, NotServed):
                logger.exception("%s cannot be pulled", req_id)
            else:
                logger.warning("%s is computed here: %s", req_id, error)
            self._told.counts["pull refused"] += 1
            if meta.awaiting_kvs:
                self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)
        if meta.awaiting_kvs and req_id in self._recv_failures:
            self._refused(req_id, meta)
        if engine_id in self._remote_agents or req_id in self._recv_failures:
            self._expected.pop(req_id, None)

    def _refused(self, req_id: str, meta: Any) -> None:
        """A pull that did not begin counts against the pair, and its producer need not keep the hold for it."""
        engine_id, expected = meta.remote.engine_id, self._expected.get(req_id)
        if engine_id not in self._remote_agents or engine_id in self._invalid_remote_engines:
            return  # the state of the link says so
        self._told.refused |= {req_id}
        if self._recving_transfers.get(req_id) or expected is None or not expected.tells:
            return  # reads from other ranks are under way: the hold stays until its lease ends
        nothing = copy(meta)
        nothing.awaiting_kvs, nothing.local_block_ids, nothing.local_physical_block_ids = False, (), []
        try:
            with self.nixl_wrapper.pulling(expected.slot):
                super()._read_blocks_for_req(req_id, nothing)
        except Exception:  # the hold stays until its lease ends
            logger.exception("%s cannot be given back", req_id)

    def _read(self, req_id: str, meta: Any, expected: ExpectedHold, early: Sequence[Any] = ()) -> None:
        """`early`: reads for the request that have begun before."""
        engine_id, slot = meta.remote.engine_id, expected.slot
        met = engine_id in self._remote_agents and engine_id not in self._invalid_remote_engines
        reads = meta.awaiting_kvs and any(meta.local_block_ids)
        remote = self._check(meta, expected) if met and reads else ()
        with self.nixl_wrapper.pulling(slot) as sources:
            super()._read_blocks_for_req(req_id, meta)
        handles = self._recving_transfers.get(req_id)
        if handles and slot is not None and sources and req_id not in self._recv_failures:
            beside, wrong = self._compare(meta, expected, remote)
            handles[:0] = early
            self._reads.add(req_id, handles, sources, slot.mark, beside=beside, wrong=wrong, tells=expected.tells)
            self._follower.wake()

    def _compare(self, meta: Any, expected: ExpectedHold, remote: Sequence[int]) -> tuple[tuple[Any, ...], Any]:
        """With digests: the read of these blocks' digests, and the function that compares them with the blocks."""
        if self._digests is None:
            return (), None
        engine_id, (local,), (first,) = meta.remote.engine_id, meta.local_block_ids, meta.local_num_computed_blocks
        (rank,) = self.tp_mappings[engine_id].all_source_ranks
        agent = self._remote_agents[engine_id][0, rank]
        handle = self._digests.read(self._agent, agent, (engine_id, rank), remote[first:], local)
        return (handle,), self._digests.compare(expected.names[first:], local)

    def _check(self, meta: Any, expected: ExpectedHold) -> Sequence[int]:
        """Before anything is read: check that the pull could be confirmed, and that it reads this prompt's own blocks.

        Returns these blocks, if P's have this engine's size.

        Raises:
            NotServed: one of the two does not hold.
        """
        engine_id = meta.remote.engine_id
        self._links.check_slot(engine_id, self.tp_mappings[engine_id].all_source_ranks, expected.slot)
        return list(meta.remote.block_ids[0]) if self._cut(meta) else ()

    def _cut(self, meta: Any) -> bool:
        """Cut P's blocks to this prompt's own. Returns whether they have this engine's size.

        Raises:
            NotServed: they cannot be read into this engine's.
        """
        engine_id = meta.remote.engine_id
        info = self.transfer_topo.get_engine_info(engine_id)
        ratio = self._physical_blocks_per_logical_kv_block
        pieces = self.transfer_topo.block_size_ratio(info.remote_block_size)
        alike = info.remote_physical_blocks_per_logical == ratio and pieces == 1
        if self._digests is not None and (not alike or self.transfer_topo.tp_ratio(info.remote_tp_size) != 1):
            raise NotServed("its blocks are cut in another way, and their digests say nothing of ours")
        if info.remote_physical_blocks_per_logical != ratio:
            raise NotServed("its attention divides blocks into other parts than ours: set the same `--block-size`")
        meta.remote.block_ids = _aligned(meta, self.dst_num_blocks[engine_id] // ratio, pieces)
        return bool(alike)

    def _read_blocks(self, **fields: Any) -> bool:
        """vLLM's; the notice of having read is kept until the slot has been read."""
        engine_id, rank = fields["dst_engine_id"], fields["read_spec"].remote_rank
        agent, table = self._remote_agents[engine_id][0, rank], self._links.table(engine_id, rank)
        with self.nixl_wrapper.reading(agent, table.place):
            posted: bool = super()._read_blocks(**fields)
        return posted

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """vLLM's for the transfers that it follows itself; Baton's for those of the following thread."""
        ours = {name: transfers.pop(name) for name in list(transfers) if self._reads.under_way(name)}
        done, failed = super()._pop_done_transfers(transfers)
        for request, handles in ours.items():
            outcome = self._reads.take(request)
            if outcome is None:
                transfers[request] = handles  # vLLM counts it as under way
                continue
            _record(self.xfer_stats, outcome)
            done.add(request)
            self._time(request, outcome)
            self._told.counts["confirmed" if outcome.good else outcome.because] += 1
            self._told.ended[request] = outcome.because
            if not outcome.good:
                if outcome.because != NOT_AWAITED:
                    logger.warning("%s is computed here: %s", request, outcome.because)
                failed.add(request)
                self._handle_failed_transfer(request, None, None, record_failed_transfer=outcome.broken)
        return done, failed

    # --- as P: holds ---

    def step(self, metadata: BatonMetadata) -> None:
        """Before a step computes anything: apply the scheduler half's orders about holds."""
        self._step, self._patient = metadata.number, metadata.patient
        if metadata.orders:
            self._held.step(metadata.orders)

    def vouch(self, metadata: BatonMetadata) -> None:
        """After a step: write the digests of the prompts that it completed. Their answers are not sent yet."""
        if self._digests is not None and not self._digests.vouch(metadata.vouched):
            self._told.counts["not vouched for"] += 1

    def _handle_failed_transfer(self, req_id: str, *more: Any, **named: Any) -> bool:
        """vLLM's. A request that was only to notify its producer is never reported as received: it ends here."""
        if req_id not in self._recving_metadata:
            self._expected.pop(req_id, None)
        released: bool = super()._handle_failed_transfer(req_id, *more, **named)
        return released

    def get_transfer_results(self) -> Any:
        """vLLM's, with ended holds. A hold's slot is cleared before its end is reported, and its blocks are freed only
        after the report.
        """
        if self._patient:
            self._patient = False
            self._follower.wait(PATIENCE_S)
        results = super().get_transfer_results()
        for request in self._held.expire():
            self.xfer_stats.record_kv_expired_req()
            logger.warning("%s: no consumer has read its blocks before the lease ended", request)
        results.finished_sending.update(self._held.take_reports())
        for request in results.finished_recving:
            self._expected.pop(request, None)  # a request whose handshake has failed is still here
        return results

    def _get_new_notifs(self) -> set[str]:
        """The consumers' notices. In vLLM's own connector, a notice that it does not understand ends the engine."""
        self._held.hear(self._agent.get_new_notifs())
        return set()  # ended holds are reported once leases were checked, too

    # --- reports ---

    def tell(self) -> WorkerReport | None:
        """What happened here since the last report; None: nothing."""
        if self._held.has_counts:
            self._told.counts.update(self._held.take_counts())
        if self._links.has_news:
            self._told.peers.update({engine: {self.tp_rank: link} for engine, link in self._links.take_news().items()})
        self._told.step, self._step = self._step, 0
        if not self._told:
            return None  # most steps
        told, self._told = self._told, WorkerReport(Counter(), {}, {})
        return told

    def shutdown(self) -> None:
        """End the following thread; vLLM calls this when the engine ends."""
        if hasattr(self, "_follower"):
            self._follower.stop()
        super().shutdown()


def _record(stats: Any, outcome: PullOutcome) -> None:
    """Put a pull's end into vLLM's statistics."""
    for each in outcome.telemetry:
        stats.record_transfer(each)
    for _ in range(outcome.notes_lost):
        stats.record_failed_notification()


def _aligned(meta: Any, blocks_max: int, pieces: int = 1) -> tuple[list[int], ...]:
    """P's blocks for this prompt, so that vLLM reads each into its own place. A block here has `pieces` of P's.

    Of blocks of one size, vLLM takes the needed number from the *end* of P's list: these are the prompt's, from its
    first on. Of smaller ones it would do the same, but the last block here may have fewer than `pieces`: the end would
    be another place. These are the needed ones alone, which vLLM takes from the first on.
    """
    groups = []
    for group, local, cached in zip(
        meta.remote.block_ids, meta.local_block_ids, meta.local_num_computed_blocks, strict=True
    ):
        first, end = (cached * pieces if pieces > 1 else 0), (cached + len(local)) * pieces
        needed = list(group)[first:end]
        if len(needed) <= end - first - pieces:
            raise NotServed(f"{len(group)} blocks are held, and {end} would be read")
        if not all(0 <= block < blocks_max for block in needed):
            raise NotServed(f"a held block is not among the producer's {blocks_max} blocks")
        groups.append(needed)
    return tuple(groups)
