"""Several routers share one fleet's credits: no engine gets more legs than its credits, each tenant gets its share."""

from __future__ import annotations

import pytest
from support.credit_fleet import Agent, Front, World, jain

from cluster.ids import InstanceId
from cluster.instance import Role

SHARES = {"acme": 3.0, "bolt": 1.0, "cave": 1.0, "dune": 2.0}
CLIENTS = {"r1": {"acme": 120, "bolt": 30}, "r2": {"bolt": 10, "cave": 80}, "r3": {"dune": 50, "acme": 10, "cave": 5}}
"""Requests that each tenant keeps at each router: they are spread very unevenly over the routers."""


def fleet(seed: int = 1, *, equal: bool = False) -> World:
    world = World(seed, SHARES, equal=equal)
    for number in range(2):
        Agent(world, f"p{number}", Role.PREFILL, 12)
    for number in range(4):
        Agent(world, f"d{number}", Role.DECODE, 16)
    return world


def began(world: World, clients: dict[str, dict[str, int]], settle_s: float) -> None:
    """Start routers, wait until they know their grants, then add clients and run for `settle_s` seconds."""
    for name in clients:
        Front(world, name)
    world.run(world.now + 8.0)
    for name, tenants in clients.items():
        for tenant, count in tenants.items():
            world.routers[name].client(tenant, count)
    world.run(world.now + settle_s)
    world.served.clear()


def fairness(world: World) -> float:
    return jain([world.served[tenant] / share for tenant, share in SHARES.items()])


@pytest.mark.parametrize("seed", [pytest.param(1), pytest.param(2, marks=pytest.mark.long)])
def test_three_routers_skewed_arrivals_one_killed_holding_credits(seed: int) -> None:
    """`Agent.take` checks with each leg that the engine has no more legs than places."""
    world = fleet(seed)
    began(world, CLIENTS, settle_s=10.0)
    world.run(world.now + 20.0)
    before, whole = fairness(world), sum(world.served.values()) / 20
    moved = world.routers["r3"].kill()
    assert sum(agent.machine.shared.routers["r3"].bound for agent in world.agents.values()) > 10
    for tenant, count in moved.items():  # the dead router's clients go to the others, again unevenly
        world.routers["r1"].client(tenant, count // 3)
        world.routers["r2"].client(tenant, count - count // 3)
    world.served.clear()
    world.run(world.now + 20.0)
    overall, through = fairness(world), sum(world.served.values()) / 20
    world.served.clear()
    world.run(world.now + 20.0)
    after, again = fairness(world), sum(world.served.values()) / 20
    most = {agent.name: f"{agent.most}/{agent.places}" for agent in world.agents.values()}
    print(
        f"seed {seed}: Jain {before:.3f} before, {overall:.3f} in the 20 s from the death on, {after:.3f} after; "
        f"{whole:.1f}, {through:.1f}, {again:.1f} legs/s of 64 in 1 s; longest queues {most}"
    )
    assert min(before, overall, after) >= 0.95
    assert all(agent.machine.shared.ghosts == 0 for agent in world.agents.values())
    assert min(whole, again) >= 0.9 * 64 / 1.04  # a leg takes 1.04 s with its prefill


def test_a_router_alone_has_all_of_it_and_an_idle_one_keeps_a_little() -> None:
    world = fleet()
    began(world, {"r1": {"acme": 60}, "r2": {}}, settle_s=6.0)
    grants = {name: world.routers[name].view.get(InstanceId("d0")).grant for name in ("r1", "r2")}
    assert grants == {"r1": 15, "r2": 1}, "a place for a first request, without asking"


def test_while_the_registry_is_away_routers_keep_their_last_grants() -> None:
    world = fleet()
    began(world, {"r1": {"acme": 40}, "r2": {"bolt": 20}}, settle_s=8.0)
    before = [[seen.grant for seen in front.view.all()] for front in world.routers.values()]
    world.down = True
    world.run(world.now + 60.0)
    assert [[seen.grant for seen in front.view.all()] for front in world.routers.values()] == before
    assert sum(world.served.values()) > 50 * 40, "routers serve on"
    world.down = False
    world.run(world.now + 3.0)
    assert all(set(agent.machine.shared.routers) == {"r1", "r2"} for agent in world.agents.values())


def test_a_router_that_announces_nothing_gets_one_leg_beside_those_that_do() -> None:
    world = fleet()
    Front(world, "mute", announces=False)
    world.run(2.0)
    assert {seen.grant for seen in world.routers["mute"].view.all()} == {None}, "no grants: an equal share"
    Front(world, "r1")
    world.run(8.0)
    assert {seen.grant for seen in world.routers["mute"].view.all()} == {1}


@pytest.mark.long
def test_beside_equal_shares() -> None:
    """The table in docs/credits.md. To print it: ``pytest -m "long or not long" -s tests/sim/test_credits_sim.py``."""
    rows = {}
    for equal in (True, False):
        world = fleet(equal=equal)
        began(world, CLIENTS, settle_s=10.0)
        world.run(world.now + 20.0)
        longest = max(agent.most for agent in world.agents.values() if agent.role is Role.DECODE)
        alone = fleet(equal=equal)
        began(alone, {"r1": {"acme": 120}, "r2": {}, "r3": {}}, settle_s=10.0)
        alone.run(alone.now + 20.0)
        rows[equal] = (longest, fairness(world), sum(world.served.values()) / 20, sum(alone.served.values()) / 20)
        said = "longest queue {}, Jain {:.3f}, {:.1f} legs/s, {:.1f} alone".format(*rows[equal])
        print("equal: " if equal else "grants:", said)
    assert rows[False][0] <= 16 < rows[True][0]
    assert rows[False][1] > rows[True][1] + 0.1 and rows[False][3] > 2 * rows[True][3]
