"""Pools that a controller may resize: what one instance is, what it costs, and what it is worth in each role. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.instance import Role
from goodput.bounds import EngineBounds
from goodput.budget import Footprint
from goodput.sizing import LoadToServe, Sizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPool:
    """One kind of instance."""

    name: str
    role: Role
    """The role that its instances start in."""
    engine: EngineBounds
    """An instance keeps the batch settings that it was started with when it takes another role."""
    footprint: Footprint
    ranks: int = 1
    """Data parallel ranks of an instance; `engine` is one of them."""
    first_token_ms: float = 0.0
    """Part of the TTFT beside queue and steps (`costs.cost.Costs.first_token_ms`)."""
    min: int = 0
    max: int = 64
    flips: bool = False
    """Whether its instances may take another role while they run."""
    startup_s: float = 60.0
    """Expected seconds of a start, until one was observed."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """All pools of one model, and what an instance of each is worth in each role."""

    pools: Mapping[str, ScalingPool]
    sizers: Mapping[str, Sizer] = field(default_factory=dict)

    @staticmethod
    def of(pools: Sequence[ScalingPool]) -> Kinds:
        """The kinds of these pools, which come in order of preference."""
        return Kinds(
            {each.name: each for each in pools},
            {each.name: Sizer(each.engine, each.first_token_ms, each.ranks) for each in pools},
        )

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that instances start in."""
        return tuple(dict.fromkeys(each.role for each in self.pools.values()))

    def first(self, role: Role) -> ScalingPool:
        """The preferred pool of a role: sizes are counted in its instances. The first of all pools if the role has
        none.
        """
        fitting = [each for each in self.pools.values() if each.role is role]
        return fitting[0] if fitting else next(iter(self.pools.values()))

    def sizer(self, role: Role) -> Sizer:
        """The sizer of the role's preferred pool."""
        return self.sizers[self.first(role).name]

    def worth(self, pool: str, role: Role, load: LoadToServe) -> float:
        """How many instances of the role's preferred pool one instance of `pool` is worth: by prompts a second for
        prefill, by answers a second otherwise. They differ in batch settings or in GPUs.
        """
        here, there = self.pools[pool], self.first(role)
        if (here.engine, here.ranks) == (there.engine, there.ranks):
            return 1.0
        one, other = self.sizers[pool], self.sizers[there.name]
        if role is Role.PREFILL:
            return other.prompt_work(load) / max(1e-9, one.prompt_work(load))
        return one.answers_a_second(load) / max(1e-9, other.answers_a_second(load))
