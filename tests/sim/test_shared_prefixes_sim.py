"""One system prompt for all requests counts once in the KV cache, so nothing waits beside an empty cache."""

from __future__ import annotations

from cluster.instance import Role
from costs import shipped
from loadgen.arrival import Arrival
from loadgen.report import Targets
from sim.experiments.systems import EqualInstances, Shelf, System, simulate

MODEL = "meta-llama/Llama-3.1-8B"
TARGETS = Targets(4000, None, 170, None)
BLOCK = 16
SHARED, OWN = 181, 7
"""Blocks of 16 tokens: 2,896 tokens that all prompts share, and 104 of each one's own."""


def arrivals(count: int, rate: float) -> list[Arrival]:
    return [
        Arrival(
            at_s=number / rate,
            input_tokens=3000,
            output_tokens=100,
            prefix=(*range(SHARED), *(1000 + OWN * number + each for each in range(OWN))),
            block_tokens=BLOCK,
        )
        for number in range(count)
    ]


def test_requests_with_one_system_prompt_do_not_wait_beside_an_empty_kv_cache() -> None:
    """An L4 keeps 38,000 tokens of this model: twelve of these prompts, or one and the rest of a hundred and fifty.
    Each counted whole, and half of the requests were late: they waited in the router.
    """
    shelf = Shelf(shipped.models(), shipped.profiles())
    system = System(
        name="x",
        pools=(EqualInstances(role=Role.BOTH, count=1, tp=1, gpu="L4", prefix_caching=True),),
        admission=True,
        policy="workload",
    )
    result = simulate(system, MODEL, shelf, arrivals(150, 2.5), 60.0, TARGETS)
    assert result.met(TARGETS).mean() > 0.97
