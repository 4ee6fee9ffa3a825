"""Parts: which blocks a producer announces while it computes, and which of them a consumer reads and uses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.early import WAIT_S_MAX, EarlyLegs
from decode.early_reads import FREE_PART_MAX, SAVED_S_MIN, EarlyReads, LinkRates, PartRead, Place, pays
from kvtransfer.early_notes import Part, Ready, encode, parse
from prefill.parts import Parts

B = 4
"""Tokens in a block."""
PART = Part("n", "r", 0, 0, (7, 8), 40, 8, B, 1.5)


# --- notices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("note", [PART, Part("n", "", 2, 9, (0,), 1, 0, 1, 0.0), Ready("n", {}, None, 0, 3)])
def test_a_notice_is_read_as_it_was_written(note: Part | Ready) -> None:
    assert parse(encode(note)) == note


@pytest.mark.parametrize(
    "wrong", [{"part": ""}, {"request": 1}, {"blocks": []}, {"blocks": [-1]}, {"blocks": [True]}, {"blocks": "78"},
              {"life": -1},
              {"first": 0.5}, {"tokens": None}, {"block": -1}, {"left_s": -1}, {"left_s": True}, {"left_s": "1"},
              {"left_s": float("nan")}, {"left_s": float("inf")}, {"left_s": 10**400}]
)  # fmt: skip
def test_what_is_no_part_is_none(wrong: dict[str, Any]) -> None:
    assert parse(json.dumps({**json.loads(encode(PART)), **wrong}).encode()) is None


# --- as P ------------------------------------------------------------------------------------------------------------


def asked(*callers: str) -> Any:
    return lambda _: callers


def producer(tokens: int = 20) -> Parts:
    parts = Parts(B)
    parts.begin("r", "n", tokens)
    return parts


def test_blocks_are_announced_once_their_step_is_over_and_only_whole_ones() -> None:
    parts = producer()
    assert parts.step(1, "r", 0, 6, [1, 2], 0.0, anew=True)
    assert parts.step(2, "r", 6, 6, [3], 0.0, anew=False), "the next step is planned before the first is over"
    assert parts.computed(1, 0.3, asked("d")) == [("d", Part("n", "r", 0, 0, (1,), 20, 6, B, pytest.approx(0.7)))]
    assert parts.computed(1, 0.4, asked("d")) == []
    assert parts.computed(2, 0.6, asked("d")) == [("d", Part("n", "r", 0, 1, (2, 3), 20, 6, B, pytest.approx(0.4)))]
    assert not parts.step(3, "r", 12, 8, [4, 5], 0.0, anew=False), "the last step: the hold is announced"
    assert parts.computed(3, 0.9, asked("d")) == [] and parts.end("r") == 0 and "r" not in parts.requests


def test_a_consumer_that_asks_late_is_told_all_and_nobody_is_told_twice() -> None:
    parts = producer()
    parts.step(1, "r", 0, 8, [1, 2], 0.0, anew=True)
    assert parts.computed(1, 0.0, asked()) == []
    parts.step(2, "r", 8, 4, [3], 0.0, anew=False)
    ((_, part),) = parts.computed(2, 0.0, asked("d"))
    assert part.first == 0 and part.blocks == (1, 2, 3)
    parts.step(3, "r", 12, 4, [4], 0.0, anew=False)
    told = {caller: (part.first, part.blocks) for caller, part in parts.computed(3, 0.0, asked("d", "e"))}
    assert told == {"d": (3, (4,)), "e": (0, (1, 2, 3, 4))}


def test_a_prompt_of_one_step_has_no_parts_and_cached_blocks_are_complete() -> None:
    parts = producer()
    assert not parts.step(1, "r", 0, 20, [1, 2, 3, 4, 5], 0.0, anew=True)
    parts.begin("s", "m", 20)
    assert parts.step(2, "s", 8, 4, [1, 2, 6], 1.0, anew=True)
    ((_, part),) = parts.computed(2, 2.0, asked("d"))
    assert part.blocks == (1, 2, 6) and part.left_s == pytest.approx(2.0), "a second for 4 tokens, and 8 are left"


@pytest.mark.parametrize("anew", [True, False])
def test_what_is_computed_again_is_of_another_life(*, anew: bool) -> None:
    """Preempted (its blocks are new ones), or a load of its own has failed (the same ones are filled again)."""
    parts = producer()
    parts.step(1, "r", 0, 8, [1, 2], 0.0, anew=True)
    parts.step(2, "r", 8, 4, [3], 0.0, anew=False)
    assert parts.computed(1, 0.0, asked("d"))
    parts.step(3, "r", 4, 4, [1, 2] if anew else [], 0.0, anew=anew)
    assert parts.computed(2, 0.0, asked("d")) == [], "a step of the former life"
    ((_, part),) = parts.computed(3, 0.0, asked("d"))
    assert (part.life, part.first, part.blocks) == (1, 0, (1, 2))
    assert parts.end("r") == 1


def test_unknown_requests_change_nothing() -> None:
    parts = Parts(B)
    assert not parts.step(1, "r", 0, 4, [1], 0.0, anew=True) and parts.end("r") == 0 and not parts.requests


# --- the rule --------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"readable": 1000, "left_s": 0.5, "rate": 50_000.0, "blocks": 10, "free": 100}


@pytest.mark.parametrize(
    ("changed", "does"),
    [({}, True), ({"rate": 0.0}, False), ({"rate": 1e6}, False), ({"left_s": 2.0}, False), ({"left_s": 0.001}, False),
     ({"readable": 0}, False), ({"readable": -4}, False), ({"free": 19}, False), ({"free": 20}, True),
     ({"rate": 1000 / SAVED_S_MIN, "left_s": 0.1}, True)],
)  # fmt: skip
def test_it_pays_where_the_wire_is_slow_the_wait_is_short_and_blocks_are_free(
    changed: dict[str, Any], *, does: bool
) -> None:
    assert pays(**{**GOOD, **changed}) is does


def test_the_rate_of_a_link_follows_long_pulls_and_is_forgotten() -> None:
    rates = LinkRates()
    assert rates.of("p") == 0
    rates.saw("p", 1000, 0.1)
    rates.saw("p", 10, 0.01)
    assert 7000 < rates.of("p") < 10_000 and rates.of("q") == 0
    for _ in range(20):
        rates.saw("p", 1000, 0.01)
    assert rates.of("p") == pytest.approx(100_000, rel=0.2)
    rates.saw("p", 0, 1.0), rates.saw("p", 5, 0.0)
    rates.forgotten("p")
    assert rates.of("p") == 0


# --- as D ------------------------------------------------------------------------------------------------------------

TOKENS = 40


def consumer() -> EarlyReads:
    reads = EarlyReads(B)
    reads.rates.saw("p", 100, 1.0)
    return reads


def told(reads: EarlyReads, first: int, blocks: tuple[int, ...], *, life: int = 0, request: str = "r") -> bool:
    return reads.told("leg", "p", Part("n", request, life, first, blocks, TOKENS, 8, B, 1.0))


HOLD = list(range(100, 110))
LOCAL = tuple(range(10))


def test_a_leg_reads_each_block_once_and_its_last_one_never_early() -> None:
    reads = consumer()
    assert reads.wants("leg", TOKENS, 8, 100) == 0, "nothing was announced"
    assert told(reads, 0, (100, 101, 102, 103))
    assert reads.wants("leg", TOKENS, 8, 100) == 32
    reads.reserved("leg", Place(LOCAL[2:], 2))
    assert reads.take_reads() == {"leg": PartRead("p", "r", 2, (102, 103), (2, 3))}
    assert reads.take_reads() == {}
    assert told(reads, 4, tuple(range(104, 110)))
    assert reads.take_reads() == {"leg": PartRead("p", "r", 4, (104, 105, 106, 107, 108), (4, 5, 6, 7, 8))}
    assert reads.ready("leg", "r", 0, TOKENS, HOLD) == Place(LOCAL[2:], 2)
    assert reads.take_over() == {} and reads.ending == 0


def test_a_leg_that_gets_no_blocks_asks_once() -> None:
    """vLLM lets no other request begin in a step in which one gets no blocks."""
    reads = consumer()
    told(reads, 0, (100, 101))
    assert reads.wants("leg", TOKENS, 0, 100) == 40 and reads.wants("leg", TOKENS, 0, 100) == 0
    assert reads.ready("leg", "r", 0, TOKENS, HOLD) is None and reads.take_over() == {}


@pytest.mark.parametrize(
    ("prompt", "free", "engine"),
    [(TOKENS + 1, 100, "p"), (TOKENS, int(10 / FREE_PART_MAX) - 1, "p"), (TOKENS, 100, "q")],
)
def test_a_leg_waits_without_blocks(prompt: int, free: int, engine: str) -> None:
    """Its prompt is not the one that is computed; too few blocks are free; or the rate of the link is unknown."""
    reads = consumer()
    reads.told("leg", engine, Part("n", "r", 0, 0, (100, 101), TOKENS, 8, B, 1.0))
    assert reads.wants("leg", prompt, 0, free) == 0


@pytest.mark.parametrize("how", ["life", "late life", "block", "request", "short", "few", "told otherwise"])
def test_what_is_not_the_holds_is_not_used(how: str) -> None:
    reads = consumer()
    told(reads, 0, (100, 101, 102, 103))
    assert reads.wants("leg", TOKENS, 0, 100)
    reads.reserved("leg", Place(LOCAL, 0))
    assert reads.take_reads()
    if how == "late life":
        assert not told(reads, 0, (100, 101), life=1)
    if how == "told otherwise":
        assert not told(reads, 2, (109, 103, 104))
    assert reads.take_reads() == {}
    hold = [*HOLD[:3], 200, *HOLD[4:]] if how == "block" else HOLD[:8] if how == "few" else HOLD
    life, request = (1 if "life" in how else 0), ("s" if how == "request" else "r")
    assert reads.ready("leg", request, life, TOKENS - (how == "short"), hold) is None
    assert reads.take_over() == {"leg": PartRead("p", "r", 0, (), LOCAL)} and reads.ending == 1
    reads.ended("leg")
    assert reads.ending == 0 and reads.take_over() == {}


def test_a_lost_notice_leaves_its_blocks_to_the_pull() -> None:
    reads = consumer()
    told(reads, 0, (100, 101))
    assert reads.wants("leg", TOKENS, 0, 100)
    reads.reserved("leg", Place(LOCAL, 0))
    assert not told(reads, 3, (103, 104))
    (read,) = reads.take_reads().values()
    assert read.remote == (100, 101)
    assert reads.ready("leg", "r", 0, TOKENS, HOLD) == Place(LOCAL, 0)


def test_a_new_life_before_any_block_is_read_begins_again() -> None:
    reads = consumer()
    told(reads, 0, (100, 101))
    assert told(reads, 0, (105, 106), life=1)
    assert reads.wants("leg", TOKENS, 0, 100)
    reads.reserved("leg", Place(LOCAL, 0))
    (read,) = reads.take_reads().values()
    assert read.remote == (105, 106)


@pytest.mark.parametrize("cause", ["finished", "lost", "time up"])
def test_a_leg_that_ends_gives_its_blocks_back_once(cause: str) -> None:
    legs, reads = EarlyLegs(), consumer()
    legs.opened("leg", "n", "p", 0.0)
    assert legs.waiting_for("p", "n") == ["leg"] and legs.waiting_for("q", "n") == []
    legs.reserved("leg")
    told(reads, 0, (100, 101))
    reads.wants("leg", TOKENS, 0, 100)
    reads.reserved("leg", Place(LOCAL, 0))
    assert legs.waiting == 1 and not legs.waits("leg", 0.0), "vLLM has given it blocks, and asks no more"
    if cause == "finished":
        legs.finished("leg")
    elif cause == "lost":
        legs.lost(lambda engine: engine == "p")
    else:
        assert legs.due(WAIT_S_MAX - 1.0) == [("p", "n")]
        legs.due(WAIT_S_MAX)
    assert legs.waiting == 0 and legs.take_abandoned() == ["leg"] and legs.take_abandoned() == []
    reads.ends("leg")
    reads.ends("leg")
    assert list(reads.take_over()) == ["leg"]
    legs.finished("leg")
    assert legs.take_abandoned() == []


# --- both ------------------------------------------------------------------------------------------------------------


class _Memory:
    """P's blocks, with what each contains; the world that both sides act in."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.number = draw, 0
        self.parts, self.reads = producer(TOKENS), consumer()
        self.content: dict[int, str] = {}
        self.here: dict[int, str] = {}
        self.mine: list[int] = []
        self.done = self.complete = 0
        self.notes: list[Part] = []
        self.flying: list[tuple[int, int]] = []
        self.over = False

    def step(self) -> None:
        """P computes some tokens. With asynchronous scheduling the report may come later."""
        tokens = min(self.draw(st.integers(4, 12)), TOKENS - self.done)
        end = self.done + tokens
        fresh = self.done == 0 and not self.mine
        more = []
        while len(self.mine) * B < end:
            block = [n for n in range(14) if n not in self.mine][self.draw(st.sampled_from([0, 0, 0, 0, 1]))]
            self.mine.append(block)
            more.append(block)
        self.number += 1
        self.parts.step(self.number, "r", self.done, tokens, more, float(self.number), anew=fresh)
        for index in range(self.done // B, -(-end // B)):
            self.content[self.mine[index]] = f"{index}" if end >= (index + 1) * B or end == TOKENS else f"{index}?"
        self.done = end

    def report(self) -> None:
        self.notes += [part for _, part in self.parts.computed(self.number, float(self.number), asked("d"))]

    def preempt(self) -> None:
        """The blocks go to another request, and may come back at the same places."""
        for block in self.mine:
            self.content[block] = "another's"
        self.mine, self.done = [], 0

    def hear(self) -> None:
        part = self.notes.pop(0)
        self.reads.told("leg", "p", part)
        if self.reads.wants("leg", TOKENS, 0, 100):
            self.reads.reserved("leg", Place(LOCAL, 0))

    def post(self) -> None:
        for read in self.reads.take_reads().values():
            self.flying += zip(read.remote, read.local, strict=True)

    def land(self) -> None:
        remote, local = self.flying.pop(self.draw(st.integers(0, len(self.flying) - 1)))
        self.here[local] = self.content[remote]


@given(st.data())
def test_no_block_is_used_that_was_not_read_from_the_one_that_the_hold_names(data: Any) -> None:
    """P is preempted, blocks go to others and come back, notices are late or lost, reads arrive in any order."""
    world = _Memory(data.draw)
    while world.done < TOKENS:
        may = ["step"] * 3 + ["report"] * 2 + ["preempt"] + (["hear"] * 3 + ["lose"]) * bool(world.notes) + ["post"] * 2
        match data.draw(st.sampled_from(may + ["land"] * 3 * bool(world.flying))):
            case "lose":
                world.notes.pop(0)
            case act:
                getattr(world, act)()
    read = {local for _, local in world.flying} | set(world.here)
    life = world.parts.end("r")
    place = world.reads.ready("leg", "r", life, TOKENS, list(world.mine))
    while world.flying:
        world.land()
    if place is not None:
        for local in place.local:
            if local not in read:
                world.here[local] = world.content[world.mine[local]]
        assert [world.here[local] for local in place.local] == [f"{n}" for n in range(len(LOCAL))]
