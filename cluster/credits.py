"""Divides an instance's credits among routers: by demand, and among tenants by weight. Pure arithmetic.

A tenant's requests may come in through any router, and the tenant's part of the fleet must not depend on the router. So
credits are first divided among *tenants*, max-min fair by weight: no tenant gets more than it wants, and what a tenant
leaves goes to the others. Each tenant's part then goes to the routers where its demand is. Credits that no tenant wants
are divided equally, so that a burst finds room at any router. Every router keeps a small part, so that its first
request needs no round trip.

`engine.agent.grants` applies this rule instance by instance. An instance sees the whole pool's demand, and scales
that demand by its own part of the pool's credits. So the grants of all instances add up to the pool's fair division,
although the instances do not know of each other.

A router divides its grants among its tenants by `local_shares`. With the tenants' plain weights, a tenant that comes in
through two routers would be served twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from cluster.instance import Role

Amounts = Mapping[str, float]

SMALL_PART: Final = 16
"""A router without demand keeps at least one `SMALL_PART`-th of an equal share, and at least one credit."""

TENANTS_MAX: Final = 32
"""A router announces this many tenants of a pool by name, those with most demand; it sums the others up."""

POOLS_MAX: Final = 8
"""A router announces the demand of this many pools, those with most demand."""

NAME_BYTES_MAX: Final = 64
"""Longest tenant name in an announcement. A tenant with a longer name counts among the others."""

OTHERS: Final = "*"
"""The name that stands for all other tenants together."""

PLACES_BYTES_MAX: Final = 36 * 1024
"""Part of an announcement for the legs at instances, about 800 of them. Instances that do not fit are announced next
time."""

Places = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantDemand:
    """What one router's tenants want of one pool."""

    role: Role
    """Prefill or decode legs. An instance of role both counts in both demands."""
    model: Name
    """Empty: any model."""
    places: Places
    """Credits of all the pool's instances together, as this router sees them."""
    tenants: Annotated[dict[Name, tuple[Places, Share]], msgspec.Meta(max_length=TENANTS_MAX + 1)] = field(
        default_factory=dict
    )
    """By tenant: the legs in flight in the pool plus those that wait for a place there, and the tenant's weight."""


def fair(total: float, wants: Amounts, weights: Amounts) -> dict[str, float]:
    """Divide `total` max-min fair by weight: no name gets more than it wants, and unmet wants get equal parts by
    weight.

    A missing weight is 1. The sum of the parts is `total`, or the sum of the wants if that is less.
    """
    given: dict[str, float] = {}
    left, heavy = total, sum(weights.get(each, 1.0) for each in wants)
    for each in sorted(wants, key=lambda name: (wants[name] / weights.get(name, 1.0), name)):
        weight = weights.get(each, 1.0)
        given[each] = max(0.0, min(wants[each], left * weight / heavy if heavy > 0 else left))
        left, heavy = left - given[each], heavy - weight
    return given


def whole(total: int, parts: Amounts, order: Iterable[str]) -> dict[str, int]:
    """Round `parts` to whole numbers that add up to `total`: round down, then give the rest by the largest remainder.

    `parts` must add up to `total`, or to less: below `total` by less than the number of parts. `order` breaks ties.
    """
    given = {name: int(part + _ROUND) for name, part in parts.items()}
    rank = {name: at for at, name in enumerate(order)}
    for name in sorted(parts, key=lambda each: (given[each] - parts[each], rank[each]))[: total - sum(given.values())]:
        given[name] += 1
    return given


_ROUND: Final = 1e-9
"""Tolerance for floating point: 2.9999999999 counts as 3."""


def share_out(
    total: int, wants: Mapping[str, Amounts], shares: Amounts, *, turn: int = 0, salt: str = ""
) -> dict[str, int]:
    """An instance's credits by router. `wants` is by router and tenant, in legs; `shares` are the tenants' weights.

    The sum is always `total` if there is a router. With fewer credits than routers, only routers with demand get
    credits. With fewer credits than those, the routers take turns: the caller counts `turn` up, and `salt` (the
    instance's name) makes instances begin with different routers.
    """
    total = max(0, total)
    order = _ring(wants, turn, salt)
    if total < len(order):
        order = [router for router in order if any(legs > 0 for legs in wants[router].values())] or order
    if total < len(order):
        return {router: int(router in order[:total]) for router in wants}
    parts = _by_demand(total, {router: wants[router] for router in order}, shares)
    idle = (total - sum(parts.values(), 0.0)) / max(1, len(parts))
    parts = {router: part + idle for router, part in parts.items()}
    small = max(1, total // (SMALL_PART * max(1, len(order))))
    return dict.fromkeys(wants, 0) | whole(total, _lifted(parts, small), order)


def local_shares(mine: Amounts, all_routers: Iterable[Amounts], shares: Amounts) -> dict[str, float]:
    """A router's weights for its own tenants: each tenant's weight times this router's part of the tenant's demand.

    `mine` is the router's demand by tenant, in legs; `all_routers` has the demand of each router, this one included.
    """
    total: dict[str, float] = {}
    for wants in all_routers:
        for tenant, legs in wants.items():
            total[tenant] = total.get(tenant, 0.0) + legs
    return {
        tenant: shares.get(tenant, 1.0) * (legs / max(total.get(tenant, 0.0), legs) if legs > 0 else 1.0)
        for tenant, legs in mine.items()
    }


def largest(tenants: Mapping[str, tuple[int, float]]) -> dict[str, tuple[int, float]]:
    """The demand of a pool as announced: the largest tenants by name, the rest as one tenant.

    Values are legs and weight; the rest has the sums of both.
    """
    ranked = sorted(
        (name for name, (legs, _) in tenants.items() if legs > 0), key=lambda name: (-tenants[name][0], name)
    )
    named = [name for name in ranked if len(name.encode()) <= NAME_BYTES_MAX and name != OTHERS][:TENANTS_MAX]
    said = {name: tenants[name] for name in named}
    rest = [tenants[name] for name in ranked if name not in said]
    if rest:
        said[OTHERS] = (sum(legs for legs, _ in rest), sum(share for _, share in rest))
    return said


def _by_demand(total: int, wants: Mapping[str, Amounts], shares: Amounts) -> dict[str, float]:
    """Divide credits among tenants by weight, then each tenant's part among the routers where its demand is."""
    wanted: dict[str, float] = {}
    for mine in wants.values():
        for tenant, legs in mine.items():
            wanted[tenant] = wanted.get(tenant, 0.0) + legs
    given = fair(total, wanted, shares)
    met = {tenant: given[tenant] / legs if legs > 0 else 0.0 for tenant, legs in wanted.items()}
    return {router: sum(met[tenant] * legs for tenant, legs in mine.items()) for router, mine in wants.items()}


def _lifted(parts: Amounts, least: int) -> dict[str, float]:
    """Raise every part to `least`, at the cost of the parts above it. The sum stays; it must allow `least` for each."""
    missing = sum(max(0.0, least - part) for part in parts.values())
    above = sum(max(0.0, part - least) for part in parts.values())
    kept = max(0.0, 1.0 - missing / above) if above > 0 else 0.0
    return {router: least + max(0.0, part - least) * kept for router, part in parts.items()}


def _ring(names: Iterable[str], turn: int, salt: str) -> list[str]:
    """An order of names that differs between instances (`salt`) and moves on by one with each `turn`."""
    ranked = sorted(names, key=lambda name: (hashlib.blake2b(f"{salt}\0{name}".encode(), digest_size=8).digest(), name))
    at = turn % len(ranked) if ranked else 0
    return ranked[at:] + ranked[:at]
