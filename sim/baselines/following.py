"""What a policy hears of requests after it has chosen: some rivals book work where they sent it, until it is done.

`follow` hands such a policy (`Following`) the simulator's news, through the hooks a world has; a policy without these
methods needs none. Attach it last: hooks that were there before are called as well.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from engine.twin import events as ev
from router.core.journey import Chosen
from router.core.values import Wanted
from sim.instance import SimInstance
from sim.world import World

_FIRST = 0
"""Index of an answer's first token."""


@runtime_checkable
class Following(Protocol):
    """A policy with a book. Requests are numbered as they came; news may come twice, or of strangers."""

    def placed(self, request: int, wanted: Wanted, chosen: Chosen) -> None:
        """It was sent where the policy said; again, where an earlier attempt failed."""

    def prefilled(self, request: int) -> None:
        """Its prompt is computed."""

    def ended(self, request: int) -> None:
        """Nothing of it is left anywhere."""


def follow(world: World, policy: object, router: int = 0) -> None:
    """Let this policy hear of the requests of one router of this world, if it wants to."""
    if not isinstance(policy, Following):
        return
    front = world.fronts[router]
    chose_before, effect_before = front.on_choice, world.on_effect

    def on_choice(passage: Any, chosen: Chosen) -> None:
        if chose_before is not None:
            chose_before(passage, chosen)
        if chosen.decode is not None:
            policy.placed(passage.number, passage.wanted, chosen)

    def on_effect(at: SimInstance, effect: ev.Effect) -> None:
        if effect_before is not None:
            effect_before(at, effect)
        if isinstance(effect, ev.StepRun):
            starting = [_number(share.request) for share in effect.shares if share.first == _FIRST]
            if starting:  # known when the run begins, true when its first step has ended
                world.kernel.at(at.world_ns(_first_end_ns(at, effect)), prefilled, starting)
        elif isinstance(effect, ev.RequestFinished):
            _finished(world, policy, effect)

    def prefilled(requests: list[int]) -> None:
        for request in requests:
            policy.prefilled(request)

    front.on_choice, world.on_effect = on_choice, on_effect


def _first_end_ns(at: SimInstance, run: ev.StepRun) -> int:
    """When the first step of a run has ended, on the twin's own clock."""
    if run.steps == 1:
        return run.end_ns
    return run.at_ns + at.member.costs.decode_run_ns(run.batch, run.sum_context, 1)


def _finished(world: World, policy: Following, effect: ev.RequestFinished) -> None:
    """A leg is over; the request with it, unless it was a prefill leg that made its token."""
    number = _number(effect.request)
    passage = world.book.open.get(number)
    prefills = () if passage is None else passage.prefilling.sent
    if effect.outputs and any(leg.request.id == effect.request for leg in prefills):
        policy.prefilled(number)
    else:
        policy.ended(number)


def _number(request: str) -> int:
    """The simulator names legs ``request/leg``."""
    return int(request.partition("/")[0])
