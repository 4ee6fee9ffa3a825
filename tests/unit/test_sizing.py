"""Pool sizes from costs: enough instances for the target, and none for prompts that no size serves in time."""

from __future__ import annotations

import dataclasses
import math

import pytest
from support.pretend_fleet import PROMISE, pools

from cluster.instance import Role
from costs import shipped
from goodput.budget import Footprint
from goodput.control_rules import ControlRules
from goodput.counters import Between
from goodput.demand import ClassPromise
from goodput.needs import Needs
from goodput.pools import Kinds, ScalingPool
from goodput.sizing import LoadToServe, RecentLengths, Sizer
from goodput.sketch import sketch_of
from sim.experiments.scaling import engine_of_member
from sim.experiments.systems import EqualInstances, Shelf

PREFILL = Sizer(pools()[0].engine)


def load(prompts: list[int], rate: float = 1.5) -> LoadToServe:
    lengths = RecentLengths(prompts=sketch_of(prompts), answers=sketch_of([200]))
    return LoadToServe(rate=rate, lengths={"": lengths}, promises={"": PROMISE})


def test_prompts_that_no_fleet_computes_in_time_add_no_instance() -> None:
    usual, _ = PREFILL.need(Role.PREFILL, load([12_000] * 97), 0.98)
    tail, because = PREFILL.need(Role.PREFILL, load([12_000] * 97 + [40_000] * 3), 0.98)
    assert PREFILL.prompt_s(40_000) * 1000 > (PROMISE.ttft_ms or 0)
    assert usual <= tail <= usual + 2
    assert because


@pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
def test_a_tpot_that_no_instance_keeps_adds_no_instance_and_is_told(role: Role) -> None:
    """Before, the pool grew to its most, and every answer missed its target all the same."""
    strict, free = (
        dataclasses.replace(load([4000]), promises={"": ClassPromise(tpot_ms=target)}) for target in (5.0, None)
    )
    count, because = PREFILL.need(role, strict, 0.98)
    assert count == PREFILL.need(role, free, 0.98)[0] < 10
    assert "TPOT 5 ms of class default is out of reach: a step takes" in because


def test_an_instance_that_cannot_keep_the_tpot_is_worth_little() -> None:
    """Before, it was worth more than one that can: its steps had no target, so they were as full as its memory."""
    shelf = Shelf(shipped.models(), shipped.profiles())
    made = [
        ScalingPool(
            name=gpu,
            role=Role.DECODE,
            engine=engine_of_member(
                shelf.member("Qwen/Qwen3-32B", EqualInstances(role=Role.DECODE, count=1, tp=2, gpu=gpu))
            ),
            footprint=Footprint(gpu=gpu, gpus=2),
        )
        for gpu in ("H100", "A100-80G-SXM")
    ]
    strict = dataclasses.replace(load([4000]), promises={"": ClassPromise(tpot_ms=20.0)})
    assert Kinds.of(made).sizers["A100-80G-SXM"].out_of_reach(strict)
    assert not Kinds.of(made).sizers["H100"].out_of_reach(strict)
    assert Kinds.of(made).worth("A100-80G-SXM", Role.DECODE, strict) < 0.1


def test_a_tpot_out_of_reach_leaves_the_target_of_another_class() -> None:
    lengths = RecentLengths(prompts=sketch_of([4000]), answers=sketch_of([200]), share=0.5)
    chat = {"chat": lengths, "code": lengths}
    promises = {"chat": PROMISE, "code": ClassPromise(tpot_ms=1.0)}
    both = LoadToServe(rate=8.0, lengths=chat, promises=promises)
    kept = dataclasses.replace(both, promises={"chat": PROMISE})
    assert PREFILL.need(Role.DECODE, both, 0.98)[0] == PREFILL.need(Role.DECODE, kept, 0.98)[0]


@pytest.mark.parametrize("rate", [0.2, 1.0, 5.0])
def test_the_reason_names_the_next_smaller_fleet_that_misses_the_target(rate: float) -> None:
    count, because = PREFILL.need(Role.PREFILL, load([8000], rate), 0.98)
    if count > 1:
        fewer = PREFILL.prefill(load([8000], rate), count - 1)
        assert fewer.met < 0.98
        assert because == f"{count - 1} would not do: {fewer.because}"
    assert PREFILL.prefill(load([8000], rate), count).met >= 0.98


@pytest.mark.parametrize("role", [*Role])
@pytest.mark.parametrize("rate", [0.5, 3.0, 20.0])
def test_an_engine_of_four_ranks_does_the_work_of_four(role: Role, rate: float) -> None:
    """Costs are those of one data parallel rank, and a controller counts engines. Before, it started four times as many
    as were needed.
    """
    engine, served = pools()[0].engine, load([8000] * 10, rate)
    one, four = Sizer(engine), Sizer(engine, ranks=4)
    needed, _ = one.need(role, served, 0.98)
    engines, because = four.need(role, served, 0.98)
    assert engines == math.ceil(needed / 4)
    assert because.startswith(f"{engines - 1} would not do" if engines > 1 else "")
    assert four.attained(role, served, 2, 0.98).met == one.attained(role, served, 8, 0.98).met
    assert four.prompt_work(served) == pytest.approx(one.prompt_work(served) / 4)
    assert four.answers_a_second(served) == pytest.approx(4 * one.answers_a_second(served))


@pytest.mark.parametrize("role", [*Role])
def test_an_engine_of_four_ranks_is_worth_four_of_one(role: Role) -> None:
    small = dataclasses.replace(pools()[0], role=role, name="small")
    large = dataclasses.replace(small, ranks=4, name="large")
    assert Kinds.of([small, large]).worth("large", role, load([8000])) == pytest.approx(4)
    assert Kinds.of([large, small]).worth("small", role, load([8000])) == pytest.approx(1 / 4)
    assert Kinds.of([large, small]).worth("large", role, load([8000])) == 1.0


def test_prompts_that_ranks_compute_do_not_wait() -> None:
    waits = []
    for ranks in (1, 4):
        kinds = Kinds.of([dataclasses.replace(each, ranks=ranks) for each in pools()])
        needs = Needs(kinds, {"": PROMISE}, ControlRules())
        needs.add(Between(seconds=5.0, classes={}, waiting=3, oldest_wait_s=0.0), 5.0)
        waits.append(needs.prompts_wait({Role.PREFILL: 1.0}))
    assert waits == [True, False]
