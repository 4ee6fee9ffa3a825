"""A prompt's beginning from a peer, as readable scripts on twins: what is held, pulled, computed, and freed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.twin import MS, World, ask, hold_id, life, right_tokens, text

from cluster.ids import InstanceId
from cluster.instance import Role
from engine.twin import events as ev
from engine.twin.config import TwinConfig
from engine.twin.request import HoldSource

SMALL = TwinConfig(
    block_size=4, num_blocks=16, max_model_len=48, max_num_batched_tokens=16, max_num_seqs=4, lease_s=0.01
)
OLD, NEW = (1, 18), (2, 7)
"""Segments: what the source has computed before, and the new turn."""


class Turn:
    """D has a conversation; its next turn is to be computed on P, which pulls the beginning from D."""

    def __init__(self, computed: tuple[int, int] = OLD, **rest: object) -> None:
        configs = {"p": replace(SMALL, role=Role.PREFILL), "d": replace(SMALL, role=Role.DECODE)}
        self.world = World(configs, **rest)  # type: ignore[arg-type]
        self.prompt = text(OLD, NEW)
        self.held: ev.Hold | None = None
        self.world.on_finish = self.finished
        self.world.send(0, "d", ev.Submit(ask("before", text(computed), 2)))

    def source_leg(self, when: int = 1 * MS) -> None:
        leg = ask("source", self.prompt, 1, hold=hold_id("source"), cached_only=True)
        self.world.send(when, "d", ev.Submit(leg))

    def finished(self, _: str, over: ev.RequestFinished) -> None:
        if over.request == "source":
            self.held = over.hold
            self.prefill(None if over.hold is None else over.hold.source(InstanceId("d")))

    def prefill(self, source: HoldSource | None) -> None:
        if source is not None:
            source = replace(source, handed_over=False)
        leg = ask("turn", self.prompt, 1, hold=hold_id("turn"), pull=source)
        self.world.send(self.world.now + 100, "p", ev.Submit(leg))


def test_the_source_holds_what_it_has_and_computes_one_token() -> None:
    turn = Turn()
    turn.source_leg()
    turn.world.play(until=3 * MS)
    assert turn.held is not None and (turn.held.tokens, len(turn.held.blocks)) == (16, 4), "whole blocks"
    steps = turn.world.records["d"].steps(turn.world.costs)
    assert [tokens for _, _, _, tokens in steps] == [16, 2, 0, 0], "its own prompt and answer, and the leg's one token"


def test_the_puller_computes_the_rest_and_holds_the_whole() -> None:
    turn = Turn()
    turn.source_leg()
    turn.world.play(until=5 * MS)
    over = turn.world.records["p"].finished("turn")
    assert (over.local_tokens, over.remote_tokens) == (0, 16)
    assert over.hold is not None and over.hold.tokens == 25
    assert turn.world.answer("p", "turn") == right_tokens(ask("turn", turn.prompt, 1), 1)
    turn.world.play()
    for name in "pd":
        assert life(turn.world.twins[name]).scheduler.pool.free_blocks == 16
    assert [each.because for each in turn.world.records["d"].of(ev.HoldEnded)] == ["read"], "at once, not by its lease"


def test_a_source_without_the_prefix_holds_nothing() -> None:
    turn = Turn(computed=(9, 18))
    turn.source_leg()
    turn.world.play(until=5 * MS)
    assert turn.held is None
    over = turn.world.records["p"].finished("turn")
    assert over.remote_tokens == 0 and over.hold is not None and over.hold.tokens == 25
    assert turn.world.answer("p", "turn") == right_tokens(ask("turn", turn.prompt, 1), 1)


@pytest.mark.parametrize("died", [True, False])
def test_a_source_that_is_gone_costs_a_pull(died: bool) -> None:
    """The read brings nothing, or the hold ends before the pull is confirmed: P computes the prompt, and no token
    counts as recomputed.
    """
    turn = Turn(latency_ns=12 * MS if not died else 2 * MS)
    turn.source_leg()
    if died:
        turn.world.spoil = lambda _contents: None
    turn.world.play()
    over = turn.world.records["p"].finished("turn")
    assert over.hold is not None and over.hold.tokens == 25
    assert turn.world.answer("p", "turn") == right_tokens(ask("turn", turn.prompt, 1), 1)
    assert len(turn.world.records["p"].of(ev.NotUsed)) == 1
    assert life(turn.world.twins["p"]).pulls.wants.recomputed_tokens == 0, "the source computed them for another"
    for name in "pd":
        assert life(turn.world.twins[name]).scheduler.pool.free_blocks == 16


def test_an_unwanted_source_leg_leaves_nothing() -> None:
    """The client has left: the router releases the hold before it exists."""
    turn = Turn()
    turn.world.on_finish = lambda _name, _over: None
    turn.world.send(0, "d", ev.GiveUpHold(str(hold_id("source"))))
    turn.source_leg()
    turn.world.play()
    assert turn.world.records["d"].finished("source").hold is None
    assert life(turn.world.twins["d"]).scheduler.pool.free_blocks == 16 and turn.world.now < 5 * MS
