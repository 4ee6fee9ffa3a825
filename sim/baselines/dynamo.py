"""NVIDIA Dynamo's router cost: blocks still to be prefilled, less what is cached, plus blocks that decode.

Source: ai-dynamo/dynamo, ``docs/design-docs/router-design.md`` at 4032c56 and the router pages of the documentation
v1.6.0:

    cost = prefill_load_scale · max(prefill_blocks − overlap_score_credit · overlap_blocks, 0) + decode_blocks

with prefill_blocks = (prompt tokens active there + this prompt) / block size, decode_blocks = blocks active there +
this request's; scale 1, credit 1, temperature 0 (the least cost). With separate pools ("Disaggregated Serving", v1.6.0)
the prefill router tracks no active blocks, the decode router neither overlap nor prefill tokens.

Conditional disaggregation (`DynamoConditional`; "Conditional Disaggregation" of v1.5 and later, experimental): the
decode instance is chosen first; if the prompt's tokens that are missing there are fewer than 2,048 and less than 0.7 of
it, and that instance is not busy, it computes the prompt itself. Its router queue ("Router configuration", v1.6): a
request waits, first come first served, while all instances for prompts have more prompt tokens active than 16 times
their token budget.

On unequal GPUs (`speeds`) costs are divided by the instance's speed, as a weighted balancer would. Dynamo has no such
setting for GPU types; an operator would need one.

Different here: Dynamo learns cached blocks from engines' events; here they are what was sent there, remembered up to
`INDEX_TOKENS` (Dynamo's own mode without events is like that, with an age instead of a size). Blocks that two active
requests share count twice. An answer's blocks count as the prompt's until it ends: output blocks are not tracked, which
is its default. Equal costs: the fewest legs sent, instead of a random one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.ids import InstanceId
from cluster.instance import Role
from router.core.arrays import Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot, ReadyRows
from router.scheduler.scoring.filters import of_role, ready, with_place
from sim.baselines.pools import by_rule
from sim.baselines.sent import SentRequests

_Cost = Callable[[InstanceId], float]

OVERLAP_CREDIT: Final = 1.0
PREFILL_LOAD_SCALE: Final = 1.0
BLOCK_TOKENS: Final = 16
"""vLLM's block on GPUs, which Dynamo's block size is to match."""
BYPASS_TOKENS: Final = 2048
BYPASS_SHARE: Final = 0.7
QUEUE_THRESHOLD: Final = 16.0
"""``--router-queue-threshold``."""
BATCHED_TOKENS: Final = 8192
"""``max_num_batched_tokens``, if it is unknown: vLLM's default on GPUs of 70 GB and more."""
INDEX_TOKENS: Final = 400_000
"""About what an 80 GB GPU keeps of an 8B model: an engine forgets beyond it."""


@dataclass(frozen=True, slots=True)
class DynamoBooking:
    """The blocks and tokens of one placed request, and the instances that they count at."""

    prefill: InstanceId
    prefill_tokens: int
    decode: InstanceId
    decode_blocks: int


