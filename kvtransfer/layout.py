"""From block ids to bytes: where blocks lie in a rank's memory, and which bytes of which rank two engines share. Pure.

A block of one KV tensor is `outer × heads × head_bytes` bytes, heads side by side (vLLM's HND layout; `outer` is 2
where one block has K and V). An engine of tensor-parallel size `tp` keeps `heads / tp` of the model's KV heads on each
rank or, with more ranks than heads, each head on several ranks. Two engines of different sizes thus share *slices* of
blocks: one rank reads from another the heads that both have.

Attention with one latent head for all (MLA) keeps the same bytes on each rank: heads = 1.

No engine uses this module: vLLM's connector maps heads by itself, and a contract test compares the two mappings.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Blocks = Sequence[int]


@dataclass(frozen=True, slots=True)
class Grid:
    """`count` pieces of `piece` bytes, the first at `address`, each `stride` bytes after the one before."""

    address: int
    piece: int
    stride: int
    count: int
    device: int = 0
    """The GPU's number; 0 for host memory."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One KV tensor in one rank's memory: `blocks` blocks, one after the other."""

    address: int
    block_bytes: int
    blocks: int
    device: int = 0

    def __post_init__(self) -> None:
        if self.address < 0 or self.block_bytes < 1 or self.blocks < 1 or self.device < 0:
            raise ValueError(f"{self} is no memory")


@dataclass(frozen=True, slots=True)
class HeadShard:
    """Which of a model's KV heads one rank holds."""

    tp: int = 1
    rank: int = 0
    heads: int = 1
    """KV heads of the whole model."""
    outer: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.tp and self.heads >= 1 and self.outer >= 1):
            raise ValueError(f"{self} is no shard")
        if self.heads % self.tp and self.tp % self.heads:
            raise ValueError(f"{self.heads} KV heads cannot be spread over {self.tp} ranks")

    @property
    def here(self) -> range:
        """The heads on this rank."""
        if self.tp >= self.heads:
            head = self.rank * self.heads // self.tp
            return range(head, head + 1)
        each = self.heads // self.tp
        return range(self.rank * each, (self.rank + 1) * each)


class Slice(NamedTuple):
    """Bytes of every block that two ranks share: where in our block, where in theirs, how many."""

    ours: int
    theirs: int
    length: int


def sources(ours: HeadShard, tp: int) -> tuple[int, ...]:
    """The ranks of an engine of size `tp` to read from, each head once.

    Where several ranks hold the same head, readers spread over them, so that rank 0 does not serve all readers.
    """
    found: list[int] = []
    for head in ours.here:
        holders = [rank for rank in range(tp) if head in HeadShard(tp, rank, ours.heads, ours.outer).here]
        alike = max(1, ours.tp // ours.heads)  # the number of our ranks that want this head
        pick = holders[ours.rank % alike * len(holders) // alike]
        if pick not in found:
            found.append(pick)
    return tuple(found)


def shared(ours: HeadShard, theirs: HeadShard, block_bytes: int) -> tuple[Slice, ...]:
    """The slices of each block that `ours` reads from `theirs`, joined where both sides are contiguous.

    `block_bytes` is the size of our block.

    Raises:
        ValueError: the shards are of different models, or the block does not divide into its heads.
    """
    if (ours.heads, ours.outer) != (theirs.heads, theirs.outer):
        raise ValueError("two shards of different models share nothing")
    head_bytes, rest = divmod(block_bytes, ours.outer * len(ours.here))
    if rest or head_bytes < 1:
        raise ValueError(f"a block of {block_bytes} bytes does not divide into {ours.outer} x {len(ours.here)} heads")
    slices: list[Slice] = []
    for outer in range(ours.outer):
        for at, head in enumerate(ours.here):
            if head not in theirs.here:
                continue
            mine = (outer * len(ours.here) + at) * head_bytes
            other = (outer * len(theirs.here) + head - theirs.here.start) * head_bytes
            last = slices[-1] if slices else None
            if last and (last.ours + last.length, last.theirs + last.length) == (mine, other):
                slices[-1] = last._replace(length=last.length + head_bytes)
            else:
                slices.append(Slice(mine, other, head_bytes))
    return tuple(slices)


def their_block_bytes(ours: HeadShard, theirs: HeadShard, block_bytes: int) -> int:
    """The size of the other side's block of the same tokens, from ours."""
    return block_bytes // len(ours.here) * len(theirs.here)


def grids(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], our_shard: HeadShard, their_shard: HeadShard
) -> tuple[tuple[Grid, ...], tuple[Grid, ...]]:
    """The same pieces on both sides: one grid for each tensor and slice, block by block.

    Raises:
        ValueError: the tensors do not match one to one, or no head is shared.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} tensors here and {len(theirs)} there")
    here: list[Grid] = []
    there: list[Grid] = []
    for mine, other in zip(ours, theirs, strict=True):
        if other.block_bytes != their_block_bytes(our_shard, their_shard, mine.block_bytes):
            raise ValueError(f"a block of {other.block_bytes} bytes there does not fit one of {mine.block_bytes} here")
        for cut in shared(our_shard, their_shard, mine.block_bytes):
            here.append(Grid(mine.address + cut.ours, cut.length, mine.block_bytes, mine.blocks, mine.device))
            there.append(Grid(other.address + cut.theirs, cut.length, other.block_bytes, other.blocks, other.device))
    if not here:
        raise ValueError("the two ranks share no head")
    return tuple(here), tuple(there)


def pieces(of: Sequence[Grid], blocks: Blocks) -> Sequence[int]:
    """The numbers of these blocks' pieces in a prepared list of grids, grid by grid. Adjacent blocks stay adjacent.

    Raises:
        ValueError: a block is not in the memory.
    """
    if len(blocks) and not 0 <= min(blocks) <= max(blocks) < min(grid.count for grid in of):
        raise ValueError("a block that is not in the memory")
    found = array.array("i")
    base = 0
    for grid in of:
        found.extend([base + block for block in blocks])
        base += grid.count
    return found


def block_bytes(of: Sequence[Grid]) -> int:
    """The bytes of one block, over all grids."""
    return sum(grid.piece for grid in of)


def ranges(of: Grid, blocks: Blocks) -> list[tuple[int, int]]:
    """The (address, length) of these blocks, joined where blocks are adjacent in the list and in memory."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        start = of.address + block * of.stride
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + of.piece)
        else:
            found.append((start, of.piece))
    return found


def copies(ours: Grid, our_blocks: Blocks, theirs: Grid, their_blocks: Blocks) -> list[tuple[int, int, int]]:
    """The (our address, their address, length) to copy these blocks, joined where both sides are adjacent."""
    found: list[tuple[int, int, int]] = []
    for mine, other in zip(our_blocks, their_blocks, strict=True):
        here, there = ours.address + mine * ours.stride, theirs.address + other * theirs.stride
        if found:
            last_here, last_there, length = found[-1]
            if (last_here + length, last_there + length) == (here, there):
                found[-1] = (last_here, last_there, length + ours.piece)
                continue
        found.append((here, there, ours.piece))
    return found


def parts(blocks: int, bytes_each: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut `blocks` blocks into runs of at most `part_bytes` bytes (at least one block): the first block and the end of
    each.
    """
    step = max(1, part_bytes // max(1, bytes_each))
    for first in range(0, blocks, step):
        yield first, min(blocks, first + step)
