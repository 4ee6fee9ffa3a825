"""What a router announces to the instances' agents, so that they can divide their credits among routers. Pure.

It announces its demand by pool and tenant (legs in flight and queued requests), and its use of grants: by instance, the
legs in flight and the heartbeat that the router follows. Both are bounded (`cluster.credits`): data of a fleet of
thousands with hundreds of tenants must not be sent every second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from cluster.credits import NAME_BYTES_MAX, PLACES_BYTES_MAX, POOLS_MAX, TenantDemand, largest, whole
from cluster.flow import NAME_CHARS_MAX, OTHERS, SERIES_MAX, Backlog
from cluster.ids import InstanceId
from cluster.instance import Role
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.telemetry.flow import RouterFlow

MODEL_BYTES_MAX = 4 * NAME_BYTES_MAX
"""The longest model name in an announcement; the demand for a longer one is left out."""

ENTRY_BYTES = 34
"""The bytes of one instance's legs besides its name: three numbers and the separators."""

Order = tuple[int, int]

_Pool = tuple[Role, str]


class OwnWord:
    """What one router says about itself in its heartbeat."""

    def __init__(self, scheduler: Scheduler, flow: RouterFlow | None = None) -> None:
        self._scheduler: Final = scheduler
        self._flow: Final = flow

    @property
    def shares(self) -> Mapping[str, float]:
        """The tenants' weights."""
        return self._scheduler.shares

    def legs(self, goes_by: Mapping[InstanceId, Order], turn: int) -> dict[str, tuple[int, int, int]]:
        """See `legs_said`."""
        return legs_said(self._scheduler.view, goes_by, turn)

    def demand(self) -> tuple[TenantDemand, ...]:
        """See `demands`."""
        return demands(self._scheduler)

    def counters(self, now: float) -> dict[str, Any]:
        """The fields of a heartbeat that the goodput controller reads."""
        if self._flow is None:
            return {}
        return {
            "counted": self._flow.told(),
            "backlog": backlog(self._scheduler.line.everybody(), now, self._flow.model_of),
        }


def demands(scheduler: Scheduler) -> tuple[TenantDemand, ...]:
    """The current demand of this router's tenants for each pool, the pools with most demand first."""
    wanted = _waiting(scheduler)
    for (role, model), legs in _running(scheduler).items():
        tenants = wanted.setdefault((role, model), {})
        for tenant, count in legs.items():
            tenants[tenant] = tenants.get(tenant, 0) + count
    pools = [pool for pool in wanted if len(pool[1].encode()) <= MODEL_BYTES_MAX]
    pools.sort(key=lambda pool: (-sum(wanted[pool].values()), pool))
    return tuple(_demand(scheduler, pool, wanted[pool]) for pool in pools[:POOLS_MAX])


