"""Decides how many legs each router may have at this instance: an agent's grants, and why they never exceed the
credits. Pure.

`cluster.credits` says what would be fair now. This module says how much of that can be granted *safely*. One router
reads a heartbeat half a second later, another five seconds later. A router that has not yet read a lower grant applies
the older, higher one.

**The most that each router can have** is known at all times (`RouterGrant.bound`). Every announcement gives, for one
moment, the router's legs here (l) and the heartbeat whose grant it applies (h). Since that moment the router has begun
a leg only if it had fewer than some grant published at h or later. So its legs are at most max(l, every grant since h).

**A grant rises only within the rest**: the sum of all bounds, the dead routers' included, stays within the credits.
Lowering a grant is always safe, but frees nothing until the router confirms that it read the lower one. So:

    legs of all routers that are known here ≤ credits, whatever is late, lost or out of order,

as long as credits do not fall. An agent that lowers its credits (its KV cache fills) lowers every grant at once, and
legs that run already run to their end. The engine's queue holds only legs of routers, so it stays within the credits,
too.

**A router that falls silent** keeps its grant for the ttl of its announcement. Then its grant is void and its bound is
a *ghost*: counted until the engine's own load shows, for `SURE_S` on end, fewer legs than that besides those of the
living routers.

Not guaranteed:

- A router that this agent does not know yet applies an equal share of the credits if no grants are given so far (in
  the first seconds of a fleet), else one leg. For about two seconds the legs may exceed the credits by that number.
- A router that loses only the registry, and serves on, looks dead. It applies its last grant. After the ttl, other
  routers are granted the places that the engine's load shows free. The silent router's legs of that moment are counted;
  a later rise is not.
- A living router counts a place at a decode instance while the prompt is still prefilled elsewhere. A ghost may be
  released too early by as many legs.
- A client that talks to the engine directly uses no credits, and is not seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.credits import share_out, whole
from cluster.instance import Load, Role
from cluster.registry.membership import Heartbeat

SURE_S: Final = 3.0
"""How long the engine must show a dead router's legs gone: the load is read twice a second, routers announce once a
second, and an announcement takes up to a second to be read."""

TURN_BEATS: Final = 8
"""If there are fewer credits than routers, the routers take turns of so many heartbeats. To take one credit back and
give it to the next router takes about three."""

GHOST_S: Final = 120.0
"""Longest time that a dead router's legs are counted: by then the engine's machine has closed its connections."""

UNANSWERED_MAX: Final = 64
"""Unconfirmed grants to a router that are kept one by one; the oldest of more are merged."""

GHOSTS_MAX: Final = 64
"""Dead routers that are remembered by name; the oldest are forgotten first, with their legs."""

Order = tuple[int, int]
"""Epoch and number of a heartbeat: `Heartbeat.order`."""

_NEVER: Final[Order] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSays:
    """The part of one announcement that concerns this instance."""

    router: str
    legs: int | None = None
    """Legs in flight here; None: this announcement does not say."""
    goes_by: Order = _NEVER
    """The heartbeat that the router had read when it announced."""
    wants: dict[str, float] = field(default_factory=dict)
    """By tenant: the legs that the router wants in this pool, divided by the credits of all its instances together."""
    shares: dict[str, float] = field(default_factory=dict)
    """The tenants' weights."""


