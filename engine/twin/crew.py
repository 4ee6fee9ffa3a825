"""The crew: all decoding requests as one. Each step does the same for all of them, so it is counted once.

While a request decodes, its state follows from the number of decided and of finished steps. A member keeps the values
it had when it joined; `outputs` and the like compute the current ones, and `leave` writes them back. A step then costs
only what changes in it: members that need a block (`due`), members that have filled one (`filled`), members that end
with it (`settle`).

A crew has members only if contents of blocks are not kept (`TwinConfig.contents`), as each step writes them. `dissolve`
turns all members into ordinary entries, for cases that cannot be handled together: preemption, a budget that is too
small. Steps are counted by their batches' numbers. The outcome is the same either way: tests/property/test_twin.py.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from itertools import chain
from typing import Final

from engine.twin.batch import Batch, BatchEntry
from engine.twin.config import TwinConfig
from engine.twin.request import Sequence, Status


def _place(one: Sequence) -> int:
    return one.place


class Crew:
    """The decoding requests of one life of an engine, and the count of its steps."""

    def __init__(self, config: TwinConfig) -> None:
        self.size = 0
        self.changes = 0
        """Grows with each member that joins or leaves."""
        self.decided = 0
        """The number of the last batch."""
        self.over = 0
        """The number of the last batch that is over."""
        self._depth: Final = config.depth
        self._caches: Final = config.prefix_caching
        self._block_size: Final = config.block_size
        self._context = 0
        """Tokens that batch 0 would have read, had all members been in it from there on."""
        self._takes: Final[list[list[Sequence]]] = [[] for _ in range(config.block_size)]
        """The members that need a block for a batch, by its number modulo the block size; in running order."""
        self._fills: Final[list[list[Sequence]]] = [[] for _ in range(config.block_size)]
        """The members whose tokens fill a block once a batch is over, likewise."""
        self._ends: Final[dict[int, list[Sequence]]] = {}
        """The members whose answer ends with a batch, by its number."""
        self._brinks: Final[list[tuple[int, int, Sequence]]] = []
        """A heap of (`Sequence.brink`, `Sequence.place`, member); former members are dropped late."""

    # --- members -----------------------------------------------------------------------------------------------------

    def join(self, one: Sequence, number: int) -> None:
        """From batch `number` on, which is being decided, the request gets one token from each."""
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
        if one.ends_with >= number:  # else its answer ends with the step under way, which handles it
            self._ends.setdefault(one.ends_with, []).append(one)
        heapq.heappush(self._brinks, (one.brink, one.place, one))

    @staticmethod
    def _add(row: list[Sequence], one: Sequence) -> None:
        if row and row[-1].place > one.place:
            insort(row, one, key=_place)
        else:
            row.append(one)

    def leave(self, one: Sequence) -> None:
        """The request continues by itself: write its current values back."""
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
        """Batch `number` was the last of some members, as their answers end by length: the next does not need them."""
        for one in self._ends.get(number, ()):
            if one.together and one.last == number:
                self.leave(one)

    def dissolve(self, batches: Iterable[Batch]) -> None:
        """Turn every member into an entry of the batches that are decided and not over."""
        retired = [one for one in chain(*self._ends.values()) if not one.together and one.status is Status.RUNNING]
        members = sorted(chain(*self._takes, retired), key=_place)
        starts = {one: one.computed - one.first for one in members if one.together}
        starts |= {one: one.computed - 1 - one.last for one in retired}
        for batch in batches:
            entries = list(batch.entries.values())
            for one in members:
                if one.first <= batch.number <= min(one.last, self.decided):
                    entry = BatchEntry(one, starts[one] + batch.number, 1, one.blocks, one.preemptions, one.place)
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

    # --- current values of a member ----------------------------------------------------------------------------------

    def outputs(self, one: Sequence) -> int:
        """The number of its answer's tokens that are made."""
        return one.outputs + max(0, self.over - one.first + 1) if one.together else one.outputs

    def computed(self, one: Sequence) -> int:
        """The number of tokens whose KV is computed, counting the steps that are decided and not over."""
        return one.computed + min(self.decided, one.last) - one.first + 1 if one.together else one.computed

    def known(self, one: Sequence) -> int:
        """The number of tokens of prompt and answer that are known."""
        return one.prompt_tokens + self.outputs(one)

    # --- a batch's work for the members ------------------------------------------------------------------------------

    def due(self, number: int) -> list[Sequence]:
        """The members that need one more block for batch `number`, in running order."""
        return self._takes[number % self._block_size]

    def hand_out(self, blocks: Iterable[int], number: int) -> None:
        """Give these blocks to the members that are due."""
        for one, block in zip(self.due(number), blocks, strict=True):
            one.blocks.append(block)

    def filled(self) -> list[Sequence]:
        """The members whose last block has just become full of known tokens, in running order."""
        return self._fills[self.over % self._block_size]

    def context(self, number: int) -> int:
        """The number of tokens that batch `number` reads for all members."""
        return self._context + self.size * number

    def settle(self) -> list[Sequence]:
        """A batch is over: returns the members that have left because their answers end with it, in no order."""
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

    # --- how far the future is known ---------------------------------------------------------------------------------

    def turns(self) -> int:
        """The number of batches that will be over before an answer ends, or has nothing left to compute."""
        brinks = self._brinks
        while brinks and not (brinks[0][2].together and brinks[0][2].brink == brinks[0][0]):
            heapq.heappop(brinks)
        return max(0, brinks[0][0] - self.over) if brinks else 0

    def until_exhausted(self, turns: int, free: int) -> int:
        """The most turns, up to `turns`, for which `free` blocks are enough."""
        rounds = min(turns // self._block_size, free // max(1, self.size))  # in a round each member takes one block
        free -= rounds * self.size
        for turn in range(rounds * self._block_size + 1, turns + 1):
            free -= len(self.due(self.decided + turn))
            if free < 0:
                return turn - 1
        return turns
