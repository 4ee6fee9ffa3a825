"""The prefix-cache index: what it expects of an instance, and everything that makes it forget."""

from __future__ import annotations

import numpy as np
import pytest

from router.predict.chunks import CHUNK_BYTES
from router.predict.held_chunks import HeldChunks
from router.predict.prefix_cache import PrefixCacheIndex, rows_of

TOKENS = CHUNK_BYTES // 4
NAMES = list(range(100, 120))


def index_of(*capacities_chunks: int, entries_max: int = 10_000) -> PrefixCacheIndex:
    index = PrefixCacheIndex(entries_max)
    for row, chunks in enumerate(capacities_chunks):
        index.join(row, chunks * TOKENS, 1)
    return index


def ask(index: PrefixCacheIndex, row: int, names: list[int], now: float, cached_chunks: int | None = None) -> None:
    """A prompt of whole chunks is sent and answered."""
    sent = index.sent(row, names, now)
    assert sent is not None
    index.answered(
        sent,
        now,
        prompt_tokens=len(names) * TOKENS,
        text_bytes=len(names) * CHUNK_BYTES,
        cached_tokens=None if cached_chunks is None else cached_chunks * TOKENS,
    )


def held(index: PrefixCacheIndex, row: int) -> list[int]:
    """Chunks that the instance is assumed to hold, used longest ago first."""
    known = index._held.get(row)
    return [] if known is None else [name for name in known.entries if name >= 0]


def test_nothing_is_expected_of_an_empty_index() -> None:
    assert not index_of(100).match(NAMES).levels
    assert not index_of(100).match([]).levels
    assert [index_of(100).match(NAMES).chunks_of(row) for row in range(3)] == [0, 0, 0]


def test_each_instance_matches_as_far_as_it_holds() -> None:
    index = index_of(100, 100, 100, 100)
    ask(index, 0, NAMES[:5], 1.0)
    ask(index, 1, NAMES, 2.0)
    ask(index, 2, NAMES[:5], 3.0)
    ask(index, 2, [1, *NAMES[6:]], 4.0)
    match = index.match([*NAMES, 999])
    assert [match.chunks_of(row) for row in range(5)] == [5, 20, 5, 0, 0]
    assert match.levels[0] == (20, 0b10)


def test_a_gap_ends_the_match() -> None:
    index = index_of(100)
    ask(index, 0, NAMES[3:], 1.0)
    assert not index.match(NAMES).levels


def test_hundreds_of_instances() -> None:
    index = index_of(*[20] * 300)
    for row in range(300):
        index.sent(row, NAMES[: row % 21], float(row))
    match = index.match(NAMES)
    assert [match.chunks_of(row) for row in range(301)] == [row % 21 for row in range(300)] + [0]


def test_what_was_used_longest_ago_goes_first_and_tails_before_heads() -> None:
    index = index_of(10)
    ask(index, 0, [1, 2, 3, 4], 1.0)
    ask(index, 0, [11, 12, 13, 14], 2.0)
    ask(index, 0, [1, 2], 3.0)
    ask(index, 0, [21, 22, 23], 4.0)
    assert index.match([1, 2, 3, 4]).chunks_of(0) == 3
    ask(index, 0, [31, 32, 33], 5.0)
    assert index.match([11, 12, 13, 14]).chunks_of(0) == 2
    assert index.match([1, 2, 3, 4]).chunks_of(0) == 2


def test_a_prompt_longer_than_the_cache_keeps_its_head() -> None:
    index = index_of(10)
    ask(index, 0, NAMES, 1.0)
    assert index.match(NAMES).chunks_of(0) == 10


