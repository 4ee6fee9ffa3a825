"""Rivals' routing policies, each after its published description, with the interface of Baton's own: `(FleetSnapshot,
Wanted) -> Chosen`.

    policy = BASELINES["dynamo"]()          # a new one for each run: what it remembers is its own
    world = World(members, settings, policy=policy)
    follow(world, policy)                   # for those that book work until it is done; harmless for the others

| name | rule | source |
| --- | --- | --- |
| `round_robin` | each pool in turn | vLLM's toy proxy, production-stack |
| `least_requests` | fewest requests in flight | load balancers |
| `weighted_requests` | fewest requests for its speed | load balancers |
| `power_of_two` | the better of two random ones | Mitzenmacher; vllm-router, sglang-router |
| `cache_aware` | longest known prefix, or the shortest queue | SGLang's router 0.3 |
| `dynamo` | prefill blocks less overlap, plus decode blocks | NVIDIA Dynamo 1.6 |
| `dynamo_conditional` | the same with bypass of short suffixes, and its queue | NVIDIA Dynamo 1.5, 1.6 |
| `llm_d_latency` | least headroom that is enough, by predicted TTFT and TPOT | llm-d 0.7 |
| `llm_d` | weighted scores of prefix, queue, KV usage | llm-d inference scheduler |
| `splitwise` | shortest queue in tokens, with a mixed pool | Splitwise, ISCA 2024 |
| `distserve` | shortest prefill queue, least loaded decode, pools as placed beforehand | DistServe, OSDI 2024 |

Each module says its source, its constants, and in what it differs from the original. Under any of these policies a
fleet of instances of role both serves aggregated (`pools`); with chunked prefill and `cache_aware` that is the honest
baseline.
"""

from __future__ import annotations

from collections.abc import Callable

from router.scheduler.scoring.policies import Policy
from sim.baselines.dynamo import Dynamo, DynamoConditional
from sim.baselines.following import Following, follow
from sim.baselines.llmd import Llmd
from sim.baselines.llmd_latency import LlmdLatency
from sim.baselines.plain import PowerOfTwo, RoundRobin, least_requests
from sim.baselines.sglang import CacheAware
from sim.baselines.splitwise import Splitwise

__all__ = ["BASELINES", "Following", "follow"]

BASELINES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_requests": lambda: least_requests,
    "power_of_two": PowerOfTwo,
    "cache_aware": CacheAware,
    "dynamo": Dynamo,
    "dynamo_conditional": DynamoConditional,
    "llm_d": Llmd,
    "llm_d_latency": LlmdLatency,
    "splitwise": Splitwise,
    "distserve": lambda: least_requests,
}
"""Makers of policies by the name used on the command line: what a policy remembers belongs to one run. Those that know
the fleet's speeds (`weighted_requests`, and `speeds` of others) are made by `sim.experiments.contest`."""
