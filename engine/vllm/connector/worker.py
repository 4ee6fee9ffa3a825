"""The connector's worker half: gives `prefill.leases` and `decode.reads` their memory, transport and clock.

Runs inside vLLM's workers. As P it asks `prefill.leases` which holds have ended; as D it posts reads, and
`decode.reads` decides whether the blocks may be used.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

from decode.peers import MET
from decode.reads import Landings, RankSource, Reads, try_to_read
from engine.vllm.connector.digests import Digests
from engine.vllm.connector.metadata import DIGESTS, TABLE, BatonMetadata, ExpectedHold, WorkerReport
from engine.vllm.connector.paced import NoticesKept, paced
from engine.vllm.connector.pages import PagedMemory, view
from kvtransfer.asks import Introduce
from kvtransfer.block_digests import Region
from kvtransfer.hold_marks import SLOT_BYTES, SLOTS, SLOTS_MAX
from kvtransfer.notes import parse, with_proof
from prefill.leases import Leases, terms

logger = logging.getLogger("vllm.baton.worker")

LANDINGS = 1024
"""The number of slots that may be read at one time (pulls times the ranks they read from); more pulls wait."""

POLL_S = 0.0002
"""The interval at which reads under way are polled."""

FIRST_READ_S = 2.0
"""How long a handshake waits for the first read of a peer's slot: UCX connects with that read."""


class NotServed(RuntimeError):
    """A pull that cannot be served; this engine computes the prompt."""


class BatonWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """See the module. Overrides hooks of vLLM 0.32's `NixlBaseConnectorWorker`.

    The class is long because vLLM calls all of these hooks on one object; the rules are in `prefill` and `decode`.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        from vllm.distributed.nixl_utils import NixlWrapper  # noqa: PLC0415 - vLLM loads NIXL when it is asked for

        api = sys.modules[NixlWrapper.__module__]
        with paced(api, api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self._engine_ttl = (
            0.0  # vLLM's drops peers that nothing is read from for an hour; agents tell which peers have gone
        )
        self._proof = ""
        self._agent: Any = vars(self)["nixl_wrapper"]
        self.nixl_wrapper = NoticesKept(self._agent, self._prove)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._digests = Digests(self._logical_num_blocks) if options.get("digests") else None
        self._table = PagedMemory(SLOTS * SLOT_BYTES)
        self._landing = PagedMemory(LANDINGS * SLOT_BYTES)
        self._first = PagedMemory(mmap.PAGESIZE)
        """The common target of the first reads of new peers: its content is never used."""
        self._leases = Leases(terms(int(options.get("kv_lease_duration", 30))), self._write)
        """As P: the leases."""
        self._introduced: dict[str, Introduce] = {}
        self._standing: dict[str, str] = {}
        """As D: how the link with each engine stands, by its id: `MET`, or why nothing can be read."""
        self._tables: dict[tuple[str, int], tuple[int, int]] = {}
        """As D: the producers' slot tables, by engine and rank: address and number of slots."""
        self._expected: dict[str, ExpectedHold] = {}
        """As D: what requests must find, until their pull has ended."""
        self._sources: list[RankSource] = []
        """The ranks that the current request reads from, while its reads are posted."""
        self._told = WorkerReport(Counter(), {}, {})
        """The next report to the scheduler half."""
        self._reads = Reads(self._agent, Landings(self._landing.view, self._landing.address), self._look)
        self._work = threading.Condition()
        self._over = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="baton-pulls", daemon=True)
        self._follower.start()

    # --- memory that peers read ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's, with the slots registered before it, and their address in the metadata."""
        for memory in (
            self._table,
            self._landing,
            self._first,
            *(() if self._digests is None else self._digests.memory),
        ):
            descs = self._agent.get_reg_descs([(memory.address, memory.size, 0, "")], "DRAM")
            self._agent.register_memory(descs, backends=self.nixl_backends)
            self._registered_descs.append(descs)
        super().register_kv_caches(kv_caches)
        stock = vars(self)["xfer_handshake_metadata"]
        told = msgspec.msgpack.decode(stock.agent_metadata_bytes)
        told[TABLE] = [self._table.address, SLOTS]
        if self._digests is not None:
            from blake3 import blake3  # noqa: PLC0415 - vLLM's own; BLAKE2 takes four times as long

            told[DIGESTS] = [self._digests.offered.address, self._digests.blocks]
            self._digests.begin(self._regions(), blake3)
        self.xfer_handshake_metadata = NixlHandshakePayload(
            compatibility_hash=stock.compatibility_hash, agent_metadata_bytes=msgspec.msgpack.encode(told)
        )

    def _regions(self) -> list[Region]:
        """The registered KV memory of this rank. Used on CPUs only (`served.refused`)."""
        parts = self._physical_blocks_per_logical_kv_block
        bases = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        blocks = self._logical_num_blocks * parts
        return [
            Region(view(base, (blocks - 1) * stride + length), stride, length, parts)
            for base, stride, length in zip(bases, self.block_stride_per_layer, self.block_len_per_layer, strict=True)
        ]

    def _look(self, agent: str, address: int, landing: int) -> Any:
        """Prepare a read of one slot."""
        here = self._agent.get_xfer_descs([(landing, SLOT_BYTES, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(address, SLOT_BYTES, 0)], "DRAM")
        return self._agent.initialize_xfer("READ", here, there, agent)

    # --- peers ---

    def meet(self, metadata: BatonMetadata) -> None:
        """Shake hands with introduced engines, in the background; forget engines that are gone. An engine that is
        introduced again is looked at again: its agent does so while the link is not well.
        """
        for met in metadata.introductions:
            for engine_id in [each.engine_id for each in self._introduced.values() if each.instance == met.instance]:
                if engine_id != met.engine_id:
                    self._forget(engine_id)
            self._introduced[met.engine_id] = met
            reads = self.kv_transfer_config.kv_role != "kv_producer"  # such an engine reads from no peer
            if reads and self._ensure_handshake(met.engine_id, met.instance, 0, met.ranks) is None:
                self._look_again(met.engine_id)
        for engine_id in metadata.forgotten:
            self._forget(engine_id)

    def _forget(self, engine_id: str) -> None:
        self._introduced.pop(engine_id, None)
        with self._handshake_lock:  # vLLM's `_cleanup_remote_engines`: its state goes once no read uses it
            for address in [each for each, name in self._engine_by_address.items() if name == engine_id]:
                del self._engine_by_address[address]

    def _look_again(self, engine_id: str) -> None:
        """The two have shaken hands before: report how the link stands, or try the first read once more, on the
        handshake thread. vLLM releases no peer while a handshake is under way.
        """
        if self._standing.get(engine_id) == MET:
            self._told.peers[engine_id] = MET
            return
        with self._handshake_lock:
            if engine_id in self._handshake_futures or engine_id not in self._remote_agents:
                return
            agents = dict(self._remote_agents[engine_id])
            future = self._handshake_initiation_executor.submit(self._try_links, engine_id, agents)
            self._handshake_futures[engine_id] = future
        future.add_done_callback(lambda _: self._handshake_futures.pop(engine_id, None))

    def _try_links(self, engine_id: str, agents: dict[tuple[int, int], str]) -> None:
        """Read a slot of each rank of a peer, and note how the link stands. On the handshake thread."""
        standing = MET
        for (_, rank), agent in agents.items():
            if not self._can_be_read(agent, self._tables[engine_id, rank][0]):
                standing = f"{MET}, and rank {rank} cannot be read"
                logger.warning("engine %s was introduced, and its rank %d cannot be read", engine_id, rank)
        self._standing[engine_id] = self._told.peers[engine_id] = standing

    def _ensure_handshake(self, engine_id: str, host: str, port: int, tp_size: int, *more: Any, **named: Any) -> Any:
        """vLLM's, but only for introduced engines: this engine never connects to an address in a request."""
        met = self._introduced.get(engine_id)
        instance, ranks = ("", 1) if met is None else (met.instance, met.ranks)
        return super()._ensure_handshake(engine_id, instance, 0, ranks)

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *more: Any, **named: Any
    ) -> tuple[dict[tuple[int, int], str], float]:
        """vLLM's, without its question over ZMQ. On the handshake thread.

        Raises:
            RuntimeError: the engine was not introduced, or is not compatible.
        """
        met = self._introduced.get(expected_engine_id)
        if met is None:
            raise NotServed(f"engine {expected_engine_id} was not introduced to this one")
        if not self.use_host_buffer:
            current_platform.set_device(self.device_id)
        payloads = {(each.stage, each.rank): each.data for each in met.payloads}
        agents: dict[tuple[int, int], str] = {}
        for rank in self.transfer_topo.handshake_target_ranks(met.ranks, 1):
            data = payloads.get((0, rank))
            if data is None:
                raise NotServed(f"{met.instance}: nothing is known of its rank {rank}")
            agents[0, rank] = self._add(met, rank, data)
        self._try_links(met.engine_id, agents)
        return agents, 0.0

    def _can_be_read(self, agent: str, address: int) -> bool:
        """Read a slot of a new peer, so that the connection exists and no request waits for it."""
        pauses = int(FIRST_READ_S / POLL_S)
        return try_to_read(
            self._agent, lambda: self._look(agent, address, self._first.address), lambda: time.sleep(POLL_S), pauses
        )

    def _add(self, met: Introduce, rank: int, data: bytes) -> str:
        handshake = msgspec.msgpack.decode(data, type=NixlHandshakePayload)
        if self.enforce_compat_hash and handshake.compatibility_hash != self.compat_hash:
            raise NotServed(
                f"{met.instance} serves another model, or with another vLLM, number type or attention backend "
                f"(its hash is {handshake.compatibility_hash}, ours {self.compat_hash})"
            )
        metadata = msgspec.msgpack.decode(handshake.agent_metadata_bytes, type=NixlAgentMetadata)
        if metadata.engine_id != met.engine_id:
            raise NotServed(f"{met.instance} was introduced as {met.engine_id} and is {metadata.engine_id}")
        self._validate_remote_parallel_config(metadata)
        told = msgspec.msgpack.decode(handshake.agent_metadata_bytes)
        match told.get(TABLE):
            case [int(address), int(slots)] if address > 0 and 0 < slots <= SLOTS_MAX:
                pass
            case _:
                raise NotServed(f"{met.instance} has no slots: it does not run Baton's connector")
        if self._digests is not None and not self._digests.meet(met.engine_id, rank, told.get(DIGESTS)):
            raise NotServed(f"{met.instance} does not vouch for its blocks: `digests` is on here and off there")
        agent: str = self.add_remote_agent(metadata, rank, met.ranks, metadata.dcp_size)
        self._tables[met.engine_id, rank] = (address, slots)
        return agent

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
        for key in [each for each in self._tables if each[0] == engine_id]:
            del self._tables[key]
        if self._digests is not None:
            self._digests.part(engine_id)
        self._standing.pop(engine_id, None)
        self._told.peers[engine_id] = "gone"

    # --- as D: reads ---

    def start_load_kv(self, metadata: BatonMetadata) -> None:
        """vLLM's, with what requests must find in the slots."""
        self._expected.update(metadata.expected)
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        """vLLM's; any problem is a failed load, and never an error of the engine's step."""
        engine_id = meta.remote.engine_id
        if not meta.awaiting_kvs and engine_id not in self._introduced and engine_id not in self._remote_agents:
            self._told.counts["not told"] += 1  # the hold's producer is unknown, so no notice can be sent
            self._expected.pop(req_id, None)
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
        if engine_id in self._remote_agents or req_id in self._recv_failures:
            self._expected.pop(req_id, None)

    def _read(self, req_id: str, meta: Any, expected: ExpectedHold) -> None:
        engine_id, slot = meta.remote.engine_id, expected.slot
        met = engine_id in self._remote_agents and engine_id not in self._invalid_remote_engines
        reads = meta.awaiting_kvs and any(meta.local_block_ids)
        remote = self._check(meta, expected) if met and reads else ()
        self._proof = "" if slot is None else slot.proof
        self._sources = []
        try:
            super()._read_blocks_for_req(req_id, meta)
        finally:
            self._proof = ""
            sources, self._sources = self._sources, []
        handles = self._recving_transfers.get(req_id)
        if handles and slot is not None and sources and req_id not in self._recv_failures:
            beside, wrong = self._compare(meta, expected, remote)
            self._reads.add(req_id, handles, sources, slot.mark, beside=beside, wrong=wrong)
            with self._work:
                self._work.notify()

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
        engine_id, slot = meta.remote.engine_id, expected.slot
        if slot is None:
            raise NotServed("nothing would confirm that the hold outlived our read")
        for rank in self.tp_mappings[engine_id].all_source_ranks:
            if slot.index >= self._tables.get((engine_id, rank), (0, 0))[1]:
                raise NotServed(f"rank {rank} of {engine_id} has no slot {slot.index}")
        info = self.transfer_topo.get_engine_info(engine_id)
        ratio = self._physical_blocks_per_logical_kv_block
        alike = info.remote_physical_blocks_per_logical == ratio and info.remote_block_size == self.block_size
        if self._digests is not None and (not alike or self.transfer_topo.tp_ratio(info.remote_tp_size) != 1):
            raise NotServed("its blocks are cut in another way, and their digests say nothing of ours")
        if not alike:
            return ()  # blocks of two sizes: vLLM's own rules, whose asserts end in a failed load
        meta.remote.block_ids = self._aligned(meta, self.dst_num_blocks[engine_id] // ratio)
        return list(meta.remote.block_ids[0])

    def _aligned(self, meta: Any, blocks_max: int) -> tuple[list[int], ...]:
        """P's blocks for this prompt, from its first on: vLLM takes the needed number from the *end* of P's list."""
        groups = []
        for group, local, cached in zip(
            meta.remote.block_ids, meta.local_block_ids, meta.local_num_computed_blocks, strict=True
        ):
            needed = list(group)[: cached + len(local)]
            if len(needed) < cached + len(local):
                raise NotServed(f"{len(needed)} blocks are held, and {cached + len(local)} would be read")
            if not all(0 <= block < blocks_max for block in needed):
                raise NotServed("a block is named that there is not")
            groups.append(needed)
        return tuple(groups)

    def _read_blocks(self, **fields: Any) -> bool:
        """vLLM's; the notice of having read is kept until the slot has been read."""
        self.nixl_wrapper.kept.clear()
        posted: bool = super()._read_blocks(**fields)
        engine_id, rank = fields["dst_engine_id"], fields["read_spec"].remote_rank
        for note in self.nixl_wrapper.kept:
            slot = self._expected[fields["request_id"]].slot
            assert slot is not None, "checked before anything was read"
            address = self._tables[engine_id, rank][0] + slot.index * SLOT_BYTES
            self._sources.append(RankSource(self._remote_agents[engine_id][0, rank], address, self._prove(note)))
        self.nixl_wrapper.kept.clear()
        return posted

    def _prove(self, note: bytes) -> bytes:
        return with_proof(note, self._proof) if self._proof else note

    def _follow(self) -> None:
        """The thread that follows reads: they end, and are confirmed, while the engine computes other requests."""
        device_set = False
        while not self._over.is_set():
            with self._work:
                while not len(self._reads) and not self._over.is_set():
                    self._work.wait()
            if not device_set:
                current_platform.set_device(self.device_id)
                device_set = True
            if self._reads.step():
                time.sleep(POLL_S)

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """vLLM's for the transfers that it follows itself; Baton's for those of the following thread."""
        ours = {name: transfers.pop(name) for name in list(transfers) if self._reads.under_way(name)}
        done, failed = super()._pop_done_transfers(transfers)
        for request, handles in ours.items():
            outcome = self._reads.take(request)
            if outcome is None:
                transfers[request] = handles  # vLLM counts it as under way
                continue
            for each in outcome.telemetry:
                self.xfer_stats.record_transfer(each)
            for _ in range(outcome.notes_lost):
                self.xfer_stats.record_failed_notification()
            done.add(request)
            self._told.counts["confirmed" if outcome.good else outcome.because] += 1
            self._told.ended[request] = outcome.because
            if not outcome.good:
                logger.warning("%s is computed here: %s", request, outcome.because)
                failed.add(request)
                self._handle_failed_transfer(request, None, None, record_failed_transfer=outcome.broken)
        return done, failed

    # --- as P: holds ---

    def step(self, metadata: BatonMetadata) -> None:
        """Before a step computes anything: apply the scheduler half's orders about holds."""
        self._leases.step(metadata.orders, time.perf_counter())

    def _write(self, index: int, content: bytes) -> None:
        self._table.view[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = content

    def vouch(self, metadata: BatonMetadata) -> None:
        """After a step: the prompts that it completed are computed, and their answers are not sent yet. Write their
        digests.
        """
        if self._digests is None or not metadata.vouched:
            return
        try:
            self._digests.vouch(metadata.vouched)
        except Exception:  # raising would end the engine; a consumer computes prompts without digests itself
            logger.exception("%d prompts are not vouched for", len(metadata.vouched))
            self._told.counts["not vouched for"] += 1

    def get_transfer_results(self) -> Any:
        """vLLM's. A hold's slot is cleared before its end is reported, and its blocks are freed only after that."""
        results = super().get_transfer_results()
        for request in self._leases.expire(time.perf_counter()):
            self.xfer_stats.record_kv_expired_req()
            logger.warning("%s: no consumer has read its blocks before the lease ended", request)
        results.finished_sending.update(self._leases.take_reports())
        for request in results.finished_recving:
            self._expected.pop(request, None)  # a request whose handshake has failed is still here
        return results

    def _get_new_notifs(self) -> set[str]:
        """The consumers' notices. In vLLM's own connector, a notice that it does not understand ends the engine."""
        for agent, notes in self._agent.get_new_notifs().items():
            for note in notes:
                self._leases.heard(agent, parse(note), time.perf_counter())
        return set()  # ended holds are reported once leases were checked, too

    # --- reports ---

    def tell(self) -> WorkerReport | None:
        """The report since the last one."""
        self._told.counts.update(self._leases.counts)
        self._leases.counts.clear()
        if not self._told:
            return None
        told, self._told = self._told, WorkerReport(Counter(), {}, {})
        return told

    def shutdown(self) -> None:
        """Called when the engine ends."""
        if hasattr(self, "_work"):
            self._over.set()
            with self._work:
                self._work.notify()
            self._follower.join(timeout=1.0)
        super().shutdown()
