"""Sharing out of credits: never more than exist, no router starved, deterministic. Grants are safe if messages are
late.
"""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from support.credit_fleet import Agent, Front, World

from cluster.credits import SMALL_PART, fair, local_shares, share_out
from cluster.ids import InstanceId, ranks_of
from cluster.instance import Load, Role
from engine.agent.grants import Grants, RouterSays

TENANTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 60).map(float), max_size=4)
WANTS = st.dictionaries(st.sampled_from(["r1", "r2", "r3", "r4"]), TENANTS, min_size=1, max_size=4)
SHARES = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 3.0]))


@given(st.integers(0, 300), WANTS, SHARES, st.integers(0, 9))
def test_all_credits_are_shared_out_and_no_router_is_starved(total: int, wants: dict, shares: dict, turn: int) -> None:
    given_out = share_out(total, wants, shares, turn=turn, salt="d0")
    assert given_out == share_out(total, dict(reversed(wants.items())), shares, turn=turn, salt="d0")
    assert sum(given_out.values()) == total and min(given_out.values()) >= 0
    busy = [router for router, mine in wants.items() if any(mine.values())]
    if total >= len(wants):
        assert min(given_out.values()) >= max(1, total // (SMALL_PART * len(wants)))
    elif total >= len(busy):
        assert all(given_out[router] for router in busy)
    turns = [share_out(total, wants, shares, turn=turn + more, salt="d0") for more in range(len(wants))]
    assert not total or all(any(each[router] for each in turns) for router in busy), (
        "each router that wants credits gets some in one of the turns"
    )


@given(st.integers(8, 300), WANTS, SHARES, st.sampled_from("abcd"), st.integers(1, 30))
def test_more_demand_or_more_credits_never_bring_less(
    total: int, wants: dict, shares: dict, tenant: str, more: int
) -> None:
    """Except for rounding: one credit may go to another router."""
    before = share_out(total, wants, shares)
    richer = share_out(total + more, wants, shares)
    assert all(richer[router] >= before[router] - 1 for router in wants)
    router = min(wants)
    greedy = {**wants, router: {**wants[router], tenant: wants[router].get(tenant, 0.0) + more}}
    assert share_out(total, greedy, shares)[router] >= before[router] - 1


@given(st.floats(0, 500), TENANTS, SHARES)
def test_tenants_are_given_max_min_fair_shares(total: float, wants: dict, shares: dict) -> None:
    parts = fair(total, wants, shares)
    assert math.isclose(sum(parts.values()), min(total, sum(wants.values())), abs_tol=1e-6)
    for one, had in parts.items():
        assert 0 <= had <= wants[one]
        if had < wants[one] - 1e-6:  # then no other tenant has more, by weight
            assert all(
                other / shares.get(name, 1.0) <= had / shares.get(one, 1.0) + 1e-6 for name, other in parts.items()
            )


@given(WANTS, SHARES)
def test_a_tenants_weight_is_divided_over_the_routers(wants: dict, shares: dict) -> None:
    local = {router: local_shares(mine, wants.values(), shares) for router, mine in wants.items()}
    for tenant in {name for mine in wants.values() for name, legs in mine.items() if legs}:
        held = sum(local[router][tenant] for router, mine in wants.items() if mine.get(tenant))
        assert math.isclose(held, shares.get(tenant, 1.0))


class Late:
    """A router that reads grants late, uses all of them, and whose reports the agent reads late."""

    def __init__(self, name: str) -> None:
        self.name, self.legs, self.goes_by, self.limit = name, 0, (0, 0), 0
        self.said: list[RouterSays] = []

    def reads(self, beats: list[tuple[tuple[int, int], dict[str, int]]], at: int) -> None:
        later = [beat for beat in beats if beat[0] > self.goes_by]
        if later:
            order, grants = later[at % len(later)]
            self.goes_by, self.limit = order, grants.get(self.name, 1 if grants else 0)

    def moves(self, wish: int) -> None:
        self.legs = min(self.legs + wish, max(self.legs, self.limit)) if wish >= 0 else max(0, self.legs + wish)

    def says(self, wants: float) -> None:
        self.said.append(
            RouterSays(router=self.name, legs=self.legs, goes_by=self.goes_by, wants={"t": wants}, shares={"t": 1.0})
        )


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 6), st.integers(-9, 12), st.booleans(), st.sampled_from([0.0, 0.2, 3.0])
    ),
    min_size=5,
    max_size=60,
)
"""The number of a router; a number that decides whether it reads a grant (below 4) and whether the agent reads reports
(no multiple of 3); legs that it begins, or ends if negative; whether it reports; its demand."""


