"""Those who decode, as one: each step does the same for all of them, so it is counted once and not for each.

While a request decodes, all about it follows from how many steps were decided and how many are over. A member keeps
what it had when it joined; `outputs` and the like say what it has now; who leaves gets it written back. A step then
costs what changes in it: who needs a block (`due`), who has filled one (`filled`), who ends with it (`settle`).

A crew has members only where nobody reads contents of blocks (`Config.contents`): these are written by each step.
`dissolve` makes ordinary entries of all, for what cannot be done together: preemption, a budget that is too small.
Steps are counted by their batches' numbers. The outcome is the same either way: tests/property/test_twin.py.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from itertools import chain
from typing import Final

from engine.twin.batch import Batch, Entry
from engine.twin.config import Config
from engine.twin.request import Sequence, Status


def _place(one: Sequence) -> int:
    return one.place


class Crew:
    """The decoding requests of one life of an engine, and the count of its steps."""

    def __init__(self, config: Config) -> None:
        self.size = 0
        self.changes = 0
        """Grows with everyone who joins or leaves."""
        self.decided = 0
        """Number of the last batch."""
        self.over = 0
        """Number of the last batch that is over."""
        self._depth: Final = config.depth
        self._caches: Final = config.prefix_caching
        self._block_size: Final = config.block_size
        self._context = 0
        """Tokens read by batch 0, had all members been in it from there on."""
        self._takes: Final[list[list[Sequence]]] = [[] for _ in range(config.block_size)]
        """Who needs a block for a batch, by its number modulo the block size; in running order."""
        self._fills: Final[list[list[Sequence]]] = [[] for _ in range(config.block_size)]
        """Whose tokens fill a block once a batch is over, likewise."""
        self._ends: Final[dict[int, list[Sequence]]] = {}
        """Whose answer ends with a batch."""
        self._brinks: Final[list[tuple[int, int, Sequence]]] = []
        """Up to which batch's end nothing happens to a member; a heap, in which those that left are forgotten late."""

    # --- who is in it ------------------------------------------------------------------------------------------------

    def join(self, one: Sequence, number: int) -> None:
        """From batch `number` on, which is being decided, it gets one token from each."""
        outputs = one.outputs + one.sampling  # when that batch begins
        one.together, one.first = True, number
        one.ends_with = number + one.ends_after - outputs - 1
        one.last = number + one.limit - outputs - 1
        one.brink = min(one.ends_with - 1, one.last - self._depth)
        self.size += 1
        self.changes += 1
        self._context += one.computed - number + 1
        self._add(self._takes[(number - one.computed) % self._block_size], one)
        if self._caches:
            self._add(self._fills[(number - 1 - one.prompt_tokens - outputs) % self._block_size], one)
        if one.ends_with >= number:  # else with the step under way, which knows it by itself
            self._ends.setdefault(one.ends_with, []).append(one)
        heapq.heappush(self._brinks, (one.brink, one.place, one))

    @staticmethod
    def _add(row: list[Sequence], one: Sequence) -> None:
        if row and row[-1].place > one.place:
            insort(row, one, key=_place)
        else:
            row.append(one)

    def leave(self, one: Sequence) -> None:
        """It goes on by itself: write back what it has."""
        number, outputs = one.first, one.outputs + one.sampling
        self.size -= 1
        self.changes += 1
        self._context -= one.computed - number + 1
        self._takes[(number - one.computed) % self._block_size].remove(one)
        if self._caches:
            self._fills[(number - 1 - one.prompt_tokens - outputs) % self._block_size].remove(one)
        one.outputs, one.computed, one.sampling, one.last_batch = (
            self.outputs(one),
            self.computed(one),
            one.sampling + min(self.decided, one.last) - max(self.over, number - 1),
            min(self.decided, one.last),
        )
        one.together = False

    def retire(self, number: int) -> None:
        """Batch `number` was the last of some, as their answers end by length: the next does not need them."""
        for one in self._ends.get(number, ()):
            if one.together and one.last == number:
                self.leave(one)

    def dissolve(self, batches: Iterable[Batch]) -> None:
        """Make everyone an entry of the batches that are decided and not over."""
        retired = [one for one in chain(*self._ends.values()) if not one.together and one.status is Status.RUNNING]
        members = sorted(chain(*self._takes, retired), key=_place)
        starts = {one: one.computed - one.first for one in members if one.together}
        starts |= {one: one.computed - 1 - one.last for one in retired}
        for batch in batches:
            entries = list(batch.entries.values())
            for one in members:
                if one.first <= batch.number <= min(one.last, self.decided):
                    entry = Entry(one, starts[one] + batch.number, 1, one.blocks, one.preemptions, one.place)
                    entry.samples = True
                    entries.append(entry)
            entries.sort(key=lambda entry: entry.place)
            batch.entries = {entry.sequence: entry for entry in entries}
        for one in members:
            if one.together:
                self.leave(one)
            one.first = one.last = 0
        self._ends.clear()
        self._brinks.clear()

    # --- what a member has now ---------------------------------------------------------------------------------------

    def outputs(self, one: Sequence) -> int:
        """Tokens of its answer that are there."""
        return one.outputs + max(0, self.over - one.first + 1) if one.together else one.outputs

    def computed(self, one: Sequence) -> int:
        """Tokens whose KV is computed, counting the steps that are decided and not over."""
        return one.computed + min(self.decided, one.last) - one.first + 1 if one.together else one.computed

    def known(self, one: Sequence) -> int:
        """Tokens of prompt and answer that are there."""
        return one.prompt_tokens + self.outputs(one)

    # --- what a batch does for them ----------------------------------------------------------------------------------

    def due(self, number: int) -> list[Sequence]:
        """Who needs a block more for batch `number`, in running order."""
        return self._takes[number % self._block_size]

    def hand_out(self, blocks: Iterable[int], number: int) -> None:
        """These blocks go to who is due."""
        for one, block in zip(self.due(number), blocks, strict=True):
            one.blocks.append(block)

    def filled(self) -> list[Sequence]:
        """Whose last block has just become full of known tokens, in running order."""
        return self._fills[self.over % self._block_size]

    def context(self, number: int) -> int:
        """Tokens that batch `number` reads for all of them."""
        return self._context + self.size * number

    def settle(self) -> list[Sequence]:
        """A batch is over: those whose answers end with it have left. In no order."""
        ending = self._ends.pop(self.over, None)
        if ending is None:
            return []
        ending = [one for one in ending if one.status is Status.RUNNING]
        for one in ending:
            if one.together:
                self.leave(one)
            else:  # retired: this was its last step
                one.outputs += 1
                one.sampling -= 1
        return ending

    # --- how far it is known what happens ----------------------------------------------------------------------------

    def turns(self) -> int:
        """How many batches will be over before an answer ends, or has nothing left to compute."""
        brinks = self._brinks
        while brinks and not (brinks[0][2].together and brinks[0][2].brink == brinks[0][0]):
            heapq.heappop(brinks)
        return max(0, brinks[0][0] - self.over) if brinks else 0

    def until_exhausted(self, turns: int, free: int) -> int:
        """The most turns up to these for which so many blocks are enough."""
        rounds = min(turns // self._block_size, free // max(1, self.size))  # in a round each takes one block
        free -= rounds * self.size
        for turn in range(rounds * self._block_size + 1, turns + 1):
            free -= len(self.due(self.decided + turn))
            if free < 0:
                return turn - 1
        return turns
