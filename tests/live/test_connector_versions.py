"""What our connector refuses, and what it leaves to vLLM's own: with vLLM's own classes, without an engine."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of libraries that vLLM imports
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup"),
]


@pytest.mark.parametrize(
    ("version", "wire", "fits"),
    [("0.32.0", 14, True), ("0.32.0+cpu", 14, True), ("0.32.7", 14, True), ("0.33.0", 14, False), ("0.31.2", 14, False),
     ("0.320.0", 14, False), ("0.32.0", 15, False)],
)  # fmt: skip
def test_another_vllm_is_refused_with_a_way_out(
    version: str, wire: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtransfer import vllm_connector as c

    monkeypatch.setattr(c.vllm, "__version__", version)
    monkeypatch.setattr(c, "NIXL_CONNECTOR_VERSION", wire)
    if fits:
        c.check_version()
    else:
        with pytest.raises(RuntimeError, match="connector: nixl"):
            c.check_version()


def config(*, extra: dict[str, Any] | None = None, lookahead: int = 0, **parallel: int) -> Any:
    sizes = {"pipeline_parallel_size": 1, "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
    transfer = SimpleNamespace(kv_buffer_device="cpu", get_from_extra_config=(extra or {}).get)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | parallel),
        kv_transfer_config=transfer,
        num_prefill_lookahead_tokens=lookahead,
    )


@pytest.mark.parametrize(
    ("asked", "device", "wrong"),
    [(True, "cpu", None), (False, "cuda", None), (True, "cuda", "host memory"), ("yes", "cpu", "true or false")],
)
def test_digests_are_refused_where_they_cannot_be_made(asked: Any, device: str, wrong: str | None) -> None:
    from kvtransfer.vllm_connector import check_digests

    if wrong is None:
        check_digests(config(extra={"digests": asked}), device)
    else:
        with pytest.raises(RuntimeError, match=wrong):
            check_digests(config(extra={"digests": asked}), device)


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=each) for each in specs])


def test_what_is_not_served_is_left_to_vllm_with_a_reason() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from kvtransfer.vllm_connector import not_served

    size: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full, sliding = FullAttentionSpec(**size), SlidingWindowSpec(**size, sliding_window=64)
    assert not_served(config(), caches(full)) is None
    for why, asked, kinds in (
        ("kinds of KV cache", config(), caches(full, sliding)),
        ("kinds of KV cache", config(), caches(sliding)),
        ("pipeline", config(pipeline_parallel_size=2), caches(full)),
        ("context", config(decode_context_parallel_size=2), caches(full)),
        ("speculative", config(lookahead=2), caches(full)),
        ("bidirectional", config(extra={"bidirectional_kv_xfer": True}), caches(full)),
    ):
        assert why in (not_served(asked, kinds) or "")
