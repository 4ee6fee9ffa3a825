"""Bounds rule out only fleets that must fail: fleets below a bound miss the promise when they are simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.ids import InstanceId
from cluster.instance import Role
from costs import shipped
from costs.cost import Costs
from costs.hardware import gpu_named
from costs.shape import Spans
from goodput.bounds import (
    EngineBounds,
    impossible,
    impossible_on,
    least_counts,
    least_decodes,
    least_prefills,
    least_wholes,
)
from goodput.demand import ClassPromise, Demand, demand_of
from loadgen.arrival import Arrival
from loadgen.report import Targets
from router.core.values import Promise
from router.scheduler.scoring.policies import POLICIES
from sim.engine_args import engine_of, read_words
from sim.evaluate import PATIENCE_S, Goal, tried
from sim.fleet import SimulatedMember, member
from sim.settings import SimSettings
from sim.world import World

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def kind(role: Role, *words: str) -> SimulatedMember:
    model = shipped.model_named("Llama-3.1-8B")
    costs, config = engine_of(
        role, model, gpu_named("H100-SXM"), Spans(), read_words(words), profiles=shipped.profiles()
    )
    return member(role.value, role, "m", costs, config)


def engine(of: SimulatedMember) -> EngineBounds:
    assert isinstance(of.costs, Costs)
    return EngineBounds.of(of.costs, of.config)


def load(seed: int, rate: float, count: int, inputs: int, outputs: int, shared: int = 0) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, count))
    ins, outs = rng.lognormal(np.log(inputs), 0.6, count), rng.lognormal(np.log(outputs), 0.6, count)
    return [
        Arrival(
            at_s=float(at[row]),
            input_tokens=int(ins[row]) + 1,
            output_tokens=int(outs[row]) + 1,
            prefix=(1, 2, 3) if row % 5 < shared else (),
            block_tokens=256,
        )
        for row in range(count)
    ]


def attainment(arrivals: list[Arrival], promise: ClassPromise, *pools: tuple[SimulatedMember, int]) -> float:
    members = [
        replace(one, name=InstanceId(f"{one.role.value}-{number}")) for one, count in pools for number in range(count)
    ]
    result = World(members, SimSettings(checks=False), policy=POLICIES["least_load"]).run(arrivals)
    return float(result.met(Targets(promise.ttft_ms, promise.tt2t_ms, promise.tpot_ms, promise.e2e_ms)).mean())


@pytest.mark.parametrize(
    ("seed", "rate", "inputs", "shared"),
    [(1, 40, 3000, 0), (2, 60, 2000, 3), pytest.param(3, 22, 5000, 0, marks=pytest.mark.long)],
)
def test_fewer_prefill_instances_than_the_bound_miss_the_promise(
    seed: int, rate: float, inputs: int, shared: int
) -> None:
    promise = ClassPromise(ttft_ms=500, attainment=0.9)
    arrivals = load(seed, rate, 300, inputs, 4, shared)
    prefill, decode = kind(P), kind(D)
    need = least_prefills(engine(prefill), demand_of(arrivals, {"": promise}))
    assert need.instances >= 2
    assert "of prompts come within" in need.because
    assert attainment(arrivals, promise, (prefill, need.instances - 1), (decode, 4)) < promise.attainment
    assert attainment(arrivals, promise, (prefill, 3 * need.instances), (decode, 4)) >= promise.attainment


@pytest.mark.parametrize(
    ("seed", "rate", "outputs"), [pytest.param(1, 100, 200, marks=pytest.mark.long), (2, 250, 100)]
)
def test_fewer_decode_instances_than_the_bound_miss_the_promise(seed: int, rate: float, outputs: int) -> None:
    promise = ClassPromise(ttft_ms=2000, tpot_ms=12, attainment=0.9)
    arrivals = load(seed, rate, 1200, 500, outputs)
    prefill, decode = kind(P), kind(D, "--max-num-seqs=64")
    need = least_decodes(engine(decode), demand_of(arrivals, {"": promise}))
    assert need.instances >= 2
    assert attainment(arrivals, promise, (prefill, 4), (decode, need.instances - 1)) < promise.attainment
    assert attainment(arrivals, promise, (prefill, 4), (decode, 4 * need.instances)) >= promise.attainment


def test_fewer_instances_that_do_both_than_the_bound_miss_the_promise() -> None:
    promise = ClassPromise(ttft_ms=500, tpot_ms=30, attainment=0.9)
    arrivals = load(5, 60, 400, 3000, 100)
    both = kind(B)
    need = least_wholes(engine(both), demand_of(arrivals, {"": promise}))
    assert need.instances >= 3
    assert attainment(arrivals, promise, (both, need.instances - 1)) < promise.attainment
    assert attainment(arrivals, promise, (both, 4 * need.instances)) >= promise.attainment


def demand(promise: ClassPromise, inputs: int = 2000, outputs: int = 100) -> Demand:
    return demand_of(load(1, 1, 50, inputs, outputs), {"": promise})


def test_requests_with_one_system_prompt_share_its_memory() -> None:
    """Counted for each request, it allowed twelve at a time on an L4, and the bound asked for a second instance. One
    keeps the promise.
    """
    shared, own = 181, 7  # blocks of 16 tokens
    arrivals = [
        Arrival(
            at_s=number / 2.5,
            input_tokens=3000,
            output_tokens=100,
            prefix=(*range(shared), *(1000 + own * number + each for each in range(own))),
            block_tokens=16,
        )
        for number in range(150)
    ]
    model, promise = shipped.model_named("Llama-3.1-8B"), ClassPromise(ttft_ms=4000.0, tpot_ms=170.0)
    costs, config = engine_of(B, model, gpu_named("L4"), Spans(), read_words(()), profiles=shipped.profiles())
    one = member("both", B, "m", costs, config)
    need = least_wholes(engine(one), demand_of(arrivals, {"": promise}))
    assert need.exact <= 1.0, need
    assert attainment(arrivals, promise, (one, 1)) == 1.0


def test_an_impossible_promise_names_its_term() -> None:
    pair = engine(kind(P)), engine(kind(D))
    assert impossible(*pair, demand(ClassPromise(ttft_ms=500, tpot_ms=40))) is None
    slow = impossible(*pair, demand(ClassPromise(ttft_ms=500, tpot_ms=2)))
    assert slow is not None
    assert slow.because.startswith("TPOT 2 ms: 100.0% of the requests take longer alone on idle H100-SXM tp1")
    late = impossible(*pair, demand(ClassPromise(ttft_ms=10, tpot_ms=40)))
    assert late is not None
    assert late.because.startswith("TTFT 10 ms: ")


def test_requests_that_may_miss_are_left_out_of_the_bounds() -> None:
    """One request in twenty is twice as long as the other nineteen together, and 5 % may miss the target."""
    arrivals = [
        Arrival(at_s=0.1 * row, input_tokens=40_000 if row % 20 == 7 else 1000, output_tokens=2) for row in range(400)
    ]
    one = engine(kind(P))
    strict, loose = (
        least_prefills(one, demand_of(arrivals, {"": ClassPromise(ttft_ms=300, attainment=share)})).instances
        for share in (1.0, 0.95)
    )
    assert strict > loose


def test_only_a_prefix_of_an_earlier_request_can_be_cached() -> None:
    def arrival(*prefix: int) -> Arrival:
        return Arrival(at_s=0.0, input_tokens=1000, output_tokens=1, prefix=prefix, block_tokens=100)

    found = demand_of(
        [arrival(1, 2, 3), arrival(1, 2, 4), arrival(2, 3), arrival(1, 2, 4, 9), arrival(*range(1, 20))],
        {"": ClassPromise(ttft_ms=1)},
    )
    assert found.cached.tolist() == [0, 200, 0, 300, 300]


def test_least_counts_are_those_of_each_pools_own_role() -> None:
    asked = demand_of(load(5, 60, 400, 3000, 100), {"": ClassPromise(ttft_ms=500, tpot_ms=30, attainment=0.9)})
    prefill, decode, both = engine(kind(P)), engine(kind(D)), engine(kind(B))
    found = least_counts({"p": (P, prefill), "d": (D, decode), "b": (B, both)}, asked)
    assert found == {
        "p": least_prefills(prefill, asked),
        "d": least_decodes(decode, asked),
        "b": least_wholes(both, asked),
    }


def test_an_end_to_end_target_can_be_the_impossible_one_and_several_kinds_are_named_once() -> None:
    full = engine(kind(B))
    capped = replace(full, costs=full.costs.capped(0.5))
    assert impossible_on((full, capped), (capped,), demand(ClassPromise(ttft_ms=500, tpot_ms=40))) is None
    late = impossible_on((full, capped), (capped,), demand(ClassPromise(e2e_ms=100)))
    assert late is not None
    assert late.because.startswith("E2E 100 ms: ")
    assert late.because.count("H100-SXM tp1") == 1
    assert late.short_by > 1


def test_requests_without_a_promise_of_their_first_token_are_not_given_up_early() -> None:
    """All of them end within ten minutes, most of them after half a minute."""
    arrivals = load(7, 100, 400, 4000, 20)
    goal = Goal(targets=Targets(e2e_ms=600_000), attainment=0.99, promise=Promise())
    seen = tried([replace(kind(B, "--max-num-seqs=4"), name=InstanceId("b"))], arrivals, {"batch": goal}, "batch")
    assert seen.holds and seen.seen is not None and seen.seen.seconds > PATIENCE_S
