"""Source legs: another instance is asked to hold what its cache has of a prompt, before the leg that pulls it is sent
(live: `router.request.sourcing`).

The source's answer, its failure and the end of the wait all send the leg, at most once.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.ids import RequestId, TransferId
from engine.twin import events as ev
from engine.twin.request import TwinRequest
from router.core import journey as j
from router.fleet import events as d
from sim.instance import SimulatedLeg
from sim.kernel import NS


def send(leg: SimulatedLeg, source: j.PrefixSource | None) -> None:
    """Send a leg: at once, or if it has a source, once that has answered."""
    passage = leg.passage
    front = passage.front
    if source is None or not front.world.by_name[source.instance].ready:
        front.world.legs.send(leg)
        return
    front.fleet.handle(d.LegStarted(source.instance), front.kernel.now_s)
    at = front.world.by_name[source.instance]
    request = TwinRequest(
        id=RequestId(f"{passage.number}/{leg.number}s"),
        prompt=passage.prompt,
        max_tokens=1,
        hold=TransferId(RequestId(str(passage.number)), passage.journey.attempt + j.SOURCE_ATTEMPTS, at.epoch),
        seed=passage.number,
        cached_only=True,
    )
    asked = SimulatedLeg(passage, at, request, leg.number, prefill=True)
    asked.sourcing = SimulatedSourcing(leg, source, front.kernel.now_ns)
    front.book.prefilling[asked] = None
    front.world.legs.send(asked)
    front.kernel.at(front.kernel.now_ns + round(source.wait_s * NS), _late, asked)


def forgo(leg: SimulatedLeg) -> j.Lost | None:
    """The client waits no longer: a leg that still waits for its source is not sent. None: the leg was sent."""
    front = leg.passage.front
    if not any(each.sourcing is not None and each.sourcing.leg is leg for each in front.book.prefilling):
        return None
    front.leg_over(leg)
    return j.not_sent(leg.at.name)


class SimulatedSourcing:
    """The leg that waits for a source leg."""

    __slots__ = ("leg", "sent_ns", "source")

    def __init__(self, leg: SimulatedLeg, source: j.PrefixSource, sent_ns: int) -> None:
        self.leg = leg
        """The leg that is sent once the source leg is answered, and pulls its hold."""
        self.source = source
        """The choice of the source."""
        self.sent_ns = sent_ns
        """When the source leg was sent."""

    def over(self, asked: SimulatedLeg, finished: ev.RequestFinished | None, *, timed: bool) -> None:
        """The source leg has been answered; None: it is lost, refused, or late. `timed`: its time counts for the next
        prices, as it does live.
        """
        passage, leg, late = asked.passage, self.leg, asked.detached
        front = passage.front
        held = None if finished is None else asked.transfer(finished)
        if timed and not late:
            now_s, wanted = front.kernel.now_s, passage.wanted
            late_ms = (front.kernel.now_ns - self.sent_ns) / 1e6 - self.source.leg_ms
            front.fleet.handle(d.Sourced(late_ms, now_s), now_s)
            if finished is not None:
                tokens = 0 if held is None else held.tokens
                told = d.SourceSaid(asked.at.name, wanted.prefix, wanted.prefix_block_tokens, tokens, now_s)
                front.fleet.handle(told, now_s)
        front.leg_over(asked)
        if late or leg.detached or passage.journey.state is j.JourneyState.DONE:
            front.release_elsewhere(asked, held)
            return
        if held is not None:
            leg.request = replace(leg.request, pull=replace(held.fields["source"], handed_over=False))
            leg.beginning = held
        front.world.legs.send(leg)
        if held is not None:
            passage.feed(j.SourceHeld(self.source, leg.at.name))


def _late(asked: SimulatedLeg) -> None:
    if asked.sourcing is not None and not asked.detached:
        asked.sourcing.over(asked, None, timed=True)
