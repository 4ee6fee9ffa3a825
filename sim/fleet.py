"""One member of the simulated fleet, with everything that distinguishes it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from cluster.ids import InstanceId, ranks_of
from cluster.instance import Role
from costs.cost import Costs
from costs.model import ModelShape
from costs.shape import ONE_GPU, CostShape, gpus
from costs.transfer import NIC_EFFICIENCY, NIC_LATENCY_MS, copies, paths
from engine.twin.config import StepCosts, TwinConfig
from goodput.budget import Footprint
from router.predict.step_model import Make, make_of
from sim.kernel import NS
from sim.startup import StartUp

MS: Final = NS // 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMember:
    """One instance. It has many attributes: engine, network, hardware, price and start are all given from outside."""

    name: InstanceId
    role: Role
    model: str
    """The model's name in the API."""
    config: TwinConfig
    costs: StepCosts
    prompt_front_ns: int = 0
    """The wait of a prompt before its steps (`costs.cost.Costs.first_token_ms`: CPU time beside the GPU)."""
    block_bytes: int = 0
    """The KV bytes of one block, held once; 0: pulls take the latency alone."""
    nic_gb_s: float = math.inf
    """The rate that all its GPUs reach together, each way, in GB/s."""
    latency_ns: int = 0
    """The latency of one message between two nodes."""
    start_up_ns: int = 60 * NS
    """The time from the process's start until it takes requests. 60 s is about what an 8B model takes from a local disk
    with compiled graphs cached; larger models take minutes. A parameter, not a measurement."""
    shape: CostShape = ONE_GPU
    sizes: ModelShape | None = None
    """The model's sizes; None: every byte is held once and one path is as wide as the NIC."""
    gpus: int = 1
    gpu: str = ""
    """The type of its GPUs."""
    price_per_hour: float = 0.0
    """The price of one of its GPUs, in USD an hour."""
    power_w: float = 0.0
    """The most that one of its GPUs draws, in watts."""
    flips: bool = False
    """Whether it may change its role during the run."""
    startup: StartUp | None = None
    """The distribution of its start's duration; None: always `start_up_ns`."""

    @property
    def footprint(self) -> Footprint:
        """The resources that it uses while it exists."""
        return Footprint(
            gpu=self.gpu,
            gpus=self.gpus,
            price_per_hour=self.price_per_hour * self.gpus,
            power_w=self.power_w * self.gpus,
        )


def member(
    name: str, role: Role, model: str, costs: Costs, config: TwinConfig, *, start_up_s: float = 60.0
) -> SimulatedMember:
    """A member as `costs` knows its hardware. `config.num_blocks` is the caller's (see `sim.engine_args`)."""
    count = gpus(costs.shape)
    return SimulatedMember(
        name=InstanceId(name),
        role=role,
        model=model,
        config=config,
        costs=costs,
        prompt_front_ns=round(costs.first_token_ms * MS),
        block_bytes=costs.kv_bytes_per_token * config.block_size,
        nic_gb_s=costs.gpu.nic_gb_s * NIC_EFFICIENCY * count,
        latency_ns=round(NIC_LATENCY_MS * MS),
        start_up_ns=round(start_up_s * NS),
        shape=costs.shape,
        sizes=costs.model,
        gpus=count,
        gpu=costs.gpu.name,
        price_per_hour=costs.gpu.usd_per_hour,
        power_w=costs.gpu.tdp_w,
    )


def as_ranks(engine: SimulatedMember) -> list[SimulatedMember]:
    """An engine as its data parallel ranks, each a member with its part of the engine's GPUs. Costs are one rank's."""
    dp = engine.shape.dp
    share = replace(engine, gpus=engine.gpus // dp, nic_gb_s=engine.nic_gb_s / dp)
    return [replace(share, name=name) for name in ranks_of(engine.name, dp)]


def pull_bytes(target: SimulatedMember, blocks: int) -> int:
    """The bytes that `target` reads for `blocks` blocks."""
    times = 1 if target.sizes is None else copies(target.sizes, target.shape)
    return target.block_bytes * blocks * times


def pull_limit_gb_s(source: SimulatedMember, target: SimulatedMember) -> float:
    """The highest rate of one pull between them, in GB/s: that of the GPUs that move data at once."""
    if source.sizes is None or math.isinf(source.nic_gb_s) or math.isinf(target.nic_gb_s):
        return math.inf
    each = min(source.nic_gb_s / source.gpus, target.nic_gb_s / target.gpus)
    return each * paths(source.sizes, source.shape, target.shape)


def check_members(members: Iterable[SimulatedMember]) -> None:
    """Check that names are unique, and that blocks which move between members have one size.

    Raises:
        ValueError: two members have one name, or members of one model have blocks of different sizes.
    """
    listed = list(members)
    if len({each.name for each in listed}) != len(listed):
        raise ValueError("two members have one name")
    for model in dict.fromkeys(each.model for each in listed):  # in order, so that the same one is named in every run
        if len({each.config.block_size for each in listed if each.model == model}) > 1:
            raise ValueError(f"{model}: members with different block sizes cannot hand over to each other")


def make_of_member(member: SimulatedMember) -> Make | None:
    """What the router knows about a member's speed; None if its costs are not the cost model's."""
    if not isinstance(member.costs, Costs):
        return None
    config = member.config
    return make_of(
        member.costs,
        capacity_tokens=config.num_blocks * config.block_size,
        budget_tokens=config.max_num_batched_tokens,
    )
