"""Which router may have how many legs at this instance: an agent's grants, and why they are never too many. Pure.

`cluster.credits` says what would be fair now. This module says how far that can be granted *safely*: a heartbeat is
read half a second later by one router and five seconds later by another, and until a router has read that it may have
fewer legs, it goes by what it was granted before.

**What each router can have at most** is known at all times (`Router.bound`): every announcement says, of one moment,
its legs here (l) and which of our heartbeats it goes by (h). Since that moment it has begun a leg only when it had
fewer than some grant published at h or later. So its legs are at most max(l, every grant since h).

**A grant is raised only within what that leaves**: the sum of all bounds, the dead routers' included, stays within the
credits. Lowering is always safe, and gives nothing away until the router has answered that it read it. So:

    legs of all routers that are known here ≤ credits, whatever is late, lost or out of order,

as long as credits do not fall: an agent that lowers them (its KV cache fills) has every grant lowered at once, and legs
that run already run to their end. The engine's queue holds legs of routers and nothing else, so it is within, too.

**A router that falls silent** keeps its grant for the ttl of its announcement. Then its grant is void and its bound is
a *ghost*: counted until the engine's own load, `SURE_S` on end, shows fewer legs than that beyond those of the living.

Not guaranteed:

- A router that this agent has not heard of goes by an equal share of the credits where no grants are given yet (the
  first seconds of a fleet), else by one leg: for about two seconds, it may be that much too many.
- A router that is cut off from the registry alone, and serves on, looks dead. It goes by its last grant; after the ttl
  others are granted what the engine's load does not show. Its legs of the moment are counted, a later rise is not.
- A living router counts a place at a decode instance while the prompt is still prefilled elsewhere. For so many legs a
  ghost may be let go too early.
- Who talks to the engine directly has no credits, and is not seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.credits import share_out, whole
from cluster.instance import Load, Role
from cluster.registry.membership import Heartbeat

SURE_S: Final = 3.0
"""How long the engine must show a dead router's legs gone: load is read twice a second, routers announce once, and an
announcement takes up to a second to be read."""

TURN_BEATS: Final = 8
"""Heartbeats of one turn where credits are fewer than routers: taking one back and giving it takes about three."""

GHOST_S: Final = 120.0
"""The longest that a dead router's legs are counted: its connections are closed, or will be by the engine's machine."""

UNANSWERED_MAX: Final = 64
"""Grants to a router that it has not answered yet, one by one; the oldest of more are taken together."""

GHOSTS_MAX: Final = 64
"""Dead routers remembered by name; the oldest are forgotten first, and what they had with them."""

Order = tuple[int, int]
"""Epoch and number of a heartbeat: `Heartbeat.order`."""

_NEVER: Final[Order] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSays:
    """One announcement, as far as it concerns this instance."""

    router: str
    legs: int | None = None
    """In flight here; None: it does not say this time."""
    goes_by: Order = _NEVER
    """The heartbeat that it had read when it said so."""
    wants: dict[str, float] = field(default_factory=dict)
    """By tenant: legs that it wants in this pool, for each credit of the whole pool."""
    shares: dict[str, float] = field(default_factory=dict)
    """The tenants' weights."""


def concerning(
    beat: Heartbeat, instance: str, role: Role, models: Iterable[str], tenants: Collection[str] = ()
) -> RouterSays:
    """What a router's announcement says to one instance; if it is kept for some tenants, what these want."""
    served, wants, shares = {"", *models}, dict[str, float](), dict[str, float]()
    for pool in beat.demand:
        fits = role.prefills if pool.role is Role.PREFILL else role.decodes
        if not fits or pool.model not in served:
            continue
        for tenant, (legs, share) in pool.tenants.items():
            if tenants and tenant not in tenants:
                continue
            wants[tenant] = wants.get(tenant, 0.0) + legs / max(1, pool.places)
            shares[tenant] = share
    said = beat.legs.get(instance)
    if said is None:
        return RouterSays(router=beat.id, wants=wants, shares=shares)
    return RouterSays(router=beat.id, legs=said[0], goes_by=(said[1], said[2]), wants=wants, shares=shares)


