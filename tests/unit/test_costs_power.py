"""Power: idle, capped, and between as measured."""

import pytest

from costs import shipped
from costs.hardware import gpu_named
from costs.power import energy_j, power_w, utilisation
from costs.roofline import peaks, roofline
from costs.shape import Spans
from costs.step import StepWork, decoding, prompt

LLAMA, A100 = shipped.model_named("meta-llama/Llama-3.1-70B"), gpu_named("A100")
SHAPE = Spans(tp=4)
PEAK, COST = peaks(LLAMA, A100, SHAPE), roofline(LLAMA, A100, SHAPE)


def watts(work: StepWork) -> float:
    return power_w(A100, *utilisation(PEAK, work, COST.step_ms(work)))


def test_idle() -> None:
    assert power_w(A100, 0.0, 0.0) == A100.idle_w == 60
    assert utilisation(PEAK, StepWork(), 0.0) == (0.0, 0.0)


def test_prompts_reach_the_tdp_and_generation_does_not() -> None:
    assert watts(prompt(4000)) == A100.tdp_w
    assert 0.5 * A100.tdp_w < watts(decoding(8, 8000)) < 0.9 * A100.tdp_w


def test_splitwise_measured_this() -> None:
    """Llama-2-70B on 4 A100: 45 ms a token at 38 % of the bandwidth drew 0.60 of the TDP."""
    assert power_w(A100, 0.0, 0.38) / A100.tdp_w == pytest.approx(0.60, abs=0.04)


def test_energy() -> None:
    assert energy_j(400.0, 50.0, 4) == pytest.approx(80.0)
    per_token = [
        energy_j(watts(work), COST.step_ms(work), 4) / work.batch for work in (decoding(1, 1000), decoding(64, 64_000))
    ]
    assert per_token[1] < per_token[0] / 20, "a batch shares the reading of the weights"
