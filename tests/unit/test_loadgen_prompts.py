"""The texts of prompts: what requests share, and what each has alone."""

from __future__ import annotations

import pytest

from loadgen.arrival import Arrival
from loadgen.prompts import Fit, prompt_text


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
