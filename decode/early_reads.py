"""The consumer's side of parts (`kvtransfer.early_notes.Part`): blocks that are read while their producer computes the
rest of the prompt. Pure.

Where the link is what waits, an early leg (`decode.early`) gets its blocks before its hold is there, and reads those of
the producer that are complete. The rules:

1. it does so only where it `pays`: for the time on the wire that it saves, this engine's blocks are kept for as long as
   the producer computes;
2. what is read early is not used before the hold is confirmed: the leg's last blocks are read as those of an ordinary
   pull, and the look at the mark comes after *all* reads (`decode.table`). The blocks belong to one request at the
   producer from their computing until its hold ends. So a mark that stands says as much of them as of the others;
3. that holds only within one *life* of the request at the producer. If the hold is of another life than the parts, or
   names another block at a place that was read, nothing of it is used: the leg gives its blocks back and pulls anew, as
   if it had read nothing. No block is read twice into one place: an earlier read might arrive later;
4. a leg that ends, or loses its producer, begins no more reads. Its blocks are free when those under way have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvtransfer.early_notes import Part

SAVED_S_MIN: Final = 0.005
"""The least time on the wire that is worth it, in seconds: about what the steps of the two engines shift it by."""
SAVED_PART_MIN: Final = 0.02
"""The least time on the wire as a part of the time for which the blocks are kept."""
FREE_PART_MAX: Final = 0.5
"""The part of this engine's blocks, of those that are free or that early reads have, that early reads may have
together: running answers must find room meanwhile, and so must prompts for which other engines' legs wait."""
KEEP: Final = 0.8
"""The weight of former pulls against one of the same size now, in the rate of a link."""


def pays(*, readable: int, left_s: float, rate: float, blocks: int, free: int, taken: int = 0) -> bool:
    """Whether a leg should read while its producer computes.

    Args:
        readable: tokens that can be read before the prompt is computed.
        left_s: seconds until it is computed.
        rate: tokens a second that pulls from this producer bring; 0: unknown.
        blocks: what the leg needs.
        free: this engine's free blocks.
        taken: the blocks of other legs that read early.
    """
    if rate <= 0 or readable <= 0 or blocks + taken > FREE_PART_MAX * (free + taken):
        return False
    saved_s = min(readable / rate, left_s)
    return saved_s >= max(SAVED_S_MIN, SAVED_PART_MIN * left_s)


class LinkRates:
    """How fast the pulls from each producer were lately. Long pulls count more than short ones."""

    def __init__(self) -> None:
        self._seen: Final[dict[str, tuple[float, float]]] = {}

    def saw(self, engine: str, tokens: int, seconds: float) -> None:
        """So many tokens were read in this time."""
        if tokens > 0 and seconds > 0:
            before_tokens, before_s = self._seen.get(engine, (0.0, 0.0))
            self._seen[engine] = (KEEP * before_tokens + tokens, KEEP * before_s + seconds)

    def of(self, engine: str) -> float:
        """Tokens a second; 0: unknown."""
        tokens, seconds = self._seen.get(engine, (0.0, 0.0))
        return tokens / seconds if seconds else 0.0

    def forgotten(self, engine: str) -> None:
        """The engine has gone."""
        self._seen.pop(engine, None)


class Place(NamedTuple):
    """A leg's blocks here."""

    local: tuple[int, ...]
    """Those to be filled, from the prompt's block `cached` on."""
    cached: int
    """Blocks of the prompt that were in the prefix cache."""


class PartRead(NamedTuple):
    """Blocks to be read now."""

    engine: str
    request: str
    """The producer's name for the request."""
    first: int
    """The index in the prompt of the first of them."""
    remote: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(slots=True)
class _Leg:
    engine: str
    part: Part
    """The latest."""
    blocks: list[int] = field(default_factory=list)
    """The producer's complete blocks, from the prompt's first on."""
    place: Place | None = None
    ordered: int = 0
    """The index in the prompt of the first block that no read was ordered for."""
    tried: bool = False
    """Whether blocks were asked for. A leg that does not get them waits as any early leg."""
    spoilt: bool = False
    """Whether its parts are of several lives: nothing more is read."""


