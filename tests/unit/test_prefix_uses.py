"""Copies of beginnings that many requests share: when they are made, and what they are charged."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.fleet.view import FleetView
from router.predict.prefix_cache import Match, PrefixCacheIndex
from router.predict.prefix_uses import USES_MIN, WITHIN_S, PrefixUses
from router.scheduler.scoring.prices import Prices
from router.scheduler.scoring.workload import workload

SYSTEM = (1, 2, 3)
ONE = Match([(3, 0b1)])
"""The first instance holds all three chunks."""
MANY = 40
"""Requests with one system prompt, a tenth of a second apart or less: enough for several copies."""


def counted(uses: PrefixUses, times: int, now: float, match: Match = ONE) -> None:
    for _ in range(times):
        uses.count(SYSTEM, match, now)


def test_a_beginning_is_worth_a_copy_by_its_uses_for_each_copy() -> None:
    uses = PrefixUses()
    counted(uses, int(2 * USES_MIN) - 1, 0.0)
    assert uses.shared(SYSTEM, ONE, 0.0) == []
    counted(uses, 1, 0.0)
    assert uses.shared(SYSTEM, ONE, 0.0) == [(3, USES_MIN)]
    assert uses.shared(SYSTEM, Match([(3, 0b11)]), 0.0) == [], "two have it, and a third would share the uses"


def test_uses_are_forgotten_within_twice_the_time() -> None:
    uses = PrefixUses()
    counted(uses, 100, 1.0)
    whole = uses.shared(SYSTEM, ONE, WITHIN_S)
    assert whole == [(3, 50.0)]
    assert uses.shared(SYSTEM, ONE, 1.5 * WITHIN_S) == [(3, 25.0)], "half of the time before counts"
    assert uses.shared(SYSTEM, ONE, 3.5 * WITHIN_S) == []
    counted(uses, 100, 10 * WITHIN_S)
    assert uses.shared(SYSTEM, ONE, 20 * WITHIN_S) == []


def test_only_where_a_match_ends_is_a_beginning_counted() -> None:
    """A conversation's own text is used by its turns alone; its system prompt by all."""
    uses, own = PrefixUses(), (*SYSTEM, 4, 5)
    both = Match([(5, 0b1), (3, 0b10)])
    for _ in range(MANY):
        uses.count(own, both, 0.0)
    assert [depth for depth, _ in uses.shared(own, both, 0.0)] == [5, 3]
    other = (*SYSTEM, 6, 7)
    assert [depth for depth, _ in uses.shared(other, both, 0.0)] == [3]


def fleet(instances: int) -> FleetView:
    """Instances with equal costs, of which the first holds the system prompt."""
    view = FleetView()
    view.all().prefixes = index = PrefixCacheIndex()
    for number in range(instances):
        name = InstanceId(f"b{number}")
        view.add(Instance(id=name, role=Role.BOTH, url="u"))
        view.seen(name, ({"id": "m"},), Load())
        index.join(view.get(name).row, 400_000, 0)
    index.sent(0, SYSTEM, 0.0)
    return view


def asks(**more: float) -> Wanted:
    told: dict[str, float] = {"prompt_tokens": 800, "prefix_block_tokens": 256.0, "output_tokens": 50.0, **more}
    return Wanted(model="m", hand_over=False, arrived=1.0, now=1.0, prefix=SYSTEM, **told)  # type: ignore[arg-type]


def busy(snapshot: FleetSnapshot, ms: float) -> None:
    """The instance that holds the system prompt computes other prompts for so long."""
    snapshot.inflight.rows[0].ends = 1000.0 + ms


@pytest.mark.parametrize("instances", [2, 70], ids=["all rows priced", "the best of a shortlist"])
def test_a_copy_is_made_where_later_requests_wait_less_for_it(instances: int) -> None:
    view = fleet(instances)
    snapshot = view.all()
    prices = Prices(snapshot, asks(), None)
    wait_ms = 0.5 * (prices.prompt_at(1) - prices.prompt_at(0))
    busy(snapshot, wait_ms)
    first = workload(snapshot, asks())
    assert first.decode == "b0", "by its own time alone a request waits"
    for _ in range(MANY):
        snapshot.prefix_uses.count(SYSTEM, Match([(3, 0b1)]), 1.0)
    copies = workload(snapshot, asks())
    assert copies.decode != "b0" and "768 copied for later requests" in copies.because


@pytest.mark.parametrize("instances", [2, 70])
def test_no_copy_is_made_while_the_holder_is_idle(instances: int) -> None:
    snapshot = fleet(instances).all()
    for _ in range(MANY):
        snapshot.prefix_uses.count(SYSTEM, Match([(3, 0b1)]), 1.0)
    chosen = workload(snapshot, asks())
    assert chosen.decode == "b0" and "copied" not in chosen.because


@pytest.mark.parametrize("instances", [2, 70])
def test_a_copy_is_no_reason_to_miss_a_target(instances: int) -> None:
    """Where the request itself would be late because of a copy, it waits."""
    snapshot = fleet(instances).all()
    prices = Prices(snapshot, asks(), None)
    cold_ms = prices.ttft_at(1)
    busy(snapshot, 0.5 * (prices.prompt_at(1) - prices.prompt_at(0)))
    for _ in range(MANY):
        snapshot.prefix_uses.count(SYSTEM, Match([(3, 0b1)]), 1.0)
    late = replace(asks(), ttft_ms=cold_ms * 0.95)
    assert workload(snapshot, late).decode == "b0"
    assert workload(snapshot, replace(late, ttft_ms=cold_ms * 3)).decode != "b0"


def test_several_routers_see_their_share_of_the_uses() -> None:
    uses = PrefixUses()
    counted(uses, 10, 0.0)
    assert uses.shared(SYSTEM, ONE, 0.0) == []
    assert uses.shared(SYSTEM, ONE, 0.0, routers=2) == [(3, 10.0)]


def test_no_copy_is_charged_to_others_where_it_would_not_stay() -> None:
    """An instance whose cache is too small for the beginning, as far as is known."""
    view = fleet(2)
    snapshot, index = view.all(), view.all().prefixes
    assert index is not None
    index.join(1, 500, 1)
    busy(snapshot, 0.5 * (Prices(snapshot, asks(), None).prompt_at(1) - Prices(snapshot, asks(), None).prompt_at(0)))
    for _ in range(MANY):
        snapshot.prefix_uses.count(SYSTEM, Match([(3, 0b1)]), 1.0)
    assert workload(snapshot, asks()).decode == "b0"
