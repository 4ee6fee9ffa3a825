"""What vLLM's offloading lacks for Baton: a fence against pulls, copies on CPUs, a bound for its files, and no shared
memory left behind.

Runs inside vLLM's process. vLLM imports its classes by name (`engine.vllm.tiers.beside`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingWorker,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from engine.vllm.connector.registered import register
from engine.vllm.kept_files import KeptFiles
from engine.vllm.tier_gauge import KV_BYTES


class BatonOffloading(OffloadingConnector):  # type: ignore[misc]
    """vLLM's offloading beside a connector that writes into KV blocks: a pull waits until the blocks' former content is
    copied.

    vLLM may copy a request's blocks after they are freed. It ends such a copy before a step computes into the blocks,
    or the tier itself loads into them (``OffloadingConnectorScheduler._current_batch_allocated_block_ids``). Blocks
    that another connector pulls into are in neither group until the pull has ended. So the copy would store the pulled
    prompt's bytes under the former prompt's hash.
    """

    brought = ""
    """The request whose tokens the other connector brings, as it has just said."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's, but for a prompt that is pulled. vLLM asks every connector and takes the first that has tokens, so
        this one would load the prompt from disk for nothing, and the pull would wait for it.
        """
        brought, self.brought = self.brought, ""
        if brought != request.request_id:
            found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return found
        return self.connector_scheduler.get_num_new_matched_tokens(  # type: ignore[no-any-return]
            request, num_computed_tokens, max_num_new_tokens=0
        )

    def tokens_below(self, request: Any, cached: int) -> int | None:
        """How many of a prompt's tokens the tiers have beyond the `cached` ones that are in the KV cache. None: they
        look for them, and know it at a later step.
        """
        found: int | None = self.get_num_new_matched_tokens(request, cached)[0]
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Fence the blocks that a request was given, before the step's copies are chosen. Blocks with a hash are
        shared, so nothing is written into them.
        """
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.scheduler._current_batch_allocated_block_ids.update(  # noqa: SLF001 - as vLLM does for its own loads
            each.block_id for group in blocks.blocks for each in group if not each.is_null and each.block_hash is None
        )


register(BatonOffloading)


