"""`baton plan` finds the cheapest fleet that keeps the promises, as a search over every fleet does; errors of input."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from baton.cli import main
from baton.planning import Planner, Task, goals_of
from cluster.spec import parse
from costs.hardware import gpu_named
from costs.shipped import model_named
from goodput.search import TOLERANCE, SearchState, TrialVerdict, search
from loadgen.arrival import Arrival
from loadgen.arrivals import poisson

FILE = """
models:
  - name: meta-llama/Llama-3.1-8B
slo:
  interactive: {ttft_ms: 300, tpot_ms: 30, attainment: 0.9}
hardware:
  H100-SXM: {count: 2}
  L40S: {count: 3, price_per_hour: 1.0}
"""
LOAD = ["--rate", "6", "--requests", "150", "--input-tokens", "1500", "--output-tokens", "60"]


def load(seed: int, rate: float, count: int) -> tuple[Arrival, ...]:
    rng = np.random.default_rng(seed)
    times = poisson(rate, rng)
    return tuple(
        Arrival(
            at_s=next(times),
            input_tokens=int(rng.lognormal(7.3, 0.7)) + 1,
            output_tokens=int(rng.lognormal(4.0, 0.7)) + 1,
            slo_class="interactive",
        )
        for _ in range(count)
    )


LONG = [pytest.param(seed, 2.0 + seed % 5, marks=pytest.mark.long) for seed in range(20, 30)]


@pytest.mark.parametrize(("seed", "rate"), [(11, 4.0), *LONG])
def test_the_plan_is_the_cheapest_of_all_fleets_that_hold(seed: int, rate: float) -> None:
    spec = parse(FILE, "baton.yaml").spec
    assert spec is not None
    task = Task(
        model=spec.models[0],
        shape=model_named("Llama-3.1-8B"),
        gpus=((gpu_named("H100-SXM"), 1), (gpu_named("L40S"), 2)),
        arrivals=load(seed, rate, 60),
        goals=goals_of(spec),
        usual="interactive",
    )
    planner = Planner(task)
    found = SearchState()
    going = search(planner.spaces, found)
    try:
        batch = next(going)
        while True:
            wanted = batch[0]
            held = planner.holds(planner.arrangements[wanted.space.name], wanted.counts)
            batch = going.send(TrialVerdict(holds=held))
    except StopIteration:
        pass
    assert found.best is not None
    assert planner.holds(planner.arrangements[found.best.space.name], found.best.counts)
    for space in planner.spaces:
        for counts in product(*(range(1, most + 1) for most in space.most)):
            if space.allows(counts) and space.price(counts) < found.best.price * (1 - TOLERANCE):
                assert not planner.holds(planner.arrangements[space.name], counts), (str(space), counts)


def test_a_plan_says_what_it_found_and_writes_a_file_that_lint_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "baton.yaml", tmp_path / "planned.yaml"
    file.write_text(FILE)
    assert main(["plan", str(file), *LOAD, "--processes", "1", "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"]
    assert found["proven"]
    assert best["holds"]
    assert best["attainment"]["interactive"]["share"] >= 0.9
    assert best["attainment"]["interactive"]["low"] <= best["attainment"]["interactive"]["share"]
    assert best["price_per_hour"] == sum(
        pool["instances"] * pool["tp"] * {"H100-SXM": 2.95, "L40S": 1.0}[pool["gpu"]] for pool in best["pools"]
    )
    assert best["joules_per_output_token"] > 0
    assert main(["lint", str(out)]) == 0
    assert out.read_text().startswith("# Planned by `baton plan` for 150 requests: ")
    assert main(["plan", str(file), *LOAD, "--out", str(out)]) == 2
    assert "there is such a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("promise", "words", "code", "told"),
    [
        ("{ttft_ms: 300, tpot_ms: 3}", [], 1, "no plan: TPOT 3 ms: 100.0% of the requests take longer alone"),
        ("{ttft_ms: 300, tpot_ms: 30}", ["--gpus", "L9=3"], 2, "Nothing is known about the GPU 'L9'"),
        ("{ttft_ms: 300, tpot_ms: 30}", ["--model", "x"], 2, "--model x: "),
        ("{ttft_ms: 300, tpot_ms: 30}", ["--processes", "0"], 2, "--processes 0: give 1 or more"),
        ("{ttft_ms: 300, tpot_ms: 30}", ["--", "--dtype", "auto"], 2, "takes no vLLM flags"),
        ("{ttft_ms: 300, tpot_ms: 30, attainment: 1.0}", ["--rate", "2000"], 1, "no plan: "),
    ],
)
def test_what_cannot_be_planned_is_told(
    promise: str, words: list[str], code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(FILE.replace("{ttft_ms: 300, tpot_ms: 30, attainment: 0.9}", promise))
    assert main(["plan", str(file), *LOAD, *words]) == code
    said = capsys.readouterr()
    assert told in said.out + said.err


def test_a_file_without_promises_or_hardware_is_no_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("models:\n  - name: meta-llama/Llama-3.1-8B\n")
    assert main(["plan", str(file), *LOAD]) == 2
    assert "promises nothing" in capsys.readouterr().err
    file.write_text("models:\n  - name: meta-llama/Llama-3.1-8B\nslo: {a: {ttft_ms: 300}}\n")
    assert main(["plan", str(file), *LOAD]) == 2
    assert "names no GPU under `hardware`" in capsys.readouterr().err
