"""What a router decided, decided again from its log. A live router's: tests/contract/test_sim_replay.py."""

from __future__ import annotations

import pytest
from support.simulated import every, members

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.decisions import Decided, LegStarted, LoggedView, entry_of, logged
from router.policy import POLICIES
from router.policy.candidates import Wanted
from router.view import Reported
from sim.replay import replay
from sim.settings import Settings
from sim.world import World

P, D = Role.PREFILL, Role.DECODE


def test_a_simulated_routers_log_replays_to_the_same_choices() -> None:
    lines: list[bytes] = []
    policy = logged("least_load", POLICIES["least_load"], lines.append)
    world = World(members(P, P, D, D), Settings(), policy=policy, view=LoggedView(lines.append))
    world.run(every(0.005, 60))
    replayed = replay(map(entry_of, lines))
    assert (replayed.choices, replayed.differences) == (60, ())


def test_every_kind_of_entry_comes_back_as_it_was() -> None:
    lines: list[bytes] = []
    view = LoggedView(lines.append)
    name = InstanceId("d")
    instance = Instance(id=name, role=D, url="http://d", epoch=2, pins=True)
    report = Reported(instance=instance, state="ready", accepting=True, credits=3, load=Load(), models=({"id": "m"},))
    view.add(Instance(id=InstanceId("p"), role=P, url="http://p"))
    view.fold((report,))
    view.seen(name, ({"id": "m", "max_model_len": 9},), Load(running=1, kv_usage=0.5))
    view.probe_failed(name)
    view.unreachable(name)
    view.seen(name, None, None)
    view.leg_started(name)
    view.leg_ended(name)
    choose = logged("least_load", POLICIES["least_load"], lines.append)
    chosen = choose(view.all(), Wanted(model="m", hand_over=True, excluded=frozenset({InstanceId("x")})))
    entries = [entry_of(line) for line in lines]
    assert [type(entry).__name__ for entry in entries] == [
        "Added", "Folded", "Seen", "ProbeFailed", "Unreachable", "Seen", "LegStarted", "LegEnded", "Decided",
    ]  # fmt: skip
    assert isinstance(entries[-1], Decided)
    assert entries[-1].chosen == chosen
    assert chosen.decode == name
    assert replay(entries).differences == ()


def test_a_log_that_was_tampered_with_is_found_out() -> None:
    lines: list[bytes] = []
    policy = logged("least_load", POLICIES["least_load"], lines.append)
    World(members(P, P, D, D), Settings(), policy=policy, view=LoggedView(lines.append)).run(every(0.005, 10))
    entries = [entry_of(line) for line in lines]
    without = [entry for entry in entries if not isinstance(entry, LegStarted)]
    with pytest.raises(AssertionError, match="a leg ended that never started"):
        replay(without)
    other = replay(
        entries, {"least_load": lambda fleet, _: POLICIES["least_load"](fleet, Wanted(model="x", hand_over=True))}
    )
    assert len(other.differences) == 10
