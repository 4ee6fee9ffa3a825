"""Any order of events on both sides of a hand-over: no wrong byte is used, no block is lost, everything ends.

Random walks over the objects that the connector runs (tests/support/handover.py). Ranks step at different times, slots
are read byte by byte, notices are lost, doubled or late, reads fail, names are released at any time, engines restart.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.handover import Offer, World, Wrong

import decode.reads
import prefill.leases
from cluster.wire import TOLD_EARLY
from decode.early import EarlyLegs
from kvtransfer.early_notes import Ready
from kvtransfer.hold_marks import CLEAR, SLOT_BYTES
from prefill.table import HoldAct, RankHold

STEPS = {
    "open": 4,
    "fill": 5,
    "pull": 5,
    "move": 22,
    "look": 8,
    "decide": 4,
    "rank": 6,
    "notice": 8,
    "release": 1.5,
    "beat": 1,
    "time": 1,
    "restart": 0.15,
    "well": 3,
}


class Walk:
    """One random walk: its world, and all offers made in it. An offer may be pulled at any later time."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.world = World(blocks=5, ranks=self.dice.choice([1, 1, 2]), consumers=("d", "e"))
        self.offers: list[Offer] = []

    def go(self, steps: int) -> None:
        for step in self.dice.choices(list(STEPS), list(STEPS.values()), k=steps):
            getattr(self, step)()
            self.world.check()

    def consumer(self):
        return self.world.consumers[self.dice.choice(list(self.world.consumers))]

    def open(self) -> None:
        request = self.world.name()
        self.world.p.open(request, self.dice.randint(1, 2), self.dice.choice([None, f"n{self.dice.randrange(6)}"]))

    def fill(self) -> None:
        running = list(self.world.p.running)
        told = [each for each in running if not self.pending(each)]
        if told:
            offer = self.world.p.fill(self.dice.choice(told), aborted=self.dice.random() < 0.1)
            if offer is not None:
                self.offers.append(offer)

    def pending(self, request: str) -> bool:
        """Whether some rank does not know this leg yet, so that no part of it can be computed."""
        told = any(request in orders.opened for each in self.world.p.orders for orders in each)
        return told or request in self.world.p.holds._orders.opened

    def pull(self) -> None:
        if self.offers:
            newest = self.offers[-1] if self.dice.random() < 0.7 else self.dice.choice(self.offers)
            self.consumer().pull(newest)

    def move(self) -> None:
        consumer = self.consumer()
        if consumer.under_way:
            read = self.dice.choice(consumer.under_way)
            for _ in range(self.dice.randint(1, 9) if read.slot else 1):
                consumer.move(read, fail=not read.slot and self.dice.random() < 0.03)

    def look(self) -> None:
        self.consumer().step()

    def decide(self) -> None:
        self.world.p.decide()

    def rank(self) -> None:
        self.world.p.rank_steps(self.dice.randrange(len(self.world.p.ranks)))

    def notice(self) -> None:
        if self.world.network:
            index = self.dice.randrange(len(self.world.network))
            fate = self.dice.random()
            if fate < 0.1:
                self.world.network.pop(index)
            else:
                self.world.deliver(index, keep=fate < 0.2)

    def release(self) -> None:
        self.world.p.release(f"n{self.dice.randrange(6)}")

    def beat(self) -> None:
        if self.offers:
            self.consumer().beat(self.dice.choice(self.offers))

    def time(self) -> None:
        self.world.now += self.dice.choice([0.3, 5.0, 31.0])

    def restart(self) -> None:
        if self.dice.random() < 0.5:
            self.world.restart_p()
            for consumer in self.world.consumers.values():
                consumer.meet("p")
        else:
            self.world.restart_d(self.dice.choice(list(self.world.consumers)))

    def well(self) -> None:
        """Let all go well for a moment, so that some hand-overs finish."""
        self.world.p.step()
        self.consumer().finish()
        self.world.deliver_all()


def walk(seed: int, steps: int = 400) -> list[str]:
    made = Walk(seed)
    made.go(steps)
    legs = [leg for consumer in made.world.consumers.values() for leg in consumer.legs]
    made.world.fall_silent()
    assert all(leg.outcome for leg in legs), "each request has an outcome"
    return [leg.outcome for leg in legs]


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_walks(first: int) -> None:
    outcomes = [outcome for seed in range(first, first + 20) for outcome in walk(seed)]
    assert min(outcomes.count("use"), outcomes.count("recompute")) > 40, (
        "walks without finished hand-overs would prove nothing"
    )


@pytest.mark.long
@pytest.mark.parametrize("first", range(1_000, 11_000, 500))
def test_many_random_walks(first: int) -> None:
    for seed in range(first, first + 500):
        walk(seed)


