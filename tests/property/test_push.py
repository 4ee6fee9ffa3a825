"""Any order of events on both sides of a push: no wrong byte is used, no block is lost, everything ends.

Hypothesis chooses the next event, and shrinks a failure to the shortest history.
"""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.pushing import Site, Transfer, World

from cluster.ids import TransferId
from kvtransfer.push import PushTerms

PRODUCERS = ("p",)
CONSUMERS = ("d", "e")
SITES = PRODUCERS + CONSUMERS
TERMS = PushTerms(
    lease_s=10.0,
    fill_s_max=30.0,
    heartbeat_s=2.0,
    write_s_max=20.0,
    reserve_s_max=8.0,
    cut_s=3.0,
    remember_s=30.0,
    entries_max=6,
    remembered_max=30,
)
"""Short times and small tables, so that every limit is reached often."""
SILENCE_S_MAX = TERMS.fill_s_max + TERMS.write_s_max + TERMS.lease_s + 4 * TERMS.cut_s
"""After so many seconds without events everything is over: a prompt never computed, then its writes, then its links."""

PICK = st.integers(0, 1 << 16)
"""Chooses one of any number of objects (modulo their number)."""
BLOCKS = st.integers(1, 3)


class Pushes(RuleBasedStateMachine):
    """A producer and two consumers with little memory and small tables: freed blocks and entries are reused soon."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(SITES, terms=TERMS, blocks=4)
        self.ids: list[tuple[TransferId, str, int]] = []

    @property
    def transfers(self) -> list[tuple[Site, Transfer]]:
        return [(site, transfer) for site in self.world.sites.values() for transfer in site.transfers]

    @property
    def prefills(self) -> list[tuple[Site, TransferId]]:
        return [(site, id_) for site in self.world.sites.values() for id_ in site.prefills]

    # --- what requests do --------------------------------------------------------------------------------------------

    def open(self, producer: str, blocks: int) -> TransferId:
        id_ = self.world.new_id(producer)
        self.ids.append((id_, producer, blocks))
        self.world.site(producer).open(id_, blocks)
        return id_

    @rule(producer=st.sampled_from(PRODUCERS), consumer=st.sampled_from(CONSUMERS), blocks=BLOCKS)
    def begin_push(self, producer: str, consumer: str, blocks: int) -> None:
        id_ = self.open(producer, blocks)
        self.world.site(consumer).reserve(id_, self.world.site(producer).me.instance, blocks)

    @precondition(lambda self: self.ids)
    @rule(pick=PICK)
    def open_again(self, pick: int) -> None:
        """A prefill leg comes twice, or late, or after its engine has restarted."""
        id_, producer, blocks = self.ids[pick % len(self.ids)]
        self.world.site(producer).open(id_, blocks)

    @precondition(lambda self: self.ids)
    @rule(pick=PICK, consumer=st.sampled_from(CONSUMERS))
    def push_again(self, pick: int, consumer: str) -> None:
        id_, producer, blocks = self.ids[pick % len(self.ids)]
        self.world.site(consumer).reserve(id_, self.world.site(producer).me.instance, blocks)

    @precondition(lambda self: self.ids)
    @rule(pick=PICK, name=st.sampled_from(SITES))
    def abort(self, pick: int, name: str) -> None:
        self.world.site(name).abort(self.ids[-1 - pick % min(4, len(self.ids))][0])

    # --- what engines, endpoints and the network do ------------------------------------------------------------------

    @precondition(lambda self: self.prefills)
    @rule(pick=PICK, whole=st.booleans())
    def compute(self, pick: int, whole: bool) -> None:
        site, id_ = self.prefills[pick % len(self.prefills)]
        if whole:
            site.fill(id_)
        else:
            site.compute(id_)

    @precondition(lambda self: self.transfers)
    @rule(pick=PICK, part=st.integers(0, 2), fail=st.sampled_from([False] * 5 + [True]), on=st.integers(1, 4))
    def move(self, pick: int, part: int, fail: bool, on: int) -> None:
        site, transfer = self.transfers[pick % len(self.transfers)]
        if not transfer.posted:
            site.post(transfer, parts=part + 1)
            return
        for _ in range(on):
            if transfer in site.transfers:
                site.step(transfer, part, fail=fail)

    @precondition(lambda self: self.world.network)
    @rule(pick=PICK, fate=st.sampled_from(["arrives", "comes twice", "is lost"]))
    def message(self, pick: int, fate: str) -> None:
        index = pick % len(self.world.network)
        if fate == "is lost":
            self.world.network.pop(index)
        else:
            self.world.deliver(index, keep=fate == "comes twice")

    @rule(turns=st.integers(1, 12))
    def all_goes_well(self, turns: int) -> None:
        """Messages arrive in order, and engines and endpoints do their work, so that some hand-overs finish."""
        for _ in range(turns):
            if self.world.network:
                self.world.deliver(0)
            elif self.prefills:
                site, id_ = self.prefills[0]
                site.fill(id_)
            elif self.transfers:
                self.finish(*self.transfers[0])

    def finish(self, site: Site, transfer: Transfer) -> None:
        if not transfer.posted:
            site.post(transfer, parts=2)
        for part in 0, 1, 0, 1, 0, 1, 0, 1:
            if transfer in site.transfers:
                site.step(transfer, part)

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(SITES), of=st.sampled_from(SITES), what=st.sampled_from(["lost", "seen", "cut", "died"]))
    def disturb(self, name: str, of: str, what: str) -> None:
        if what == "died":
            self.world.restart(name)
        elif what == "cut" and name != of:
            self.world.site(name).cut(self.world.site(of).me.instance)
        elif name != of:
            self.world.notice(name, of, lost=what == "lost")

    @rule(seconds=st.sampled_from([0.3, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        self.world.check()

    @rule(seconds=st.sampled_from([1.0, 11.0, 50.0]))
    def drivers_are_late(self, seconds: float) -> None:
        """Time passes and no timer fires: the next event must notice all deadlines that have passed."""
        self.world.now += seconds

    @invariant()
    def books_and_memory_agree(self) -> None:
        self.world.check(prompt=False)

    def teardown(self) -> None:
        if not self.world.broken:  # otherwise this would hide the failure
            assert self.world.fall_silent() <= SILENCE_S_MAX


TestPushes = Pushes.TestCase
TestPushes.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


# --- the same as random walks: more steps, no shrinking --------------------------------------------------------------

WEIGHTS = {
    "begin_push": 5,
    "open_again": 0.5,
    "push_again": 0.5,
    "abort": 1.5,
    "compute": 3,
    "move": 12,
    "message": 14,
    "all_goes_well": 6,
    "disturb": 0.8,
    "time_passes": 1,
    "drivers_are_late": 0.2,
}


def draw_arguments(dice: random.Random, step: str) -> dict[str, Any]:
    producer, consumer = dice.choice(PRODUCERS), dice.choice(CONSUMERS)
    pick = dice.randrange(1 << 16)
    choices: dict[str, dict[str, Any]] = {
        "begin_push": {"producer": producer, "consumer": consumer, "blocks": dice.randint(1, 3)},
        "open_again": {"pick": pick},
        "push_again": {"pick": pick, "consumer": consumer},
        "abort": {"pick": pick, "name": dice.choice(SITES)},
        "compute": {"pick": pick, "whole": dice.random() < 0.5},
        "move": {"pick": pick, "part": dice.randrange(3), "fail": dice.random() < 0.1, "on": dice.randint(1, 3)},
        "message": {"pick": pick, "fate": dice.choice(["arrives"] * 8 + ["comes twice", "is lost"])},
        "all_goes_well": {"turns": dice.randint(1, 6)},
        "disturb": {
            "name": dice.choice(SITES),
            "of": dice.choice(SITES),
            "what": dice.choice(["lost", "seen", "cut", "died"]),
        },
        "time_passes": {"seconds": dice.choice([0.3, 0.3, 1.0, 3.0, 11.0])},
        "drivers_are_late": {"seconds": dice.choice([0.3, 4.0, 11.0])},
    }
    return choices[step]


NEEDS = {
    "open_again": "ids",
    "push_again": "ids",
    "abort": "ids",
    "compute": "prefills",
    "move": "transfers",
}


def walk(seed: int, steps: int) -> Pushes:
    dice = random.Random(seed)
    machine = Pushes()
    names = list(WEIGHTS)
    for step in dice.choices(names, list(WEIGHTS.values()), k=steps):
        possible = machine.world.network if step == "message" else getattr(machine, NEEDS.get(step, "world"))
        if possible:
            getattr(machine, step)(**draw_arguments(dice, step))
            machine.books_and_memory_agree()
    machine.teardown()
    return machine


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_walks(first: int) -> None:
    used = recomputed = 0
    for seed in range(first, first + 20):
        legs = [leg for site in walk(seed, 400).world.sites.values() for leg in site.past]
        used += sum(leg.outcome == "use" for leg in legs)
        recomputed += sum(leg.outcome == "recompute" for leg in legs)
    assert min(used, recomputed) > 20, "walks without finished hand-overs would prove nothing"


@pytest.mark.long
@pytest.mark.parametrize("first", range(1_000, 11_000, 500))
def test_many_random_walks(first: int) -> None:
    for seed in range(first, first + 500):
        assert walk(seed, 400).ids
