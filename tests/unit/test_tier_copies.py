"""Copies between a KV cache and a tier, both in host memory: exact, timed, and made only where they are used."""

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

    from engine.vllm.connector.tiers import BatonOffloading, HostCopies, _in_few_folders


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


class Looked:
    """The scheduler half of vLLM's offloading: it notes how many tokens it may look for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None]] = []

    def get_num_new_matched_tokens(
        self, request: SimpleNamespace, _computed: int, max_num_new_tokens: int | None = None
    ) -> tuple[int, bool]:
        self.asked.append((request.request_id, max_num_new_tokens))
        found = 64 if max_num_new_tokens is None else max_num_new_tokens
        return found, found > 0


def test_tiers_look_for_nothing_of_a_prompt_that_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such prompt was loaded from disk, and its pull waited for that."""
    monkeypatch.setattr(BatonOffloading, "_max_loadable_tokens", lambda *_: None)
    tiers = object.__new__(BatonOffloading)
    looked = tiers.connector_scheduler = Looked()
    pulled, other = (SimpleNamespace(request_id=name) for name in ("pulled", "other"))
    tiers.brought = "pulled"
    assert tiers.get_num_new_matched_tokens(pulled, 0) == (0, False)
    assert tiers.get_num_new_matched_tokens(other, 0) == (64, True)
    assert tiers.get_num_new_matched_tokens(pulled, 0) == (64, True), "asked again, after the pull came to nothing"
    tiers.brought = "pulled"
    assert tiers.get_num_new_matched_tokens(other, 0) == (64, True)
    assert looked.asked == [("pulled", 0), ("other", None), ("pulled", None), ("other", None)]
