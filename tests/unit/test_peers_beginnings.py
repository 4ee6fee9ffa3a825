"""Answers of several routers that share a prompt's beginning: it counts once for them all, at each router."""

from __future__ import annotations

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.core.journey import Choose
from router.core.load_notes import LoadNote, note_bytes, note_of
from router.core.values import Wanted
from router.fleet import events as d
from router.fleet.view import FleetView
from router.predict.inflight_load import RowLoad
from router.predict.step_model import make_of
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES

MAKE = make_of(costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("L4"), profiles=shipped.profiles()))
CAPACITY = 38_624
BOTH = InstanceId("both-0")
SHARED, OWN = 12, 1
"""Chunks of each prompt that all of them begin with, and those of its own."""
PROMPT, ANSWER = 3250, 100
"""Tokens: of 13 chunks with 250 tokens, and of its expected answer."""
ALONE = OWN * 250 + ANSWER


class Router:
    """One router of a fleet with one engine, an L4."""

    def __init__(self, name: str) -> None:
        self.view = FleetView(lambda _: MAKE)
        self.view.add(Instance(id=BOTH, role=Role.BOTH, url="http://b"))
        self.view.index()
        self.view.seen(BOTH, ({"id": "m"},), Load(kv_tokens=CAPACITY))
        prefixes = self.view.all().prefixes
        assert prefixes is not None
        self.prefixes = prefixes
        self.at = self.view.get(BOTH).row
        prefixes.join(self.at, CAPACITY, self.view.get(BOTH).life)
        self.view.routers = 2
        self.updates = self.view.tell_peers(name, shares_names=True)
        self.scheduler = Scheduler(self.view, POLICIES["workload"], admission=False, foresees=True)
        self.asked = 0

    def place(self, now: float, *, own: int) -> SchedulingContext | None:
        """A request gets a place, and its answer begins; None: there is no room."""
        names = (*range(1, SHARED + 1), 1000 + own)
        context = SchedulingContext(
            Wanted(
                model="m", hand_over=True, prompt_tokens=PROMPT, prefix=names, prefix_block_tokens=250.0,
                output_tokens=float(ANSWER), output_lengths=(10, 20, 40, 80, 100, 150, 200), output_variance=900.0,
                arrived=now, now=now,
            )
        )  # fmt: skip
        chosen, _ = self.scheduler.choose(context, Choose(frozenset(), hand_over=True), now)
        if chosen.decode is None:
            return None
        self.scheduler.prompt_over(context, now + 0.2, done=True)
        self.scheduler.opened(context, now + 0.2)
        return context

    def notes(self, now: float) -> list[LoadNote]:
        """Its notes as they come over the wire."""
        read = [note_of(note_bytes(note)) for note in self.updates.notes(now)]
        return [note for note in read if isinstance(note, LoadNote)]

    def hear(self, notes: list[LoadNote], now: float) -> None:
        for note in notes:
            self.view.handle(d.LoadNoted(note, now), now)

    @property
    def load(self) -> RowLoad:
        return self.view.all().inflight.rows[self.at]


def told(owner: Router, *peers: Router, count: int = 10) -> list[SchedulingContext]:
    """The owner places requests that begin alike, and tells these peers of each."""
    made = []
    for number in range(count):
        context = owner.place(1000.0 + number, own=number)
        assert context is not None
        made.append(context)
        notes = owner.notes(1000.3 + number)
        for peer in peers:
            peer.hear(notes, 1000.3 + number)
    return made


def test_a_beginning_that_a_peers_answers_share_counts_once() -> None:
    owner, peer = Router("a"), Router("b")
    made = told(owner, peer)
    assert owner.load.kv_mean == pytest.approx(SHARED * 250 + 10 * ALONE)
    assert peer.load.kv_mean == pytest.approx(owner.load.kv_mean)
    for context in made[:9]:
        owner.scheduler.finish(context, 1020.0, ANSWER)
    peer.hear(owner.notes(1020.1), 1020.1)
    assert peer.load.kv_mean == pytest.approx(owner.load.kv_mean) == pytest.approx(SHARED * 250 + ALONE)
    owner.scheduler.finish(made[9], 1021.0, ANSWER)
    peer.hear(owner.notes(1021.1), 1021.1)
    assert (peer.load.kv_mean, peer.load.decoding) == (0.0, 0)


def test_two_routers_have_room_for_as_many_answers_as_one() -> None:
    """Peers' answers counted whole: two routers gave an L4 19 answers."""
    routers = [Router("a"), Router("b")]
    for number in range(80):
        now = 1000.0 + number
        owner, peer = routers[number % 2], routers[1 - number % 2]
        assert owner.place(now, own=number) is not None, f"no room beside {number} answers"
        peer.hear(owner.notes(now + 0.3), now + 0.3)
    for each in routers:
        assert each.load.kv_mean == pytest.approx(SHARED * 250 + 80 * ALONE)


def test_a_router_that_comes_later_is_told_the_names_again() -> None:
    owner, peer, late = Router("a"), Router("b"), Router("c")
    told(owner, peer)
    before = list(peer.prefixes._held[peer.at].entries.items())
    owner.updates.tell_all()
    notes = owner.notes(1020.0)
    for each in (peer, late):
        each.hear(notes, 1020.0)
        assert each.load.kv_mean == pytest.approx(owner.load.kv_mean)
        names = (*range(1, SHARED + 1), 1003)
        assert each.prefixes.match(names).chunks_of(each.at) == len(names)
    after = list(peer.prefixes._held[peer.at].entries.items())
    assert after == before, "names that are told again are no new use of what is cached"


def test_a_router_that_lost_the_names_is_told_them_again() -> None:
    """The first note that it hears is on the answer's first token."""
    owner, peer = Router("a"), Router("b")
    told(owner, count=9)
    context = owner.place(1010.0, own=9)
    assert context is not None
    owner.notes(1010.1)
    for number, each in enumerate(list(owner.updates._booked.values())):
        owner.updates.changed(each.booking)
        peer.hear(owner.notes(1011.0 + number), 1011.0 + number)
    assert peer.load.decoding == 10
    assert peer.load.kv_mean == pytest.approx(10 * (PROMPT + ANSWER)), "it knows no names"
    owner.updates.tell_all()
    peer.hear(owner.notes(1030.0), 1030.0)
    assert peer.load.kv_mean == pytest.approx(owner.load.kv_mean)
    assert peer.load.decoding == 10
    owner.scheduler.finish(context, 1031.0, ANSWER)
    peer.hear(owner.notes(1031.1), 1031.1)
    assert peer.load.kv_mean == pytest.approx(owner.load.kv_mean)
