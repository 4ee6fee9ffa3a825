"""Which files of a tier on disk are kept below a tier in host memory, with vLLM's own managers of both."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="make setup installs torch")
pytest.importorskip("vllm", reason="make setup installs vLLM")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own deprecations as it is imported
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

    from engine.vllm.connector.tiers import BoundedFiles

HOST_CHUNKS = 64
CHUNK_BYTES = 4096
STEP_END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class TwoTiers:
    """A tier in host memory, with room for all that a test stores, above a tier of `files_max` files."""

    def __init__(self, folder: Path, files_max: int) -> None:
        parallel = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "rank": 0, "data_parallel_index": 0}
        config = SimpleNamespace(
            groups=[], parallel=SimpleNamespace(**parallel, is_parallelism_agnostic=True), canonical_layout=False,
            replicated_layout=False, model=SimpleNamespace(name="m", dtype="half"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )  # fmt: skip
        spec = SimpleNamespace(config=config, blocks_per_chunk=1)
        pages = mmap.mmap(-1, HOST_CHUNKS * CHUNK_BYTES)  # vLLM may write past the page cache, from whole pages
        view = memoryview(pages).cast("b", (HOST_CHUNKS, CHUNK_BYTES))
        region: Any = SimpleNamespace(create_kv_memoryview=lambda: view, cleanup=lambda: None)
        self.files = BoundedFiles(
            spec, view, "BoundedFiles", limit_bytes=files_max * CHUNK_BYTES, root_dir=str(folder), n_read_threads=1,
            n_write_threads=1,
        )  # fmt: skip
        self.manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(HOST_CHUNKS, region), [self.files])
        self._asked = 0

    def ask(self, keys: list[Any], *, step_chunks: int = 100, in_gpu: bool = False) -> int:
        """A request for these chunks, `step_chunks` of them computed in a step. Returns how many are found in host
        memory. `in_gpu`: the KV cache has all of them, and vLLM asks no tier.
        """
        self._asked += 1
        context, found = ReqContext(req_id=str(self._asked)), 0
        self.manager.on_new_request(context)
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (number + 1))
        while not in_gpu and found < len(keys) and self._host_has(keys[found], context):
            found += 1
        if found:
            self.manager.prepare_load(keys[:found], context)
            self.manager.complete_load(keys[:found], context)
        for begin in range(0, len(keys), step_chunks):
            stored = self.manager.prepare_store(keys[begin : begin + step_chunks], context)
            assert stored is not None
            if stored.keys_to_store:
                self.manager.complete_store(stored.keys_to_store, context)
            self._step()
        self.manager.on_request_finished(context)
        return found

    def _host_has(self, key: Any, context: ReqContext) -> bool:
        return self.manager.lookup(key, context) is LookupResult.HIT

    def _step(self) -> None:
        """The step ends. The next step, which has no work, learns that what this one writes is written."""
        self.manager.on_schedule_end(STEP_END)
        self.files.drain_jobs()
        self.manager.on_schedule_end(STEP_END)

    def kept(self, keys: Iterable[Any]) -> str:
        """For each chunk whether its file is there."""
        for key in keys:
            assert Path(self.files.file_mapper.get_file_name(key)).exists() == (key in self.files._kept)
        return "".join("x" if key in self.files._kept else "-" for key in keys)

    def close(self) -> None:
        self.manager.shutdown()


def chunks(name: str, count: int = 4) -> list[Any]:
    return [make_offload_key(f"{name}{number}".encode().ljust(32), 0) for number in range(count)]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterable[TwoTiers]:
    made = TwoTiers(tmp_path, files_max=10)
    yield made
    made.close()


@pytest.mark.parametrize("in_gpu", [False, True])
def test_a_prompt_that_is_found_above_keeps_its_files(tiers: TwoTiers, in_gpu: bool) -> None:
    """vLLM asks the disk only for what host memory lacks."""
    known = chunks("a")
    tiers.ask(known)
    for other in "bcdef":
        tiers.ask(chunks(other))
        assert tiers.ask(known, in_gpu=in_gpu) == (0 if in_gpu else 4)
    assert tiers.kept(known) == "xxxx" and tiers.kept(chunks("b")) == "----" and tiers.kept(chunks("f")) == "xxxx"


@pytest.mark.parametrize("step_chunks", [1, 3, 100])
def test_a_prompts_end_goes_before_its_beginning(tiers: TwoTiers, step_chunks: int) -> None:
    """A file without those before it is of no use."""
    for each in "abc":
        tiers.ask(chunks(each), step_chunks=step_chunks)
    assert [tiers.kept(chunks(each)) for each in "abc"] == ["xx--", "xxxx", "xxxx"]
