"""The content of the next step: vLLM's `Scheduler.schedule`, one rule after the other.

Running requests go first, in the order in which they came; where blocks run out, the newest (or the least important)
request is preempted and computed again later. Then waiting requests are admitted (`admit.py`), unless a request was
preempted.

The module knows requests, blocks and budgets, no times. Line numbers are those of vLLM 0.32.0's
v1/core/sched/scheduler.py.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from engine.twin.admit import Admission
from engine.twin.batch import Batch, BatchEntry
from engine.twin.blocks import BlockPool
from engine.twin.config import Policy, TwinConfig
from engine.twin.crew import Crew
from engine.twin.pulls import TwinPulls
from engine.twin.request import Sequence, Status


class TwinScheduler:
    """The requests of one life of an engine, and their blocks."""

    def __init__(self, config: TwinConfig, life: int, pulls: TwinPulls) -> None:
        self.config: Final = config
        self.pool: Final = BlockPool(config.num_blocks, life)
        self.crew: Final = Crew(config)
        self.running: list[Sequence] = []
        self.batches: Final[deque[Batch]] = deque()
        """Steps that are decided and not over; the first one runs."""
        self.admission: Final = Admission(config, self.pool, self.crew, self.running, pulls)
        self._deferred: list[tuple[int, list[int]]] = []

    @property
    def defers(self) -> bool:
        """Whether blocks wait for a step to be over before they are free."""
        return bool(self._deferred)

    def schedule(self) -> Batch:
        """Decide a step. An empty one may still order pulls."""
        crew = self.crew
        batch = Batch(crew.decided + 1, self.config.max_num_batched_tokens)
        if self.running:
            self._go_on(batch)
        if not batch.preempted:
            self.admission.admit(batch)
        batch.decide(crew.size, crew.context(batch.number), crew.changes)
        if not batch.empty:
            crew.decided = batch.number
            self.batches.append(batch)
        for entry in batch.entries.values():
            self._advance(entry, batch.number)
        return batch

    def over(self, batch: Batch) -> None:
        """A step is over: the blocks it might have written to are free."""
        self.crew.over = batch.number
        if not self._deferred:
            return
        due = [blocks for number, blocks in self._deferred if number <= batch.number]
        self._deferred = [(number, blocks) for number, blocks in self._deferred if number > batch.number]
        for blocks in due:
            self.pool.give_back(blocks)

    def free(self, sequence: Sequence) -> None:
        """Take all its blocks from a request (:2766)."""
        blocks, sequence.blocks, sequence.cached_blocks = sequence.blocks, [], 0
        if self._must_defer(sequence):
            self._deferred.append((sequence.last_batch, blocks))
        else:
            self.pool.give_back(blocks)

    def remove(self, sequence: Sequence) -> None:
        """End a request that waits or runs; its blocks stay taken."""
        if sequence.status is Status.RUNNING:
            if sequence.together:
                self.crew.leave(sequence)
            self.running.remove(sequence)
        else:
            self.admission.remove(sequence)
        sequence.status = Status.OVER

    def cache_to(self, sequence: Sequence, tokens: int) -> None:
        """Put the blocks that are full with these tokens into the prefix cache."""
        self.admission.cache_to(sequence, tokens)

    # --- running requests (:659-890) ---------------------------------------------------------------------------------

    def _go_on(self, batch: Batch) -> None:
        if self.config.contents:
            self._one_by_one(batch)
        elif not self._together(batch):
            self.crew.dissolve(self.batches)
            self._one_by_one(batch)

    def _together(self, batch: Batch) -> bool:
        """Continue all decoding requests at once. Returns False and changes nothing if a request has to be preempted,
        or to wait.
        """
        crew = self.crew
        crew.retire(batch.number - 1)
        due, filled = crew.due(batch.number), crew.filled() if self.config.prefix_caching else []
        left, needed = batch.left - crew.size, len(due)
        others: dict[Sequence, int] = {}
        if crew.size < len(self.running):
            lacking = False
            for sequence in self.running:
                if sequence.together:
                    if lacking:  # a request that stands before it takes the block
                        return False
                    continue
                wanted = self._wanted(sequence)
                count = min(wanted, left)
                lacking = lacking or count < wanted
                if count > 0:
                    others[sequence] = count
                    needed += self._missing(sequence, count)
                    left -= count
        if left < 0 or needed > self.pool.free_blocks:
            return False
        batch.left = left
        if others:
            self._beside(batch, others)
        else:
            crew.hand_out(self.pool.take(len(due)), batch.number) if due else None
            for sequence in filled:
                self.cache_to(sequence, crew.known(sequence))
        return True

    def _beside(self, batch: Batch, others: dict[Sequence, int]) -> None:
        """Give blocks to the crew, blocks and work to the requests that compute part of a prompt, in running order."""
        crew = self.crew
        due = frozenset(crew.due(batch.number))
        filled = frozenset(crew.filled() if self.config.prefix_caching else ())
        for sequence in sorted({*due, *filled, *others}, key=lambda one: one.place):
            if sequence in due:
                sequence.blocks += self.pool.take(1)
            if sequence in filled:
                self.cache_to(sequence, crew.known(sequence))
            if sequence in others:
                self._compute(sequence, others[sequence], batch)

    def _wanted(self, sequence: Sequence) -> int:
        """The number of tokens it has to compute; 0 if its answer ends with a step under way."""
        if sequence.sampling > 0 and sequence.outputs + sequence.sampling >= sequence.limit:
            return 0
        return sequence.known + sequence.sampling - sequence.computed

    def _compute(self, sequence: Sequence, count: int, batch: Batch) -> None:
        """Take blocks for its next tokens, and put it into the batch."""
        sequence.blocks += self.pool.take(self._missing(sequence, count))
        self.cache_to(sequence, min(sequence.computed + count, sequence.known))
        self.admission.put_into(batch, sequence, count)

    def _one_by_one(self, batch: Batch) -> None:
        at = 0
        while at < len(self.running) and batch.left > 0:
            sequence = self.running[at]
            count = min(self._wanted(sequence), batch.left)
            if count == 0:
                at += 1
                continue
            if missing := self._missing(sequence, count):
                if not self._make_room(sequence, count, batch):
                    break
                if batch.preempted:
                    at = self.running.index(sequence)  # a preempted one may have stood before it
                sequence.blocks += self.pool.take(missing)
            self.cache_to(sequence, min(sequence.computed + count, sequence.known))
            batch.entries[sequence] = BatchEntry(
                sequence, sequence.computed, count, sequence.blocks, sequence.preemptions, sequence.place
            )
            batch.left -= count
            at += 1

    def _missing(self, sequence: Sequence, count: int) -> int:
        tokens, block_size = sequence.computed + count, self.config.block_size
        more = tokens - len(sequence.blocks) * block_size
        return -(-more // block_size) if more > 0 else 0

    def _make_room(self, sequence: Sequence, count: int, batch: Batch) -> bool:
        """Preempt until there are enough blocks. False: the request itself is preempted, or has to wait."""
        while self._missing(sequence, count) > self.pool.free_blocks:
            victim = self._victim()
            if self._must_defer(victim):  # its blocks would not be free at once (:805)
                return False
            self._preempt(victim, batch)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        if self.config.policy is Policy.PRIORITY:
            return max(self.running, key=lambda sequence: sequence.rank)
        return self.running[-1]

    def _preempt(self, sequence: Sequence, batch: Batch) -> None:
        """Take all its blocks; it waits at the head of the queue (:1571)."""
        entry = batch.entries.pop(sequence, None)
        if entry is not None:  # chosen for this step already
            batch.left += entry.count
            for block in sequence.blocks[sequence.computed // self.config.block_size :]:
                self.pool.forget(block)  # no step will compute into it
        self.running.remove(sequence)
        self.free(sequence)
        sequence.status = Status.PREEMPTED
        sequence.computed = sequence.sampling = sequence.unread = 0
        sequence.preemptions += 1
        self.admission.put_back(sequence)
        batch.preempted += (sequence,)

    def _must_defer(self, sequence: Sequence) -> bool:
        return self.config.defers_frees and sequence.last_batch > self.crew.over

    def _advance(self, entry: BatchEntry, number: int) -> None:
        """Decided tokens count as computed (:1616)."""
        sequence = entry.sequence
        sequence.computed += entry.count
        sequence.last_batch = number
        entry.samples = sequence.computed == sequence.known + sequence.sampling
        sequence.sampling += entry.samples
