"""Values that are written to decision logs, and read from them by the types of their fields. Pure.

They stand apart from what uses them since compiled classes (docs/compiled.md) forget those types.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from cluster.ids import InstanceId
from cluster.instance import Instance, Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a request's class promises it, and what becomes of it when that cannot be kept (`cluster.spec`)."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    """0: nothing."""
    sheds: bool = False
    lengths_within: float = 1.0
    """By how much more often than all together prompts of one length may be given up."""
    degraded: Promise | None = None
    """Its second promise."""


NO_PROMISE: Final = Promise()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """An instance's own word, as its heartbeat brings it."""

    instance: Instance
    state: str
    accepting: bool
    credits: int
    load: Load
    models: tuple[dict[str, object], ...]
    grant: int | None = None
    """Legs of its credits that are this router's; None: its agent grants none by name."""
    shuns: tuple[InstanceId, ...] = ()
    """Producers that its engine pulls nothing from for now."""
    evicted: tuple[int, int] = (0, 0)
    """Since its engine's start: tokens thrown out of its KV cache, and how often all were."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Digests of its LoRA adapters by name (`cluster.registry.membership.Heartbeat.adapters`)."""


class Standing(NamedTuple):
    """What proofs (`router.fleet.pair_proofs`) say of a fleet, but for the pairs that failed."""

    gives: Mapping[InstanceId, int]
    """By producer, the number of the circle that it is proven to belong to; 0: to none."""
    takes: Mapping[InstanceId, int]
    """The same by consumer."""
    inexact: Mapping[tuple[InstanceId, InstanceId], str]
    """Pairs that hand over, but P's token may not stand for D's first, and why. A pair of one circle that was not tried
    itself is no better than another pair of its P."""
    doubts: Mapping[tuple[InstanceId, InstanceId], str]
    """Pairs of which the last try has said nothing, and why."""


NOTHING_PROVEN: Final = Standing({}, {}, {}, {})


class Sent(NamedTuple):
    """A prompt that went to an instance, for its answer to be compared with what had been expected."""

    row: int
    life: int
    chunks: Sequence[int]
    former_s: tuple[float, ...]
    """When each chunk that it was believed to hold was last used there."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of the fleet. A Struct, since two are made of each request."""

    model: str | None
    """None: any model, as vLLM's own server treats a request that names none."""
    hand_over: bool
    """Whether prefill and decode may run on two instances."""
    prefill_only: bool = False
    """The whole answer is one token: a prefill instance's work."""
    excluded: frozenset[InstanceId] = frozenset()
    weights: str = ""
    """Of the instance that made what its client already has: only the same goes on from there. Empty: any."""
    circle: int = 0
    """The circle (`router.fleet.pair_proofs`) of the instance that made it, where nothing but what is proven counts; 0:
    it was in none."""
    meaning: str = ""
    """What the model's name meant there (`InstanceView.meaning`). Empty: nothing is made yet."""
    routers: int = 1
    """Routers that share the instances' credits."""
    prompt_tokens: int = 0
    """About so many; 0: nobody has estimated it."""
    prefix: tuple[int, ...] = ()
    """Names of the prompt's blocks from its beginning, where somebody has hashed them."""
    prefix_block_tokens: float = 0
    """Tokens behind each of them."""
    tenant: str = ""
    slo_class: str = ""
    output_tokens: float = 0.0
    """Expected length of its answer; 0: nobody has predicted it."""
    output_lengths: tuple[int, ...] = ()
    """Lengths that so many of such answers do not exceed (`router.scheduler.scoring.prices.SHARES`); none: nobody
    predicted it.
    """
    output_variance: float = 0.0
    ttft_ms: float = 0.0
    """Its class's target for the first token, from its arrival; 0: none."""
    tpot_ms: float = 0.0
    """And for each token after it."""
    sheds: bool = False
    """It is refused rather than served late: what is let in is to keep its targets."""
    lengths_within: float = 1.0
    """`Promise.lengths_within`."""
    arrived: float = 0.0
    now: float = 0.0
    """Monotonic seconds: of its arrival, and of this choice."""
    late: bool = False
    """It is taken to miss its target for the first token anyway (`router.scheduler.flow_control.queue`)."""
    whose: str = ""
    """Its tenant, where some instances are kept for it: others have other places."""
    unseeded: bool = False
    """A stream whose first token cannot come from P: handed over, its client waits for D."""
    scoring: Any = None
    """What its scheduler's scoring goes by (`router.scheduler.scoring.prices.Scoring`); never written to a log.
    None: no saturation holds for it.
    """

    @property
    def kind(self) -> Hashable:
        """Two requests of one kind are told the same: where one finds no place, the other finds none either."""
        return (self.model, self.hand_over, self.prefill_only, self.excluded, *self.made_by, self.whose)

    @property
    def made_by(self) -> tuple[str, int, str]:
        """By what it goes on only with the like of the instance that made what its client has."""
        return (self.weights, self.circle, self.meaning)
