"""When a prompt's beginning is pulled from a peer, by the prices of places, and which peers may be its source."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.core.journey import Chosen
from router.core.values import ProofStanding, Wanted
from router.fleet.events import SourceSaid
from router.fleet.view import FleetView
from router.predict.prefix_cache import PrefixCacheIndex
from router.predict.step_model import make_of
from router.scheduler.placements import Placement, Placements
from router.scheduler.scoring.figures import CLEAR, LEAST_MS, SOURCE_S_MAX, SOURCE_S_MIN
from router.scheduler.scoring.prices import prices_of
from router.scheduler.scoring.workload import workload

CHUNKS = tuple(range(1000, 1064))
"""Names of the prompt's 64 chunks, of 64 tokens each."""


MAKE = make_of(costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named("H100"), profiles=shipped.profiles()))
P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def sharing(*roles: Role, weights: str = "") -> FleetView:
    """Instances p0, d1, …, in this order, that share prompts' beginnings; `weights`: a letter of each."""
    made = FleetView(lambda _: MAKE)
    for at, role in enumerate(roles):
        name = InstanceId(f"{role.value[0]}{at}")
        made.add(Instance(id=name, role=role, url=f"http://{name}", pins=True, weights=weights[at : at + 1]))
        made.seen(name, ({"id": "m"},), Load())
    fleet = made.all()
    fleet.prefixes = PrefixCacheIndex()
    for each in fleet:
        fleet.prefixes.join(each.row, 400_000, 0)
        fleet.peers(each, takes_part=True)
    return made


def long(**more: object) -> Wanted:
    """A long prompt, of which chunks may be cached."""
    told = {"prompt_tokens": 4096, "prefix": CHUNKS, "prefix_block_tokens": 64.0, "output_tokens": 200.0, **more}
    return Wanted(model="m", hand_over=True, **{"one_prompt": True, **told})  # type: ignore[arg-type]


def has(made: FleetView, name: str, chunks: int = 60) -> None:
    fleet = made.all()
    assert fleet.prefixes is not None
    fleet.prefixes.sent(made.get(InstanceId(name)).row, CHUNKS[:chunks], 0.0)


def test_a_prompt_is_cheaper_where_its_beginning_is_pulled_to() -> None:
    """The price of the prompt on p0, with its beginning from d1 and without a source."""
    made = sharing(P, D)
    has(made, "d1")
    prices = prices_of(made.all(), long())
    source = prices.source_at(0)
    assert source is not None and source.instance == "d1" and source.tokens == 60 * 64
    assert SOURCE_S_MIN <= source.wait_s <= SOURCE_S_MAX
    alone = prices_of(sharing(P, D).all(), long())
    assert prices.prompt_at(0) <= alone.prompt_at(0) * (1 - CLEAR)
    assert prices.prompt_at(0) <= alone.prompt_at(0) - LEAST_MS
    assert prices.stall_at(0) < alone.stall_at(0), "answers on p0 are delayed less"
    assert source.wait_s == pytest.approx(alone.prompt_at(0) / 1000, abs=0.001), "as long as the whole prompt takes"


def test_a_source_takes_part_has_two_credits_and_is_another_instance() -> None:
    made = sharing(P, D)
    has(made, "d1")
    made.all().peers(made.get(InstanceId("d1")), takes_part=False)
    plain = workload(made.all(), long(output_tokens=2.0))
    assert plain.source is None and "more from" not in plain.because
    both = sharing(B, B)
    has(both, "b1")
    for credits_, asked in ((0, False), (1, False), (2, True)):
        both.get(InstanceId("b1")).credits = credits_
        found = prices_of(both.all(), long()).source_at(0)
        assert (found is not None) == asked, "a place for the leg, and one for the answer"
    both.get(InstanceId("b1")).credits = 9
    prices = prices_of(both.all(), long())
    assert prices.source_at(0) is not None and prices.source_at(1) is None, "no instance is its own source"


@pytest.mark.parametrize("chunks", [0, 8, 20])
def test_a_short_beginning_is_computed_and_not_pulled(chunks: int) -> None:
    made = sharing(P, D)
    has(made, "d1", chunks)
    assert prices_of(made.all(), long()).source_at(0) is None


