"""The prefill legs of one request (live: `router.request.prefilling`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cluster.ids import InstanceId, RequestId, TransferId
from engine.twin import events as ev
from engine.twin.request import TwinRequest
from router.core import journey as j
from router.core.eligibility import Way
from router.fleet import events as d
from router.fleet.view import can_pin
from sim import sourcing
from sim.instance import SimulatedLeg

if TYPE_CHECKING:
    from sim.passage import Passage

_FIRST_TOKEN: Final = 0
"""Any number in place of P's first token: a twin makes the right one on D in any case."""


class SimulatedPrefilling:
    """All prefill legs that one request has sent."""

    __slots__ = ("sent",)

    def __init__(self) -> None:
        self.sent: tuple[SimulatedLeg, ...] = ()

    def send(self, passage: Passage, instance: InstanceId, source: j.PrefixSource | None) -> None:
        """Send a leg to this instance; if there is a `source`, once that has answered."""
        front = passage.front
        front.fleet.handle(d.LegStarted(instance), front.kernel.now_s)
        at = front.world.by_name[instance]
        name, number = RequestId(str(passage.number)), passage.next_leg()
        request = TwinRequest(
            id=RequestId(f"{name}/{number}"),
            prompt=passage.prompt,
            max_tokens=1,
            hold=TransferId(name, passage.journey.attempt, at.epoch),
            seed=passage.number,
        )
        leg = SimulatedLeg(passage, at, request, number, prefill=True)
        passage.row.prefilled_on = at.index
        self.sent += (leg,)
        front.book.prefilling[leg] = None
        sourcing.send(leg, source)

    def at(self, instance: InstanceId) -> SimulatedLeg:
        """The last leg that was sent to this instance."""
        return next(leg for leg in reversed(self.sent) if leg.at.name == instance)

    def close(self) -> None:
        """Stop reading all legs that the request still waits for, and end them."""
        for leg in self.sent:
            if not leg.detached and not leg.outlasted:
                leg.passage.front.leg_over(leg)
                leg.passage.front.world.legs.abort(leg)

    def answered(self, leg: SimulatedLeg, finished: ev.RequestFinished) -> j.PrefillAnswered | None:
        """A leg has been answered. Returns what the journey is told; None: the request went on without this leg, and
        its hold is released.
        """
        passage, front = leg.passage, leg.passage.front
        front.leg_over(leg)
        if leg.outlasted:
            front.release_elsewhere(leg, leg.transfer(finished))
            return None
        row = passage.row
        row.cached_tokens, row.prefilled_on = finished.local_tokens, leg.at.index
        if front.scheduler.remembers:
            front.tell(d.PromptOver(passage, front.kernel.now_s, True, finished.local_tokens))
        seeds = front.settings.seeding and passage.verdict.way is Way.SEEDED and row.first_ns < 0
        first = _FIRST_TOKEN if seeds and can_pin(front.scheduler.view, passage.decode) else None
        return j.PrefillAnswered(finished.reason, leg.transfer(finished), first, by=leg.at.name)
