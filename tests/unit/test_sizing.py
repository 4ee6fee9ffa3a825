"""Pool sizes from costs: enough instances for the target, and none for prompts that no size serves in time."""

from __future__ import annotations

import pytest
from support.pretend_fleet import PROMISE, pools

from cluster.instance import Role
from goodput.sizing import LoadToServe, RecentLengths, Sizer
from goodput.sketch import sketch_of

PREFILL = Sizer(pools()[0].engine)


def load(prompts: list[int], rate: float = 1.5) -> LoadToServe:
    lengths = RecentLengths(prompts=sketch_of(prompts), answers=sketch_of([200]))
    return LoadToServe(rate=rate, lengths={"": lengths}, promises={"": PROMISE})


def test_prompts_that_no_fleet_computes_in_time_add_no_instance() -> None:
    usual, _ = PREFILL.need(Role.PREFILL, load([12_000] * 97), 0.98)
    tail, because = PREFILL.need(Role.PREFILL, load([12_000] * 97 + [40_000] * 3), 0.98)
    assert PREFILL.prompt_s(40_000) * 1000 > (PROMISE.ttft_ms or 0)
    assert usual <= tail <= usual + 2
    assert because


@pytest.mark.parametrize("rate", [0.2, 1.0, 5.0])
def test_the_reason_names_the_next_smaller_fleet_that_misses_the_target(rate: float) -> None:
    count, because = PREFILL.need(Role.PREFILL, load([8000], rate), 0.98)
    if count > 1:
        fewer = PREFILL.prefill(load([8000], rate), count - 1)
        assert fewer.met < 0.98
        assert because == f"{count - 1} would not do: {fewer.because}"
    assert PREFILL.prefill(load([8000], rate), count).met >= 0.98
