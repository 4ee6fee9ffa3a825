"""Three router processes share a fleet's credits through a registry server. Demand is uneven, the server is killed and
comes back empty, and a router is killed while it holds credits.

Every run uses the stand-in for Redis. `make test-long` uses real Redis, and compares the tenants' shares before and
after.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.credit_fleet import jain
from support.shared_fleet import SharedFleet, until

from cluster.instance import Role

SHARES = {"acme": 3.0, "bolt": 2.0, "cord": 1.0, "dune": 1.0}
ROLES = {Role.PREFILL: 2, Role.DECODE: 4}
PLACES = 8
"""Credits of an instance. The fleet gives 32 answers at once; the clients want more than twice that."""
ANSWERS = ROLES[Role.DECODE] * PLACES

SKEWED = {("acme", 0): 24, ("acme", 1): 2, ("bolt", 1): 16, ("cord", 1): 2, ("cord", 2): 10, ("dune", 2): 12}
"""Number of clients, by tenant and router."""

WARM_S, LOOK_S = 5.0, 30.0

MOVES_S = 20.0
"""Time limit for credits to move. Announcing, reading and granting take about 2 s on an idle machine."""


def within_credits(fleet: SharedFleet) -> None:
    """Check that no engine has ever had more requests than its agent gave credits for."""
    assert len(fleet.most) >= ROLES[Role.DECODE], "they had some"
    assert all(most <= fleet.credits(name) == PLACES for name, most in fleet.most.items()), fleet.most


@pytest.mark.timeout(120)
async def test_credits_follow_demand_and_stay_where_they_are_while_the_registry_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SharedFleet(tmp_path, standin=True, tenants=SHARES, roles=ROLES, places=PLACES) as fleet:
        await fleet.begin_routers(3)
        for (tenant, router), count in SKEWED.items():
            fleet.clients(tenant, router, count)
        await until(lambda: fleet.granted(0) >= ANSWERS // 3, "its demand moves credits to the first", MOVES_S)

        fleet.server.kill()
        # an agent that has just read the routers' demand still grants by it, with the heartbeat that fails
        await until(lambda: caplog.text.count("; serving on") == len(fleet.agents), "all agents notice", MOVES_S)
        granted = fleet.grants()
        fleet.fronts[1].kill()
        fleet.clients("bolt", 2, 16)
        before = fleet.served.copy()
        await until(
            lambda: all(fleet.served[tenant] >= before[tenant] + 4 for tenant in SHARES), "all are served on", MOVES_S
        )
        for name, grants in fleet.grants().items():  # the credit that is left over when shares are rounded goes round
            assert grants.keys() == granted[name].keys(), "the last known ones, the killed router's too"
            assert all(abs(legs - granted[name][router]) <= 1 for router, legs in grants.items()), (grants, granted)

        first = fleet.granted(2)
        fleet.server.start()
        fleet.clients("acme", 0, 4)
        fleet.clients("acme", 2, 20)
        await until(lambda: fleet.granted(2) > first + 4, "demand moves them again", MOVES_S)
        within_credits(fleet)
        assert not fleet.failed


@pytest.mark.long
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="apt install redis-server")
@pytest.mark.timeout(300)
async def test_tenants_have_their_shares_before_and_after_a_router_dies_and_redis_with_it(tmp_path: Path) -> None:
    """Takes 90 s, with real Redis."""
    heavy = {"prompt_words": 400, "prefill_ms_per_1k": 300.0}  # engines' time is scarce, and shares are of that
    async with SharedFleet(tmp_path, standin=False, tenants=SHARES, roles=ROLES, places=PLACES, **heavy) as fleet:
        await fleet.begin_routers(3)
        for (tenant, router), count in SKEWED.items():
            fleet.clients(tenant, router, count)
        await fleet.shares(WARM_S)
        before, rate = await fleet.shares(LOOK_S)

        fleet.server.kill()
        fleet.fronts[0].kill()
        for router in (1, 2):
            fleet.clients("acme", router, 14)
        deaf, rate_deaf = await fleet.shares(3.0)
        fleet.server.start()
        took_s = await until(lambda: fleet.granted(1) + fleet.granted(2) >= ANSWERS - 1, "the dead one's credits", 30.0)
        await fleet.shares(WARM_S)
        after, rate_after = await fleet.shares(LOOK_S)
        for when, served, per_s in (("before", before, rate), ("deaf", deaf, rate_deaf), ("after", after, rate_after)):
            print(f"{when}: Jain {jain(list(served.values())):.3f}, {per_s:.1f} requests a second, {served}")
        print(f"the dead router's credits were shared out after {took_s:.1f} s; at most {dict(fleet.most)}")
        within_credits(fleet)
        assert not fleet.failed
        assert min(jain(list(each.values())) for each in (before, after)) >= 0.95
