"""`make bench-load`: what the engine itself says of the requests of one round."""

from __future__ import annotations

import pytest

from bench.load import Counted
from bench.processes import Failed
from engine.mock.metrics import Metrics


def counted(*first_tokens_s: float, cached: int = 0) -> Counted:
    metrics = Metrics("m")
    for each in first_tokens_s:
        metrics.observe("time_to_first_token_seconds", each)
    metrics.counts["prefix_cache_hits"] = cached
    lines = []
    for name, histogram in metrics.histograms.items():
        lines += histogram.lines(f"vllm:{name}", 'engine="0"')
    return Counted.of("\n".join([*lines, f'vllm:prefix_cache_hits_total{{engine="0"}} {float(cached)}']))


def test_only_the_round_s_own_requests_count() -> None:
    assert counted(9.0, 0.02, 0.04).first_token_ms(counted(9.0)) == pytest.approx(30.0)


def test_a_round_that_cannot_be_compared_ends_the_benchmark() -> None:
    with pytest.raises(Failed, match="no first token"):
        counted(9.0).first_token_ms(counted(9.0))
    with pytest.raises(Failed, match="cache answered 16 tokens"):
        counted(9.0, 0.02, cached=16).first_token_ms(counted(9.0))
    with pytest.raises(Failed, match="does not count"):
        Counted.of("")
