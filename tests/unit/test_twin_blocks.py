"""The twin's pool of KV blocks, without an engine."""

import pytest

from engine.twin.blocks import BlockPool
from engine.twin.config import TwinConfig
from engine.twin.tokens import Segment, Text

TEXT = Text((Segment(1, 40),), 0, 4)


def filled(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.take(count)
    for number, block in enumerate(blocks):
        pool.cache(block, TEXT.chain(number))
    return blocks


def test_cached_blocks_are_reused_last_and_their_tail_first() -> None:
    pool = BlockPool(6, 1)
    cached, plain = filled(pool, 3), pool.take(2)
    pool.give_back(cached)
    pool.give_back(plain)
    pool.check()
    assert pool.take(6) == [*reversed(plain), 5, *reversed(cached)]
    assert pool.hits(TEXT, 9) == []


def test_a_free_block_that_is_cached_can_be_reused() -> None:
    pool = BlockPool(4, 1)
    cached = filled(pool, 3)
    pool.give_back(cached)
    assert pool.hits(TEXT, 9) == cached
    assert pool.hits(TEXT, 2) == cached[:2]
    assert pool.unused(cached) == 3
    pool.touch(cached[:2])
    pool.touch(cached[:1])
    assert (pool.free_blocks, pool.users[:3]) == (2, [2, 1, 0])
    pool.give_back(cached[:1])
    pool.give_back(cached[:2])
    pool.check()
    assert pool.free_blocks == 4


def test_the_first_of_two_equal_blocks_is_found() -> None:
    pool = BlockPool(4, 1)
    first, second = filled(pool, 1), filled(pool, 1)
    assert pool.hits(TEXT, 1) == first
    pool.give_back(first)
    pool.take(3)
    assert pool.hits(TEXT, 1) == second


def test_a_block_is_given_back_once() -> None:
    pool = BlockPool(2, 1)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="once"):
        pool.give_back(blocks)


def test_a_fresh_pool_keeps_no_entries_for_blocks_that_were_never_taken() -> None:
    pool = BlockPool(1_000_000, 1)
    assert pool.take(3) == [0, 1, 2]
    assert pool.free_blocks == 999_997
    kept = (pool._front, pool._tail, pool._names, pool._idle, pool._extra, pool._written)
    assert not any(kept)


def test_caching_a_row_of_blocks_equals_caching_them_one_by_one() -> None:
    row, single = BlockPool(9, 1), BlockPool(9, 1)
    for _ in range(2):  # the second time, equal blocks are cached already
        blocks = row.take(3)
        row.cache_row(blocks, TEXT.chains(0, 3))
        assert blocks == filled(single, 3)
    assert (row._cached, row._same, row._names) == (single._cached, single._same, single._names)
    row.check()


def test_a_reused_block_has_one_place_in_the_free_queue() -> None:
    pool = BlockPool(4, 1)
    cached = filled(pool, 4)
    pool.give_back(cached)
    for _ in range(3):
        pool.touch(cached[2:3])
        pool.give_back(cached[2:3])
        pool.check()
    assert pool._free == [3, 1, 0, 2]
    assert pool.take(4) == [3, 1, 0, 2]
    assert not pool._stale


def test_pools_of_two_engine_starts_have_different_contents() -> None:
    assert not set(BlockPool(8, 1).contents) & set(BlockPool(8, 2).contents)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"num_blocks": 4},
        {"watermark_blocks": -1},
        {"watermark_blocks": 600},
        {"chunked_prefill": False},
    ],
)
def test_settings_that_vllm_refuses_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be|does not fit"):
        TwinConfig(**wrong)  # type: ignore[arg-type]