class BatonTiers(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiers in host memory and below, also where the KV cache itself is in host memory."""

    _worker: Any

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """vLLM's, and the bytes of one token's KV."""
        said = "Bytes of one token's KV: what one worker moves of it, and what all workers have of it together."
        made = OffloadingGaugeMetadata(documentation=said, labelnames=("of",))
        return {**super().build_metric_definitions(extra_config), KV_BYTES: made}

    def get_manager(self) -> Any:
        """The scheduler's half. It maps the shared region after every rank has, so the region's name is removed then:
        the kernel frees the memory with the last process, however that ends.
        """
        if self._manager is None:
            made = super().get_manager()
            made.get_stats = self._with_token_bytes(made.get_stats)
        manager = super().get_manager()
        region = self._scheduler_mmap
        if region is not None:
            with contextlib.suppress(FileNotFoundError):
                Path(region.mmap_path).unlink()
        return manager

    def _with_token_bytes(self, stats: Callable[[], Any]) -> Callable[[], Any]:
        """The manager's statistics, with the bytes of one token's KV: rates by bytes need them (`TierSpeeds`). A group
        of layers has blocks of its own, each as large as any other group's.
        """
        blocks = sum(1 / tokens for tokens in self.tokens_per_block)
        mine = self.cpu_page_size_per_worker / self.blocks_per_chunk * blocks
        whole = mine if self.replicated_layout else mine * self.config.parallel.world_size

        def told() -> Any:
            found = stats()
            if found is not None:
                found.set_gauge(KV_BYTES, mine, ("worker",))
                found.set_gauge(KV_BYTES, whole, ("all",))
            return found

        return told

    def get_worker(self, kv_caches: Any) -> Any:
        """A rank's half; on CPUs Baton's, because vLLM's own needs a GPU."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        made: Any = self._worker
        if made is None:
            made = self._worker = self._copies(kv_caches)
        return made

    def _copies(self, kv_caches: Any) -> HostCopies:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: PLC0415

        if self.blocks_per_chunk != 1 or self.config.canonical_layout:
            raise RuntimeError("On CPUs a tier moves single blocks: leave `blocks_per_chunk`, `canonical_layout` out")
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(region.cleanup)
            made = HostCopies(kv_caches, region)
            unless_made.pop_all()
        return made


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between a KV cache in host memory and the tier's region, at once.

    On a CPU a step's forward pass is over when vLLM asks for a copy, so nothing has to be waited for.
    """

    def __init__(self, kv_caches: Any, region: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: seconds, for the time that a copy takes."""
        self._region = region
        self._clock: Final = clock
        self._groups: Final = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self._pages: Final = [
            (each.tensor.view(torch.int8).view(-1, each.page_size_bytes),
             region.create_next_worker_view(each.page_size_bytes))
            for each in kv_caches.tensors
        ]  # fmt: skip
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the KV cache to the tier."""
        return self._copy(job_id, src_spec, dst_spec, load=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the tier to the KV cache."""
        return self._copy(job_id, dst_spec, src_spec, load=True)

    def _copy(self, job_id: int, cache_spec: Any, tier_spec: Any, *, load: bool) -> bool:
        moved, began = 0, self._clock()
        for tensors, cache, tier in self._moves(cache_spec, tier_spec):
            for index in tensors:
                cached, kept = self._pages[index]
                if load:
                    cached[cache] = kept[tier]
                else:
                    kept[tier] = cached[cache]
                moved += len(cache) * cached.shape[1]
        took_s = self._clock() - began
        self._done.append(TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=took_s))
        return True

    def _moves(self, cache: Any, tier: Any) -> Iterable[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """By group of layers: its tensors, the blocks in the cache, and those in the tier, in the same order."""
        assert len(cache.block_ids) == len(tier.block_ids) == sum(cache.group_sizes)
        begin = 0
        for tensors, count in zip(self._groups, cache.group_sizes, strict=True):
            if count:
                ids = (each.block_ids[begin : begin + count].astype(np.int64) for each in (cache, tier))
                here, there = (torch.from_numpy(each) for each in ids)
                yield tensors, here, there
            begin += count

    def get_finished(self) -> list[TransferResult]:
        """The copies that have ended since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a copy is over when it has been submitted."""

    def shutdown(self) -> None:
        """Release the shared region."""
        self._pages.clear()
        self._region.cleanup()


def _in_few_folders(mapper: Any, key: Any) -> str:
    """The path of a block's file, in one of 256 folders. vLLM's own has a million folders, which it never removes: each
    takes a disk's block, so a bound of the files would be none of the disk's.
    """
    name = get_offload_block_hash(key).hex()
    return f"{mapper.base_path}_r{mapper.rank}/{name[:2]}/{name}_g{get_offload_group_idx(key)}.bin"


class BoundedFiles(FileSystemTierManager):  # type: ignore[misc]
    """vLLM's tier of files, with a bound: files used longest ago are removed. vLLM's own grows without a bound. Each
    data parallel rank has a folder of its own, so it removes no other rank's files.

    Its folder belongs to this start of the engine, so the tier knows which files there are. vLLM's own asks the file
    system, on another thread, and a prompt waits a step of the engine for the answer.
    """

    def __init__(self, offloading_spec: Any, *args: Any, limit_bytes: int, root_dir: str, **more: Any) -> None:
        folder = Path(root_dir) / f"rank{offloading_spec.config.parallel.data_parallel_index}"
        super().__init__(offloading_spec, *args, root_dir=str(folder), **more)
        self.file_mapper.get_file_name = partial(_in_few_folders, self.file_mapper)
        self._kept: Final = KeptFiles(max(1, limit_bytes // self._block_size))
        self._writing: Final[dict[Any, tuple[Any, ...]]] = {}
        self._reading: Final[dict[Any, tuple[Any, ...]]] = {}
        """The blocks of the jobs under way, by job."""

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Whether a block's file is there. A file that is asked for counts as used now."""
        if key not in self._kept:
            return LookupResult.MISS
        self._kept.used(key)
        return LookupResult.HIT

    def on_request_finished(self, req_context: Any) -> None:
        """All of the request's blocks count as used now, the prompt's end first. vLLM asks this tier only for blocks
        that no tier above has, so that the files of a prompt that is always found there would grow old.
        """
        super().on_request_finished(req_context)
        ends = getattr(req_context, "_offload_key_positions", {})  # vLLM tells keys one by one, and this tier not all
        for key in sorted(ends, key=ends.__getitem__, reverse=True):
            self._kept.used(key)

    def submit_store(self, job_metadata: Any) -> None:
        """Write blocks, and remove the files that are then too many."""
        keys = self._writing[job_metadata.job_id] = tuple(job_metadata.keys)
        gone = self._kept.added(keys)
        super().submit_store(job_metadata)
        self._remove(gone, told=gone)

    def submit_load(self, job_metadata: Any) -> None:
        """Read blocks."""
        self._reading[job_metadata.job_id] = tuple(job_metadata.keys)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Any:
        """The jobs that have ended. Files that are written may be removed from now on; those that could not be written
        or read are not there.
        """
        results = list(super().get_finished_jobs())
        for each in results:
            written, read = self._writing.pop(each.job_id, ()), self._reading.pop(each.job_id, ())
            self._kept.written(written)
            if not each.success:
                lost = self._kept.lost(set(written + read).difference(each.successful_keys or ()))
                self._remove(lost, told=set(read).intersection(lost))  # no event has said that the others are there
        return results

    def _remove(self, keys: Iterable[Any], *, told: Collection[Any]) -> None:
        """Remove files. `told`: those of which KV events have said that they are there."""
        for key in keys:
            with contextlib.suppress(OSError):
                Path(self.file_mapper.get_file_name(key)).unlink()
        if told and self.events is not None:
            self.events.append(
                OffloadingEvent(keys=list(told), medium=self.medium, removed=True, locality=self.locality)
            )
