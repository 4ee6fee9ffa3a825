"""Rivals' policies: each decides as its published rule says, on fleets small enough to work it out by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.journey import Chosen
from router.core.values import Reported, Wanted
from router.fleet.view import FleetView
from router.scheduler.scoring.policies import Policy
from sim.baselines import BASELINES, Following
from sim.baselines.dynamo import QUEUE_THRESHOLD, Dynamo, DynamoConditional
from sim.baselines.llmd import Llmd
from sim.baselines.llmd_latency import LlmdLatency
from sim.baselines.plain import PowerOfTwo, WeightedRequests
from sim.baselines.sent import SentRequests
from sim.baselines.sglang import CacheAware
from sim.baselines.splitwise import Splitwise

P2D2 = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
B3 = {"b0": Role.BOTH, "b1": Role.BOTH, "b2": Role.BOTH}


def fleet(roles: dict[str, Role], credits: int = 100, **loads: Load) -> FleetView:  # noqa: A002 - the fleet's own word
    view = FleetView()
    said = [
        Reported(
            instance=Instance(id=InstanceId(name), role=role, url=f"http://{name}"),
            state="ready",
            accepting=True,
            credits=credits,
            load=loads.get(name, Load()),
            models=({"id": "m"},),
        )
        for name, role in roles.items()
    ]
    view.fold(tuple(said))
    return view


def wanted(tokens: int = 1000, prefix: tuple[int, ...] = (), **rest: Any) -> Wanted:
    fields: dict[str, Any] = {"model": "m", "hand_over": True, "prompt_tokens": tokens, "prefix": prefix, **rest}
    return Wanted(prefix_block_tokens=100 if prefix else 0, **fields)


def ask(policy: Policy, view: FleetView, what: Wanted | None = None) -> tuple[str | None, str | None]:
    chosen = policy(view.all(), what or wanted())
    assert chosen.because
    return chosen.prefill, chosen.decode


def busy(view: FleetView, **legs: int) -> None:
    for name, count in legs.items():
        for _ in range(count):
            view.leg_started(InstanceId(name))


def pair(prefill: str | None, decode: str) -> Chosen:
    return Chosen(None if prefill is None else InstanceId(prefill), InstanceId(decode), "test")


# --- all baselines ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=sorted(BASELINES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return BASELINES[request.param]()


def test_a_pair_from_two_pools_and_one_instance_of_role_both(policy: Policy) -> None:
    prefill, decode = ask(policy, fleet(P2D2))
    assert (prefill or "")[0] == "p"
    assert (decode or "")[0] == "d"
    assert ask(policy, fleet({"b0": Role.BOTH})) == (None, "b0")


def test_an_empty_fleet_and_an_unknown_model_give_no_choice(policy: Policy) -> None:
    assert ask(policy, fleet({})) == (None, None)
    assert not policy(fleet({}).all(), wanted()).wait
    assert ask(policy, fleet(P2D2), wanted(model="other")) == (None, None)


def test_excluded_instances_are_never_chosen(policy: Policy) -> None:
    view = fleet(P2D2)
    for _ in range(8):
        assert ask(policy, view, wanted(excluded=frozenset({InstanceId("p0"), InstanceId("d1")}))) == ("p1", "d0")


def test_full_instances_are_passed_over_and_a_full_fleet_is_waited_for(policy: Policy) -> None:
    view = fleet(P2D2, credits=1)
    busy(view, p0=1, d1=1)
    for _ in range(4):
        assert ask(policy, view) == ("p1", "d0")
    busy(view, p1=1, d0=1)
    full = policy(view.all(), wanted())
    assert full.wait
    assert full.decode is None


def test_an_aggregated_request_has_no_prefill_instance(policy: Policy) -> None:
    prefill, decode = ask(policy, fleet({**B3, "d0": Role.DECODE}), wanted(hand_over=False))
    assert prefill is None
    assert decode is not None
    prefill, decode = ask(policy, fleet(B3), wanted())
    assert prefill is None or policy.__class__ is Splitwise


def test_instances_of_role_both_beside_others_are_candidates_for_either_leg(policy: Policy) -> None:
    for roles in ({"p0": Role.PREFILL, "b0": Role.BOTH}, {"b0": Role.BOTH, "d0": Role.DECODE}):
        view, found = fleet(roles, credits=1), set()
        for _ in range(3):
            found.add(ask(policy, view))
        assert found <= {(None, "b0"), ("p0", "b0"), ("b0", "d0")}
        busy(view, b0=1)
        assert "b0" not in ask(policy, view)


def test_each_factory_makes_a_new_policy() -> None:
    for name in ("round_robin", "cache_aware", "dynamo", "llm_d", "splitwise", "power_of_two"):
        assert BASELINES[name]() is not BASELINES[name]()


# --- plain ones -------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns_whatever_runs_there() -> None:
    policy, view = BASELINES["round_robin"](), fleet(P2D2)
    busy(view, p0=50, d0=50)
    found = [ask(policy, view) for _ in range(4)]
    assert found == [("p0", "d0"), ("p1", "d1"), ("p0", "d0"), ("p1", "d1")]


def test_fewest_requests_and_turns_among_equals() -> None:
    policy, view = BASELINES["least_requests"](), fleet(P2D2, d0=Load(kv_usage=0.1))
    busy(view, p0=1, d0=2, d1=1)
    assert ask(policy, view) == ("p1", "d1")
    for name in ("p0", "d0", "d0", "d1"):
        view.leg_ended(InstanceId(name))
    assert ask(policy, view) == ("p1", "d1")  # all idle: fewest legs ever sent


def test_power_of_two_never_takes_the_busiest_of_many_and_repeats_itself() -> None:
    roles = {f"b{n}": Role.BOTH for n in range(4)}
    view = fleet(roles)
    busy(view, b0=9, b1=3, b2=2, b3=1)
    one, other = PowerOfTwo(seed=7), PowerOfTwo(seed=7)
    found = [ask(one, view)[1] for _ in range(400)]
    assert found == [ask(other, view)[1] for _ in range(400)]
    counts = Counter(found)
    assert counts["b0"] == 0
    # of 6 equally likely pairs b3 wins 3, b2 wins 2, b1 wins 1
    assert counts["b3"] == pytest.approx(200, abs=40)
    assert counts["b2"] == pytest.approx(133, abs=40)
    assert counts["b1"] == pytest.approx(67, abs=40)


# --- what was sent where ----------------------------------------------------------------------------------------------


def test_sent_matches_from_the_beginning_and_forgets_the_oldest() -> None:
    sent, at = SentRequests(capacity_tokens=600), InstanceId("p0")
    sent.add(at, wanted(300, (1, 2, 3)))
    assert sent.matched(at, wanted(300, (1, 2, 9))) == 200
    assert sent.matched(at, wanted(300, (9, 2, 3))) == 0
    assert sent.matched(at, wanted(150, (1, 2))) == 150
    assert sent.matched(InstanceId("p1"), wanted(300, (1, 2, 3))) == 0
    sent.add(at, wanted(400))  # text that no other prompt shares takes room as well
    assert sent.tokens(at) <= 600
    assert sent.matched(at, wanted(300, (1, 2, 3))) == 0  # block 1 went first


# --- SGLang -----------------------------------------------------------------------------------------------------------


def test_cache_aware_follows_a_match_above_the_threshold() -> None:
    policy, view = CacheAware(), fleet(P2D2)
    policy.sent.add(InstanceId("p1"), wanted(1000, (1, 2, 3, 4)))
    busy(view, p1=60)
    assert ask(policy, view, wanted(1000, (1, 2, 3, 4)))[0] == "p1"
    assert ask(policy, view, wanted(1000, (1, 2, 3, 8)))[0] == "p0"  # exactly 30 % is not above it


def test_cache_aware_without_a_match_takes_the_smallest_tree() -> None:
    policy, view = CacheAware(), fleet(P2D2)
    policy.sent.add(InstanceId("p0"), wanted(5000))
    busy(view, p1=60)
    assert ask(policy, view)[0] == "p1"


def test_cache_aware_goes_by_load_only_when_both_thresholds_are_passed() -> None:
    again = wanted(1000, (1, 2, 3, 4))
    policy, view = CacheAware(), fleet(P2D2)
    policy.sent.add(InstanceId("p1"), again)
    busy(view, p1=65)
    assert ask(policy, view, again)[0] == "p0"  # 65 − 0 > 64, and 65 > 1.5 · 0
    policy, view = CacheAware(), fleet(P2D2, credits=1000)
    policy.sent.add(InstanceId("p1"), again)
    busy(view, p0=200, p1=265)
    assert ask(policy, view, again)[0] == "p1"  # 65 apart, but 265 < 1.5 · 200


def test_cache_aware_decodes_on_the_least_loaded() -> None:
    policy, view = CacheAware(), fleet(P2D2)
    busy(view, d0=1)
    assert ask(policy, view, wanted(1000, (1,)))[1] == "d1"


# --- Dynamo -----------------------------------------------------------------------------------------------------------


def test_dynamo_costs_as_in_its_own_example() -> None:
    """docs/design-docs/router-design.md: 10 blocks to prefill; overlap 2, 5, 8; decode 10, 5, 9 → 18, 10, 11."""
    policy, view = Dynamo(), fleet(B3)
    prompt = Wanted(model="m", hand_over=True, prompt_tokens=160, prefix=tuple(range(10)), prefix_block_tokens=16)
    for name, overlap, decode in (("b0", 2, 10), ("b1", 5, 5), ("b2", 8, 9)):
        known = Wanted(
            model="m",
            hand_over=True,
            prompt_tokens=16 * overlap,
            prefix=tuple(range(overlap)),
            prefix_block_tokens=16,
        )
        policy.sent.add(InstanceId(name), known)
        policy.decode_blocks[InstanceId(name)] = decode
    costs = [
        policy.prefill_cost(InstanceId(name), prompt) + policy.decode_blocks[InstanceId(name)]
        for name in ("b0", "b1", "b2")
    ]
    assert costs == [18, 10, 11]
    assert ask(policy, view, prompt) == (None, "b1")


def test_dynamo_books_prefill_until_the_first_token_and_blocks_until_the_end() -> None:
    policy, view = Dynamo(), fleet(P2D2)
    policy.placed(1, wanted(3200), pair("p0", "d0"))
    assert policy.prefill_tokens["p0"] == 3200  # type: ignore[index]
    assert policy.decode_blocks["d0"] == 200  # type: ignore[index]
    assert ask(policy, view) == ("p1", "d1")
    policy.prefilled(1)
    policy.prefilled(1)
    assert policy.prefill_tokens["p0"] == 0  # type: ignore[index]
    assert ask(policy, view) == ("p0", "d1")
    policy.ended(1)
    policy.ended(1)
    assert policy.decode_blocks["d0"] == 0  # type: ignore[index]


def test_dynamo_decode_pool_ignores_overlap_and_prefill() -> None:
    policy, view = Dynamo(), fleet(P2D2)
    policy.sent.add(InstanceId("d0"), wanted(1000, tuple(range(10))))
    policy.decode_blocks[InstanceId("d0")] = 1
    assert ask(policy, view, wanted(1000, tuple(range(10))))[1] == "d1"


# --- llm-d ------------------------------------------------------------------------------------------------------------


def test_llmd_adds_weighted_scores() -> None:
    """The weights are 2 for the prefix and 1 for the queue. A match of 60 % (1.2) beats an empty queue (1.0), a match
    of 40 % (0.8) does not.
    """
    for matched, expected in ((6, "p0"), (4, "p1")):
        policy, view = Llmd(), fleet(P2D2, p0=Load(waiting=5))
        policy.sent.add(InstanceId("p0"), wanted(100 * matched, tuple(range(matched))))
        assert ask(policy, view, wanted(1000, tuple(range(10))))[0] == expected


def test_llmd_hands_over_unless_the_decode_instance_has_nearly_all() -> None:
    policy, view = Llmd(), fleet(P2D2)
    prompt = wanted(1000, tuple(range(10)))
    policy.sent.add(InstanceId("d1"), prompt)
    assert ask(policy, view, prompt) == (None, "d1")
    assert ask(Llmd(), view, prompt)[0] is not None
    for tokens, whole in ((1016, True), (1017, False)):  # 16 may be missing
        policy = Llmd()
        policy.sent.add(InstanceId("d1"), prompt)
        assert (ask(policy, view, wanted(tokens, tuple(range(10))))[0] is None) is whole


def test_llmd_weighs_kv_usage_on_aggregated_fleets() -> None:
    policy = Llmd()
    view = fleet(B3, b0=Load(kv_usage=0.5), b1=Load(kv_usage=0.2), b2=Load(kv_usage=0.9))
    assert ask(policy, view) == (None, "b1")


# --- Splitwise --------------------------------------------------------------------------------------------------------

HOMES = ([InstanceId("b0")], [InstanceId("b1"), InstanceId("b2")])


def test_splitwise_joins_the_shortest_queues_of_its_pools() -> None:
    policy, view = Splitwise(*HOMES, capacity_tokens=100_000), fleet(B3)
    policy.memory[InstanceId("b1")] = 5000
    assert ask(policy, view) == ("b0", "b2")
    assert not policy.mixed


def test_splitwise_borrows_when_the_prompt_queue_is_long_and_gives_back() -> None:
    policy, view = Splitwise(*HOMES, capacity_tokens=100_000), fleet(B3)
    policy.placed(1, wanted(8000), pair("b0", "b1"))
    assert ask(policy, view, wanted(1000)) == (None, "b2")  # the emptier token machine takes both phases
    assert policy.mixed == {"b2"}
    policy.placed(2, wanted(1000), pair(None, "b2"))
    policy.prefilled(2)
    assert policy.mixed == {"b2"}
    policy.ended(2)
    assert not policy.mixed  # no work is left on b2: it is back in its own pool


def test_splitwise_borrows_when_no_token_machine_has_room() -> None:
    policy = Splitwise([InstanceId("b0"), InstanceId("b1")], [InstanceId("b2")], capacity_tokens=3000)
    view = fleet(B3)
    policy.placed(1, wanted(2500), pair("b0", "b2"))
    policy.prefilled(1)
    _, decode = ask(policy, view, wanted(1000))
    assert decode in {"b0", "b1"}
    assert policy.mixed == {decode}


def test_splitwise_does_not_ask_an_engine_of_one_role_for_the_other() -> None:
    policy, view = Splitwise(capacity_tokens=1200), fleet(P2D2)
    policy.placed(1, wanted(9000), pair("p0", "d0"))
    policy.placed(2, wanted(9000), pair("p1", "d1"))
    assert ask(policy, view, wanted(1000))[0] is None
    assert not policy.mixed


def test_splitwise_splits_nothing_where_no_instance_has_a_home_pool() -> None:
    """Splitwise's own baseline: prompt and answer run on the machine with the fewest pending tokens."""
    policy, view = Splitwise(capacity_tokens=100_000), fleet(B3)
    policy.placed(1, wanted(500), pair(None, "b0"))
    policy.placed(2, wanted(400), pair(None, "b1"))
    assert ask(policy, view) == (None, "b2")
    policy.placed(3, wanted(5000), pair(None, "b2"))
    policy.prefilled(1)
    assert ask(policy, view) == (None, "b0"), "one answer under way counts one token"
    assert not policy.mixed


