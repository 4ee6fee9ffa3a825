"""Endpoints in bad weather: whatever is lost, late, doubled, cut or killed, no wrong byte is used, nothing is left."""

from __future__ import annotations

import random

import pytest
from support.endpoints import World

from cluster.ids import InstanceId
from kvtransfer.loopback import Weather
from kvtransfer.pacing import Limits
from kvtransfer.terms import Terms

TERMS = Terms(
    lease_s=2.0,
    extend_s=1.0,
    hold_s_max=6.0,
    fill_s_max=5.0,
    heartbeat_s=0.3,
    wait_s_max=3.0,
    read_s_max=0.5,
    ask_again_s=0.05,
    confirm_s_max=0.3,
    reserve_s_max=2.0,
    cut_s=0.5,
    remember_s=10.0,
)
"""Short, so that every limit is met."""
SILENCE_S_MAX = TERMS.fill_s_max + TERMS.hold_s_max + 4 * TERMS.cut_s
STEPS = 120


def weather(dice: random.Random) -> Weather:
    return Weather(
        delay_s=0.001,
        jitter_s=dice.choice([0.0, 0.02, 0.2]),
        lost=dice.choice([0.0, 0.1, 0.5]),
        doubled=dice.choice([0.0, 0.2]),
        failing=dice.choice([0.0, 0.05, 0.3]),
        bytes_per_s=dice.choice([1e5, 1e8]),
        copies=dice.choice([1, 6]),
    )


class Story:
    """One producer, two consumers, little memory, dice."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        limits = Limits(part_bytes=dice.choice([64, 300, 1 << 20]), link_bytes=dice.choice([200, 1 << 20]))
        stamped = dice.random() < 0.8
        self.world = World(
            blocks=8, block_bytes=64, seed=seed, weather=weather(dice), terms=TERMS, limits=limits, stamped=stamped
        )
        self.epochs = {"p": 1, "d": 1, "e": 1}
        for name in self.epochs:
            self.world.party(name)
        self.world.introduce(*self.epochs)
        self.past = list(self.world.parties.values())

    def run(self) -> None:
        acts = [self.pull, self.pull, self.pull, self.push, self.abort, self.wait, self.wait, self.wait, self.noise]
        for _ in range(STEPS):
            self.dice.choice(acts)()
            for party in self.world.parties.values():
                party.check()
            if self.dice.random() < 0.01:
                self.restart(self.dice.choice(list(self.epochs)))
            if self.dice.random() < 0.02:
                self.cut()
            if self.dice.random() < 0.05:
                self.world.introduce(*self.epochs)
        self.fall_silent()

    def pull(self) -> None:
        p, d = self.world.parties["p"], self.world.parties[self.dice.choice("de")]
        offer = p.prefill(self.world.new_id("p"), self.dice.randint(1, 3))
        if offer is not None and (len(d.free) >= len(offer.blocks)):
            if self.dice.random() < 0.2:
                self.wait()
            stamp = p.offers[offer.id][1] if self.dice.random() < 0.8 else None
            d.pull(offer, "p", stamp)

    def push(self) -> None:
        p, d = self.world.parties["p"], self.world.parties[self.dice.choice("de")]
        count = self.dice.randint(1, 3)
        if len(d.free) < count or len(p.free) < count:
            return
        id_ = self.world.new_id("p")
        d.reserve(id_, "p", count)
        if self.dice.random() < 0.5:
            self.wait()
        p.prefill(id_, count)

    def abort(self) -> None:
        party = self.world.parties[self.dice.choice("pde")]
        ids = [*party.holds, *party.pulls]
        if ids:
            party.abort(self.dice.choice(ids))

    def wait(self) -> None:
        for _ in range(self.dice.choice([1, 5, 20])):
            self.world.step(without=tuple(name for name in self.epochs if self.dice.random() < 0.3))

    def noise(self) -> None:
        party = self.world.parties[self.dice.choice("pde")]
        other = self.world.parties[self.dice.choice("pde")]
        party.carrier.notify(other.carrier.name, self.dice.randbytes(self.dice.randint(0, 90)))
        party.endpoint.introduce(self.dice.randbytes(200), self.world.now)

    def restart(self, name: str) -> None:
        self.world.parties[name].dead = True
        self.world.parties[name].endpoint.close()
        self.epochs[name] += 1
        self.past.append(self.world.party(name, epoch=self.epochs[name]))
        self.world.introduce(*self.epochs)

    def cut(self) -> None:
        one, other = self.dice.sample(list(self.epochs), 2)
        party = self.world.parties[one]
        party.obey(party.endpoint.forget(InstanceId(other), self.world.now))

    def fall_silent(self) -> None:
        """Nothing new comes. Then all must end."""
        end = self.world.now + SILENCE_S_MAX
        while self.world.now < end:
            self.world.step()
        for name, party in self.world.parties.items():
            held = party.endpoint.ledger.statistics(self.world.now)
            assert held.idle and held.leaked == 0, f"{name} keeps {held.states}"
            assert len(party.free) == self.world.blocks, f"{name} lost blocks"
            assert party.table is None or not len(party.table)
            assert not party.endpoint._flights and not party.endpoint._moves and not party.endpoint._writes
            assert not party.endpoint._expected and not party.endpoint._asking and not party.endpoint._offered
            assert party.endpoint._pacer.under_way == 0 and not len(party.endpoint._pacer)


@pytest.mark.parametrize("first", range(0, 36, 12))
def test_no_wrong_byte_is_used_and_nothing_is_left(first: int) -> None:
    used = recomputed = 0
    for seed in range(first, first + 12):
        story = Story(seed)
        story.run()
        past = [pulled for party in story.past for pulled in party.past]
        wrong = [pulled.id for pulled in past if not pulled.right]
        assert not wrong, f"story {seed}: wrong bytes were used by {wrong}"
        used += sum(pulled.outcome == "use" for pulled in past)
        recomputed += sum(pulled.outcome == "recompute" for pulled in past)
    assert min(used, recomputed) > 20, "stories that get nowhere would prove nothing"


@pytest.mark.long
@pytest.mark.parametrize("first", range(1_000, 6_000, 250))
def test_for_long(first: int) -> None:
    for seed in range(first, first + 250):
        story = Story(seed)
        story.run()
        assert all(pulled.right for party in story.past for pulled in party.past), f"story {seed}"
