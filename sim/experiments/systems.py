"""A system under comparison: pools of equal instances, and the policy in front; and the fleet to simulate it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Final

from cluster.ids import InstanceId
from cluster.instance import Role
from costs.cost import Costs, costs_of
from costs.hardware import gpu_named
from costs.model import ModelShape
from costs.profile import Profile
from costs.shape import Spans
from costs.step import StepCost, StepWork
from engine.twin.config import TwinConfig, Version
from loadgen.arrival import Arrival
from loadgen.report import Targets
from router.core.values import NO_PROMISE, Promise
from router.fleet.view import FleetView
from router.predict.step_model import Make
from router.scheduler.scoring.policies import POLICIES, Policy
from sim.baselines import BASELINES, follow
from sim.engine_args import engine_of, read_words
from sim.fleet import SimulatedMember, make_of_member, member
from sim.result import Result
from sim.roughness import SMOOTH, Roughness
from sim.settings import SimSettings
from sim.world import World

SEQS_2023: Final = 256
"""vLLM's ``max_num_seqs`` of 2023."""
LOAD_AGE_S: Final = {"llm_d": 0.05}
"""Seconds between engines' reports, for rivals that route by these, as in their own product: llm-d scrapes each 50 ms.
"""
MEMORY_2023: Final = 0.9
"""vLLM's ``gpu_memory_utilization`` of 2023."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualInstances:
    """A pool of `count` equal instances."""

    role: Role
    count: int
    tp: int
    gpu: str
    batched_tokens: int | None = None
    """``max_num_batched_tokens``; None = vLLM 0.32's default for the GPU."""
    chunked: bool = True
    prefix_caching: bool = False
    profile: str | None = None
    """Use just this profile (a paper's); the engine is then one of 2023: no asynchronous scheduling."""
    length_max: int | None = None
    """``max_model_len``; needed where `profile` is given."""
    serial: bool = False
    """Prompts and decodes take steps of their own, as before chunked prefill (`Serial`)."""
    block_tokens: int | None = None
    """``block_size``; None: vLLM's 16."""
    nvlink: bool = False
    """KV goes over the links inside a node instead of the network: prefill and decode share nodes."""

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.count * self.tp


@dataclass(frozen=True, slots=True)
class Serial:
    """Steps of an engine that computes prompts first and lets decodes wait: a step that has both takes as long as both.

    vLLM of 2023 decided them as steps of their own, prompts first; here each prompt's step brings one token of every
    decode as well. The sum of the times is the same, and so is a request's mean time per token.
    """

    costs: Costs

    def step_ns(self, work: StepWork) -> int:
        """Nanoseconds of a prompt step, and of a decode step after it."""
        if not (work.batch and work.new_tokens):
            return self.costs.step_ns(work)
        prompts = replace(work, batch=0, sum_context=0)
        return self.costs.step_ns(prompts) + self.costs.decode_step_ns(work.batch, work.sum_context)

    def decode_run_ns(self, batch: int, sum_context: int, steps: int) -> int:
        """As of `costs`."""
        return self.costs.decode_run_ns(batch, sum_context, steps)

    def decode_steps_for(self, batch: int, sum_context: int, duration_ns: int) -> int:
        """As of `costs`."""
        return self.costs.decode_steps_for(batch, sum_context, duration_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system that is compared with others."""

    name: str
    pools: tuple[EqualInstances, ...]
    policy: str = "least_requests"
    make_policy: Callable[[Sequence[SimulatedMember]], Policy] | None = None
    """A policy that has to know the fleet, instead of the one of that name."""
    admission: bool = False
    """Whether Baton's own admission is in front of the policy."""
    costs_off: float = 1.0
    """The router takes every step to last so many times what its engines' costs say."""
    rough: Roughness = SMOOTH
    """How far engines, network and estimates are from what predictions say."""
    routers: int = 1
    """Routers in front, to which requests are dealt in turns."""
    beside: float | None = None
    """What a token of an answer's context costs its engine in a prompt's step, over a decode step. The router believes
    the profiles (`Profile.mixed_context`); None: they are right."""

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.gpus for pool in self.pools)

    def __str__(self) -> str:
        """`3P tp2 + 1D tp4`; aggregated pools with their token budget."""
        letters = {Role.PREFILL: "P", Role.DECODE: "D", Role.BOTH: "×"}
        return " + ".join(f"{pool.count}{letters[pool.role]} tp{pool.tp}{_budget(pool)}" for pool in self.pools)


def _budget(pool: EqualInstances) -> str:
    if pool.role is not Role.BOTH:
        return ""
    if not pool.chunked:
        return " whole prompts"
    return f" {pool.batched_tokens} tokens" if pool.batched_tokens else ""


def pool_of(member: SimulatedMember) -> int:
    """The index of the member's pool, which its name contains (`Shelf.members`)."""
    return int(member.name.split("-")[1])