@dataclass(slots=True)
class Router:
    """What one router may have here."""

    said: RouterSays
    legs: int = 0
    goes_by: Order = _NEVER
    granted: list[tuple[Order, int]] = field(default_factory=list)
    """What it may have gone by since then: from which heartbeat on, and how many."""

    @property
    def bound(self) -> int:
        """Legs that it can have here at most."""
        return max(self.legs, max((legs for _, legs in self.granted), default=0))

    def heard(self, said: RouterSays) -> None:
        """Another announcement."""
        self.said = said
        if said.legs is None:
            return
        self.legs, self.goes_by = said.legs, max(said.goes_by, self.goes_by)
        while len(self.granted) > 1 and self.granted[1][0] <= self.goes_by:
            del self.granted[0]

    def grant(self, order: Order, legs: int) -> None:
        """So many from that heartbeat on."""
        if self.granted and self.granted[-1][1] == legs:
            return
        self.granted.append((order, legs))
        if len(self.granted) > UNANSWERED_MAX:
            (first, one), (_, other) = self.granted[:2]
            self.granted[:2] = [(first, max(one, other))]


class Grants:
    """One instance's grants. Its agent feeds announcements and load, and asks with each heartbeat."""

    def __init__(self, instance: str) -> None:
        self.instance: Final = instance
        self.routers: Final[dict[str, Router]] = {}
        self._dead: dict[str, tuple[Router, int, float]] = {}
        """With how many of its legs are still counted, and since when it is dead, in seconds."""
        self._looks: list[tuple[float, int]] = []
        """When, and how many legs the engine then had beyond those of the living."""
        self._last: tuple[Order, int] = (_NEVER, 0)
        """The last heartbeat, and what a router that it does not name may have had by it."""

    @property
    def ghosts(self) -> int:
        """Legs of dead routers that may still be in the engine."""
        return sum(left for _, left, _ in self._dead.values())

    @property
    def bound(self) -> int:
        """Legs that all routers known here, living and dead, can have at most."""
        return self.ghosts + sum(router.bound for router in self.routers.values())

    def heard(self, everybody: Iterable[RouterSays], now: float) -> None:
        """What all routers that are alive say; who is not among them has left, or fallen silent for too long."""
        alive = {said.router: said for said in everybody}
        for name in [name for name in self.routers if name not in alive]:
            gone = self.routers.pop(name)
            self._dead[name] = (gone, gone.bound, now)
            if len(self._dead) > GHOSTS_MAX:
                del self._dead[next(iter(self._dead))]
        for name, said in alive.items():
            if name not in self.routers:
                back = self._dead.pop(name, None)
                self.routers[name] = Router(said, granted=[self._last]) if back is None else back[0]
            self.routers[name].heard(said)

    def engine_has(self, load: Load, now: float) -> None:
        """The engine's own word: ghosts that it does not show any more, for `SURE_S`, are gone."""
        legs = load.running + load.waiting
        self._looks = [look for look in self._looks if look[0] > now - SURE_S]
        self._looks.append((now, max(0, legs - sum(router.legs for router in self.routers.values()))))
        shown = max(look for _, look in self._looks)
        kept: dict[str, tuple[Router, int, float]] = {}
        for name, (router, left, since) in reversed(self._dead.items()):
            if now - since >= SURE_S:
                left = min(left, shown)  # noqa: PLW2901 - the youngest keep theirs: the oldest had most time to end
                shown -= left
            if left and now - since < GHOST_S:
                kept[name] = (router, min(left, legs), since)
        self._dead = dict(reversed(kept.items()))

    def engine_lost(self) -> None:
        """Its engine is gone, and every leg with it: what a dead router had is void."""
        self._dead.clear()

    def issue(self, order: Order, credits: int) -> dict[str, int]:  # noqa: A002 - the fleet's own word
        """The grants that go out with this heartbeat: by router, as near to what is fair as is safe."""
        free = max(0, credits - self.ghosts)
        wants = {
            name: {tenant: legs * credits for tenant, legs in router.said.wants.items()}
            for name, router in self.routers.items()
        }
        fair = share_out(free, wants, self._shares(), turn=order[1] // TURN_BEATS, salt=self.instance)
        room = max(0, credits - self.bound)
        lacking = {
            name: fair[name] - router.bound for name, router in self.routers.items() if fair[name] > router.bound
        }
        more = min(room, sum(lacking.values()))
        parts = {name: more * legs / sum(lacking.values()) for name, legs in lacking.items()}
        raised = whole(more, parts, sorted(parts))
        grants = {name: min(fair[name], router.bound + raised.get(name, 0)) for name, router in self.routers.items()}
        for name, legs in grants.items():
            self.routers[name].grant(order, legs)
        self._last = (order, 1 if grants else credits)
        return grants

    def _shares(self) -> dict[str, float]:
        """The tenants' weights; where routers differ (a file was changed in one of them), the higher one."""
        found: dict[str, float] = {}
        for router in self.routers.values():
            for tenant, share in router.said.shares.items():
                found[tenant] = max(share, found.get(tenant, 0.0))
        return found
