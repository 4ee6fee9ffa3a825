"""The demand that a router announces: by pool and tenant, of bounded size, all of one moment."""

from __future__ import annotations

import pytest

from cluster.credits import OTHERS, PLACES_BYTES_MAX, TENANTS_MAX, TenantDemand, largest, share_out
from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from cluster.registry.membership import HEARTBEAT_BYTES_MAX, Heartbeat, MemberKind, decode, encode
from engine.agent.grants import RouterSays, concerning
from router.core.journey import Choose
from router.core.values import Wanted
from router.fleet.view import FleetView
from router.scheduler.demand import ENTRY_BYTES, demands, legs_said
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES

ASK = Choose(frozenset(), hand_over=True)


def scheduler(places: int = 2) -> Scheduler:
    view = FleetView()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}"))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
        view.get(InstanceId(name)).credits = 8 if role is Role.PREFILL else places
    made = Scheduler(view, POLICIES["least_load"])
    made.shares = {"acme": 3.0}
    return made


def arrive(at: Scheduler, tenant: str, times: int) -> list[SchedulingContext]:
    contexts = [SchedulingContext(Wanted(model="m", hand_over=True, tenant=tenant)) for _ in range(times)]
    for context in contexts:
        chosen, _ = at.choose(context, ASK, 0.0)
        if chosen.prefill is not None:
            at.view.leg_started(chosen.prefill)
    return contexts


def test_demand_is_what_runs_and_what_waits_by_tenant() -> None:
    here = scheduler()
    (first,) = arrive(here, "acme", 1)
    arrive(here, "bolt", 3)
    assert demands(here) == (
        TenantDemand(role=Role.DECODE, model="m", places=2, tenants={"bolt": (3, 1.0), "acme": (1, 3.0)}),
        TenantDemand(role=Role.PREFILL, model="m", places=8, tenants={"bolt": (3, 1.0), "acme": (1, 3.0)}),
    )
    here.leg_ended(InstanceId("p"))
    here.finish(first, 0.0)
    assert [each.tenants.get("acme") for each in demands(here)] == [None, None]


def running(at: Scheduler, role: Role, model: str = "m") -> dict[str, int]:
    """What it announces of one pool, by tenant."""
    (pool,) = (each for each in demands(at) if (each.role, each.model) == (role, model))
    return {tenant: legs for tenant, (legs, _) in pool.tenants.items()}


@pytest.mark.parametrize("legs", [1, 7, 30, 31])
def test_prefill_legs_are_announced_once_however_many_tenants_have_answers(legs: int) -> None:
    """Before, each tenant with an answer was announced a leg at least, and another router lost its credits by it."""
    here = scheduler(places=500)
    for number in range(30):
        for _ in range(1 + number % 3):
            here.legs.takes_place(InstanceId("d"), f"t{number}")
    for _ in range(legs):
        here.view.leg_started(InstanceId("p"))
    said = running(here, Role.PREFILL)
    assert sum(said.values()) == legs
    assert said == running(here, Role.PREFILL)
    if legs == 1:
        assert share_out(32, {"r1": said, "r2": {"acme": 20}}, {}) == {"r1": 6, "r2": 26}
    assert sum(running(here, Role.DECODE).values()) == 60


def test_prefill_legs_are_announced_for_the_tenants_of_their_model() -> None:
    here = scheduler(places=500)
    for name, role in (("p2", Role.PREFILL), ("d2", Role.DECODE), ("p3", Role.PREFILL)):
        here.view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}"))
        here.view.seen(InstanceId(name), ({"id": "m2" if name != "p3" else "m3"},), Load())
    for tenant, times in (("acme", 3), ("bolt", 1)):
        for _ in range(times):
            here.legs.takes_place(InstanceId("d"), tenant)
    here.legs.takes_place(InstanceId("d2"), "cave")
    for name in ("p", "p2", "p3"):
        for _ in range(5):
            here.view.leg_started(InstanceId(name))
    assert running(here, Role.PREFILL) == {"acme": 4, "bolt": 1}
    assert running(here, Role.PREFILL, "m2") == {"cave": 5}
    assert running(here, Role.PREFILL, "m3") == {"acme": 3, "bolt": 1, "cave": 1}, "no answer of it: as all answers are"


def test_places_are_counted_once_and_given_back() -> None:
    here = scheduler(places=5)
    contexts = arrive(here, "acme", 3)
    assert here.legs.placed == {(InstanceId("d"), "acme"): 3}
    for context in contexts:
        here.occupy(context, InstanceId("p"))
        here.finish(context, 0.0)
        here.finish(context, 0.0)
    assert not here.legs.placed


