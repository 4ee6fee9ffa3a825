"""KV capacity and vLLM's defaults."""

import pytest

from costs import shipped
from costs.hardware import Dtype, gpu_named
from costs.memory import activation_bytes, batched_tokens_default, kv_bytes_free, kv_capacity_tokens
from costs.shape import ONE_GPU, Spans

LLAMA = shipped.model_named("meta-llama/Llama-3.1-8B")


def test_capacity_is_what_the_weights_leave() -> None:
    """79.6 GiB × 0.92, less 15 GiB of weights and about 2 GiB, leaves about 56 GiB, at 128 KiB a token."""
    tokens = kv_capacity_tokens(LLAMA, gpu_named("H100"), ONE_GPU)
    assert tokens % 16 == 0
    assert tokens * 131_072 / 2**30 == pytest.approx(56, rel=0.03)
    assert kv_capacity_tokens(LLAMA, gpu_named("H100"), ONE_GPU, kv_dtype=Dtype.FP8) == pytest.approx(
        2 * tokens, rel=0.001
    )


def test_two_gpus_hold_more_than_twice_as_much() -> None:
    one = kv_capacity_tokens(LLAMA, gpu_named("RTX-4090"), ONE_GPU)
    assert kv_capacity_tokens(LLAMA, gpu_named("RTX-4090"), Spans(tp=2)) > 2 * one


def test_no_room_is_no_tokens() -> None:
    large = shipped.model_named("meta-llama/Llama-3.1-405B")
    assert kv_bytes_free(large, gpu_named("H200"), Spans(tp=4)) == 0
    assert kv_capacity_tokens(large, gpu_named("H200"), Spans(tp=4)) == 0
    assert kv_capacity_tokens(large, gpu_named("H200"), Spans(tp=8)) > 300_000


@pytest.mark.parametrize(
    ("gpu", "tokens"),
    [("B200", 16384), ("H100", 8192), ("H200", 8192), ("A100", 2048), ("L40S", 2048), ("RTX-PRO-6000", 8192)],
)
def test_vllms_defaults(gpu: str, tokens: int) -> None:
    assert batched_tokens_default(gpu_named(gpu)) == tokens


def test_larger_steps_need_more_room() -> None:
    few, many = (activation_bytes(LLAMA, ONE_GPU, tokens) for tokens in (2048, 16384))
    assert 0.3e9 < few < 1.2e9 < many < 4e9
    mixture = shipped.model_named("Qwen/Qwen3-30B-A3B")
    assert activation_bytes(mixture, ONE_GPU, 8192) > 0