class EarlyReads:
    """The legs of one engine that know of parts, by its request ids."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens: Final = block_tokens
        self._legs: Final[dict[str, _Leg]] = {}
        self._taken: Final[dict[str, int]] = {}
        """By leg: how many blocks it has, until its hold is there or the ranks have said that no read is under way."""
        self._ending: Final[set[str]] = set()
        """Legs that give their blocks back, until the ranks have said that no read is under way."""
        self._over: list[tuple[str, PartRead]] = []
        self.rates: Final = LinkRates()
        self.counts: Final[Counter[str]] = Counter()

    @property
    def ending(self) -> int:
        """The number of legs that wait for the end of their reads."""
        return len(self._ending)

    def has(self, request: str) -> bool:
        """Whether a leg has its blocks already."""
        leg = self._legs.get(request)
        return leg is not None and leg.place is not None

    def told(self, request: str, engine: str, part: Part) -> bool:
        """The producer of a leg says that blocks are complete. Returns whether this was news of use."""
        if part.block_tokens != self._block_tokens:
            return False
        leg = self._legs.get(request)
        if leg is None or (leg.place is None and leg.part.life != part.life):
            leg = self._legs[request] = _Leg(engine, part, tried=leg is not None and leg.tried)
        if leg.part.life != part.life or leg.part.request != part.request:
            leg.spoilt = True
        if leg.spoilt or part.first > len(leg.blocks):  # a notice was lost: the rest is read at the end
            return False
        known = leg.blocks[part.first :]
        if list(part.blocks[: len(known)]) != known[: len(part.blocks)]:  # of one life, blocks are only added
            leg.spoilt = True
            return False
        leg.part = part
        leg.blocks += part.blocks[len(known) :]
        return True

    def wants(self, request: str, prompt: int, cached: int, free: int) -> int:
        """The number of tokens that blocks are wanted for now; 0: none. Asked once more at most after this was above 0.

        Args:
            request: a leg that has no blocks.
            prompt: its prompt's tokens.
            cached: those of them that are in the prefix cache, a whole number of blocks.
            free: this engine's free blocks.
        """
        leg = self._legs.get(request)
        if leg is None or leg.tried or leg.part.tokens != prompt or not leg.blocks or leg.spoilt:
            return 0
        done = len(leg.blocks) * self._block_tokens
        readable = min(max(done, prompt - leg.part.chunk), prompt) - cached
        blocks = -(-(prompt - cached) // self._block_tokens)
        rate, taken = self.rates.of(leg.engine), sum(self._taken.values())
        if not pays(readable=readable, left_s=leg.part.left_s, rate=rate, blocks=blocks, free=free, taken=taken):
            return 0
        leg.tried = True
        return prompt - cached

    def reserved(self, request: str, place: Place) -> None:
        """The engine has given the leg its blocks."""
        leg = self._legs[request]
        leg.place, leg.ordered = place, place.cached
        self._taken[request] = len(place.local)
        self.counts["legs read early"] += 1

    def take_reads(self) -> dict[str, PartRead]:
        """The reads to begin now. The prompt's last block is never among them: it is read when the hold is there."""
        reads = {}
        for request in self._taken:  # not those of all legs: most have no blocks, or have them for good
            leg = self._legs.get(request)
            if leg is None or leg.place is None or leg.spoilt:
                continue
            end = min(len(leg.blocks), leg.place.cached + len(leg.place.local) - 1)
            if leg.ordered >= end:
                continue
            here = slice(leg.ordered - leg.place.cached, end - leg.place.cached)
            remote, local = tuple(leg.blocks[leg.ordered : end]), leg.place.local[here]
            reads[request] = PartRead(leg.engine, leg.part.request, leg.ordered, remote, local)
            leg.ordered = end
            self.counts["parts read early"] += 1
        return reads

    def ready(self, request: str, hold: str, life: int, tokens: int, blocks: Sequence[int]) -> Place | None:
        """The hold is there: the blocks of its pull, which goes on as an ordinary one, confirmed by the mark. None: the
        leg has none, or what was read is not the hold's, and the leg gives its blocks back (`take_over`).

        Args:
            request: the leg's.
            hold: the producer's name for it.
            life: that of its computing.
            tokens: the prompt's tokens that it holds.
            blocks: its blocks.
        """
        leg = self._legs.pop(request, None)
        if leg is None or leg.place is None:
            return None
        cached = leg.place.cached
        same = list(blocks[cached : leg.ordered]) == leg.blocks[cached : leg.ordered]
        whole = tokens >= leg.part.tokens and len(blocks) >= cached + len(leg.place.local)
        if same and whole and not leg.spoilt and (hold, life) == (leg.part.request, leg.part.life):
            del self._taken[request]
            return leg.place
        self.counts["early reads in vain"] += 1
        self._end(request, leg, leg.place)
        return None

    def ends(self, request: str) -> None:
        """The leg is over, is computed here, or never gets its hold."""
        leg = self._legs.pop(request, None)
        if leg is not None and leg.place is not None:
            self.counts["early reads abandoned"] += 1
            self._end(request, leg, leg.place)

    def _end(self, request: str, leg: _Leg, place: Place) -> None:
        self._ending.add(request)
        self._over.append((request, PartRead(leg.engine, leg.part.request, place.cached, (), place.local)))

    def take_over(self) -> dict[str, PartRead]:
        """The legs that give their blocks back when no read into them is under way; `local` has them all. Each once."""
        over, self._over = self._over, []
        return dict(over)

    def ended(self, request: str) -> None:
        """The ranks have said that no read of the request is under way."""
        self._ending.discard(request)
        self._taken.pop(request, None)
