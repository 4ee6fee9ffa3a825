"""What the next step does: vLLM's `Scheduler.schedule`, one rule after the other.

Running requests go first, in the order they came in; where blocks run out, the newest (or the least important) is
preempted and will be computed anew. Then waiting ones are admitted (`admit.py`), unless somebody was preempted.

It knows requests, blocks and budgets, no times. Line numbers are those of vLLM 0.32.0's v1/core/sched/scheduler.py.
"""

from __future__ import annotations

from typing import Final

from engine.twin.admit import Admission
from engine.twin.batch import Batch, Entry
from engine.twin.blocks import Pool
from engine.twin.config import Config, Policy
from engine.twin.request import Sequence, Status


class Scheduler:
    """The requests of one life of an engine, and their blocks."""

    def __init__(self, config: Config, life: int) -> None:
        self.config: Final = config
        self.pool: Final = Pool(config.num_blocks, life)
        self.running: list[Sequence] = []
        self.admission: Final = Admission(config, self.pool, self.running)
        self._number = 0
        self._over = 0
        self._deferred: list[tuple[int, list[int]]] = []

    @property
    def defers(self) -> bool:
        """Whether blocks wait for a step to be over before they are free."""
        return bool(self._deferred)

    def schedule(self) -> Batch:
        """Decide a step. An empty one may still order pulls."""
        batch = Batch(self._number + 1, self.config.max_num_batched_tokens)
        self._go_on(batch)
        if not batch.preempted:
            self.admission.admit(batch)
        if batch.entries:
            self._number = batch.number
        for entry in batch.entries.values():
            self._advance(entry, batch.number)
        return batch

    def over(self, batch: Batch) -> None:
        """A step is over: what it might have written to is free."""
        self._over = max(self._over, batch.number)
        due = [blocks for number, blocks in self._deferred if number <= self._over]
        self._deferred = [(number, blocks) for number, blocks in self._deferred if number > self._over]
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
        """Forget a request, wherever it stands; its blocks stay."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        else:
            self.admission.remove(sequence)
        sequence.status = Status.OVER

    def cache_to(self, sequence: Sequence, tokens: int) -> None:
        """Let the blocks that are full with these tokens be found."""
        self.admission.cache_to(sequence, tokens)

    # --- running requests (:659-890) ---------------------------------------------------------------------------------

    def _go_on(self, batch: Batch) -> None:
        at = 0
        while at < len(self.running) and batch.left > 0:
            sequence = self.running[at]
            count = min(sequence.known + sequence.sampling - sequence.computed, batch.left)
            nothing_left = sequence.sampling > 0 and sequence.outputs + sequence.sampling >= sequence.limit
            if count == 0 or nothing_left:
                at += 1
                continue
            if not self._make_room(sequence, count, batch):
                break
            at = self.running.index(sequence)  # a preempted one may have stood before it
            sequence.blocks += self.pool.take(self._missing(sequence, count))
            self.cache_to(sequence, min(sequence.computed + count, sequence.known))
            batch.entries[sequence] = Entry(sequence, sequence.computed, count, sequence.blocks, sequence.preemptions)
            batch.left -= count
            at += 1

    def _missing(self, sequence: Sequence, count: int) -> int:
        return max(0, self.config.blocks_for(sequence.computed + count) - len(sequence.blocks))

    def _make_room(self, sequence: Sequence, count: int, batch: Batch) -> bool:
        """Preempt until there are blocks enough. False: it is preempted itself, or has to wait."""
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
        """All its blocks go; it waits at the head of the line (:1571)."""
        entry = batch.entries.pop(sequence, None)
        if entry is not None:  # chosen for this step already
            batch.left += entry.count
            for block in sequence.blocks[sequence.computed // self.config.block_size :]:
                self.pool.forget(block)  # nothing will be computed into it
        self.running.remove(sequence)
        self.free(sequence)
        sequence.status = Status.PREEMPTED
        sequence.computed = sequence.sampling = sequence.unread = 0
        sequence.preemptions += 1
        self.admission.put_back(sequence)
        batch.preempted.append(sequence)

    def _must_defer(self, sequence: Sequence) -> bool:
        return self.config.defers_frees and sequence.last_batch > self._over

    def _advance(self, entry: Entry, number: int) -> None:
        """What is decided counts as computed (:1616)."""
        sequence = entry.sequence
        sequence.computed += entry.count
        sequence.last_batch = number
        entry.samples = sequence.computed == sequence.known + sequence.sampling
        sequence.sampling += entry.samples
