"""A prefill instance that hangs, on virtual time: when a second P prefills, and how the first leg ends."""

from __future__ import annotations

from typing import Any

import pytest
from support.simulated import HANDS_OVER, every, members, simulate

from cluster.instance import Role
from costs.step import StepCost
from router.core.journey import PATIENCE_S
from router.core.values import Promise
from router.fleet.view import FleetView
from router.predict.step_model import Make
from router.scheduler import scheduler
from router.scheduler.scheduler import SECOND_LEGS_SAVED, SECOND_LEGS_SHARE
from sim.faults import Fault, Faults
from sim.kernel import NS
from sim.settings import SimSettings
from sim.world import World

STEP = StepCost(floor_ms=1.0, start_ms=1.0, token_ms=0.01, area_ms=0.0, decode_ms=1.0, context_ms=1e-4, request_ms=0.02)
MAKE = Make(prefill=STEP, decode=STEP, capacity_tokens=2000 * 16, budget_tokens=2048)
"""What a router knows of engines with the costs `support.simulated.COSTS`."""

P, D = Role.PREFILL, Role.DECODE
LIMIT_S = 8.0
LIMITS: dict[str, Any] = {"first_token_s": LIMIT_S, "stall_s": 4.0}


def hang(name: str, *, duration_s: float = 1000.0) -> Fault:
    """A fault that makes an engine hang: a step takes 20 minutes, while its agent goes on as usual."""
    return Fault(at_s=0.0, kind="slow", instance=name, factor=1_000_000, duration_s=duration_s)


def test_a_request_at_a_hanging_p_is_served_by_another_p_within_the_deadline() -> None:
    world, result = simulate(members(P, P, D, D), every(0.2, 40), faults=[hang("prefill-0")], **LIMITS)
    rows = result.columns
    assert (rows["outcome"] == 1).all(), result.details
    late = rows[rows["attempts"] > 1]
    assert 0 < len(late) <= SECOND_LEGS_SAVED
    waited_s = (late["first_ns"] - late["at_ns"]) / NS
    assert waited_s.min() >= LIMIT_S / 2 and waited_s.max() < LIMIT_S / 2 + 0.5
    assert (late["prefill"] == 1).all()
    assert all(view.inflight == 0 for view in world.view.all()), "places are given back"


@pytest.mark.parametrize("kind", ["slow", "kill"])
def test_a_class_that_refuses_late_requests_does_not_refuse_those_whose_p_hangs_or_dies(kind: str) -> None:
    """They were admitted before, and their target is long past when a second P is asked."""
    world = World(
        members(P, P, D, D, config={"num_blocks": 2000}),
        SimSettings(**LIMITS),
        policy=HANDS_OVER,
        view=FleetView(lambda _: MAKE),
        promises={"": Promise(ttft_ms=500.0, tpot_ms=20.0, sheds=True)},
    )
    faults = [hang("prefill-0")]
    if kind == "kill":
        faults.append(Fault(at_s=2.0, kind="kill", instance="prefill-0", duration_s=1000.0))
    Faults(world, faults, 0)
    result = world.run(every(0.02, 400, tokens=800, answer=5)[1:])
    rows = result.columns
    assert (rows["outcome"] == 1).all(), result.details
    again = rows[rows["attempts"] > 1]
    waited_s = (again["first_ns"] - again["at_ns"]) / NS
    assert len(again) >= 2 and (again["prefill"] == 1).all()
    assert waited_s.max() > 1.0, "long after its target"
    assert waited_s.max() < LIMIT_S / 2 + 0.5
    assert all(view.inflight == 0 for view in world.view.all())


@pytest.mark.parametrize("late_s", [0.2, PATIENCE_S + 5.0], ids=["by itself", "aborted"])
def test_what_the_silent_leg_holds_is_released_when_it_answers(late_s: float) -> None:
    """The silent P recovers after another P has answered, long before the lease ends."""
    well_s = LIMIT_S / 2 + late_s
    world = World(members(P, P, D, D, config={"lease_s": 100.0}), SimSettings(**LIMITS), policy=HANDS_OVER)
    Faults(world, [hang("prefill-0", duration_s=well_s)], 0)
    slow = world.instances[0]
    usage: list[float] = []
    for at_s in (well_s - 0.1, well_s + PATIENCE_S):
        world.kernel.at(round(at_s * NS), lambda _: usage.append(world.kv_usage(slow)))
    result = world.run(every(0.5, 4))
    assert (result.columns["outcome"] == 1).all(), result.details
    assert (result.columns["attempts"] > 1).any()
    assert usage[0] > 0, "the silent P still has the prompt's blocks"
    assert usage[1] == 0
    assert all(view.inflight == 0 for view in world.view.all())


def test_a_slow_p_that_is_alone_is_waited_for() -> None:
    _, result = simulate(members(P, D), every(0.5, 3), faults=[hang("prefill-0", duration_s=6.0)], **LIMITS)
    assert (result.columns["outcome"] == 1).all(), result.details
    assert (result.columns["attempts"] == 1).all()


def test_a_fleet_that_is_slow_everywhere_serves_no_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prefill instances have long queues: many second legs would delay all other requests."""
    load = every(0.2, 300)
    faults = [Fault(at_s=0.0, kind="slow", instance=f"prefill-{n}", factor=600, duration_s=1000.0) for n in range(2)]

    def served() -> tuple[int, int]:
        rows = simulate(members(P, P, D, D, config={"max_num_seqs": 256}), load, faults=faults, **LIMITS)[1].columns
        return int((rows["outcome"] == 1).sum()), int((rows["attempts"] > 1).sum())

    right, seconds = served()
    assert seconds <= SECOND_LEGS_SAVED + len(load) * SECOND_LEGS_SHARE
    monkeypatch.setattr(scheduler, "SECOND_LEGS_SAVED", 0.0)
    without, none = served()
    assert none == 0 and 0 < without < len(load) / 4, "most requests cannot be served in time"
    assert right >= without