def test_an_instance_that_computes_long_prompts_is_no_source() -> None:
    made = sharing(P, P)
    has(made, "p1")
    fleet = made.all()
    assert prices_of(fleet, long()).source_at(0) is not None
    placements = Placements(fleet)
    other = Wanted(model="m", hand_over=True, prompt_tokens=30_000, excluded=frozenset({InstanceId("p0")}))
    for _ in range(3):
        chosen = workload(fleet, other)
        assert chosen.decode == "p1"
        placements.placed(Placement(), other, chosen)
    assert prices_of(fleet, long()).source_at(0) is None


def test_a_request_of_several_prompts_has_no_source() -> None:
    """A batch is named by its first prompt: all of its prompts would pull that one's beginning."""
    made = sharing(P, D)
    has(made, "d1")
    assert prices_of(made.all(), long()).source_at(0) is not None
    assert prices_of(made.all(), long(one_prompt=False)).source_at(0) is None


def test_an_instance_that_is_reserved_is_no_source_for_others() -> None:
    made = sharing(P, D)
    view = made.get(InstanceId("d1"))
    view.instance = dataclasses.replace(view.instance, tenants=("acme",))
    fleet = made.all()
    assert fleet.shares(1, 0, long(whose="acme")) and not fleet.shares(1, 0, long())


def test_an_instance_that_holds_about_as_much_needs_no_source() -> None:
    made = sharing(P, D)
    has(made, "d1")
    has(made, "p0", 58)
    assert prices_of(made.all(), long()).source_at(0) is None


def test_which_peers_may_be_a_source() -> None:
    made = sharing(P, D, weights="ab")
    fleet = made.all()
    assert not fleet.shares(1, 0, long()), "other weights"
    made = sharing(P, D, P)
    fleet, wanted = made.all(), long()
    assert fleet.shares(1, 0, wanted) and fleet.shares(0, 2, wanted)
    fleet.shuns(made.get(InstanceId("p0")), (InstanceId("d1"),))
    assert not fleet.shares(1, 0, wanted) and fleet.shares(0, 1, wanted), "p0 has not met d1"
    fleet.shuns(made.get(InstanceId("p0")), ())
    names = {each: InstanceId(each) for each in ("p0", "d1", "p2")}
    fleet.pairing.circles(ProofStanding({names["p0"]: 1, names["p2"]: 2}, {names["d1"]: 1}, {}, {}))
    assert fleet.shares(1, 0, wanted) and fleet.shares(0, 1, wanted)
    assert not fleet.shares(1, 2, wanted) and not fleet.shares(0, 2, wanted), "another circle"
    made.get(names["d1"]).up = False
    assert not fleet.shares(1, 0, wanted), "d1 is down"


@pytest.mark.parametrize(("worth", "asked"), [(0.97, True), (0.9, True), (0.1, False)])
def test_what_a_tier_has_is_pulled_for_the_price_of_its_loading(worth: float, asked: bool) -> None:
    """A source leg loads it first; if that takes as long as to compute it, nothing is pulled."""
    made = sharing(P, D)
    fleet = made.all()
    assert fleet.prefixes is not None
    row = made.get(InstanceId("d1")).row
    has(made, "d1")
    in_cache = prices_of(fleet, long()).source_at(0)
    fleet.prefixes.keeps(row, ((1e9, worth),))
    fleet.prefixes._held[row].upper[0].names.clear()
    source = prices_of(fleet, long()).source_at(0)
    assert (source is not None) == asked
    if source is not None and in_cache is not None:
        assert source.tokens == in_cache.tokens == 60 * 64, "whatever it is worth, so much is pulled"
        whole_ms = prices_of(sharing(P, D).all(), long()).prompt_at(0)
        assert source.leg_ms - in_cache.leg_ms == pytest.approx((1 - worth) * whole_ms * 60 / 64, rel=0.05)


