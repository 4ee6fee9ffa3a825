"""The paged KV cache: which blocks are free, who uses the others, what is cached, and what each block contains.

As vLLM's `BlockPool`: free blocks stand in a queue; cached ones join it at the end and leave it from the front (LRU),
uncached ones are reused first. A free block that is cached can be had back until it is given out anew. Two blocks may
hold the same content; the one cached first is found.

What always holds: a block is either free or used by somebody, and the counts say by how many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.twin.tokens import Text, mix


class Pool:
    """All blocks of one life of an engine. `life` makes what lies in fresh memory different in each."""

    def __init__(self, num_blocks: int, life: int) -> None:
        self.contents = [mix(life, block, 0xDEAD) for block in range(num_blocks)]
        """The digest of what was last written to each block."""
        self.users = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[int, dict[int, None]] = {}
        self._names: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be given out."""
        return len(self._free)

    def hits(self, text: Text, blocks_max: int) -> list[int]:
        """The blocks that hold the beginning of a text, as far as all of it is cached."""
        found: list[int] = []
        while len(found) < blocks_max and (same := self._cached.get(text.chain(len(found)))):
            found.append(next(iter(same)))
        return found

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of these are free: having them back takes as much of the pool as new ones."""
        return sum(not self.users[block] for block in blocks)

    def touch(self, blocks: Iterable[int]) -> None:
        """One more user for these cached blocks."""
        for block in blocks:
            if not self.users[block]:
                del self._free[block]
            self.users[block] += 1

    def take(self, count: int) -> list[int]:
        """Blocks for one user; what was cached in them is forgotten, what they contain stays until written over."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            assert not self.users[block]
            self.forget(block)
            self.users[block] = 1
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user less for a row of blocks; its tail will be reused first."""
        first: list[int] = []
        for block in reversed(blocks):
            assert self.users[block] > 0, "a block is given back once"
            self.users[block] -= 1
            if self.users[block]:
                continue
            if block in self._names:
                self._free[block] = None
            else:
                first.append(block)
        for block in reversed(first):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def cache(self, block: int, name: int) -> None:
        """Let a full block be found under its digest."""
        if block not in self._names:
            self._names[block] = name
            self._cached.setdefault(name, {})[block] = None

    def forget(self, block: int) -> None:
        """Let a block not be found any more."""
        name = self._names.pop(block, None)
        if name is not None:
            same = self._cached[name]
            del same[block]
            if not same:
                del self._cached[name]

    def check(self) -> None:
        """Assert what always holds."""
        assert all(bool(users) != (block in self._free) for block, users in enumerate(self.users))
        assert sum(len(same) for same in self._cached.values()) == len(self._names)
