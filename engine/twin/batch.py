"""One step of the engine, as its scheduler decided it."""

from __future__ import annotations

from dataclasses import dataclass, field

from costs.step import Work, decoding, prompt
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

    @property
    def work(self) -> Work:
        return decoding(1, self.start + 1) if self.count == 1 else prompt(self.count, self.start)


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
    pulls: list[PullOrder] = field(default_factory=list)
    full_hits: list[Source] = field(default_factory=list)
    """Holds that need not be pulled: all of it is here."""
    preempted: list[Sequence] = field(default_factory=list)
    short: Sequence | None = None
    """The request that could not be admitted for want of blocks."""

    @property
    def work(self) -> Work:
        return sum((entry.work for entry in self.entries.values()), Work())

    @property
    def decodes_only(self) -> bool:
        """One token in, one token out, for everyone."""
        plain = all(
            entry.count == 1 and entry.samples and not entry.stale and not entry.dead for entry in self.entries.values()
        )
        return plain and not (self.pulls or self.full_hits or self.preempted)