@dataclass(frozen=True, slots=True)
class Shelf:
    """Sizes and profiles to build fleets from; members once made are kept."""

    models: Mapping[str, ModelShape]
    profiles: Sequence[Profile]
    made: dict[tuple[str, EqualInstances], SimulatedMember] = field(default_factory=dict)
    others: dict[float, Shelf] = field(default_factory=dict)
    """By `with_beside`."""

    def with_beside(self, beside: float) -> Shelf:
        """The same, but for profiles with this `Profile.mixed_context`."""
        if beside not in self.others:
            changed = [replace(each, mixed_context=beside) for each in self.profiles]
            self.others[beside] = Shelf(self.models, changed)
        return self.others[beside]

    def member(self, model: str, pool: EqualInstances) -> SimulatedMember:
        """One instance of a pool, whatever the pool's size."""
        key = (model, replace(pool, count=1))
        if key not in self.made:
            self.made[key] = self._member(model, pool)
        return self.made[key]

    def costs(self, model: str, pool: EqualInstances) -> Costs:
        """The cost model of a pool's instances."""
        costs = self.member(model, pool).costs
        assert isinstance(costs, Costs)
        return costs

    def members(self, model: str, pools: Sequence[EqualInstances]) -> list[SimulatedMember]:
        """All instances, named by role, index of the pool, and number."""
        found: list[SimulatedMember] = []
        for at, pool in enumerate(pools):
            one = self.member(model, pool)
            if pool.serial:
                one = replace(one, costs=Serial(self.costs(model, pool)))
            found += [replace(one, name=InstanceId(f"{pool.role.value}-{at}-{n:02d}")) for n in range(pool.count)]
        return found

    def _member(self, model: str, pool: EqualInstances) -> SimulatedMember:
        costs, config = self._of_2023(model, pool) if pool.profile else self._of_today(model, pool)
        one = member("one", pool.role, model, costs, config)
        return replace(one, nic_gb_s=costs.gpu.link_gb_s * pool.tp) if pool.nvlink else one

    def _of_today(self, model: str, pool: EqualInstances) -> tuple[Costs, TwinConfig]:
        words = [] if pool.batched_tokens is None else [f"--max-num-batched-tokens={pool.batched_tokens}"]
        words += [] if pool.prefix_caching else ["--no-enable-prefix-caching"]
        words += [] if pool.block_tokens is None else [f"--block-size={pool.block_tokens}"]
        words += [] if pool.length_max is None else [f"--max-model-len={pool.length_max}"]
        shape = Spans(tp=pool.tp)
        gpu = gpu_named(pool.gpu)
        return engine_of(pool.role, self.models[model], gpu, shape, read_words(words), profiles=self.profiles)

    def _of_2023(self, model: str, pool: EqualInstances) -> tuple[Costs, TwinConfig]:
        assert pool.length_max is not None, "an engine of 2023 needs its length"
        profile = next(each for each in self.profiles if each.name == pool.profile)
        batched = pool.batched_tokens or pool.length_max
        costs = costs_of(
            self.models[model],
            gpu_named(pool.gpu),
            Spans(tp=pool.tp),
            only=profile,
            memory_share=MEMORY_2023,
            batched_tokens=batched,
        )
        config = TwinConfig(
            role=pool.role,
            num_blocks=costs.kv_capacity_tokens // 16,
            max_num_batched_tokens=batched,
            max_num_seqs=SEQS_2023,
            max_model_len=pool.length_max,
            chunked_prefill=pool.chunked,
            prefix_caching=False,
            contents=False,
            every_share=False,
            version=Version(pull_after_forward=False),
        )
        return costs, config


def policy_of(system: System, members: Sequence[SimulatedMember]) -> Policy:
    """The system's policy: one that `make_policy` makes, a rival's, or one of the router's own."""
    if system.make_policy is not None:
        return system.make_policy(members)
    return BASELINES[system.policy]() if system.policy in BASELINES else POLICIES[system.policy]


def misled(members: Sequence[SimulatedMember], off: float) -> FleetView:
    """The fleet as a router sees it whose cost model is wrong by a factor."""
    makes = {each.name: believed(make_of_member(each), off) for each in members}
    return FleetView(lambda instance: makes[instance.id])


def believed(make: Make | None, off: float) -> Make | None:
    """The speed that such a router believes an engine to have."""
    if make is None:
        return None

    def scaled(cost: StepCost) -> StepCost:
        return replace(cost, **{each.name: getattr(cost, each.name) * off for each in fields(cost) if _is_time(each)})

    return replace(make, prefill=scaled(make.prefill), decode=scaled(make.decode), first_ms=make.first_ms * off)


def _is_time(each: Field[Any]) -> bool:
    return each.name.endswith("_ms")


def simulate(
    system: System,
    model: str,
    shelf: Shelf,
    arrivals: Sequence[Arrival],
    first_token_s: float,
    targets: Targets | None = None,
    watch: Callable[[World], None] | None = None,
) -> Result:
    """One run, without the simulator's own checks. A request without a first token after `first_token_s` has failed.

    `targets` are what the router promises to all requests, if the system has an admission. `watch` is called
    as the run goes on (`World.on_progress`); what it raises ends the run.
    """
    believes = members = shelf.members(model, system.pools)
    if system.beside is not None:
        members = shelf.with_beside(system.beside).members(model, system.pools)
    policy = policy_of(system, members)
    age_s = LOAD_AGE_S.get(system.policy)
    settings = SimSettings(checks=False, first_token_s=first_token_s, rough=system.rough)
    if age_s is not None:
        settings = replace(settings, beat_every_s=age_s, read_every_s=age_s)
    promise = Promise(ttft_ms=targets.ttft_ms or 0.0, tpot_ms=targets.tpot_ms or 0.0) if targets else NO_PROMISE
    promises = {"": promise} if system.admission else None
    view = None if system.costs_off == 1.0 and believes is members else misled(believes, system.costs_off)
    others = [policy_of(system, members) for _ in range(system.routers - 1)]
    world = World(members, settings, policy=policy, model=model, promises=promises, view=view, others=others)
    for number, each in enumerate((policy, *others)):
        follow(world, each, number)
    world.on_progress = watch
    return world.run(arrivals)
