"""Rates from costs alone: where a search for goodput or for a split begins. Averages, no queues; never a result."""

from __future__ import annotations

from costs.cost import Costs
from loadgen.report import Targets


def prefill_rate(costs: Costs, input_tokens: float) -> float:
    """Prompts a second of one instance that does nothing else."""
    return 1000 / costs.prefill_ms(max(1, round(input_tokens)))


def decode_rate(costs: Costs, input_tokens: float, output_tokens: float, tpot_ms: float) -> float:
    """Answers a second of one instance that only decodes, with the largest batch whose step keeps the target."""
    context = round(input_tokens + output_tokens / 2)
    low, high = 0, max(1, costs.max_batch(context))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if costs.decode_step_ms(middle, middle * context) <= tpot_ms else (low, middle - 1)
    batch = max(1, low)
    return batch * 1000 / (costs.decode_step_ms(batch, batch * context) * max(1.0, output_tokens))


def whole_rate(costs: Costs, input_tokens: float, output_tokens: float, tpot_ms: float) -> float:
    """Requests a second of one instance that computes prompts and answers in turn."""
    decode = decode_rate(costs, input_tokens, output_tokens, tpot_ms)
    return 1 / (1 / prefill_rate(costs, input_tokens) + 1 / decode)


def tpot_of(targets: Targets, costs: Costs) -> float:
    """The TPOT target in ms; without one, three times the step of a single request."""
    return targets.tpot_ms if targets.tpot_ms is not None else 3 * costs.decode_step_ms(1, 1000)