def legs_said(view: FleetView, goes_by: Mapping[InstanceId, Order], turn: int) -> dict[str, tuple[int, int, int]]:
    """Legs at each instance, and the heartbeat that this router follows there, for as many as an announcement holds.

    An instance without room in this announcement gets it in a later `turn`: its agent uses the last announcement, and
    grants no more on it.
    """
    names = sorted({*goes_by, *(seen.id for seen in view.all())})
    room = sum(len(name) + ENTRY_BYTES for name in names) <= PLACES_BYTES_MAX
    fit = len(names) if room else max(1, PLACES_BYTES_MAX // (max(map(len, names)) + ENTRY_BYTES))
    start = 0 if room else turn * fit % len(names)
    said: dict[str, tuple[int, int, int]] = {}
    for name in (names[start:] + names[:start])[:fit]:
        legs = view.get(name).inflight if view.knows(name) else 0
        said[name] = (legs, *goes_by.get(name, (0, 0)))
    return said


def _demand(scheduler: Scheduler, pool: _Pool, tenants: dict[str, int]) -> TenantDemand:
    role, model = pool
    weighed = {tenant: (legs, scheduler.shares.get(tenant, 1.0)) for tenant, legs in tenants.items()}
    return TenantDemand(
        role=role, model=model, places=_places(scheduler.view.all(), role, model), tenants=largest(weighed)
    )


def _waiting(scheduler: Scheduler) -> dict[_Pool, dict[str, int]]:
    """Queued requests: each wants a place for its answer, and one for its prompt if it may be handed over."""
    found: dict[_Pool, dict[str, int]] = {}
    for context in scheduler.line.everybody():
        assert isinstance(context, SchedulingContext)
        wanted = context.wanted
        roles = [Role.PREFILL] if wanted.prefill_only else [Role.DECODE, *[Role.PREFILL] * wanted.hand_over]
        for role in roles:
            tenants = found.setdefault((role, wanted.model or ""), {})
            tenants[wanted.tenant] = tenants.get(wanted.tenant, 0) + 1
    return found


def _running(scheduler: Scheduler) -> dict[_Pool, dict[str, int]]:
    """Legs in flight. Prefill legs are not recorded by tenant.

    A pool's prefill legs are divided as the places of its model's answers are, or as those of all answers where its
    model has none. The parts add up to the pool's legs.
    """
    found: dict[_Pool, dict[str, int]] = {}
    unnamed: dict[_Pool, int] = {}
    at: dict[InstanceId, int] = {}
    answers: dict[str, dict[str, int]] = {}
    """Places of answers, by model and tenant."""
    view = scheduler.view
    for (name, tenant), legs in scheduler.legs.placed.items():
        if not view.knows(name):
            continue
        seen = view.get(name)
        role, model = Role.PREFILL if seen.role is Role.PREFILL else Role.DECODE, _model(seen.models)
        for tenants in (found.setdefault((role, model), {}), answers.setdefault(model, {})):
            tenants[tenant] = tenants.get(tenant, 0) + legs
        at[name] = at.get(name, 0) + legs
    for seen in view.all():
        legs = seen.inflight - at.get(seen.id, 0)
        if legs > 0:
            pool = (Role.PREFILL if seen.role.prefills else Role.DECODE, _model(seen.models))
            unnamed[pool] = unnamed.get(pool, 0) + legs
    everywhere = _together(answers.values()) or {"": 1}
    for pool, legs in unnamed.items():
        tenants = found.setdefault(pool, {})
        for tenant, part in _divided(legs, answers.get(pool[1], everywhere)).items():
            tenants[tenant] = tenants.get(tenant, 0) + part
    return found


def _together(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tenants in several:
        for tenant, count in tenants.items():
            found[tenant] = found.get(tenant, 0) + count
    return found


def _divided(legs: int, tenants: Mapping[str, int]) -> dict[str, int]:
    """The legs by tenant, in proportion to these counts: whole numbers that add up to `legs`. Of equal remainders the
    first names get a leg more.
    """
    counted = sum(tenants.values())
    return whole(legs, {tenant: legs * count / counted for tenant, count in tenants.items()}, sorted(tenants))


def _model(names: tuple[str, ...]) -> str:
    """One name for what an engine serves."""
    return names[0] if names else ""


def _places(fleet: FleetSnapshot, role: Role, model: str) -> int:
    """The credits of a pool's instances together."""
    fits = (
        seen.credits or 0
        for seen in fleet
        if (seen.role.prefills if role is Role.PREFILL else seen.role.decodes)
        and seen.ready
        and (not model or model in seen.models)
    )
    return sum(fits)


def backlog(waiting: Iterable[object], now: float, model_of: Callable[[str], str] = str) -> tuple[Backlog, ...]:
    """The backlog of the flow-control queue, by model. `waiting`: requests; `now` on the clock of their arrivals;
    `model_of`: the model that a name means.
    """
    found: dict[str, tuple[int, float]] = {}
    for context in waiting:
        assert isinstance(context, SchedulingContext)
        model = model_of(context.wanted.model or "")
        if len(model) > NAME_CHARS_MAX or (model not in found and len(found) >= SERIES_MAX - 1):
            model = OTHERS
        count, oldest_s = found.get(model, (0, 0.0))
        found[model] = (count + 1, max(oldest_s, now - context.wanted.arrived))
    return tuple(
        Backlog(model=model, waiting=count, oldest_s=max(0.0, round(oldest_s, 3)))
        for model, (count, oldest_s) in found.items()
    )