def test_answers_take_room() -> None:
    index = index_of(10)
    ask(index, 0, NAMES[:8], 1.0)
    index.wrote(0, TOKENS // 2, 2.0)
    index.wrote(0, 2 * TOKENS, 2.0)
    assert index.match(NAMES).chunks_of(0) == 8
    index.wrote(0, TOKENS // 2, 3.0)
    assert index.match(NAMES).chunks_of(0) == 7
    index.wrote(0, 50 * TOKENS, 4.0)
    assert not index.match(NAMES).levels


def test_a_request_that_ends_was_used_just_now() -> None:
    index = index_of(10)
    ask(index, 0, [1, 2, 3, 4], 1.0)
    ask(index, 0, [11, 12, 13, 14], 2.0)
    index.used(0, [1, 2, 3, 4, 999], 3.0)
    index.wrote(0, 6 * TOKENS, 4.0)
    assert index.match([1, 2, 3, 4]).chunks_of(0) == 4
    assert index.match([11]).chunks_of(0) == 0


def test_an_instance_that_says_what_it_has_of_a_prompt_is_believed() -> None:
    """The instance was asked for a prompt's beginning, as a source. Before, the index assumed that it held all of the
    beginning, used just now, whatever it answered.
    """
    index = index_of(100, 100)
    for row in (0, 1):
        index.sent(row, [*range(20)], 1.0)
        index.sent(row, [50, 51], 2.0)
    index.told(0, [*range(20)], 64.0, 20 * 64, 3.0)
    assert index.match([*range(20)]).chunks_of(0) == 20 and held(index, 0)[:2] == [51, 50], "used just now"
    index.told(1, [*range(20)], 64.0, 8 * 64 + 30, 3.0)
    assert index.match([*range(20)]).chunks_of(1) == 8 and index.match([50, 51]).chunks_of(1) == 2
    assert index.match([*range(20)]).chunks_of(0) == 20, "the other one has not been asked"
    index.told(1, [*range(20)], 64.0, 0, 3.0)
    index.told(1, [*range(20)], 64.0, 640, 3.0)
    assert index.match([*range(20)]).chunks_of(1) == 0
    index.told(0, [*range(20)], 64.0, 18 * 64, 4.0)
    assert index.match([*range(20)]).chunks_of(0) == 20, "engines count in blocks"
    index.told(7, [1], 64.0, 0, 5.0)
    index.told(0, [1], 0.0, 0, 5.0)


def test_tokens_per_chunk_are_learned() -> None:
    """Text of two bytes a token takes twice the place."""
    index = index_of(100)
    for at in range(400):
        sent = index.sent(0, [at], float(at))
        assert sent is not None
        index.answered(sent, float(at), prompt_tokens=2 * TOKENS, text_bytes=CHUNK_BYTES)
    assert 48 <= len(index) <= 51


def test_fewer_cached_tokens_than_expected_forget_that_and_what_is_older() -> None:
    index = index_of(100)
    ask(index, 0, [1, 2, 3], 1.0)
    ask(index, 0, NAMES, 2.0)
    ask(index, 0, [51, 52, 53], 9.0)
    before = index._held[0].capacity_tokens
    ask(index, 0, NAMES, 10.0, cached_chunks=0)
    assert not index.match([1, 2, 3]).levels, "older than what was missing"
    assert index.match([51, 52, 53]).chunks_of(0) == 3
    assert index.match(NAMES).chunks_of(0) == 20, "it was computed just now"
    assert index._held[0].capacity_tokens < before


def test_a_miss_of_what_was_used_lately_forgets_nothing_else() -> None:
    index = index_of(100)
    ask(index, 0, [1, 2, 3], 1.0)
    ask(index, 0, NAMES, 9.0)
    ask(index, 0, NAMES, 10.0, cached_chunks=0)
    assert index.match([1, 2, 3]).chunks_of(0) == 3
    assert index._held[0].capacity_tokens == 100 * TOKENS


def test_rounding_is_no_miss() -> None:
    index = index_of(100)
    ask(index, 0, NAMES, 1.0)
    ask(index, 0, [1], 5.0)
    ask(index, 0, NAMES, 6.0, cached_chunks=19)
    assert index._held[0].capacity_tokens == 100 * TOKENS


def test_more_cached_tokens_than_expected_are_trusted() -> None:
    index = index_of(100)
    for at in range(200):
        ask(index, 0, [1000 + 10 * at + each for each in range(5)], float(at), cached_chunks=5)
    assert index._held[0].capacity_tokens == 2 * 100 * TOKENS


def test_a_wrong_capacity_is_found_out() -> None:
    """The engine keeps 120 chunks and the index is told 240, or 70: reported cached tokens bring it near 120."""
    for told in (240, 70):
        index, real, draw = index_of(told), dict.fromkeys(range(0)), np.random.default_rng(1)
        for at in range(3000):
            first = int(draw.integers(80)) * 3
            prompt = [first, first + 1, first + 2]
            cached = 3 if all(each in real for each in prompt) else 0
            for each in prompt:
                real.pop(each, None)
                real[each] = None
            while len(real) > 120:
                del real[next(iter(real))]
            ask(index, 0, prompt, float(at), cached_chunks=cached)
        assert 105 < index._held[0].capacity_tokens / TOKENS < 150, told


def test_a_new_epoch_forgets_all_and_late_answers_of_the_old_one_count_nothing() -> None:
    index = index_of(100, 100)
    ask(index, 1, NAMES, 1.0)
    sent = index.sent(0, NAMES, 1.0)
    assert sent is not None
    index.join(0, 100 * TOKENS, 1)
    assert index.match(NAMES).chunks_of(0) == 20, "the same incarnation again changes nothing"
    index.join(0, 100 * TOKENS, 2)
    assert index.match(NAMES).chunks_of(0) == 0
    index.answered(sent, 2.0, prompt_tokens=50 * TOKENS, text_bytes=50 * CHUNK_BYTES, cached_tokens=0)
    assert len(index) == 20
    assert index.match(NAMES).chunks_of(1) == 20


def test_an_instance_that_has_left_is_not_known() -> None:
    index = index_of(100)
    ask(index, 0, NAMES, 1.0)
    index.leave(0)
    assert (len(index), index.match(NAMES).levels, index.sent(0, NAMES, 2.0)) == (0, [], None)
    index.wrote(0, 100, 2.0)
    index.used(0, NAMES, 2.0)
    index.removed(0, 100)
    index.cleared(0)
    index.leave(0)
    assert held(index, 0) == []


def test_kv_events_forget() -> None:
    index = index_of(100)
    ask(index, 0, [1, 2, 3], 1.0)
    ask(index, 0, NAMES, 2.0)
    index.removed(0, 4 * TOKENS)
    assert not index.match([1, 2, 3]).levels
    assert index.match(NAMES).chunks_of(0) == 19
    index.cleared(0)
    assert len(index) == 0


def test_kv_events_of_less_than_a_chunk_add_up() -> None:
    index = index_of(100)
    ask(index, 0, NAMES, 1.0)
    for _ in range(4 * len(NAMES)):
        index.removed(0, TOKENS // 4)
    assert len(index) == 0
    ask(index, 0, NAMES, 2.0)
    index.removed(0, TOKENS // 2)
    index.cleared(0)
    ask(index, 0, NAMES, 3.0)
    index.removed(0, TOKENS // 2)
    assert len(index) == len(NAMES), "what was left over went with the rest"


def test_kv_events_do_not_forget_twice_what_the_estimate_has() -> None:
    index = index_of(20)
    index.removed(0, 0)
    ask(index, 0, NAMES, 1.0)
    for at in range(10):
        ask(index, 0, [at, at + 50], 2.0 + at)
        index.removed(0, 2 * TOKENS)
    assert len(index) == 20


def test_the_index_is_shared_out_by_capacity() -> None:
    index = index_of(100, 300, entries_max=100)
    for row in (0, 1):
        index.sent(row, list(range(row * 1000, row * 1000 + 400)), 1.0)
    assert [len(held(index, row)) for row in (0, 1)] == [25, 75]
    index.leave(1)
    index.sent(0, list(range(400)), 2.0)
    assert len(index) == 100


def test_rows_of_gives_the_places_of_set_bits() -> None:
    for rows in ([0], [70], [3, 5], [0, 64, 200], list(range(0, 300, 7))):
        bits = sum(1 << row for row in rows)
        assert sorted(np.atleast_1d(rows_of(bits)).tolist()) == rows


class Engine:
    """An engine's KV cache: prompts whose chunks have different numbers of tokens, evicted by last use."""

    def __init__(self, tokens: int) -> None:
        self.room = float(tokens)
        self.prompts: list[tuple[list[int], int]] = []

    def computes(self, names: list[int], each: int) -> int:
        """Compute a prompt that it has not had; return the tokens that are evicted for it."""
        self.prompts.append((names, each))
        self.room -= len(names) * each
        gone = 0
        while self.room < 0:
            names, each = self.prompts.pop(0)
            self.room += len(names) * each
            gone += len(names) * each
        return gone


@pytest.mark.parametrize("told", [True, False], ids=["tokens told", "tokens unknown"])
@pytest.mark.parametrize(
    "prompts", [[(6, 301)], [(4, 160)], [(2, 250)] * 4 + [(50, 353)]], ids=["code", "dense", "mix"]
)
def test_kv_events_forget_what_is_gone_whatever_a_chunk_weighs(prompts: list[tuple[int, int]], told: bool) -> None:
    """Evictions are in tokens. If each entry counted as the mean, a little more would be forgotten than is added with
    each prompt, until the index knew only what came since the last heartbeat.
    """
    index, engine = index_of(400), Engine(400 * TOKENS)
    for now in range(1000):
        count, each = prompts[now % len(prompts)]
        names = list(range(100 * now, 100 * now + count))
        gone = engine.computes(names, each)
        sent = index.sent(0, names, float(now), float(each) if told else 0.0)
        assert sent is not None
        size = {"prompt_tokens": count * each, "text_bytes": count * CHUNK_BYTES}
        index.answered(sent, float(now), **size)
        index.removed(0, gone)
    there = sum(index.match(names).chunks_of(0) == len(names) for names, _ in engine.prompts)
    assert there >= 0.9 * len(engine.prompts) - 1
    assert len(held(index, 0)) <= 1.1 * sum(len(names) for names, _ in engine.prompts)


@pytest.mark.interpreted
def test_a_thousand_instances_that_join_at_once_divide_the_index_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each one that joined, the router that started stood still for seconds."""
    shrunk: list[HeldChunks] = []

    def shrink(held: HeldChunks) -> None:
        shrunk.append(held)

    monkeypatch.setattr(HeldChunks, "shrink", shrink)
    index = PrefixCacheIndex(10_000)
    for row in range(1000):
        index.join(row, 400_000, 1)
    assert len(shrunk) == 0
    assert index.sent(3, (1, 2, 3), 0.0) is not None and index.room(3) == 10
    assert len(shrunk) == 1000 + 1  # and the one that was sent a prompt
