"""Targets below what the hardware can do are mistakes that lint names."""

import pytest

from baton.floor import floor_of
from cluster.spec import Severity, parse

FILE = """\
models:
  - name: {model}
    pools:
      prefill: {{shape: {{tp: 4}}, gpu: {gpu}}}
      decode: {{shape: {{tp: 4}}, gpu: {gpu}}}
slo:
  fast: {{ttft_ms: {ttft}, tpot_ms: {tpot}}}
"""


def problems(model: str, gpu: str, ttft: float, tpot: float) -> list[str]:
    text = FILE.format(model=model, gpu=gpu, ttft=ttft, tpot=tpot)
    parsed = parse(text, "f", floor_of=floor_of)
    return [str(problem.message) for problem in parsed.problems if problem.severity is Severity.ERROR]


LLAMA = "meta-llama/Llama-3.1-70B-Instruct"


def test_impossible_targets_are_named_with_what_is_possible() -> None:
    """70 billion weights of two bytes, a quarter on each GPU, are 35 GB to read for every token: 10 ms at 3.35 TB/s."""
    found = problems(LLAMA, "H100-SXM", 5, 4)
    assert len(found) == 2
    assert all("cannot reach it: at best 10" in message for message in found)


@pytest.mark.parametrize(("ttft", "tpot"), [(500, 40), (10.5, 10.5)])
def test_possible_targets_pass(ttft: float, tpot: float) -> None:
    assert problems(LLAMA, "H100-SXM", ttft, tpot) == []


@pytest.mark.parametrize(("model", "gpu"), [("nobody/knows-it", "H100-SXM"), ("baton-tiny", "H100-SXM")])
def test_a_model_whose_config_does_not_ship_has_no_floor(model: str, gpu: str) -> None:
    assert problems(model, gpu, 1, 1) == []
