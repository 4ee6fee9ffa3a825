"""The answering leg of one request (live: `router.request.answering`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.ids import InstanceId, RequestId
from cluster.wire import TransferFields
from engine.twin.request import HoldSource, TwinRequest
from router.core import journey as j
from router.fleet import events as d
from router.fleet.view import turned_away
from sim import result as rows
from sim import sourcing
from sim.instance import SimulatedLeg

if TYPE_CHECKING:
    from sim.front import SimulatedRouter
    from sim.passage import Passage


class SimulatedAnswering:
    """The leg that answers a request's client: the last one, if several were sent."""

    __slots__ = ("early_ns", "leg")

    def __init__(self) -> None:
        self.leg: SimulatedLeg | None = None
        self.early_ns = 0
        """When D's server has read its early leg, if there is one."""

    def prepare(self, front: SimulatedRouter, instance: InstanceId) -> None:
        """The router sends an early leg to this instance: it waits in the engine's server until P holds the blocks."""
        self.early_ns = front.world.legs.front_of_pull(front.world.by_name[instance])

    def send(
        self,
        passage: Passage,
        instance: InstanceId,
        transfer: TransferFields | None,
        beginning: j.PrefixSource | None,
        *,
        prepared: bool = False,
    ) -> j.Event | None:
        """Send the leg to this instance, to pull the hold `transfer`, or a prompt's beginning once its source answers.
        `prepared`: it is the early leg. Returns an event if the instance takes no more legs.
        """
        front = passage.front
        source: HoldSource | None = None if transfer is None else transfer.fields["source"]
        away = turned_away(front.scheduler.view, instance, None if source is None else source.producer)
        if away is not None:
            return away
        front.tell(d.Occupied(passage, instance))
        if source is not None:
            passage.row.flags |= rows.HANDED_OVER
        number = passage.next_leg()
        request = TwinRequest(
            id=RequestId(f"{passage.number}/{number}"),
            prompt=passage.prompt,
            max_tokens=max(1, passage.arrival.output_tokens),
            seed=passage.number,
            pull=source,
        )
        leg = self.leg = SimulatedLeg(passage, front.world.by_name[instance], request, number, prefill=False)
        if prepared:
            front.world.legs.send(leg, at_server_ns=self.early_ns)
        else:
            sourcing.send(leg, beginning)
        lost = source is not None and front.scheduler.view.lost(source.producer)
        return j.HolderLost(source.producer) if source is not None and lost else None

    def close(self) -> None:
        """Stop reading the leg, and end it."""
        leg = self.leg
        if leg is not None and not leg.over:
            leg.detached = True
            leg.passage.front.abort(leg)
