"""A tier gets a prompt's own bytes: a pull does not write into blocks that the tier still copies.

The tests run vLLM's own scheduler with Baton's connector and a tier beside it, without an engine. The test plays the
workers.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from support import device

from engine.tiny import model_path
from engine.vllm.tiers import Tiers, beside
from kvtransfer.hold_marks import FIELD, Slot

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of libraries that vLLM imports
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup"),
]

BLOCK, BLOCKS = 16, 8
"""Tokens in a block, and blocks; vLLM keeps one of them for itself."""
OWN = {
    "kv_connector": "BatonConnector",
    "kv_connector_module_path": "engine.vllm.connector.facade",
    "kv_role": "kv_both",
    "kv_buffer_device": "cuda" if device.gpus() else "cpu",
    "kv_load_failure_policy": "recompute",
}


class Engine:
    """vLLM's scheduler. The test plays its workers: `step` reports that all scheduled tokens are computed."""

    def __init__(self) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            model=str(model_path()),
            block_size=BLOCK,
            max_model_len=BLOCK * (BLOCKS - 1),
            enforce_eager=True,
            async_scheduling=False,
            kv_transfer_config=beside(OWN, Tiers(host_bytes=8 << 20)),  # type: ignore[arg-type]
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        kind: Any = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        page = kind.page_size_bytes
        memory = KVCacheTensor(size=BLOCKS * page, layers=["0"], layer_stride=BLOCKS * page, block_stride=page)
        cache = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[memory], kv_cache_groups=[KVCacheGroupSpec(["0"], kind)]
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler: Any = Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        pulls, tier = self.scheduler.connector.sub_connectors
        self.peers, self.tier = pulls.connector_scheduler._pulls.peers, tier.connector_scheduler
        self.peers.met("engine of p", "p", 0.0)

    def asks(self, name: str, prompt: list[int], tokens: int, fields: dict[str, Any] | None = None) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args={"kv_transfer_params": fields})
        sampling.update_from_generation_config({}, None)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))

    def step(self) -> tuple[Any, Any]:
        """Run one step. Return the metadata for the workers of Baton's connector and of the tier."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        done = [each.num_computed_tokens >= each.num_tokens for each in requests]  # scheduled tokens count as computed
        tokens = [[7] if each else [] for each in done]
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens)
        )
        first, second = output.kv_connector_metadata.metadata
        return first, second

    def copied(self) -> dict[int, set[int]]:
        """The blocks that the tier still copies, by its job."""
        return {job: set(each.deferred_fence_block_ids or ()) for job, each in self.tier._jobs.items() if each.is_store}


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.scheduler.shutdown()


def held(prompt: list[int]) -> dict[str, Any]:
    """The fields of a hold of the whole prompt."""
    blocks = -(-len(prompt) // BLOCK)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine of p",
        "remote_request_id": "r",
        "remote_block_ids": [list(range(1, blocks + 1))],
        "remote_num_tokens": len(prompt),
        "remote_host": "p",
        "remote_port": 0,
        "tp_size": 1,
        FIELD: Slot(1, bytes(range(1, 17))).field(),
    }


@pytest.mark.parametrize("late", [False, True])
def test_a_pull_waits_for_copies_of_the_blocks_that_it_is_given(engine: Engine, *, late: bool) -> None:
    """The pull has room only after the other request has ended. The tier's copy of that request's blocks began before,
    and still runs, as on GPUs. Where the tier had no room (`late`), the copy begins only in the step of the pull.
    """
    if late:
        store, running = engine.tier.manager.prepare_store, engine.scheduler.requests
        engine.tier.manager.prepare_store = lambda *more: None if "a" in running else store(*more)
    pulled = list(range(1000, 1000 + BLOCK * (BLOCKS - 2)))
    engine.asks("a", list(range(BLOCK * (BLOCKS - 2))), 2)
    engine.asks("b", pulled, 4, held(pulled))
    for steps in itertools.count(1):
        ours, theirs = engine.step()
        if ours.reqs_to_recv:
            break
        assert steps < 5
    into = set(ours.reqs_to_recv["b"].local_block_ids[0])
    copies = {job for job, blocks in engine.copied().items() if blocks & into}
    assert copies, "the tier copies blocks that are read into"
    assert copies <= theirs.jobs_to_flush
    assert late == bool(copies & set(theirs.store_jobs)), "a worker makes these copies before it starts a load"


def test_shared_blocks_are_not_waited_for(engine: Engine) -> None:
    """A pull does not write into blocks that the cache already has."""
    shared = list(range(BLOCK * 2))
    engine.asks("a", [*shared, 1], 1)
    engine.step()
    pulled = [*shared, *range(1000, 1000 + BLOCK * 2)]
    engine.asks("b", pulled, 4, held(pulled))
    ours, theirs = engine.step()
    assert len(ours.reqs_to_recv["b"].local_block_ids[0]) == 2
    assert engine.copied() and not theirs.jobs_to_flush