def test_splitwise_books_the_known_length_of_an_answer() -> None:
    usual, knowing = Splitwise(*HOMES), Splitwise(*HOMES, known=[7, 900])
    for policy in (usual, knowing):
        policy.placed(1, wanted(1000), pair("b0", "b1"))
    assert usual.memory["b1"] == 1000 + 211
    assert knowing.memory["b1"] == 1000 + 900
    knowing.ended(1)
    assert knowing.memory["b1"] == 0


# --- told about the fleet ---------------------------------------------------------------------------------------------


def test_weighted_requests_follow_the_speeds() -> None:
    names = [InstanceId(each) for each in B3]
    policy, view = WeightedRequests(dict(zip(names, (1.0, 0.5, 0.25), strict=True))), fleet(B3)
    chosen = []
    for _ in range(7):
        chosen.append(ask(policy, view)[1] or "")
        busy(view, **{chosen[-1]: 1})
    assert Counter(chosen) == {"b0": 4, "b1": 2, "b2": 1}


def test_dynamo_divides_its_costs_by_the_speed() -> None:
    policy = Dynamo(speeds={InstanceId("b0"): 1.0, InstanceId("b1"): 0.25})
    view = fleet({"b0": Role.BOTH, "b1": Role.BOTH})
    for number in range(4):
        chosen = policy(view.all(), wanted())
        assert chosen.decode == "b0"
        policy.placed(number, wanted(), chosen)
    assert ask(policy, view) == (None, "b1")  # b0: the blocks of five requests; b1: four times those of one
    assert policy.prefill_cost(InstanceId("b1"), wanted()) == 4 * 62.5