def replaced(seed: int) -> tuple[bool, str]:
    """An early leg that P tells after its answer, and that its router replaces at any time. Returns whether the first
    leg was scheduled, with its blocks in D's prefix cache, and the outcome of the second leg.
    """
    dice = random.Random(seed)
    world, legs = World(ranks=dice.choice([1, 2])), EarlyLegs()
    d, offer = world.d, world.held()
    legs.opened("early", "n", offer.engine, world.now)
    legs.told(offer.engine, Ready("n", {"remote_engine_id": offer.engine, TOLD_EARLY: False}, 5))
    first = d.pull(offer, tells=not legs.keeps("early"))
    second, scheduled, ends = None, False, dice.choice([0, 10, 40, 120])
    for step in range(300):
        if second is None and step >= ends:
            legs.finished("early")  # its reads go on
            second = d.pull(offer)
        elif second is None and first.outcome and not scheduled and dice.random() < 0.2:
            legs.scheduled("early")
            scheduled = True
        for _ in legs.take_given_back():
            d.reject(offer)
        if d.under_way:
            d.move(dice.choice(d.under_way))
        d.step()
        if world.network and dice.random() < 0.5:
            world.deliver()
        world.p.step()
        world.check()
    assert second is not None
    world.fall_silent()
    return scheduled, second.outcome


def test_a_leg_that_replaces_one_told_late_pulls_the_hold_or_finds_the_prompt_in_the_cache() -> None:
    """Otherwise D computes a prompt again that P has computed and still could have given."""
    found = [replaced(seed) for seed in range(60)]
    assert {outcome for scheduled, outcome in found if not scheduled} == {"use"}
    assert any(scheduled for scheduled, _ in found)


def breaks() -> bool:
    """Whether one of 200 walks finds a wrong byte in use."""
    for seed in range(200):
        try:
            walk(seed)
        except Wrong:
            return True
    return False


def look_before_the_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the consumer: it judges a slot by its content at the time when the reads were posted."""
    seen: dict[int, tuple[bytes, bytes]] = {}
    add, saw = decode.reads.Reads.add, decode.reads.PullAtRank.saw

    def adds(self, request, handles, sources, mark, **more):
        engine, _, rank = sources[0].agent.partition("/")
        producer, at = self._agent._consumer.world.engine(engine), sources[0].slot_address * SLOT_BYTES
        said = CLEAR if producer is None else bytes(producer.tables[int(rank)][at : at + SLOT_BYTES])
        seen[id(mark)] = said, mark
        return add(self, request, handles, sources, mark, **more)

    monkeypatch.setattr(decode.reads.Reads, "add", adds)
    monkeypatch.setattr(decode.reads.PullAtRank, "saw", lambda self, _said: saw(self, seen[id(self.mark)][0]))


def never_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    table = prefill.leases.LEASES
    rewritten = {
        state: {
            cause: row._replace(acts=tuple(act for act in row.acts if act is not HoldAct.CLEAR))
            for cause, row in causes.items()
        }
        for state, causes in table.items()
    }
    monkeypatch.setattr(prefill.leases, "LEASES", rewritten)


def clear_one_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the producer: it clears a slot one step after it has reported the end of the hold."""
    never_clear(monkeypatch)
    late: dict[int, list[int]] = {}
    step, move = prefill.leases.Leases.step, prefill.leases.Leases._move

    def steps(self, orders, now):
        for index in late.pop(id(self), []):
            self._write(index, CLEAR)
        return step(self, orders, now)

    def moves(self, request, kept, cause, now):
        moved = move(self, request, kept, cause, now)
        if moved and kept.slot is not None and kept.state in {RankHold.OVER, RankHold.READ_EARLY}:
            late.setdefault(id(self), []).append(kept.slot.index)
        return moved

    monkeypatch.setattr(prefill.leases.Leases, "step", steps)
    monkeypatch.setattr(prefill.leases.Leases, "_move", moves)


def never_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.reads.PullAtRank, "saw", lambda _self, _said: None)


@pytest.mark.interpreted
@pytest.mark.parametrize("broken", [never_look, look_before_the_reads, never_clear, clear_one_step_late])
def test_the_walks_find_each_broken_order(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Safety needs one order on each side: the producer clears a slot before it reports the end of the hold, and the
    consumer looks at the slot after its reads. Without either order, wrong bytes are used.
    """
    broken(monkeypatch)
    monkeypatch.setattr(
        World, "check", lambda _self: None
    )  # it would fail at a stale mark, before a wrong byte is used
    assert breaks()