@given(STEPS, st.integers(3, 20), st.integers(10, 60))
@settings(max_examples=200, deadline=None)
def test_known_routers_never_have_more_legs_than_there_are_credits(steps: list, places: int, death: int) -> None:
    """Heartbeats and reports are read late, some never. The legs of a dead router run on and still count."""
    agent, beats = Grants("d0"), list[tuple[tuple[int, int], dict[str, int]]]()
    routers = {number: Late(f"r{number}") for number in range(3)}
    for each in routers.values():
        each.says(0.5)
    agent.heard([each.said[0] for each in routers.values()], -1.0)
    gone: list[Late] = []
    for number, (who, hears, wish, says, wants) in enumerate(steps):
        each = routers[who] if who in routers else next(iter(routers.values()))
        if hears < 4:
            each.reads(beats, hears - 1 if hears else -1)
        each.moves(wish)
        if says:
            each.says(wants)
        if hears % 3:
            agent.heard([one.said[-1] for one in routers.values()], float(number))
        if number == death:
            gone.append(routers.pop(min(routers)))
            agent.heard([one.said[-1] for one in routers.values()], float(number))
        beats.append(((1, number + 1), agent.issue((1, number + 1), places)))
        legs = sum(one.legs for one in [*routers.values(), *gone])
        assert legs <= places, f"step {number}"
        assert agent.bound <= places


@given(
    st.integers(0, 1 << 20), st.integers(2, 4), st.integers(2, 12), st.integers(1, 3), st.booleans(),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_no_rank_ever_has_more_legs_than_its_own_credits(
    seed: int, ranks: int, places: int, routers: int, dies: bool
) -> None:
    """The schedulers and the agents' machines are real. `credit_fleet.Agent.take` asserts the limit at each leg."""
    world = World(seed, {"t": 1.0})
    agents = [Agent(world, "p", Role.PREFILL, 64)]
    names = [name for engine in "de" for name in ranks_of(InstanceId(engine), ranks)]
    agents += [Agent(world, name, Role.DECODE, places) for name in names]
    fronts = [Front(world, f"router-{number}") for number in range(routers)]
    world.run(6.0)
    for front in fronts:
        front.client("t", 2 * ranks * places)
    world.run(14.0)
    if dies:
        fronts[0].kill()
    world.run(26.0)
    assert all(0 < each.most <= each.places for each in agents), {each.name: each.most for each in agents}


@given(st.integers(1, 40), st.integers(0, 40))
def test_the_legs_of_a_dead_router_end(granted: int, left: int) -> None:
    agent = Grants("d0")
    agent.heard([RouterSays(router="r1"), RouterSays(router="r2")], 0.0)
    agent.issue((1, 1), granted)
    agent.heard([RouterSays(router="r2")], 6.0)
    had = agent.ghosts
    for tick in range(1, 9):
        agent.engine_has(Load(running=min(left, had)), 6.0 + tick / 2)
    assert agent.ghosts == min(left, had), "legs that the engine still reports"
    for tick in range(9, 18):
        agent.engine_has(Load(), 6.0 + tick / 2)
    assert agent.ghosts == 0