def test_dynamo_bypasses_prefill_for_a_short_rest_on_a_decode_instance() -> None:
    policy, view = DynamoConditional(), fleet(P2D2)
    first = wanted(3000, tuple(range(30)))
    policy.placed(0, first, pair("p0", "d0"))
    assert ask(policy, view, first)[0] is not None  # D's own cache is not known to have it
    policy.placed(1, first, pair(None, "d1"))
    policy.prefilled(1)
    policy.ended(1)
    assert ask(policy, view, wanted(3100, (*range(30), 99))) == (None, "d1")
    assert ask(policy, view, wanted(6000, tuple(range(60))))[0] is not None, "3,000 tokens are missing"


def test_dynamo_queues_while_every_prompt_instance_has_enough() -> None:
    policy, view = DynamoConditional({InstanceId("p0"): 512, InstanceId("p1"): 512}), fleet(P2D2)
    many = wanted(int(QUEUE_THRESHOLD * 512) + 1)
    policy.placed(0, many, pair("p0", "d0"))
    assert ask(policy, view)[0] == "p1"
    policy.placed(1, many, pair("p1", "d0"))
    assert policy(view.all(), wanted()).wait
    policy.prefilled(0)
    assert ask(policy, view)[0] == "p0"


def test_llmd_latency_packs_where_the_headroom_is_enough_and_else_misses_by_the_least() -> None:
    view = fleet({"b0": Role.BOTH, "b1": Role.BOTH})
    policy = LlmdLatency(ttft_ms=500, tpot_ms=50)
    policy.placed(0, wanted(5000), pair(None, "b0"))
    assert ask(policy, view) == (None, "b0")  # b0 needs about 180 of 500 ms: enough headroom, and the least
    policy.placed(1, wanted(12_000), pair(None, "b0"))
    assert ask(policy, view) == (None, "b1")  # no headroom is left on b0
    policy.placed(2, wanted(40_000), pair(None, "b1"))
    assert ask(policy, view) == (None, "b0")  # neither has headroom
    for number in range(3):
        policy.ended(number)
    assert not +policy.pending and not +policy.answers and not +policy.contexts


def test_llmd_latency_without_targets_takes_the_least_latency() -> None:
    view, policy = fleet(P2D2), LlmdLatency()
    policy.placed(0, wanted(), pair("p0", "d1"))
    assert ask(policy, view) == ("p1", "d0")


def test_baselines_that_book_requests_are_known_by_their_methods() -> None:
    assert {name for name, make in BASELINES.items() if isinstance(make(), Following)} == {
        "dynamo",
        "dynamo_conditional",
        "llm_d_latency",
        "splitwise",
    }
