"""Block digests: a pulled block passes only with the right bytes, for the right prompt, in the right place."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.peers import NOT_ITS_OWN
from engine.vllm.connector.digests import Digests
from kvtransfer.block_digests import DIGEST_BYTES, Computing, Region, Vouchers, names, runs

BLOCKS, TOKENS, LENGTH, STRIDE = 8, 4, 24, 32


class Blake2:
    """BLAKE2 with the interface of BLAKE3: `digest` takes the length, in bytes."""

    def __init__(self, name: bytes) -> None:
        self._state = hashlib.blake2b(name)

    def update(self, data: Any) -> None:
        self._state.update(data)

    def digest(self, length: int) -> bytes:
        return self._state.digest()[:length]


class Rank:
    """KV memory of two tensors: one with padding between its blocks, one with two pieces a block."""

    def __init__(self) -> None:
        self.first, self.second = bytearray(BLOCKS * STRIDE), bytearray(2 * BLOCKS * LENGTH)
        self.offered, self.found = (bytearray(BLOCKS * DIGEST_BYTES) for _ in range(2))
        regions = [Region(memoryview(self.first), STRIDE, LENGTH), Region(memoryview(self.second), LENGTH, LENGTH, 2)]
        self.vouchers = Vouchers(memoryview(self.offered), memoryview(self.found), regions, Blake2)

    def fill(self, block: int, seed: int) -> None:
        chance = random.Random(seed)
        self.first[block * STRIDE : block * STRIDE + LENGTH] = chance.randbytes(LENGTH)
        self.second[2 * block * LENGTH : 2 * (block + 1) * LENGTH] = chance.randbytes(2 * LENGTH)

    def pull(self, p: Rank, remote: list[int], local: list[int]) -> None:
        """Copy the blocks of `p` and their digests."""
        self.vouchers.forget(local)
        for there, here in zip(remote, local, strict=True):
            self.first[here * STRIDE : here * STRIDE + LENGTH] = p.first[there * STRIDE : there * STRIDE + LENGTH]
            size, digest = 2 * LENGTH, DIGEST_BYTES
            self.second[here * size : (here + 1) * size] = p.second[there * size : (there + 1) * size]
            self.found[here * digest : (here + 1) * digest] = p.offered[there * digest : (there + 1) * digest]


PROMPT = names(range(10), TOKENS)
"""The names of three blocks; the last block is not full."""
REMOTE, LOCAL = [5, 2, 7], [0, 3, 1]


@pytest.fixture
def pair() -> tuple[Rank, Rank]:
    p, d = Rank(), Rank()
    for block in range(BLOCKS):
        p.fill(block, block)
    p.vouchers.vouch(REMOTE, PROMPT)
    return p, d


def test_held_blocks_pass(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    d.pull(p, REMOTE, LOCAL)
    assert d.vouchers.wrong(LOCAL, PROMPT) == ()
    d.pull(p, REMOTE[1:], LOCAL[1:])
    assert d.vouchers.wrong(LOCAL[1:], PROMPT[1:]) == (), "without the prefix that D has"


def test_every_flipped_byte_shows_and_padding_does_not_count(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    for memory, size in ((d.first, STRIDE), (d.second, 2 * LENGTH)):
        for at in range(size):
            d.pull(p, REMOTE, LOCAL)
            memory[LOCAL[1] * size + at] ^= 0x10
            padding = memory is d.first and at >= LENGTH
            assert d.vouchers.wrong(LOCAL, PROMPT) == (() if padding else (1,))


def test_exchanged_blocks_are_found_in_the_list_and_in_memory(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    d.pull(p, [2, 5, 7], LOCAL)
    assert d.vouchers.wrong(LOCAL, PROMPT) == (0, 1), "in the list"
    d.pull(p, REMOTE, LOCAL)
    d.first[0:LENGTH], d.first[3 * STRIDE : 3 * STRIDE + LENGTH] = (
        bytes(d.first[3 * STRIDE : 3 * STRIDE + LENGTH]), bytes(d.first[0:LENGTH])
    )  # fmt: skip
    assert d.vouchers.wrong(LOCAL, PROMPT) == (0, 1), "in memory"


def test_a_block_of_another_prompt_shows_though_it_is_whole_and_in_its_place(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    p.vouchers.vouch([4, 6], names([9, 9, 9, 9, 1], TOKENS))
    d.pull(p, [5, 6, 7], LOCAL)
    assert d.vouchers.wrong(LOCAL, PROMPT) == (1,)


def test_a_block_that_was_reused_for_another_prompt_is_found(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    p.fill(2, 99)
    d.pull(p, REMOTE, LOCAL)
    assert d.vouchers.wrong(LOCAL, PROMPT) == (1,), "its bytes are new, its digest is old"
    p.vouchers.vouch([2], names(range(50, 54), TOKENS))
    d.pull(p, REMOTE, LOCAL)
    assert d.vouchers.wrong(LOCAL, PROMPT) == (1,), "bytes and digest are new"


def test_blocks_without_digests_do_not_pass(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    d.pull(p, REMOTE, LOCAL)
    d.vouchers.forget(LOCAL)
    assert d.vouchers.wrong(LOCAL, PROMPT) == (0, 1, 2)


def test_blocks_beyond_the_prompt_have_no_digest(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    p.vouchers.vouch([*REMOTE, 6], PROMPT)
    d.pull(p, [*REMOTE, 6], [*LOCAL, 6])
    assert d.vouchers.wrong([*LOCAL, 6], PROMPT) == (3,)
    assert p.offered[6 * DIGEST_BYTES : 7 * DIGEST_BYTES] == bytes(DIGEST_BYTES)


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_says_all_that_its_block_was_computed_for() -> None:
    assert len(PROMPT) == 3 and names([], TOKENS) == ()
    assert names(range(12), TOKENS)[:2] == PROMPT[:2], "two prompts share a prefix"
    assert names(range(9), TOKENS)[2] != PROMPT[2] != names(range(12), TOKENS)[2], "a last block of other length"
    assert names([1, *range(1, 10)], TOKENS)[1] != PROMPT[1], "the tokens before the block"
    assert len({*PROMPT, *names(range(10), TOKENS, b"adapter")}) == 6
    assert names([7] * 12, TOKENS)[0] != names([7] * 12, TOKENS)[1]


@given(st.lists(st.integers(0, 2**31)), st.lists(st.integers(0, 2**31)))
def test_names_agree_exactly_as_far_as_prompts_do(one: list[int], other: list[int]) -> None:
    mine, theirs = names(one, TOKENS), names(other, TOKENS)
    for at in range(max(len(mine), len(theirs))):
        until = (at + 1) * TOKENS
        assert (mine[at : at + 1] == theirs[at : at + 1]) == (one[:until] == other[:until])


# --- reads -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_runs_are_the_same_blocks(pairs: list[tuple[int, int]]) -> None:
    made = runs([there for there, _ in pairs], [here for _, here in pairs])
    assert [(there + n, here + n) for there, here, count in made for n in range(count)] == pairs
    assert runs([3, 4, 5, 9], [6, 7, 8, 9]) == [(3, 6, 3), (9, 9, 1)]


class Nixl:
    """A stand-in for NIXL that reads digests from one table of this process into another."""

    def __init__(self) -> None:
        self.reads: list[tuple[list[Any], list[Any], str]] = []

    def get_xfer_descs(self, descs: list[Any], kind: str) -> list[Any]:
        assert kind == "DRAM"
        return descs

    def initialize_xfer(self, what: str, here: list[Any], there: list[Any], agent: str) -> int:
        assert what == "READ"
        self.reads.append((here, there, agent))
        return len(self.reads)

    def transfer(self, handle: int) -> None:
        import ctypes

        here, there, _ = self.reads[handle - 1]
        for (to, size, _), (source, same, _) in zip(here, there, strict=True):
            assert size == same
            ctypes.memmove(to, source, size)


def digests(memory: bytearray) -> Digests:
    made = Digests(BLOCKS)
    made.begin([Region(memoryview(memory), LENGTH, LENGTH)], Blake2)
    return made


def test_a_worker_reads_what_another_vouches_for_and_compares() -> None:
    memory = bytearray(random.Random(1).randbytes(BLOCKS * LENGTH))
    copy = bytearray(BLOCKS * LENGTH)
    for there, here in zip(REMOTE, LOCAL, strict=True):
        copy[here * LENGTH : (here + 1) * LENGTH] = memory[there * LENGTH : (there + 1) * LENGTH]
    p, d, nixl = digests(memory), digests(copy), Nixl()
    assert d.meet("e", 0, [p.offered.address, BLOCKS])
    p.vouch({"r": (REMOTE, PROMPT)})
    d.read(nixl, "agent", ("e", 0), REMOTE, LOCAL)
    assert d.compare(PROMPT, LOCAL)() == ""
    d.read(nixl, "agent", ("e", 0), REMOTE[1:], LOCAL[1:])
    assert d.compare(PROMPT[1:], LOCAL[1:])() == "" and nixl.reads[-1][2] == "agent"
    copy[3 * LENGTH] ^= 1
    assert d.compare(PROMPT, LOCAL)() == NOT_ITS_OWN
    assert d.compare((), LOCAL)() == NOT_ITS_OWN
    for remote in ([BLOCKS], [-1]):
        with pytest.raises(LookupError):
            d.read(nixl, "agent", ("e", 0), remote, [0])
    d.part("e")
    with pytest.raises(LookupError):
        d.read(nixl, "agent", ("e", 0), REMOTE, LOCAL)


@pytest.mark.parametrize("told", [None, [], [1], [0, 5], [5, 0], [5, 1 << 40], ["1", 5], [1.0, 5], {"a": 1}, b"xx"])
def test_an_impossible_table_of_digests_is_refused(told: object) -> None:
    assert not digests(bytearray(BLOCKS * LENGTH)).meet("e", 0, told)


# --- legs that are being computed ------------------------------------------------------------------------------------


def test_a_prompt_is_done_once_its_last_token_is_computed_whatever_it_took() -> None:
    c = Computing()
    c.begin("r", 10, PROMPT)
    c.given("r", [5, 2], anew=True)
    assert c.step("r", 8) is None
    c.given("r", [7], anew=False)
    assert c.step("r", 10) == ((5, 2, 7), PROMPT)
    c.given("r", [1, 3], anew=True)  # preempted, and begun again
    c.given("r", [4, 6], anew=False)
    assert c.step("r", 10) == ((1, 3, 4), PROMPT), "the block for the token after the prompt is not one of the prompt's"
    c.end("r")
    c.given("r", [1], anew=True)
    assert c.step("r", 10) is None and c.step("never", 10) is None
    c.end("r")
