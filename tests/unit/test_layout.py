"""From block ids to bytes: where blocks lie, and which bytes of which rank two engines share."""

from __future__ import annotations

import pytest

from kvtransfer.layout import (
    Grid,
    HeadShard,
    Tensor,
    copies,
    grids,
    parts,
    pieces,
    ranges,
    shared,
    sources,
    their_block_bytes,
)

# --- layout ----------------------------------------------------------------------------------------------------------


def test_ranges_are_joined_where_blocks_follow_each_other() -> None:
    grid = Grid(1000, 64, 64, 100)
    assert ranges(grid, [3, 4, 5, 9, 8]) == [(1192, 192), (1576, 64), (1512, 64)]
    assert ranges(Grid(0, 32, 64, 10), [0, 1]) == [(0, 32), (64, 32)], "a slice of a block has no neighbour"
    assert copies(grid, [3, 4, 5], Grid(0, 64, 64, 100), [7, 8, 1]) == [(1192, 448, 128), (1320, 64, 64)]


def test_pieces_are_numbered_grid_by_grid() -> None:
    of = (Grid(0, 64, 64, 10), Grid(640, 64, 64, 10))
    assert list(pieces(of, (2, 3, 0))) == [2, 3, 0, 12, 13, 10]
    for wrong in ((10,), (-1,)):
        with pytest.raises(ValueError):
            pieces(of, wrong)
    assert list(parts(5, 100, 250)) == [(0, 2), (2, 4), (4, 5)]
    assert list(parts(2, 100, 1)) == [(0, 1), (1, 2)], "a block is never cut"


def rank_memory(shard: HeadShard, head_bytes: int, blocks: int) -> bytearray:
    """A rank's memory, whose bytes are made of block, outer index and head."""
    out = bytearray()
    for block in range(blocks):
        for outer in range(shard.outer):
            for head in shard.here:
                out += bytes([(block * 31 + outer * 7 + head) % 251]) * head_bytes
    return out


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("outer", [1, 2])
def test_every_rank_gets_its_heads_from_any_sharding(heads: int, outer: int) -> None:
    """For all pairs of sizes: the copies that the grids name give a rank the bytes that it would compute itself."""
    sizes = [tp for tp in (1, 2, 4, 16) if heads % tp == 0 or tp % heads == 0]
    for ours_tp, theirs_tp in ((a, b) for a in sizes for b in sizes):
        for rank in range(ours_tp):
            ours = HeadShard(ours_tp, rank, heads, outer)
            want = rank_memory(ours, 3, blocks=4)
            got = bytearray(len(want))
            size = len(want) // 4
            for number in sources(ours, theirs_tp):
                theirs = HeadShard(theirs_tp, number, heads, outer)
                memory = rank_memory(theirs, 3, blocks=4)
                other = Tensor(0, their_block_bytes(ours, theirs, size), 4)
                here, there = grids([Tensor(0, size, 4)], [other], ours, theirs)
                for mine, far in zip(here, there, strict=True):
                    for to, at, length in copies(mine, range(4), far, range(4)):
                        got[to : to + length] = memory[at : at + length]
            assert got == want, (ours_tp, theirs_tp, rank)


def test_equal_shards_share_whole_blocks() -> None:
    assert shared(HeadShard(2, 1, 8, 2), HeadShard(2, 1, 8, 2), 96) == ((0, 0, 96),)
    assert len(shared(HeadShard(1, 0, 8, 2), HeadShard(2, 1, 8, 2), 96)) == 2, "K and V are apart"
    spread = [sources(HeadShard(8, rank, 2), 4)[0] for rank in range(8)]
    assert sorted(set(spread)) == [0, 1, 2, 3], "readers are spread over the replicas of a head"


@pytest.mark.parametrize("wrong", [{"tp": 3, "heads": 8}, {"rank": 1}, {"heads": 0}, {"outer": 0}])
def test_impossible_shards(wrong) -> None:
    with pytest.raises(ValueError):
        HeadShard(**wrong)


def test_memory_of_another_shape_is_refused() -> None:
    ours = [Tensor(0, 64, 4)]
    for theirs, shard in (
        ([], HeadShard()),
        ([Tensor(0, 128, 4)], HeadShard()),
        ([Tensor(0, 64, 4)], HeadShard(heads=2)),
    ):
        with pytest.raises(ValueError):
            grids(ours, theirs, HeadShard(), shard)
