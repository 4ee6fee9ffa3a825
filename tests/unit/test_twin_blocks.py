"""The pool of KV blocks by itself."""

import pytest

from engine.twin.blocks import Pool
from engine.twin.config import Config
from engine.twin.tokens import Segment, Text

TEXT = Text((Segment(1, 40),), 0, 4)


def filled(pool: Pool, count: int) -> list[int]:
    blocks = pool.take(count)
    for number, block in enumerate(blocks):
        pool.cache(block, TEXT.chain(number))
    return blocks


def test_cached_blocks_are_reused_last_and_their_tail_first() -> None:
    pool = Pool(6, 1)
    cached, plain = filled(pool, 3), pool.take(2)
    pool.give_back(cached)
    pool.give_back(plain)
    pool.check()
    assert pool.take(6) == [*reversed(plain), 5, *reversed(cached)]
    assert pool.hits(TEXT, 9) == []


def test_a_free_block_that_is_cached_can_be_had_back() -> None:
    pool = Pool(4, 1)
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
    pool = Pool(4, 1)
    first, second = filled(pool, 1), filled(pool, 1)
    assert pool.hits(TEXT, 1) == first
    pool.give_back(first)
    pool.take(3)
    assert pool.hits(TEXT, 1) == second


def test_a_block_is_given_back_once() -> None:
    pool = Pool(2, 1)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="once"):
        pool.give_back(blocks)


def test_another_life_has_other_memory() -> None:
    assert not set(Pool(8, 1).contents) & set(Pool(8, 2).contents)


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
def test_settings_that_vllm_does_not_start_with(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be|does not fit"):
        Config(**wrong)  # type: ignore[arg-type]
