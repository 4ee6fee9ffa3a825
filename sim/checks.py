"""The laws that must hold after every event: a broken law stops the run where it broke."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.core import journey as j
from sim.kernel import NS

if TYPE_CHECKING:
    from sim.instance import SimInstance
    from sim.passage import Passage
    from sim.world import World

_BLOCKS_AT_ONCE: Final = 500
"""A look at all blocks of an instance takes a while. An instance with up to so many blocks is looked at after every
event of its own, one with up to twice as many after every second event, and so on."""

_EVERYTHING_EVERY: Final = 256
"""Events between two looks at all requests at once; what an event touched is looked at after each."""


class LawBroken(AssertionError):
    """A law of the simulation does not hold. A fault of ours, never of the load."""


def law(holds: object, what: str) -> None:
    """Raise `LawBroken` unless this holds, also where Python runs without asserts."""
    if not holds:
        raise LawBroken(what)


class Checks:
    """The checks of one world."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._now_ns = 0
        self._events = 0
        self._touches: Final[dict[SimInstance, int]] = {}
        """Events until an instance's blocks are looked at again."""

    def after(self) -> None:
        """Check, after an event, what the event has touched."""
        world = self._world
        law(world.kernel.now_ns >= self._now_ns, "time ran backwards")
        self._now_ns = world.kernel.now_ns
        for at in world.touched:
            self._touches[at] = left = self._touches.get(at, 0) - 1
            if left <= 0:
                self._touches[at] = at.member.config.num_blocks // _BLOCKS_AT_ONCE
                _blocks(at)
        world.touched.clear()
        rows = world.book.rows
        law(rows.count == rows.ended + len(world.book.open), "a request was lost, or ended twice")
        self._events += 1
        if self._events % _EVERYTHING_EVERY == 0:
            self.places()

    def at_end(self) -> None:
        """Check that nothing is left, once no event is."""
        world = self._world
        self.places()
        law(not world.book.open, f"{len(world.book.open)} requests never ended")
        law(all(len(each.scheduler.line) == 0 for each in world.fronts), "a request is still queued")
        for at in world.instances:
            law(not at.legs and not at.awaited and not at.pulling, f"{at.name} still has legs")
            law(not at.nic.sending and not at.nic.receiving, f"{at.name} still has flows")
            if at.ready:
                held = world.kv_usage(at)
                law(held == 0.0, f"{at.name} still holds {held:.1%} of its blocks")
        for view in (view for each in world.fronts for view in each.scheduler.view.all()):
            law(view.inflight == 0, f"{view.id} still has {view.inflight} places taken")

    def _moves(self, passage: Passage) -> bool:
        """Whether a request is neither over its deadline nor over its engine's last answer by more than a second."""
        world, leg = self._world, passage.answering.leg
        wakeup_s = passage.journey.next_wakeup()
        if wakeup_s is not None:
            return world.kernel.now_s <= wakeup_s + 1.0
        if passage.journey.state is not j.JourneyState.STREAMING or leg is None or not leg.over or leg.at.cut_off:
            return True
        return world.kernel.now_ns <= leg.over_ns + NS

    def places(self) -> None:
        """Each router's places are those of its open requests, no more and no fewer."""
        world = self._world
        taken = {each: dict.fromkeys((view.id for view in each.scheduler.view.all()), 0) for each in world.fronts}
        for passage in world.book.open.values():
            law(passage.journey.state is not j.JourneyState.DONE, f"request {passage.number} is over and still open")
            if passage.decode is not None:
                taken[passage.front][passage.decode] += 1
            law(self._moves(passage), f"request {passage.number} waits for nothing, {passage.journey.state}")
        for leg in world.book.prefilling:
            taken[leg.passage.front][leg.at.name] += 1
        for front, legs in taken.items():
            for view in front.scheduler.view.all():
                law(view.inflight == legs[view.id], f"{view.id}: {view.inflight} places taken by {legs[view.id]} legs")


def _blocks(at: SimInstance) -> None:
    """No block has two owners, none is lost."""
    life = at.twin._life  # noqa: SLF001 - a look inside is what checks are
    if life is not None:
        life.scheduler.pool.check()
