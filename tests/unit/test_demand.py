"""The demand that a router announces: by pool and tenant, of bounded size, all of one moment."""

from __future__ import annotations

from cluster.credits import OTHERS, PLACES_BYTES_MAX, TENANTS_MAX, TenantDemand, largest
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
