"""Many decode steps at once: how far the scheduler's next decisions are known, and their result in closed form.

While every running request decodes and no waiting one can start, each turn of the engine (settle a step, decide
another) is trivial: one token more for each. `horizon` says for how many turns that holds, `leap` carries them out. The
result is the same, block by block and in the same order, as if `TwinScheduler.schedule` had made each turn:
tests/property/test_twin.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from engine.twin.batch import Batch, BatchEntry
from engine.twin.crew import Crew
from engine.twin.request import Sequence
from engine.twin.schedule import TwinScheduler


def horizon(scheduler: TwinScheduler, batches: Row[Batch]) -> int:
    """The number of trivial turns from here, given the steps that are decided and not over, if no event comes in."""
    if len(batches) < scheduler.config.depth or scheduler.defers:
        return 0
    running, crew, last = scheduler.running, scheduler.crew, batches[-1]
    if scheduler.config.contents:
        if any(not (batch.plain and batch.decodes_only and list(batch.entries) == running) for batch in batches):
            return 0
        turns = min(_own(sequence) for sequence in running)
    else:
        if crew.size != len(running):
            return 0
        if any(batch.entries or batch.changes != crew.changes or not batch.plain for batch in batches):
            return 0
        turns = crew.turns()
    if last.short is not None:
        turns = min([turns, *(_until_found(scheduler, sequence, last.short) for sequence in running)])
    if crew.size:
        return crew.until_exhausted(turns, scheduler.pool.free_blocks)
    return _until_exhausted(scheduler, max(0, turns))


def _own(sequence: Sequence) -> int:
    """The number of turns before the request ends, and before it has nothing more to compute."""
    return min(sequence.ends_after - sequence.outputs - 1, sequence.limit - sequence.outputs - sequence.sampling)


def _until_found(scheduler: TwinScheduler, sequence: Sequence, short: Sequence) -> int:
    """The number of turns before the request fills a block that the request waiting for blocks would find in
    the cache.
    """
    block, block_size = sequence.cached_blocks, scheduler.config.block_size
    looked_at = (short.known - 1) // block_size
    if not scheduler.config.prefix_caching or short.computed or block >= looked_at:
        return sequence.limit
    if short.text.chain(block - 1) != sequence.text.chain(block - 1):
        return sequence.limit
    crew = scheduler.crew
    return (block + 1) * block_size - min(crew.computed(sequence), crew.known(sequence)) - 1


def _until_exhausted(scheduler: TwinScheduler, turns: int) -> int:
    """The most turns, up to `turns`, for which there are blocks."""

    def lacking(turns: int) -> int:
        blocks_for = scheduler.config.blocks_for
        return sum(blocks_for(one.computed + turns) - len(one.blocks) for one in scheduler.running)

    free, low, high = scheduler.pool.free_blocks, 0, turns
    while low < high:
        middle = (low + high + 1) // 2
        if lacking(middle) <= free:
            low = middle
        else:
            high = middle - 1
    return low


def leap(scheduler: TwinScheduler, batches: Row[Batch], turns: int) -> None:
    """Make `turns` trivial turns."""
    if not turns:
        return
    for batch in batches:
        batch.sum_context += turns * batch.decodes
    if not scheduler.config.contents:
        _leap_together(scheduler, scheduler.crew, turns)
        for batch in batches:
            batch.number += turns
        return
    _allocate(scheduler, turns)
    for sequence in scheduler.running:
        sequence.outputs += turns
        sequence.computed += turns
    for batch in batches:
        for entry in batch.entries.values():
            entry.start += turns
    for entry in batches[0].entries.values():
        write(scheduler, entry, entry.start - turns, entry.start + 1)


def _leap_together(scheduler: TwinScheduler, crew: Crew, turns: int) -> None:
    """Blocks for all decoding requests, and names for the blocks that they fill, turn by turn."""
    caches = scheduler.config.prefix_caching
    for _ in range(turns):
        crew.over += 1
        crew.decided += 1
        if due := crew.due(crew.decided):
            crew.hand_out(scheduler.pool.take(len(due)), crew.decided)
        if caches:
            for sequence in crew.filled():
                scheduler.cache_to(sequence, crew.known(sequence))


def _allocate(scheduler: TwinScheduler, turns: int) -> None:
    """Take and cache blocks in the order in which the turns would have done it."""
    block_size = scheduler.config.block_size
    moves: list[tuple[int, int, bool]] = []
    for place, sequence in enumerate(scheduler.running):
        empty = len(sequence.blocks) * block_size - sequence.computed
        moves += [(turn, place, False) for turn in range(empty + 1, turns + 1, block_size)]
        left = block_size - min(sequence.computed, sequence.known) % block_size
        moves += [(turn, place, True) for turn in range(left, turns + 1, block_size)]
    for turn, place, full in sorted(moves):
        sequence = scheduler.running[place]
        if full:
            scheduler.cache_to(sequence, min(sequence.computed, sequence.known) + turn)
        else:
            sequence.blocks += scheduler.pool.take(1)


def execute(scheduler: TwinScheduler, batch: Batch) -> None:
    """A step's effect on memory: each request reads what came from elsewhere, and writes what it computes.

    In the order of the batch: a later request may have found an earlier one's blocks in the cache.
    """
    for entry in batch.entries.values():
        if not entry.stale and not entry.dead and entry.sequence.unread:
            _read(scheduler, entry)
        write(scheduler, entry, entry.start, entry.start + entry.count)


def _read(scheduler: TwinScheduler, entry: BatchEntry) -> None:
    """Compare the contents with the right ones. A request that reads anything else makes wrong tokens from there on."""
    sequence, block_size = entry.sequence, scheduler.config.block_size
    for block in range(scheduler.config.blocks_for(sequence.unread)):
        found = scheduler.pool.read(entry.table[block])
        right = sequence.text.digest(block, min(sequence.unread, (block + 1) * block_size))
        if found != right:
            sequence.taint = found | 1  # 0 means: all contents were right
            break
    sequence.unread = 0


def write(scheduler: TwinScheduler, entry: BatchEntry, start: int, end: int) -> None:
    """Write the KV of the tokens from `start` to `end`."""
    block_size = scheduler.config.block_size
    first, full = start // block_size, end // block_size
    if end - start == 1:
        scheduler.pool.write((entry.table[first],), (entry.sequence.digest(first, end),))
        return
    contents = entry.sequence.digests(first, full)
    if end % block_size:
        contents.append(entry.sequence.digest(full, end))
    scheduler.pool.write(entry.table[first : first + len(contents)], contents)
