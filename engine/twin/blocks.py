"""The paged KV cache: free blocks, users of the others, the prefix cache, and each block's content.

As in vLLM's `BlockPool`, free blocks stand in a queue: cached ones join it at the end and leave it from the front
(LRU), uncached ones are reused first. A free cached block can be taken back until it is given out again. Two blocks may
have the same content; the one cached first is found.

The queue has three parts: uncached blocks that were returned (a stack), blocks that were never used (a count), cached
blocks. Each is handed out in slices, and nothing is stored for a block that was never used.

Invariant: a block is either free or has users, and the counts say how many.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from engine.twin.tokens import Text, mix


@cache
def _ids(num_blocks: int) -> tuple[int, ...]:
    """All blocks of a pool of this size; one row of numbers for all pools."""
    return tuple(range(num_blocks))


class BlockPool:
    """All blocks of one life of an engine. `life` makes the content of fresh memory different in each life.

    It has many attributes: free blocks, users, prefix cache and contents change together.
    """

    def __init__(self, num_blocks: int, life: int) -> None:
        self.num_blocks: Final = num_blocks
        self.free_blocks = num_blocks
        """The number of blocks that can be given out."""
        self._life: Final = life
        self._front: list[int] = []
        """Uncached blocks; the last is reused first."""
        self._fresh = 0
        """This block and those after it were never given out; they go after `_front`."""
        self._tail: deque[int] = deque()
        """Cached blocks, and stale places of blocks that were taken back (`_stale`)."""
        self._stale: dict[int, int] = {}
        """How many of a block's places in `_tail`, the first ones, are stale."""
        self._extra: dict[int, int] = {}
        """The number of users beyond the first."""
        self._names = array("Q")
        """The name of each block; 0 for none. Empty until a block is cached, like `_idle`."""
        self._idle = bytearray()
        """1 for a block that is cached and free."""
        self._cached: dict[int, int] = {}
        """The block that is found under a name."""
        self._same: dict[int, list[int]] = {}
        """Other blocks of the same name, in the order in which they were cached."""
        self._written: dict[int, int] = {}
        """The content of each block that was written to."""

    # --- contents ----------------------------------------------------------------------------------------------------

    @property
    def contents(self) -> list[int]:
        """The digest of what was last written to each block."""
        return [self.read(block) for block in range(self.num_blocks)]

    def read(self, block: int) -> int:
        """The digest of what was last written to a block."""
        content = self._written.get(block)
        return mix(self._life, block, 0xDEAD) if content is None else content

    def write(self, blocks: Iterable[int], contents: Iterable[int]) -> None:
        """Write these contents (digests) to these blocks, one to each."""
        self._written.update(zip(blocks, contents, strict=True))

    # --- users -------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Blocks for one user. They leave the prefix cache; their contents stay until overwritten."""
        assert count <= self.free_blocks
        self.free_blocks -= count
        taken: list[int] = []
        if self._front and count:
            taken = self._front[-count:]
            taken.reverse()
            del self._front[-count:]
            count -= len(taken)
        if count and self._fresh < self.num_blocks:
            fresh = _ids(self.num_blocks)[self._fresh : self._fresh + count]
            taken += fresh
            self._fresh += len(fresh)
            count -= len(fresh)
        if count:
            self._take_cached(count, taken)
        return taken

    def _take_cached(self, count: int, taken: list[int]) -> None:
        """Take the blocks that were used longest ago."""
        tail, stale, idle, names = self._tail, self._stale, self._idle, self._names
        while count:
            block = tail.popleft()
            if block in stale:
                stale[block] -= 1
                if not stale[block]:
                    del stale[block]
                continue
            idle[block] = 0
            if self._cached[name := names[block]] == block and name not in self._same:
                del self._cached[name]
                names[block] = 0
            else:
                self.forget(block)
            taken.append(block)
            count -= 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """A row of blocks has one user less; its tail will be reused first."""
        extra, names, idle = self._extra, self._names, self._idle
        if not names:
            assert self.free_blocks + len(blocks) <= self.num_blocks, "a block is given back once"
            self._front += blocks
            self.free_blocks += len(blocks)
            return
        first: list[int] = []
        for block in reversed(blocks):
            if block in extra:
                extra[block] -= 1
                if not extra[block]:
                    del extra[block]
            elif names[block]:
                assert not idle[block], "a block is given back once"
                idle[block] = 1
                self._tail.append(block)
                self.free_blocks += 1
            else:
                first.append(block)
        assert self.free_blocks + len(first) <= self.num_blocks, "a block is given back once"
        self.free_blocks += len(first)
        first.reverse()
        self._front += first

    # --- the prefix cache --------------------------------------------------------------------------------------------

    def hits(self, text: Text, blocks_max: int) -> list[int]:
        """The cached blocks of a text's beginning, up to the first missing one: `blocks_max` of them at most."""
        cached, step = self._cached, 1  # mostly nothing is found, which one digest shows
        found: list[int] = []
        while cached and len(found) < blocks_max:
            names = text.chains(len(found), min(blocks_max, len(found) + step))
            for block in map(cached.get, names):
                if block is None:
                    return found
                found.append(block)
            step *= 8
        return found

    def unused(self, blocks: Sequence[int]) -> int:
        """The number of these blocks that are free: taking them back uses as much of the pool as new ones."""
        return sum(map(self._idle.__getitem__, blocks)) if blocks else 0

    def touch(self, blocks: Iterable[int]) -> None:
        """One more user for these cached blocks."""
        idle, stale, extra = self._idle, self._stale, self._extra
        for block in blocks:
            if idle[block]:
                idle[block] = 0
                stale[block] = stale.get(block, 0) + 1
                self.free_blocks -= 1
            else:
                extra[block] = extra.get(block, 0) + 1

    def cache(self, block: int, name: int) -> None:
        """Put a full block into the prefix cache under its digest."""
        names = self._names or self._begin()
        if not names[block]:
            names[block] = name
            if self._cached.setdefault(name, block) != block:
                self._same.setdefault(name, []).append(block)

    def cache_row(self, blocks: Sequence[int], names: Sequence[int]) -> None:
        """The same for full blocks of one text, `names` being their digests."""
        known = self._names or self._begin()
        if self._cached.keys().isdisjoint(names) and not any(map(known.__getitem__, blocks)):
            self._cached.update(zip(names, blocks, strict=True))
            for block, name in zip(blocks, names, strict=True):
                known[block] = name
        else:
            for block, name in zip(blocks, names, strict=True):
                self.cache(block, name)

    def _begin(self) -> array[int]:
        """Make the tables of the prefix cache, when the first block is cached."""
        self._names = array("Q", bytes(8 * self.num_blocks))
        self._idle = bytearray(self.num_blocks)
        return self._names

    def forget(self, block: int) -> None:
        """Remove a block from the prefix cache."""
        name = self._names[block] if self._names else 0
        if not name:
            return
        self._names[block] = 0
        same = self._same.get(name)
        if same is None:
            del self._cached[name]
            return
        if self._cached[name] == block:
            self._cached[name] = same.pop(0)
        else:
            same.remove(block)
        if not same:
            del self._same[name]

    # --- for tests ---------------------------------------------------------------------------------------------------

    @property
    def _free(self) -> list[int]:
        """The free queue, first to be reused first."""
        stale, tail = dict(self._stale), []
        for block in self._tail:
            if stale.get(block):
                stale[block] -= 1
            else:
                tail.append(block)
        return [*reversed(self._front), *range(self._fresh, self.num_blocks), *tail]

    @property
    def users(self) -> list[int]:
        """The number of users of each block."""
        free = set(self._free)
        return [0 if block in free else 1 + self._extra.get(block, 0) for block in range(self.num_blocks)]

    def check(self) -> None:
        """Assert the invariants."""
        row, free = self._free, set(self._free)
        assert len(row) == len(free) == self.free_blocks
        # Lists: compiled code (mypyc) enumerates no arrays and no bytearrays.
        named = {block for block, name in enumerate(list(self._names)) if name}
        idle = {block for block, flag in enumerate(list(self._idle)) if flag}
        assert idle == free & set(self._tail) == free & named
        assert all(users > 0 and block not in free for block, users in self._extra.items())
        others = [block for same in self._same.values() for block in same]
        assert sorted([*self._cached.values(), *others]) == sorted(named)
        assert all(same for same in self._same.values())
