"""One step of the engine, as the engine's scheduler decided it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.twin.request import HoldSource, Sequence, Status, TwinRequest


@dataclass(slots=True, eq=False)
class BatchEntry:
    """One step's work for one request: compute the tokens from `start` on."""

    sequence: Sequence
    start: int
    count: int
    table: list[int]
    """The request's blocks; the same list as the request's own, as long as it has them."""
    life: int
    """The request's preemptions so far: the result of a step decided before a later preemption is stale."""
    place: int
    """The number of the request's admission (`Sequence.place`): requests of a step run in this order."""
    samples: bool = False
    """Whether the step makes a token for it: the step computes its last known token."""

    @property
    def stale(self) -> bool:
        """Whether its request has lost its blocks since the step was decided."""
        return self.life != self.sequence.preemptions

    @property
    def dead(self) -> bool:
        """Whether its request is over, so that its result is not needed any more."""
        return self.sequence.status is Status.OVER


@dataclass(frozen=True, slots=True)
class PullOrder:
    """A pull that the scheduler made room for."""

    request: TwinRequest
    source: HoldSource
    first: int
    """The index of the first block of the prompt to pull."""
    blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Batch:
    """One step. It has many attributes: the work of the step, its sums, and what its decision did besides."""

    number: int
    left: int
    """The unused tokens of the budget."""
    entries: dict[Sequence, BatchEntry] = field(default_factory=dict)
    """The work for each request by itself; the work for those that decode together is counted below."""
    joined: tuple[Sequence, ...] = ()
    """Requests that decode together with the others from this batch on."""
    changes: int = 0
    """The crew's `changes` at the decision: the same count means the same members."""
    decodes: int = 0
    """Requests that get a token and compute one, by themselves or together."""
    sum_context: int = 0
    """The context tokens that they read."""
    new_tokens: int = 0
    """Computed tokens of prompts."""
    area: int = 0
    """Token pairs of prompts (`costs.step.StepWork`)."""
    longest_cached: int = 0
    """Tokens that the prompt with the longest prefix had before this step."""
    pulls: tuple[PullOrder, ...] = ()
    full_hits: tuple[HoldSource, ...] = ()
    """Holds that need not be pulled: this engine has all of their tokens."""
    preempted: tuple[Sequence, ...] = ()
    short: Sequence | None = None
    """The request that could not be admitted for lack of blocks."""

    @property
    def empty(self) -> bool:
        """Whether it computes nothing."""
        return not (self.decodes or self.new_tokens)

    @property
    def plain(self) -> bool:
        """Whether its decision ordered no pull, gave no hold back and preempted no request."""
        return not (self.pulls or self.full_hits or self.preempted)

    @property
    def decodes_only(self) -> bool:
        """Whether every entry takes one token in and one token out."""
        if self.new_tokens:
            return False
        return all(entry.samples and not entry.stale and not entry.dead for entry in self.entries.values())

    def decide(self, crew_size: int, crew_context: int, changes: int) -> None:
        """The batch is complete: sum up the work of its entries and of the crew (its members, their context tokens)."""
        decodes, context, new, area, longest = crew_size, crew_context, 0, 0, 0
        for entry in self.entries.values():
            start, count = entry.start, entry.count
            if count == 1:
                decodes += 1
                context += start + 1
            else:
                new += count
                area += count * (count + 2 * start)
                longest = max(longest, start)
        self.longest_cached = longest
        self.decodes, self.sum_context, self.new_tokens, self.area = decodes, context, new, area
        self.changes = changes
