"""The texts of prompts: what requests share, and what each has alone."""

from __future__ import annotations

import pytest

from loadgen import prompts
from loadgen.arrival import Arrival
from loadgen.prompts import Fit, prompt_ids, prompt_text


@pytest.mark.parametrize("overhead", [0.0, 1.0, 36.0])
@pytest.mark.parametrize("shared", [448, 496, 512])
def test_prompts_with_tokens_of_their_own_are_never_equal(overhead: float, shared: int) -> None:
    """A chat template's tokens are part of the wanted length. Equal prompts would be all cached."""
    arrival = Arrival(at_s=0, input_tokens=513, output_tokens=1, prefix=tuple(range(shared // 16)), block_tokens=16)
    fit = Fit(5.0, overhead)
    one, other = (prompt_text(arrival, fit, salt) for salt in ("x 1", "x 2"))
    assert one != other and len(one) == fit.chars(513)


def test_prompts_that_a_trace_shares_whole_are_equal() -> None:
    arrival = Arrival(at_s=0, input_tokens=512, output_tokens=1, prefix=tuple(range(32)), block_tokens=16)
    assert len({prompt_text(arrival, Fit(5.0), salt) for salt in "ab"}) == 1


def test_only_the_ids_of_shared_blocks_are_kept_in_memory() -> None:
    """Text that no other prompt has is never asked for again: 4,096 long prompts would be gigabytes."""
    prompts._id_block.cache_clear()
    arrival = Arrival(at_s=0, input_tokens=1000, output_tokens=1, prefix=(1, 2), block_tokens=16)
    found = [prompt_ids(arrival, (10, 5000), salt) for salt in "abc"]
    assert prompts._id_block.cache_info().currsize == 2
    assert len({tuple(each) for each in found}) == 3 and {len(each) for each in found} == {1000}
    assert len({tuple(each[:32]) for each in found}) == 1
