"""Prefill instances of unequal speed: the slow ones compute what they can, while requests wait for the quick one."""

from __future__ import annotations

import numpy as np

from cluster.instance import Role
from costs import shipped
from loadgen.lengths import Uniform
from loadgen.report import Targets
from sim.experiments.loads import made_up
from sim.experiments.systems import EqualInstances, Shelf, System, simulate

TARGETS = Targets(8000.0, None, 60.0, None)
FLEET = (
    EqualInstances(role=Role.PREFILL, count=1, tp=1, gpu="H100-SXM"),
    EqualInstances(role=Role.PREFILL, count=2, tp=1, gpu="A100-80G-SXM"),
    EqualInstances(role=Role.DECODE, count=1, tp=1, gpu="H100-SXM"),
)
REQUESTS, PER_S = 600, 4.5


def test_slow_prefill_instances_are_not_kept_idle_in_an_overload() -> None:
    """An A100 takes three times as long for a prompt, and computes nothing else. A price that counted a millisecond of
    the decode instance no dearer left both nearly idle, let that instance compute a third of the prompts, and kept
    0.873. (Two seeds have 0.982 and 0.923.)
    """
    shelf = Shelf(shipped.models(), shipped.profiles())
    system = System(name="unequal", pools=FLEET, policy="workload", admission=True)
    attained, on_slow = [], []
    for seed in (1, 2):
        load = made_up("long", Uniform(500, 24_000), Uniform(50, 500), seed, REQUESTS)
        arrivals = load.at_rate(PER_S, REQUESTS)
        result = simulate(system, "meta-llama/Llama-3.1-8B", shelf, arrivals, 16.0, TARGETS)
        attained.append(float(result.met(TARGETS).mean()))
        on_slow.append(float(np.isin(result.columns["prefill"], (1, 2)).mean()))
    assert np.mean(attained) > 0.93
    assert min(on_slow) > 0.3
