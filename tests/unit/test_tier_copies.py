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

    from engine.vllm.connector.tiers import HostCopies


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
