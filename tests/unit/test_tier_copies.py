"""Copies between a KV cache and a tier, both in host memory: they are exact, and timed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="make setup installs torch")
pytest.importorskip("vllm", reason="make setup installs vLLM")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own deprecations as it is imported
    import numpy as np
    import torch
    from vllm.v1.kv_offload.base import make_offload_key

    from engine.vllm.connector.tiers import HostCopies, _in_few_folders


def test_a_copy_is_exact_and_says_how_long_it_took() -> None:
    """Three blocks of two layers, 64 bytes each. vLLM counts what `TransferResult` says."""
    layers = [SimpleNamespace(tensor=torch.full((8, 64), at, dtype=torch.int8), page_size_bytes=64) for at in (1, 2)]
    caches = SimpleNamespace(group_data_refs=[[SimpleNamespace(tensor_idx=at) for at in (0, 1)]], tensors=layers)
    region = SimpleNamespace(create_next_worker_view=lambda size: torch.zeros((8, size), dtype=torch.int8))
    ticks = iter([10.0, 10.5, 20.0, 22.0])
    copies = HostCopies(caches, region, clock=lambda: next(ticks))
    cache = SimpleNamespace(block_ids=np.array([0, 1, 2]), group_sizes=[3])
    tier = SimpleNamespace(block_ids=np.array([5, 6, 7]))
    copies.submit_store(1, cache, tier)
    for layer in layers:
        layer.tensor[:] = 0
    copies.submit_load(2, tier, cache)
    stored, loaded = copies.get_finished()
    assert (stored.job_id, stored.transfer_size, stored.transfer_time) == (1, 3 * 2 * 64, 0.5)
    assert (loaded.job_id, loaded.transfer_size, loaded.transfer_time) == (2, 3 * 2 * 64, 2.0)
    assert [layer.tensor[:, 0].tolist() for layer in layers] == [[at] * 3 + [0] * 5 for at in (1, 2)]
    assert copies.get_finished() == []


def test_files_of_blocks_are_in_few_folders_and_all_differ() -> None:
    """Folders stay when their files are removed, so there must be few of them whatever is stored."""
    mapper = SimpleNamespace(base_path="/tier/m_1", rank=0)
    keys = [make_offload_key(number.to_bytes(32, "big"), group) for number in range(2000) for group in (0, 1)]
    keys += [make_offload_key(number.to_bytes(32, "little"), 0) for number in range(1, 2000)]
    paths = [_in_few_folders(mapper, key) for key in keys]
    assert len(set(paths)) == len(keys)
    assert len({path.rpartition("/")[0] for path in paths}) <= 256
    assert all(path.startswith("/tier/m_1_r0/") and path.endswith(".bin") for path in paths)
