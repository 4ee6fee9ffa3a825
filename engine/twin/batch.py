"""One step of the engine, as its scheduler decided it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.twin.request import Request, Sequence, Source, Status


@dataclass(slots=True, eq=False)
class Entry:
    """What one step does for one request: compute the tokens from `start` on."""

    sequence: Sequence
    start: int
    count: int
    table: list[int]
    """Its blocks; the same list as the request has, as long as it has them."""
    life: int
    """Its preemptions so far: what a step brings that was decided before another one is stale."""
    place: int
    """Where it stands among the entries."""
    samples: bool = False
    """Whether the step makes a token for it: it computes the last one there is."""

    @property
    def stale(self) -> bool:
        """Its request has lost its blocks since."""
        return self.life != self.sequence.preemptions

    @property
    def dead(self) -> bool:
        """Nobody will see what it makes."""
        return self.sequence.status is Status.OVER


@dataclass(frozen=True, slots=True)
class PullOrder:
    """A pull that the scheduler made room for."""

    request: Request
    source: Source
    first: int
    """Which block of the prompt is the first to be pulled."""
    blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Batch:
    """One step."""

    number: int
    left: int
    """Tokens of the budget that nobody has yet."""
    entries: dict[Sequence, Entry] = field(default_factory=dict)
    """What it does for each request by itself; what it does for those who decode together is counted below."""
    joined: tuple[Sequence, ...] = ()
    """Who decodes together with the others from this batch on."""
    changes: int = 0
    """The crew's count when it was decided: the same count, the same members."""
    decodes: int = 0
    """Requests that get a token and compute one, by themselves or together."""
    sum_context: int = 0
    """Tokens that they read."""
    new_tokens: int = 0
    """Of prompts."""
    area: int = 0
    """Token pairs of prompts (`costs.step.Work`)."""
    pulls: tuple[PullOrder, ...] = ()
    full_hits: tuple[Source, ...] = ()
    """Holds that need not be pulled: all of it is here."""
    preempted: tuple[Sequence, ...] = ()
    short: Sequence | None = None
    """The request that could not be admitted for want of blocks."""

    @property
    def empty(self) -> bool:
        """It computes nothing."""
        return not (self.decodes or self.new_tokens)

    @property
    def plain(self) -> bool:
        """Nothing but entries and members."""
        return not (self.pulls or self.full_hits or self.preempted)

    @property
    def decodes_only(self) -> bool:
        """One token in, one token out, for everyone who has an entry."""
        if self.new_tokens:
            return False
        return all(entry.samples and not entry.stale and not entry.dead for entry in self.entries.values())

    def decide(self, crew_size: int, crew_context: int, changes: int) -> None:
        """It is complete: sum its work up."""
        decodes, context, new, area = crew_size, crew_context, 0, 0
        for entry in self.entries.values():
            start, count = entry.start, entry.count
            if count == 1:
                decodes += 1
                context += start + 1
            else:
                new += count
                area += count * (count + 2 * start)
        self.decodes, self.sum_context, self.new_tokens, self.area = decodes, context, new, area
        self.changes = changes
