"""The energy of a simulated fleet, compared with sums that can be calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.ids import InstanceId
from cluster.instance import Role
from costs import shipped
from costs.cost import Costs
from costs.hardware import gpu_named
from costs.shape import Spans
from costs.step import StepWork, decoding, prompt
from engine.twin import events as ev
from loadgen.arrival import Arrival
from sim.engine_args import engine_of, read_words
from sim.fleet import SimulatedMember, member
from sim.instance import SimInstance
from sim.kernel import NS
from sim.result import Result
from sim.settings import SimSettings
from sim.world import World

GPU = gpu_named("H100-SXM")


def one(role: Role, name: str, *, cap: float = 1.0, words: tuple[str, ...] = ()) -> SimulatedMember:
    costs, config = engine_of(
        role, shipped.model_named("Llama-3.1-8B"), GPU, Spans(), read_words(words), profiles=shipped.profiles()
    )
    return member(name, role, "m", costs.capped(cap), config)


def ran(*members: SimulatedMember, arrivals: list[Arrival]) -> tuple[World, Result]:
    world = World(members, SimSettings())
    return world, world.run(arrivals)


def test_an_idle_fleet_draws_what_its_gpus_draw_idle() -> None:
    """Two answers of one token, 100 s apart, add hardly any energy."""
    arrivals = [Arrival(at_s=at, input_tokens=10, output_tokens=1) for at in (0.0, 100.0)]
    _, result = ran(one(Role.BOTH, "b"), arrivals=arrivals)
    assert result.energy_j == pytest.approx(GPU.idle_w * 100, rel=0.01)


def test_a_prompt_and_its_answer_draw_what_their_steps_do() -> None:
    world, result = ran(one(Role.BOTH, "b"), arrivals=[Arrival(at_s=0.0, input_tokens=4000, output_tokens=201)])
    costs = world.instances[0].member.costs
    assert isinstance(costs, Costs)
    steps = [prompt(4000), *(decoding(1, 4000 + made) for made in range(1, 201))]
    busy_s = sum(costs.step_ms(step) for step in steps) / 1000
    drawn_j = sum(costs.energy_j(step) for step in steps)
    ended_s = float(result.columns["end_ns"][0]) / NS
    assert world.energy.busy_s(world.instances[0]) == pytest.approx(busy_s, rel=0.01)
    assert result.energy_j == pytest.approx(drawn_j + (ended_s - busy_s) * GPU.idle_w, rel=0.01)


def test_a_cap_on_prefill_saves_energy_and_costs_time() -> None:
    arrivals = [Arrival(at_s=0.4 * number, input_tokens=4000, output_tokens=20) for number in range(40)]
    runs = [
        ran(one(Role.PREFILL, "p", cap=cap), one(Role.DECODE, "d", cap=cap), arrivals=arrivals)[1] for cap in (1.0, 0.5)
    ]
    assert runs[1].energy_j < 0.9 * runs[0].energy_j
    ttft = [float(run.latency_s("ttft").mean()) for run in runs]
    tpot = [float(run.latency_s("tpot").mean()) for run in runs]
    assert 1.2 < ttft[1] / ttft[0] < 1.31
    assert tpot[1] == pytest.approx(tpot[0], rel=0.02)


def test_a_run_that_is_cut_counts_the_steps_it_made() -> None:
    """The meter alone: a run of 100 steps begins, and is cut after 7."""
    world = World([one(Role.BOTH, "b")], SimSettings())
    at = world.instances[0]
    costs = at.member.costs
    assert isinstance(costs, Costs)
    whole_ns, made_ns = (costs.decode_run_ns(4, 1000, steps) for steps in (100, 7))
    run = ev.StepRun(
        number=1, at_ns=0, end_ns=whole_ns, steps=100, batch=4, sum_context=1000, prompt_tokens=0, shares=()
    )
    world.energy.ran(at, run)
    world.energy.cut(at, ev.Cut(number=1, at_ns=5, end_ns=made_ns, steps=7))
    world.energy.died(at)
    assert world.energy.busy_s(at) == pytest.approx(made_ns / NS)
    assert world.energy.joules(at, world.energy.busy_s(at)) == pytest.approx(
        sum(costs.energy_j(decoding(4, 1000 + 4 * step)) for step in range(7)), rel=1e-3
    )


def test_a_prompts_attention_counts_though_a_run_does_not_name_it() -> None:
    """`StepRun` has no context length of its prompts; the meter infers it from the step's time."""
    world = World([one(Role.BOTH, "b")], SimSettings())
    at: SimInstance = world.instances[0]
    costs = at.member.costs
    assert isinstance(costs, Costs)
    work = StepWork(new_tokens=512, area=512 * (512 + 2 * 60_000), batch=3, sum_context=9_000)
    run = ev.StepRun(
        number=1, at_ns=0, end_ns=costs.step_ns(work), steps=1, batch=3, sum_context=9_000, prompt_tokens=512, shares=()
    )
    world.energy.ran(at, run)
    world.energy.died(at)
    assert world.energy.joules(at, 0.0) == pytest.approx(costs.energy_j(work), rel=1e-3)


def test_unknown_costs_draw_nothing() -> None:
    from support.simulated import every, members, simulate

    _, result = simulate(members(Role.PREFILL, Role.DECODE), every(0.1, 10))
    assert result.energy_j == 0.0


def test_an_instance_that_ends_draws_nothing_more() -> None:
    from goodput.actions import Stop
    from sim.provisioning import Timed

    kept, ended = one(Role.BOTH, "kept"), one(Role.BOTH, "ended")
    world = World([kept, ended], SimSettings())
    world.provisioning.schedule([Timed(10.0, Stop(instance=InstanceId("ended")))])
    result = world.run([Arrival(at_s=at, input_tokens=10, output_tokens=1) for at in (0.0, 100.0)])
    assert result.energy_j == pytest.approx(GPU.idle_w * (100 + 11), rel=0.01)
    assert replace(kept, name=ended.name) == ended
