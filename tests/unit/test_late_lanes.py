"""Which instances compute late prompts, as whole schedulers choose."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.core.journey import Choose
from router.core.load_notes import note_bytes, note_of
from router.core.values import Promise, Wanted
from router.fleet import events
from router.fleet.view import FleetView
from router.predict.step_model import make_of
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES

COST = costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("H100"), profiles=shipped.profiles())
ASK = Choose(frozenset(), hand_over=True)
PROMISE = Promise(ttft_ms=500, tpot_ms=200)
LATE_TOKENS = 60_000


def scheduler(models: Sequence[str]) -> Scheduler:
    """A router of instances of these models."""
    view = FleetView(lambda _: make_of(COST))
    for number, model in enumerate(models):
        name = InstanceId(f"{model}{number}")
        view.add(Instance(id=name, role=Role.BOTH, url=f"http://{name}"))
        view.seen(name, ({"id": model},), Load(kv_tokens=400_000))
    return Scheduler(view, POLICIES["workload"], admission=True, foresees=True)


def asked(at: Scheduler, model: str, tokens: int, now: float) -> tuple[SchedulingContext, InstanceId | None]:
    """A new request, and where it goes."""
    wanted = Wanted(
        model=model, hand_over=True, prompt_tokens=tokens, output_tokens=200.0, arrived=now, tenant="t",
        output_lengths=(10, 20, 40, 100, 200, 400, 800), output_variance=900.0,
    )  # fmt: skip
    context = SchedulingContext(wanted, PROMISE)
    return context, at.choose(context, ASK, now)[0].decode


def serve(at: Scheduler, model: str, tokens: int, now: float) -> None:
    """One short request, to its end."""
    context, where = asked(at, model, tokens, now)
    if where is not None:
        at.prompt_over(context, now + 0.02, done=True)
        at.opened(context, now + 0.02)
    at.finish(context, now + 0.03, None if where is None else 3)


def test_late_prompts_have_their_models_idle_instances_while_another_model_is_busy() -> None:
    """Before, they had one of four: all models' prompts in time kept instances of each."""
    for busy in (False, True):
        here, now = scheduler(["a"] * 12 + ["b"] * 4), 1000.0
        for _ in range(2000 if busy else 0):
            now += 0.005
            serve(here, "a", 1500, now)
        found = [asked(here, "b", LATE_TOKENS, now + number / 1000)[1] for number in range(4)]
        assert None not in found and len(set(found)) == 4, busy


def tell(routers: Sequence[Scheduler], now: float) -> None:
    """Every router's notes reach the others."""
    for each in routers:
        updates = each.view.all().inflight.updates
        for note in () if updates is None else updates.notes(now):
            heard = note_of(note_bytes(note))
            assert not isinstance(heard, str)
            for other in routers:
                if other is not each:
                    other.view.handle(events.LoadNoted(heard, now), now)


def late_rows(count: int) -> int:
    """The instances, of eight, on which so many routers' late prompts are computed while prompts in time keep two
    busy.
    """
    routers, now = [scheduler(["b"] * 8) for _ in range(count)], 1000.0
    for number, each in enumerate(routers):
        each.view.routers, each.view.router_number = count, number
        each.view.tell_peers(f"r{number}", shares_names=True)
    running: list[tuple[float, int, Scheduler, SchedulingContext]] = []
    free_s: dict[InstanceId, float] = {}
    for turn in range(1600):
        now += 0.005
        while running and running[0][0] <= now:
            ends, _, at, context = heappop(running)
            at.prompt_over(context, ends, done=True)
            at.opened(context, ends)
            at.finish(context, ends, 1)
        here = routers[turn % count]
        context, where = asked(here, "b", 1000, now)
        assert where is not None
        free_s[where] = max(now, free_s.get(where, now)) + 0.02  # an engine computes one after the other
        heappush(running, (free_s[where], turn, here, context))
        if turn % 10 == 0:
            tell(routers, now)
    used: set[InstanceId] = set()
    for turn in range(16):
        context, where = asked(routers[turn % count], "b", LATE_TOKENS, now + turn / 1000)
        assert context.late
        used |= set() if where is None else {where}
        tell(routers, now + turn / 1000)
    return len(used)


def test_several_routers_keep_as_many_instances_for_prompts_in_time_as_one() -> None:
    """Before, each of them used as many for late prompts as one alone, so that they kept none."""
    alone = late_rows(1)
    assert alone == 5
    for count in (2, 4):
        assert 4 <= late_rows(count) <= alone


@pytest.mark.parametrize("routers", range(1, 12))
def test_routers_divide_the_lanes_and_have_one_each(routers: int) -> None:
    here = scheduler(["b"] * 8)
    assert here.admission is not None
    asks = [Wanted(model="b", hand_over=True, routers=routers, router_number=number) for number in range(routers)]
    found = [here.admission.saturation._lanes(each, 8, 8) for each in asks]
    assert sum(found) == max(8, routers) and min(found) >= max(1, 8 // routers)
