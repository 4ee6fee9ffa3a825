"""Which instances compute late prompts, as whole schedulers choose."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.core.journey import Choose
from router.core.values import Promise, Wanted
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