def concerning(
    beat: Heartbeat, instance: str, role: Role, models: Iterable[str], tenants: Collection[str] = ()
) -> RouterSays:
    """The part of a router's announcement for one instance. If `tenants` are named, the instance is reserved, and only
    their wants count.
    """
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
class RouterGrant:
    """What one router may have here."""

    said: RouterSays
    legs: int = 0
    goes_by: Order = _NEVER
    granted: list[tuple[Order, int]] = field(default_factory=list)
    """Grants that it may have applied since: the heartbeat of each, and how many legs."""

    @property
    def bound(self) -> int:
        """The most legs that the router can have here."""
        return max(self.legs, max((legs for _, legs in self.granted), default=0))

    def heard(self, said: RouterSays) -> None:
        """Take another announcement."""
        self.said = said
        if said.legs is None:
            return
        self.legs, self.goes_by = said.legs, max(said.goes_by, self.goes_by)
        while len(self.granted) > 1 and self.granted[1][0] <= self.goes_by:
            del self.granted[0]

    def grant(self, order: Order, legs: int) -> None:
        """Record the grant that holds from this heartbeat (`order`) on."""
        if self.granted and self.granted[-1][1] == legs:
            return
        self.granted.append((order, legs))
        if len(self.granted) > UNANSWERED_MAX:
            (first, one), (_, other) = self.granted[:2]
            self.granted[:2] = [(first, max(one, other))]


class Grants:
    """One instance's grants. Its agent feeds announcements and load, and asks for grants with each heartbeat."""

    def __init__(self, instance: str) -> None:
        self.instance: Final = instance
        self.routers: Final[dict[str, RouterGrant]] = {}
        self._dead: dict[str, tuple[RouterGrant, int, float]] = {}
        """Dead routers by name: the router, how many of its legs are still counted, and the time of its death, in
        seconds."""
        self._looks: list[tuple[float, int]] = []
        """Readings of the last `SURE_S`: the time, and the engine's legs besides those of the living routers."""
        self._last: tuple[Order, int] = (_NEVER, 0)
        """The last heartbeat, and the legs that a router without a named grant may have had by it."""

    @property
    def ghosts(self) -> int:
        """Legs of dead routers that may still be in the engine."""
        return sum(left for _, left, _ in self._dead.values())

    @property
    def bound(self) -> int:
        """The most legs that all routers known here, living and dead, can have."""
        return self.ghosts + sum(router.bound for router in self.routers.values())

    def heard(self, announcements: Iterable[RouterSays], now: float) -> None:
        """Take the announcements of all living routers. A router that is not among them has left, or was silent for too
        long. `now` in seconds.
        """
        alive = {said.router: said for said in announcements}
        for name in [name for name in self.routers if name not in alive]:
            gone = self.routers.pop(name)
            self._dead[name] = (gone, gone.bound, now)
            if len(self._dead) > GHOSTS_MAX:
                del self._dead[next(iter(self._dead))]
        for name, said in alive.items():
            if name not in self.routers:
                back = self._dead.pop(name, None)
                self.routers[name] = RouterGrant(said, granted=[self._last]) if back is None else back[0]
            self.routers[name].heard(said)

    def engine_has(self, load: Load, now: float) -> None:
        """Take the engine's own load, at `now` (seconds): ghosts that it has not shown for `SURE_S` are gone."""
        legs = load.running + load.waiting
        self._looks = [look for look in self._looks if look[0] > now - SURE_S]
        self._looks.append((now, max(0, legs - sum(router.legs for router in self.routers.values()))))
        shown = max(look for _, look in self._looks)
        kept: dict[str, tuple[RouterGrant, int, float]] = {}
        for name, (router, left, since) in reversed(self._dead.items()):
            if now - since >= SURE_S:
                left = min(left, shown)  # noqa: PLW2901 - the youngest keep their legs: the oldest had most time to end
                shown -= left
            if left and now - since < GHOST_S:
                kept[name] = (router, min(left, legs), since)
        self._dead = dict(reversed(kept.items()))

    def engine_lost(self) -> None:
        """The engine is gone with every leg: the legs of dead routers are void."""
        self._dead.clear()

    def issue(self, order: Order, credits: int) -> dict[str, int]:  # noqa: A002 - the fleet's own word
        """The grants by router that go out with this heartbeat: as close to fair as is safe."""
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
        """The tenants' weights; if routers differ (one read a changed file), the higher weight holds."""
        found: dict[str, float] = {}
        for router in self.routers.values():
            for tenant, share in router.said.shares.items():
                found[tenant] = max(share, found.get(tenant, 0.0))
        return found