def test_what_no_tier_has_is_forgotten() -> None:
    """A source leg looks into all tiers: what it does not find is nowhere."""
    made = sharing(P, D)
    fleet = made.all()
    assert fleet.prefixes is not None
    row = made.get(InstanceId("d1")).row
    has(made, "d1")
    fleet.prefixes.keeps(row, ((1e9, 0.9),))
    fleet.prefixes._held[row].upper[0].names.clear()
    made.handle(SourceSaid(InstanceId("d1"), CHUNKS, 64.0, 20 * 64, 1.0), 1.0)
    assert fleet.prefixes.held_by(row, CHUNKS, 64) == (20, 0.0), "it has loaded what it had"


def test_neither_speed_nor_cache_is_learned_from_a_prompt_with_a_source() -> None:
    made = sharing(P, D)
    fleet = made.all()
    has(made, "d1")
    wanted = long()
    chosen = workload(fleet, wanted)
    if chosen.source is None:  # the policy may serve the request aggregated on d1
        source = prices_of(fleet, wanted).source_at(0)
        chosen = replace(chosen, prefill=InstanceId("p0"), decode=InstanceId("d1"), source=source)
    placements, expected = Placements(fleet), Placement()
    placements.placed(expected, wanted, chosen)
    assert expected.pulls_beginning and expected.booking is not None and expected.booking.plain_ms == 0.0
    assert fleet.prefixes is not None
    capacity = fleet.prefixes._held[0].capacity_tokens
    placements.prompt_over(expected, wanted, 1.0, done=True, cached_tokens=3840)
    assert fleet.prefixes._held[0].capacity_tokens == capacity
    assert fleet.prefixes.match(CHUNKS).chunks_of(0) == len(CHUNKS), "p0 has the prompt from now on"


@pytest.mark.interpreted
def test_a_source_counts_as_used_once_it_has_said_what_it_has() -> None:
    made = sharing(P, D)
    fleet = made.all()
    has(made, "d1")
    wanted = long()
    source = prices_of(fleet, wanted).source_at(0)
    assert source is not None and fleet.prefixes is not None
    row, used = made.get(InstanceId("d1")).row, []
    fleet.prefixes.used = lambda *given: used.append(given[0])  # type: ignore[method-assign]
    chosen = Chosen(InstanceId("p0"), InstanceId("d1"), "", source=source)
    Placements(fleet).placed(Placement(), wanted, chosen)
    assert row not in used
    del fleet.prefixes.used
    made.handle(SourceSaid(InstanceId("d1"), CHUNKS, 64.0, 0, 1.0), 1.0)
    assert fleet.prefixes.match(CHUNKS[:60]).chunks_of(row) == 0
    assert prices_of(fleet, long(now=1.0)).source_at(0) is None
    made.handle(SourceSaid(InstanceId("gone"), CHUNKS, 64.0, 0, 1.0), 1.0)


def test_instances_of_one_role_that_have_not_met_are_no_parted_pair() -> None:
    """Parted pairs are reported to an operator: pairs that should hand over and do not."""
    made = sharing(P, D, D)
    fleet = made.all()
    for name in ("p0", "d1", "d2"):
        others = tuple(each.id for each in fleet if each.id != name)
        fleet.shuns(made.get(InstanceId(name)), others)
    assert fleet.pairing.parted_pairs() == {("p0", "d1"), ("p0", "d2")}
    assert not any(fleet.shares(source, row, long()) for source in range(3) for row in range(3))


def test_the_delay_of_source_legs_is_learned_and_fades() -> None:
    made = sharing(P, D)
    fleet = made.all()
    has(made, "d1")
    first = prices_of(fleet, long(now=1.0)).source_at(0)
    assert first is not None and 0 < first.leg_ms < 50
    fleet.inflight.source_delay.took(6.0, 1.0)
    assert fleet.inflight.source_delay.ms(1.0) == 2.0, "one leg is no rule"
    assert prices_of(fleet, long(now=1.0)).source_at(0) is not None
    fleet.inflight.source_delay.took(-20.0, 1.0)
    assert fleet.inflight.source_delay.ms(1.0) == 0.0, "never less than the price"
    for _ in range(4):
        fleet.inflight.source_delay.took(10_000.0, 1.0)
    assert prices_of(fleet, long(now=1.0)).source_at(0) is None, "a pull would not pay"
    assert fleet.inflight.source_delay.ms(1.0) < 500
    assert prices_of(fleet, long(now=900.0)).source_at(0) is not None, "tried again after a while"
