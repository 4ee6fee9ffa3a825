"""What a policy is told of requests after its choice: some rivals book work where they sent it, until it is done.

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
    """A policy that books load in flight. Requests have numbers in the order of arrival. Each method may be called
    again for the same request, and for requests that the policy has not placed.
    """

    def placed(self, request: int, wanted: Wanted, chosen: Chosen) -> None:
        """The request was sent as the policy chose; called again if an earlier attempt failed."""

    def prefilled(self, request: int) -> None:
        """The request's prompt is computed."""

    def ended(self, request: int) -> None:
        """The request has left all instances."""


def follow(world: World, policy: object, router: int = 0) -> None:
    """Tell this policy of the requests of one router, if it is `Following`."""
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
    """The end of a run's first step, in ns on the twin's own clock."""
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
