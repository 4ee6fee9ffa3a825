"""Two engines that are both P and D, each with blocks that the other one waits for: how long that can last.

The rules of both sides run as they are (`decode.early`, `decode.early_reads`, `prefill.parts`, `prefill.callers`). Of
vLLM there is what counts here: a prompt begins when all of it fits, a growing answer preempts prompts, blocks of an
early leg are not preempted. Time is virtual.

The bound: no early leg has blocks that nothing fills for longer than `WAIT_S_MAX` (seconds) after it has come, however
the two engines wait for each other. Then its blocks are free within one step of its engine, which an idle one makes
within `prefill.rests.LONG_S`. (Its reads have ended: they wait for no engine's blocks.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from decode.early import WAIT_S_MAX, EarlyLegs
from decode.early_reads import FREE_PART_MAX, EarlyReads, Place
from kvtransfer.early_notes import Part, Ready, Want
from prefill.callers import Callers
from prefill.parts import Parts

B = 16
BLOCKS = 100
"""Of each engine."""
CHUNK = 4
"""Blocks that a prompt gets in a step."""
STEP_S = 0.5


@dataclass
class _Prompt:
    name: str
    blocks: int
    mine: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.blocks * B


class _Engine:
    """One engine, as P of the other one's legs and as D of its own."""

    def __init__(self, name: str) -> None:
        self.name, self.number, self.notes = name, 0, list[Want | Part | Ready]()
        self.free = set(range(BLOCKS))
        self.answer = list[int]()
        self.legs, self.reads, self.parts, self.callers = EarlyLegs(), EarlyReads(B), Parts(B), Callers()
        self.early = dict[str, _Prompt]()
        self.places, self.held = dict[str, list[int]](), dict[str, _Prompt]()
        self.running, self.waiting, self.done = list[_Prompt](), list[_Prompt](), list[str]()
        self.other: _Engine

    def opens(self, prompt: _Prompt, now: float) -> None:
        """An early leg has come, and its prompt has come to the other engine."""
        self.reads.rates.saw(self.other.name, 100, 1.0)
        self.early[prompt.name] = prompt
        self.legs.opened(prompt.name, prompt.name, self.other.name, now)
        self.other.parts.begin(prompt.name, prompt.name, prompt.tokens)
        self.other.waiting.append(_Prompt(prompt.name, prompt.blocks))

    def take(self, many: int) -> list[int]:
        taken = sorted(self.free)[:many]
        self.free -= set(taken)
        return taken

    def grows(self) -> None:
        """An answer takes all free blocks, and those of the prompts that are under way."""
        while self.running:
            self.preempt(self.running.pop())
        self.answer += self.take(BLOCKS)

    def preempt(self, prompt: _Prompt) -> None:
        self.free |= set(prompt.mine)
        prompt.mine = []
        self.waiting.insert(0, prompt)

    def step(self, now: float) -> None:
        self._hear(now)
        self._give_back(now)
        self._ask_for_blocks()
        self._compute(now)

    def _hear(self, now: float) -> None:
        notes, self.notes = self.notes, []
        for note in notes:
            if isinstance(note, Want):
                ready = self.callers.wanted(self.other.name, note.name, now)
                self.other.notes += [] if ready is None else [ready]
            elif isinstance(note, Part):
                for leg in self.legs.waiting_for(self.other.name, note.name):
                    self.reads.told(leg, self.other.name, note)
            else:
                for leg in self.legs.told(self.other.name, note):
                    self._pulled(leg, note)

    def _pulled(self, leg: str, note: Ready) -> None:
        """The hold is there: its pull takes no time here, and its answer is short."""
        hold = self.other.held.pop(leg)
        place = self.reads.ready(leg, leg, note.life, hold.tokens, hold.mine)
        if place is not None:
            self.free |= set(self.places.pop(leg))
        self.other.free |= set(hold.mine)
        self.legs.finished(leg)
        self.done.append(leg)

    def _give_back(self, now: float) -> None:
        self.other.notes += [Want(name) for _, name in self.legs.due(now)]
        for leg in self.legs.take_abandoned():
            self.reads.ends(leg)
            self.waiting.append(_Prompt("", self.early[leg].blocks))
        for leg in self.reads.take_over():
            self.free |= set(self.places.pop(leg))
            self.reads.ended(leg)
        for leg, _ in self.legs.take_given_back():
            self.other.free |= set(self.other.held.pop(leg).mine)

    def _ask_for_blocks(self) -> None:
        for leg, prompt in self.early.items():
            if leg in self.done or leg in self.places or not self.reads.wants(leg, prompt.tokens, 0, len(self.free)):
                continue
            under_way = sum(each.blocks - len(each.mine) for each in self.running)  # vLLM leaves these to them
            if prompt.blocks <= len(self.free) - under_way and self.legs.reserved(leg):
                self.places[leg] = self.take(prompt.blocks)
                self.reads.reserved(leg, Place(tuple(self.places[leg]), 0))

    def _compute(self, now: float) -> None:
        if self.waiting and self.waiting[0].blocks <= len(self.free):
            self.running.append(self.waiting.pop(0))
        self.number += 1
        for prompt in list(self.running):
            need = min(CHUNK, prompt.blocks - len(prompt.mine))
            while len(self.free) < need and prompt in self.running:
                self.preempt(self.running.pop())
            if prompt not in self.running:
                continue
            before, more = len(prompt.mine), self.take(need)
            prompt.mine += more
            if more and prompt.name:
                self.parts.step(self.number, prompt.name, before * B, len(more) * B, more, now, anew=not before)
            if len(prompt.mine) == prompt.blocks:
                self.running.remove(prompt)
                self._computed(prompt)
        self.other.notes += [part for _, part in self.parts.computed(self.number, now, self.callers.asking)]

    def _computed(self, prompt: _Prompt) -> None:
        if not prompt.name:  # an early leg that is computed here
            self.free |= set(prompt.mine)
            self.done.append("here")
            return
        self.held[prompt.name] = prompt
        ready = Ready(prompt.name, {"remote_engine_id": self.name}, 1, 0, self.parts.end(prompt.name))
        if self.callers.filled(prompt.name, ready):
            self.other.notes.append(ready)


