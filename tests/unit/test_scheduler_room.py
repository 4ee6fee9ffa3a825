"""Who is asked when a prompt is computed, and how requests are served that nobody can foretell."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.journey import Choose
from router.core.values import Promise, Wanted
from router.fleet.view import FleetView
from router.predict.step_model import SURE, UNKNOWN
from router.scheduler.flow_control.saturation import SaturationDetector
from router.scheduler.scheduler import Scheduler, SchedulingContext
from router.scheduler.scoring.policies import POLICIES
from router.scheduler.scoring.prices import Scoring

ASK = Choose(frozenset(), hand_over=True)
WANTED = Wanted(model="m", hand_over=True, prompt_tokens=1000, arrived=1.0)


def scheduler(*, admission: bool) -> Scheduler:
    view = FleetView()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}"))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    return Scheduler(view, POLICIES["workload"], admission=admission)


class Shut(SaturationDetector):
    """There is no room anywhere."""

    def opens_until_ms(self, wanted: Wanted) -> float:
        return 0.0

    def lanes(self, wanted: Wanted, servers: int, prefills: int) -> list[int] | None:
        return []


@pytest.mark.interpreted
def test_what_nobody_can_foretell_is_held_back_by_credits_alone() -> None:
    here = scheduler(admission=True)
    fleet = here.view.all()
    scoring = Scoring(Shut(here.line))
    asked = Wanted(model=None, hand_over=False)
    assert here.policy(fleet, replace(asked, scoring=scoring)).wait
    assert here.pick(replace(asked)).decode is not None
    for each in fleet:
        each.credits, each.inflight = 1, 1
    assert here.pick(replace(asked)).decode is None


@pytest.mark.interpreted
def test_the_line_is_asked_when_a_prompt_is_computed_where_room_is_more_than_credits() -> None:
    here = scheduler(admission=True)
    here.scoring.saturation = Shut(here.line)  # type: ignore[misc]
    waits = SchedulingContext(WANTED, Promise(ttft_ms=60_000))
    assert here.choose(waits, ASK, 1.0)[0].wait
    assert here.room() == (waits,)
    best_effort = scheduler(admission=False)
    assert best_effort.room() == ()


@pytest.mark.interpreted
def test_a_share_counts_here_by_the_part_of_its_demand_that_is_here() -> None:
    here = scheduler(admission=True)
    here.shares = {"acme": 4.0}
    given = []
    here.line.gave = lambda _, work: given.append(work)  # type: ignore[method-assign]
    for local in ({}, {"acme": 1.0}):
        here.local_shares = local
        context = SchedulingContext(Wanted(model="m", hand_over=True, prompt_tokens=1000, arrived=1.0, tenant="acme"))
        assert here.choose(context, ASK, 1.0)[0].decode is not None
        here.finish(context, 2.0)
    assert given[1] > 3 * given[0]


def test_what_was_foretold_stands_on_the_seat() -> None:
    here = scheduler(admission=True)
    context = SchedulingContext(WANTED, Promise(ttft_ms=60_000, tpot_ms=500))
    here.choose(context, ASK, 1.25)
    assert context.ttft_ms > 250, "what it has waited is in it"
    assert context.tpot_ms > 0


def test_who_only_decodes_need_not_have_timed_a_prompt() -> None:
    """No costs are known and nobody ever prefills on D: what P has been seen to take says who cannot be in time."""
    here = scheduler(admission=True)
    fleet = here.view.all()
    step_model, p, d = fleet.inflight.step_model, *(fleet.by_id[InstanceId(name)].row for name in "pd")
    for at in range(SURE):
        hopeless = SchedulingContext(WANTED, Promise(ttft_ms=50))
        here.choose(hopeless, ASK, 1.0)
        assert not hopeless.late, f"nothing is believed after {at} prompts"
        here.finish(hopeless, 1.0)
        tokens = 100 + 37 * (at % 9)
        step_model.prompt_took(p, UNKNOWN.prompt_ms(tokens), 50 * UNKNOWN.prompt_ms(tokens))
    assert step_model.sure(np.array([p])) and not step_model.sure(np.array([d]))
    hopeless, easy = SchedulingContext(WANTED, Promise(ttft_ms=50)), SchedulingContext(WANTED, Promise(ttft_ms=60_000))
    for context in (hopeless, easy):
        here.choose(context, ASK, 1.0)
    assert hopeless.late and not easy.late