def test_small_tenants_are_summed_up() -> None:
    tenants = {f"t{number:03}": (number + 1, 2.0) for number in range(TENANTS_MAX + 3)} | {"x" * 65: (900, 1.0)}
    said = largest(tenants)
    assert len(said) == TENANTS_MAX + 1
    assert said[OTHERS] == (1 + 2 + 3 + 900, 7.0)


def test_legs_at_a_large_fleet_are_told_in_turns_and_fit_an_announcement() -> None:
    goes_by = {InstanceId(f"decode-of-a-long-name-{number}"): (20_000_000, number) for number in range(3000)}
    turns = [legs_said(FleetView(), goes_by, turn) for turn in range(8)]
    assert all(sum(len(name) + ENTRY_BYTES for name in said) <= PLACES_BYTES_MAX for said in turns)
    assert set().union(*turns) == set(goes_by)
    tenants = {f"{number:02}" + "ä" * 31: (10**6, 1234.5) for number in range(TENANTS_MAX + 1)}
    pools = tuple(TenantDemand(role=Role.DECODE, model="m" * 256, places=10**6, tenants=tenants) for _ in range(8))
    beat = Heartbeat(
        id=InstanceId("router-1"), agent="a", kind=MemberKind.ROUTER, url="http://r", legs=turns[0], demand=pools
    )
    assert len(encode(beat)) <= HEARTBEAT_BYTES_MAX
    assert decode(encode(beat)) == (beat, "")


def test_an_agent_reads_the_demand_that_concerns_its_instance() -> None:
    pools = (
        TenantDemand(role=Role.PREFILL, model="m", places=10, tenants={"acme": (5, 3.0)}),
        TenantDemand(role=Role.DECODE, model="m", places=20, tenants={"acme": (5, 3.0), "bolt": (40, 1.0)}),
        TenantDemand(role=Role.DECODE, model="other", places=20, tenants={"cave": (9, 1.0)}),
    )
    beat = Heartbeat(
        id=InstanceId("router-1"),
        agent="a",
        kind=MemberKind.ROUTER,
        url="http://r",
        legs={"d": (7, 3, 12)},
        demand=pools,
    )
    heard = concerning(beat, "d", Role.DECODE, ["m"])
    assert heard == RouterSays(
        router="router-1", legs=7, goes_by=(3, 12), wants={"acme": 0.25, "bolt": 2.0},
        shares={"acme": 3.0, "bolt": 1.0},
    )  # fmt: skip
    assert concerning(beat, "b", Role.BOTH, ["m"]).wants == {"acme": 0.75, "bolt": 2.0}
    assert concerning(beat, "b", Role.BOTH, ["m"]).legs is None


def test_demand_of_another_kind_than_announced_is_refused() -> None:
    good = encode(Heartbeat(id=InstanceId("r"), agent="a", url="http://r", legs={"d": (1, 1, 1)}))
    for bad in (b'{"d":[1,1]}', b'{"d":[-1,1,1]}', b'{"a b":[1,1,1]}'):
        assert decode(good.replace(b'{"d":[1,1,1]}', bad))[0] is None
    pools = (TenantDemand(role=Role.DECODE, model="m", places=1, tenants={"a": (1, 1.0)}),)
    told = encode(Heartbeat(id=InstanceId("r"), agent="a", url="http://r", demand=pools))
    for bad in (b'{"a":[1,0]}', b'{"a":[-1,1]}', b'{"a\\n":[1,1]}'):
        assert decode(told.replace(b'{"a":[1,1.0]}', bad))[0] is None


def test_a_reserved_instance_counts_the_demand_of_its_tenants_alone() -> None:
    """Demand of other tenants must not draw its credits to routers that cannot use them."""
    tenants = {"acme": (5, 3.0), "bolt": (40, 1.0), OTHERS: (9, 1.0)}
    pools = (TenantDemand(role=Role.DECODE, model="m", places=20, tenants=tenants),)
    beat = Heartbeat(id=InstanceId("r"), agent="a", kind=MemberKind.ROUTER, url="http://r", legs={}, demand=pools)
    assert concerning(beat, "d", Role.DECODE, ["m"], ("acme", "cave")).wants == {"acme": 0.25}
    assert set(concerning(beat, "d", Role.DECODE, ["m"]).wants) == {"acme", "bolt", OTHERS}