@pytest.fixture
def engines() -> tuple[_Engine, _Engine]:
    one, two = _Engine("one"), _Engine("two")
    one.other, two.other = two, one
    return one, two


def _until(engines: tuple[_Engine, _Engine], now: float, end: float) -> float:
    while now < end:
        now += STEP_S
        for each in engines:
            each.step(now)
    return now


def test_two_engines_that_wait_for_each_others_blocks_go_on_after_two_minutes(
    engines: tuple[_Engine, _Engine],
) -> None:
    """The worst case: both prompts are preempted by answers that never end, and all that is left is the early legs'."""
    for each in engines:
        each.opens(_Prompt(f"of {each.name}", 40), 0.0)
    now = _until(engines, 0.0, 2.0)
    for each in engines:
        assert len(each.places) == 1 and len(each.running) == 1, "both compute, and both have blocks for the other's"
        each.grows()
        assert not each.free and each.waiting[0].blocks > len(each.free)
    now = _until(engines, now, WAIT_S_MAX - STEP_S)
    assert all(each.places and not each.done for each in engines), "each has what the other one needs"
    _until(engines, now, WAIT_S_MAX + 2 * STEP_S)
    assert not any(each.places or each.legs.waiting or each.reads.ending for each in engines)
    _until(engines, now, WAIT_S_MAX + 60.0)
    for each in engines:
        assert each.done == ["here"], "the leg is computed where it waited, and P is told so"
        assert not each.held and len(each.free) + len(each.answer) == BLOCKS


def test_where_answers_end_no_leg_waits_so_long(engines: tuple[_Engine, _Engine]) -> None:
    for n in range(6):
        for each in engines:
            each.opens(_Prompt(f"{n} of {each.name}", (40, 10, 30, 20, 40, 25)[n]), 0.0)
    now = 0.0
    for _ in range(4):
        now = _until(engines, now, now + 4.0)
        for each in engines:
            each.grows()
        now = _until(engines, now, now + 2.0)
        for each in engines:
            each.free |= set(each.answer)
            each.answer = []
    _until(engines, now, WAIT_S_MAX / 2)
    for each in engines:
        assert len(each.done) == 6 and "here" not in each.done and len(each.free) == BLOCKS


@pytest.mark.parametrize("sizes", [(40, 20, 10, 10, 5, 5), (10,) * 12, (49, 30, 1, 1)])
def test_early_legs_together_leave_half_of_the_free_blocks(sizes: tuple[int, ...]) -> None:
    """Also for the engine's own running answers, which vLLM would preempt."""
    reads, free = EarlyReads(B), BLOCKS
    reads.rates.saw("p", 100, 1.0)
    for n, blocks in enumerate(sizes):
        reads.told(f"{n}", "p", Part("n", "r", 0, 0, (1,), blocks * B, B, B, 1.0))
        if reads.wants(f"{n}", blocks * B, 0, free):
            reads.reserved(f"{n}", Place(tuple(range(blocks)), 0))
            free -= blocks
    assert BLOCKS * FREE_PART_MAX <= free < BLOCKS
