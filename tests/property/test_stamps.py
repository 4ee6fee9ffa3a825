"""A stamp that stands proves the bytes: any interleaving of a producer's frees and reuses with a consumer's reads.

Both sides are cut into their smallest steps: the producer writes and wipes a stamp byte by byte, in any order of the
bytes, and hands a freed block to its next owner at any time; the consumer reads blocks and stamps byte by byte. And the
same model with one step in the wrong order is caught, so the test sees what it looks for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ids import RequestId, TransferId
from kvtransfer.stamps import STAMP_BYTES, WIPED, Stamp, StampTable, read_stamp, stands

SECRET = bytes(range(32))


class Slow(bytearray):
    """Memory that is written a byte at a time: what a write leaves to be done is done by `trickle`."""

    def __init__(self, size: int, dice: random.Random) -> None:
        super().__init__(size)
        self.dice = dice
        self.owed: list[tuple[int, int]] = []

    def __setitem__(self, at, value) -> None:
        bytes_now = list(zip(range(at.start, at.stop), value, strict=True))
        self.dice.shuffle(bytes_now)
        self.owed += bytes_now

    def trickle(self) -> Iterator[None]:
        """One byte a step."""
        while self.owed:
            place, byte = self.owed.pop(0)
            super().__setitem__(place, byte)
            yield


class Model:
    """One block, one slot and whoever owns them in turn; `wrong` names an order to be broken."""

    def __init__(self, seed: int, wrong: str = "") -> None:
        self.dice = random.Random(seed)
        self.wrong = wrong
        self.memory = Slow(STAMP_BYTES, self.dice)
        self.table = StampTable(self.memory, SECRET)
        self.block = bytearray(4)
        self.offers: list[tuple[int, Stamp]] = []
        self.used: list[tuple[int, bytes]] = []

    def producer(self) -> Iterator[None]:
        yield from self.memory.trickle()
        for owner in range(1, 6):
            id_ = TransferId(RequestId(f"r{owner}"), 1, 1)
            for place in range(len(self.block)):
                self.block[place] = owner
                yield
            stamp = self.table.offer(id_)
            assert stamp is not None
            yield from self.memory.trickle()
            self.offers.append((owner, stamp))
            for _ in range(self.dice.randint(0, 60)):
                yield
            self.table.wipe(id_)
            if self.wrong != "freed before it was wiped":
                yield from self.memory.trickle()

    def consumer(self) -> Iterator[None]:
        for _ in range(6):
            while not self.offers:
                yield
            owner, stamp = self.offers[-1]
            found = bytearray(STAMP_BYTES)
            if self.wrong == "stamp read before the block":
                yield from self.read(self.memory, found)
            got = bytearray(len(self.block))
            yield from self.read(self.block, got)
            if self.wrong != "stamp read before the block":
                yield from self.read(self.memory, found)
            if stands(stamp, found):
                self.used.append((owner, bytes(got)))
            yield

    def read(self, source: bytearray, into: bytearray) -> Iterator[None]:
        order = list(range(len(source)))
        self.dice.shuffle(order)
        for place in order:
            into[place] = source[place]
            yield

    def run(self) -> bool:
        """Whether every use was of its own bytes."""
        sides = [self.producer(), self.consumer()]
        while sides:
            side = self.dice.choice(sides)
            for _ in range(self.dice.choice([1, 1, 5, 40])):
                if next(side, "over") == "over":
                    sides.remove(side)
                    break
            if len(sides) == 1 and sides[0].gi_code.co_name == "consumer" and not self.offers:
                break
        return all(set(got) == {owner} for owner, got in self.used)


def test_what_stands_is_what_was_read() -> None:
    used = 0
    for seed in range(1500):
        model = Model(seed)
        assert model.run(), f"story {seed}"
        used += len(model.used)
    assert used > 300, "stories in which nothing is confirmed prove nothing"


@pytest.mark.parametrize("wrong", ["freed before it was wiped", "stamp read before the block"])
def test_the_wrong_order_is_caught(wrong: str) -> None:
    assert any(not Model(seed, wrong).run() for seed in range(1500))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_a_table_gives_no_stamp_twice_and_loses_no_slot(steps) -> None:
    memory = bytearray(4 * STAMP_BYTES)
    table = StampTable(memory, SECRET)
    standing: dict[TransferId, Stamp] = {}
    ever: set[bytes] = set()
    for number, wipe in steps:
        id_ = TransferId(RequestId(f"r{number}"), 1, 1)
        if wipe or id_ in standing:
            assert table.wipe(id_) == (standing.pop(id_, None) is not None)
        elif (stamp := table.offer(id_)) is not None:
            assert stamp.value not in ever
            ever.add(stamp.value)
            standing[id_] = stamp
        else:
            assert len(standing) == 4
        found = {slot: bytes(memory[slot * 16 : slot * 16 + 16]) for slot in range(4)}
        assert {stamp.slot: stamp.value for stamp in standing.values()} == {
            slot: value for slot, value in found.items() if value != WIPED
        }
        assert len(table) == len(standing)


ALMOST = st.tuples(st.integers(0, 10**10), st.text("0123456789abcdefAF", min_size=30, max_size=34))


@given(st.one_of(st.text(), st.integers(), st.none(), st.binary(), ALMOST.map(lambda each: f"{each[0]}.{each[1]}")))
def test_only_a_stamp_reads_as_one(text) -> None:
    stamp = read_stamp(text)
    assert stamp is None or stamp.text() == text


def test_a_stamp_travels_as_text() -> None:
    stamp = StampTable(bytearray(64), SECRET).offer(TransferId(RequestId("r"), 1, 1))
    assert stamp is not None and read_stamp(stamp.text()) == stamp
    assert not stands(stamp, WIPED) and not stands(stamp, stamp.value[:15]) and not stands(Stamp(0, WIPED), WIPED)