class Dynamo:
    """Dynamo's policy: counts the work that it has placed, and chooses the instances of least cost."""

    def __init__(
        self,
        overlap_credit: float = OVERLAP_CREDIT,
        prefill_load_scale: float = PREFILL_LOAD_SCALE,
        index_tokens: int = INDEX_TOKENS,
        speeds: Mapping[InstanceId, float] | None = None,
    ) -> None:
        self.speeds: Final = speeds or {}
        self.overlap_credit: Final = overlap_credit
        self.prefill_load_scale: Final = prefill_load_scale
        self.sent: Final = SentRequests(index_tokens)
        self.prefill_tokens: Final[Counter[InstanceId]] = Counter()
        self.decode_blocks: Final[Counter[InstanceId]] = Counter()
        self._active: Final[dict[int, DynamoBooking]] = {}
        self._prefilling: Final[set[int]] = set()

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        def prefill(rows: Ints) -> int:
            return self._cheapest(fleet, rows, lambda name: self.prefill_cost(name, wanted))

        def decode(rows: Ints) -> int:
            return self._cheapest(fleet, rows, lambda name: self.decode_cost(name, wanted))

        def whole(rows: Ints) -> int:
            return self._cheapest(
                fleet, rows, lambda name: self.prefill_cost(name, wanted) + self.decode_cost(name, wanted)
            )

        return by_rule(fleet, wanted, "least cost (Dynamo)", prefill, decode, whole)

    def prefill_cost(self, name: InstanceId, wanted: Wanted) -> float:
        """Blocks to prefill at this instance, those before this prompt included, over the instance's speed."""
        blocks = (self.prefill_tokens[name] + wanted.prompt_tokens) / BLOCK_TOKENS
        overlap = self.sent.matched(name, wanted) / BLOCK_TOKENS
        return self.prefill_load_scale * max(blocks - self.overlap_credit * overlap, 0.0) / self.speeds.get(name, 1.0)

    def decode_cost(self, name: InstanceId, wanted: Wanted) -> float:
        """Blocks that would decode at this instance, over its speed."""
        return (self.decode_blocks[name] + _blocks(wanted)) / self.speeds.get(name, 1.0)

    @staticmethod
    def _cheapest(fleet: FleetSnapshot, rows: Ints, cost: _Cost) -> int:
        of = fleet.columns
        ranked = [(cost(fleet.at(row).id), int(of.sent[row]), int(of.order[row]), int(row)) for row in rows.tolist()]
        return min(ranked)[3]

    # --- load in flight (sim.baselines.following) ---------------------------------------------------------------------

    def placed(self, request: int, wanted: Wanted, chosen: Chosen) -> None:
        self.ended(request)
        assert chosen.decode is not None
        at = chosen.prefill or chosen.decode
        booked = DynamoBooking(at, wanted.prompt_tokens - self.sent.matched(at, wanted), chosen.decode, _blocks(wanted))
        self.sent.add(at, wanted)
        self._active[request] = booked
        self._prefilling.add(request)
        self.prefill_tokens[at] += booked.prefill_tokens
        self.decode_blocks[chosen.decode] += booked.decode_blocks

    def prefilled(self, request: int) -> None:
        if request in self._prefilling:
            self._prefilling.remove(request)
            booked = self._active[request]
            self.prefill_tokens[booked.prefill] -= booked.prefill_tokens

    def ended(self, request: int) -> None:
        self.prefilled(request)
        booked = self._active.pop(request, None)
        if booked is not None:
            self.decode_blocks[booked.decode] -= booked.decode_blocks


class DynamoConditional(Dynamo):
    """The same with conditional disaggregation and the router's queue."""

    def __init__(self, budgets: Mapping[InstanceId, int] | None = None) -> None:
        super().__init__()
        self.budgets: Final = budgets or {}
        """Token budgets by instance."""

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        found = ready(fleet, wanted)
        prompting = [fleet.at(row).id for row in found.any.tolist() if fleet.at(row).role is not Role.DECODE]
        if prompting and all(map(self._loaded, prompting)):
            return Chosen(None, None, "Dynamo's queue: every instance has prompts enough", wait=True)
        near = self._bypass(fleet, found, wanted)
        if near is not None:
            return Chosen(None, near, f"least cost (Dynamo): {near} has enough of the prompt, prefill is bypassed")
        return super().__call__(fleet, wanted)

    def _loaded(self, name: InstanceId) -> bool:
        return self.prefill_tokens[name] > QUEUE_THRESHOLD * self.budgets.get(name, BATCHED_TOKENS)

    def _bypass(self, fleet: FleetSnapshot, found: ReadyRows, wanted: Wanted) -> InstanceId | None:
        """The decode instance, if it computes this prompt itself."""
        decodes = with_place(fleet, np.concatenate([of_role(found, each) for each in (Role.DECODE, Role.BOTH)]), wanted)
        if not wanted.hand_over or not len(decodes) or not len(of_role(found, Role.PREFILL)):
            return None
        name = fleet.at(self._cheapest(fleet, decodes, lambda name: self.decode_cost(name, wanted))).id
        missing = wanted.prompt_tokens - self.sent.matched(name, wanted)
        few = missing < BYPASS_TOKENS and missing < BYPASS_SHARE * wanted.prompt_tokens
        return name if few and not self._loaded(name) else None


def _blocks(wanted: Wanted) -> int:
    return -(-wanted.prompt_tokens // BLOCK_TOKENS)
