"""The engine of a measured run: what both kinds of runs share."""

from __future__ import annotations

from cluster.errors import UsageError
from costs.cost import Costs, CostSource
from engine.twin.config import TwinConfig


def check_source(costs: Costs, *, must_fit: bool) -> None:
    """Refuse a roofline if a profile must fit.

    Raises:
        UsageError: `must_fit`, and these costs are a roofline.
    """
    if must_fit and costs.source is CostSource.ROOFLINE:
        raise UsageError(
            f"the profile has no fit of {costs.model.name} on {costs.gpu.name}; "
            "leave --profile out to use the shipped ones"
        )


def engine_text(vllm: str, costs: Costs, config: TwinConfig) -> str:
    """An engine's version, hardware and settings in words."""
    scheduling = "asynchronous" if config.version.async_scheduling else "synchronous"
    return (
        f"vLLM {vllm} on {costs.gpu.name} tp{costs.shape.tp}, {config.max_num_batched_tokens} batched tokens, "
        f"{config.max_num_seqs} sequences, {config.num_blocks * config.block_size:,} tokens of KV, "
        f"{scheduling} scheduling"
    )
