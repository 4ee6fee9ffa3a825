"""Values that decision logs contain. The reader of a log takes the types of their fields from this module. Pure.

They are a module of their own because compiled classes (docs/compiled.md) lose these types.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from cluster.ids import InstanceId
from cluster.instance import Instance, Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a request's class promises, and what happens to the request when the promise cannot be kept
    (`cluster.spec`).
    """

    ttft_ms: float = 0.0
    """0: no promise."""
    tpot_ms: float = 0.0
    """0: no promise."""
    sheds: bool = False
    lengths_within: float = 1.0
    """By how much the share of prompts of one length that are given up may exceed that share of all prompts, 0 to 1; 1:
    no bound (`router.scheduler.flow_control.sizes`)."""
    degraded: Promise | None = None
    """The second promise, for a degraded request."""


NO_PROMISE: Final = Promise()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What an instance says about itself in its heartbeat."""

    instance: Instance
    state: str
    accepting: bool
    credits: int
    load: Load
    models: tuple[dict[str, object], ...]
    grant: int | None = None
    """The part of the instance's credits granted to this router, in legs; None: its agent grants none by name."""
    shuns: tuple[InstanceId, ...] = ()
    """Producers that the instance's engine pulls nothing from for now (peer health)."""
    peers: bool = False
    """Whether its engine pulls prompts' beginnings from other instances, and holds them for other instances."""
    evicted: tuple[int, int] = (0, 0)
    """Since the engine's start: the tokens evicted from its KV cache, and how often the whole cache was cleared."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Tokens in the tiers below its KV cache now, by tier (``host``, ``disk``); none: it has no tiers."""
    kept_gb_s: Mapping[str, float] = field(default_factory=dict)
    """The measured rates at which its engine loads KV from these tiers, in GB/s (10⁹ bytes), by tier."""
    kv_token_bytes: int = 0
    """Bytes of one token's KV; 0: its engine does not tell."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Digests of the instance's LoRA adapters by name (`cluster.registry.membership.Heartbeat.adapters`)."""


class ProofStanding(NamedTuple):
    """What pair proofs (`router.fleet.pair_proofs`) say about a fleet, apart from the pairs that failed."""

    gives: Mapping[InstanceId, int]
    """By producer, the number of the proven circle it belongs to; 0: none."""
    takes: Mapping[InstanceId, int]
    """The same by consumer."""
    inexact: Mapping[tuple[InstanceId, InstanceId], str]
    """Pairs of P and D that hand over but where P's token may not stand for D's first token, and why. If one pair of P
    is listed, P's pairs with proven consumers that were not tried themselves are listed, too."""
    doubts: Mapping[tuple[InstanceId, InstanceId], str]
    """Pairs whose last proof had no result, and why."""
    merged: Mapping[int, int] = MappingProxyType({})
    """By number of a circle that has become part of another one: that one's number."""


NOTHING_PROVEN: Final = ProofStanding({}, {}, {}, {})


class Sent(NamedTuple):
    """A prompt that was sent to an instance, kept so that the engine's answer can be compared with the prediction."""

    row: int
    life: int
    chunks: Sequence[int]
    former_s: tuple[float, ...]
    """For each chunk that the instance was predicted to hold, when it was last used there, in monotonic seconds."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs of the fleet. A Struct, as each request makes two. It has many attributes, one for each
    fact about a request that filters, scorers and flow control read.
    """

    model: str | None
    """None: any model, as vLLM's own server treats a request that names none."""
    hand_over: bool
    """Whether prefill and decode may run on two instances."""
    prefill_only: bool = False
    """The whole answer is one token: a prefill instance can serve it alone."""
    excluded: frozenset[InstanceId] = frozenset()
    weights: str = ""
    """The weights of the instance that made the client's output so far: only the same weights may continue.
    Empty: any."""
    circle: int = 0
    """The circle (`router.fleet.pair_proofs`) of the instance that made the output so far, if only proven instances
    count; 0: it was in none."""
    meaning: str = ""
    """What the model's name meant on the instance that made the output so far (`InstanceView.meaning`). Empty: there is
    no output yet."""
    routers: int = 1
    """The number of routers that share the instances' credits."""
    router_number: int = 0
    """This router's number among them, from 0: of what is divided in whole numbers, the first ones get what is left."""
    urgency: float = 0.0
    """The number of other waiting requests that a delay of a millisecond is expected to make late, in the flow-control
    queues of these routers: each is taken to have a queue like this one's (`FlowControlQueue.urgency`)."""
    prompt_tokens: int = 0
    """The estimated number of the prompt's tokens; 0: no estimate."""
    prefix: tuple[int, ...] = ()
    """Names of the prompt's blocks from its beginning; empty if they were not hashed."""
    prefix_block_tokens: float = 0
    """The tokens of each of these blocks."""
    tenant: str = ""
    slo_class: str = ""
    output_tokens: float = 0.0
    """The expected length of the answer, in tokens; of several answers, of each. 0: no prediction."""
    answers: int = 1
    """The number of its answers: `n` of them to each of its prompts."""
    output_lengths: tuple[int, ...] = ()
    """Quantiles of the answer's length (`router.predict.answer_lengths.SHARES`); empty: no prediction."""
    output_variance: float = 0.0
    """The variance of that length, in tokens squared."""
    ttft_ms: float = 0.0
    """The class's target for the first token, from the request's arrival; 0: none."""
    tpot_ms: float = 0.0
    """The class's target for each later token; 0: none."""
    sheds: bool = False
    """The request is refused rather than served late: a request that is admitted is to meet its targets."""
    lengths_within: float = 1.0
    """`Promise.lengths_within`."""
    arrived: float = 0.0
    """The request's arrival, in monotonic seconds."""
    now: float = 0.0
    """The time of this choice, in monotonic seconds."""
    late: bool = False
    """The request is expected to miss its TTFT target in any case (`router.scheduler.flow_control.queue`)."""
    beyond_memory: tuple[int, ...] | None = None
    """The request may go beyond the memory that instances are foretold to have, except at these rows; None: nowhere
    (`router.scheduler.flow_control.overdue`)."""
    whose: str = ""
    """The request's tenant, if some instances are reserved for it: other tenants use other instances."""
    one_prompt: bool = False
    """Every leg of the request reads the same prompt (`router.core.eligibility`), in which no picture is known, so the
    prompt's beginning may come from another instance's KV cache."""
    unseeded: bool = False
    """A stream whose first token cannot come from P: it is handed over, and the client waits for D."""
    streamed: bool = True
    """Its answer is streamed: the router sees when it begins."""
    scoring: Any = None
    """The inputs of the scheduler's scoring (`router.scheduler.scoring.prices.Scoring`); never written to a log. None:
    no saturation limit holds for the request."""

    @property
    def kind(self) -> Hashable:
        """Requests of one kind get the same reply: if one finds no place, the other finds none either."""
        return (self.model, self.hand_over, self.prefill_only, self.excluded, *self.made_by, self.whose)

    @property
    def made_by(self) -> tuple[str, int, str]:
        """Weights, circle and meaning of the instance that made the output so far: only an equal one may go on."""
        return (self.weights, self.circle, self.meaning)
