"""Moving KV: bytes, paths, shares."""

import pytest

from costs import shipped
from costs.hardware import Dtype, gpu_named
from costs.shape import Spans
from costs.transfer import Link, copies, handoff, nic, paths, whole_blocks

LLAMA = shipped.model_named("meta-llama/Llama-3.1-8B")
DEEPSEEK = shipped.model_named("deepseek-ai/DeepSeek-V3")
LINK = Link(latency_ms=0.02, gb_s=25.0)


def test_bytes_are_those_of_whole_blocks() -> None:
    assert [whole_blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 16, 16, 32]
    moved = handoff(LLAMA, 1000, Spans(), Spans())
    assert moved.size_bytes == 1008 * 131_072
    assert handoff(LLAMA, 1000, Spans(), Spans(), kv_dtype=Dtype.FP8).size_bytes == 1008 * 65_536
    assert handoff(LLAMA, 1000, Spans(), Spans(), block_tokens=128).size_bytes == 1024 * 131_072


def test_time_is_latency_and_bytes_over_bandwidth() -> None:
    assert LINK.ms(25e6) == pytest.approx(0.02 + 1.0)
    assert LINK.ms(25e6, sharers=4) == pytest.approx(0.02 + 4.0), "a fair share each"
    assert LINK.ms(25e6, paths=4) == pytest.approx(0.02 + 0.25)
    assert LINK.ms(0) == 0


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [(1, 1, 1), (2, 2, 2), (2, 4, 2), (4, 2, 2), (8, 8, 8), (16, 16, 8)],
)
def test_the_narrower_side_bounds_the_paths(source: int, target: int, count: int) -> None:
    assert paths(LLAMA, Spans(tp=source), Spans(tp=target)) == count


def test_heads_fewer_than_ranks_are_sent_twice() -> None:
    assert copies(LLAMA, Spans(tp=8)) == 1
    assert copies(LLAMA, Spans(tp=16)) == 2


def test_latents_go_to_every_rank() -> None:
    moved = handoff(DEEPSEEK, 1600, Spans(tp=8), Spans(tp=4))
    assert moved.size_bytes == 4 * 1600 * DEEPSEEK.kv_bytes_per_token()
    assert moved.paths == 4


def test_stages_move_their_own_layers() -> None:
    assert paths(LLAMA, Spans(tp=2, pp=2), Spans(tp=2, pp=2)) == 4
    assert paths(LLAMA, Spans(tp=2, pp=2), Spans(tp=2)) == 2


def test_the_slower_nic_counts() -> None:
    assert nic(gpu_named("A100"), gpu_named("H100")).gb_s == nic(gpu_named("A100"), gpu_named("A100")).gb_s
    assert nic(gpu_named("H100"), gpu_named("H100")).gb_s == pytest.approx(35.9, rel=0.01), "as vidur measured"
