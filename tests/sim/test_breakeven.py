"""The modes of the break-even experiment (hand over always, never, or one request both ways) change nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.instance import Role
from costs import shipped
from loadgen.lengths import parse
from loadgen.report import Targets
from router.scheduler.scoring.workload import workload
from sim.experiments.breakeven import MODES, PATIENCE_S, Forced, in_mode, outcome, regret
from sim.experiments.loads import UnitLoad, made_up
from sim.experiments.systems import EqualInstances, Shelf, System, simulate
from sim.kernel import NS
from sim.result import Result

MODEL = "meta-llama/Llama-3.1-8B"
TARGETS = Targets(400, None, 30, None)
FLEETS = {
    "two pools": tuple(EqualInstances(role=role, count=2, tp=1, gpu="H100") for role in (Role.PREFILL, Role.DECODE)),
    "all do both": (EqualInstances(role=Role.BOTH, count=4, tp=1, gpu="H100"),),
}


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf(shipped.models(), shipped.profiles())


@pytest.fixture(scope="module")
def load() -> UnitLoad:
    return made_up("tiny", parse("lognormal:mean=1500,cv=1"), parse("uniform:2-60"), 1, 120)


def run(fleet: str, policy: object, shelf: Shelf, load: UnitLoad) -> Result:
    system = System(name="x", pools=FLEETS[fleet])
    return simulate(in_mode(system, policy), MODEL, shelf, load.at_rate(40.0, 120), PATIENCE_S, TARGETS)  # type: ignore[arg-type]


@pytest.mark.parametrize("fleet", FLEETS)
def test_always_hands_all_over_and_never_none(fleet: str, shelf: Shelf, load: UnitLoad) -> None:
    shares = {}
    for mode, policy in MODES.items():
        result = run(fleet, policy, shelf, load)
        assert result.good().all()
        shares[mode] = outcome(result, TARGETS).handed_over
    assert (shares["always"], shares["never"]) == (1.0, 0.0)
    assert 0 <= shares["auto"] <= 1


@pytest.mark.parametrize("pair", [False, True])
def test_one_forced_decision_leaves_all_before_it_as_they_were(pair: bool, shelf: Shelf, load: UnitLoad) -> None:
    arrivals = load.at_rate(40.0, 120)
    free = run("two pools", workload, shelf, load)
    forced = run("two pools", Forced(round(arrivals[60].at_s * NS) / NS, pair=pair), shelf, load)
    assert bool(forced.columns["flags"][60] & 1) is pair
    before = free.columns["end_ns"] < free.columns["at_ns"][60]
    assert before.sum() > 10
    assert np.array_equal(free.columns[before], forced.columns[before])


def test_forcing_what_it_would_have_done_changes_nothing(shelf: Shelf, load: UnitLoad) -> None:
    arrivals = load.at_rate(40.0, 120)
    free = run("two pools", workload, shelf, load)
    pair = bool(free.columns["flags"][60] & 1)
    same = Forced(round(arrivals[60].at_s * NS) / NS, pair=pair)
    assert np.array_equal(run("two pools", same, shelf, load).columns, free.columns)
    assert same.free is pair
    system = System(name="x", pools=FLEETS["two pools"])
    found = regret(system, MODEL, shelf, arrivals, 60, TARGETS)
    assert found is not None
    assert found.auto is pair
    assert found.relative >= 0
    assert found.latency_ms[0] != found.latency_ms[1]
