"""Replays measured runs of real engines, and bounds the error of the twin and the cost model together.

The bounds lie a little above the figures of docs/validation.md, so that a regression of either is seen. The steady
loads are shorter than there: a twentieth of their time, one seed.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

from costs import shipped
from sim.validate.figures import RunComparison, totals, without_its_own_run
from sim.validate.measured import read_gpu, read_requests, read_series, read_settings, read_steady
from sim.validate.stamped import Stamped, replay_stamped
from sim.validate.steady import BUSY_STEPS, SteadyLoad, replay_steady

SHORT = SteadyLoad(seeds=1, share=0.05)


@pytest.fixture(scope="module")
def data() -> Path:
    root = os.environ.get("BATON_DATA")
    if not root or not (Path(root) / "measured").is_dir():
        pytest.skip("measured runs: set BATON_DATA to the folder that holds measured/ (docs/validation.md)")
    return Path(root) / "measured"


@pytest.fixture(scope="module")
def steady_runs(data: Path) -> dict[str, RunComparison]:
    rows, _ = read_steady((data / "vllm-0.15-h100.csv").read_text(), "vllm-0.15-h100.csv")
    return {row.number: replay_steady(row, shipped.model_named(row.model), shipped.profiles(), SHORT) for row in rows}


def stamped(folder: Path) -> RunComparison:
    def text(name: str) -> str:
        return (folder / name).read_text()

    settings = read_settings(text("meta.json"), "meta.json")
    return replay_stamped(
        Stamped(
            name=folder.name,
            settings=settings,
            requests=read_requests(text("requests.jsonl"), "requests.jsonl"),
            samples=read_series(text("timeseries.csv"), "timeseries.csv")[0],
            gpu=settings.gpu or read_gpu(text("config.json"), "config.json"),
        ),
        shipped.model_named(settings.model),
        shipped.profiles(),
    )


def error(run: RunComparison, name: str) -> float:
    figure = run.figure(name)
    assert figure is not None and figure.error is not None
    return figure.error


def test_the_medians_over_the_steady_runs(steady_runs: dict[str, RunComparison]) -> None:
    found = {each.name: each for each in totals(list(steady_runs.values()))}
    assert {each.runs for each in found.values()} == {9}
    assert found["TPOT mean"].median <= 0.06
    assert found["E2E mean"].median <= 0.06
    assert found["TTFT mean"].median <= 0.06
    ttft, e2e = without_its_own_run(list(steady_runs.values()), BUSY_STEPS)
    assert ttft.median <= 0.1
    assert e2e.median <= 0.06


def test_a_mixture_near_saturation_is_worse(data: Path) -> None:
    """At a twentieth of its load it has not queued yet, so that its first tokens say little: here it has a tenth."""
    rows, _ = read_steady((data / "vllm-0.15-h100.csv").read_text(), "vllm-0.15-h100.csv")
    (row,) = (each for each in rows if each.number == "56")
    run = replay_steady(row, shipped.model_named(row.model), shipped.profiles(), SteadyLoad(seeds=2))
    assert abs(error(run, "TTFT mean")) <= 0.52
    assert abs(error(run, "TPOT mean")) <= 0.2
    assert abs(error(run, "E2E mean")) <= 0.22


@pytest.mark.parametrize(
    ("row", "tpot", "e2e"),
    [
        ("2", 0.06, 0.06),
        ("7", 0.09, 0.09),
        ("13", 0.12, 0.12),
        ("16", 0.04, 0.04),
        ("18", 0.05, 0.05),
        ("26", 0.13, 0.12),
    ],
)
def test_dense_models_on_one_h100_and_on_several(
    steady_runs: dict[str, RunComparison], row: str, tpot: float, e2e: float
) -> None:
    run = steady_runs[row]
    assert abs(error(run, "TPOT mean")) <= tpot
    assert abs(error(run, "E2E mean")) <= e2e
    assert run.preemptions == 0


def test_a_4090_out_of_memory(data: Path) -> None:
    """Requests wait minutes for KV blocks, and many are preempted: times follow from the scheduler's rules, too."""
    run = stamped(data / "vllm-0.19-rtx4090-llama-3.1-8b")
    for name in ("TTFT", "TPOT", "E2E", "queue"):
        for statistic in ("mean", "p50", "p90", "p99"):
            assert abs(error(run, f"{name} {statistic}")) <= 0.04, (name, statistic)
    assert max(run.one_by_one.values()) <= 0.05
    assert 100 <= run.preemptions <= 300
    full = [row for row in run.series if row.waiting > 20]
    assert len(full) > 60
    assert statistics.median(abs(row.running_predicted / row.running - 1) for row in full) <= 0.08
    assert statistics.median(abs(row.waiting_predicted / row.waiting - 1) for row in full) <= 0.08
    assert min(row.kv_percent_predicted for row in full) > 85


def test_a_pro_6000_at_its_limit_of_running_requests(data: Path) -> None:
    run = stamped(data / "vllm-0.19-rtxpro6000-llama-3.1-8b")
    assert abs(error(run, "TPOT mean")) <= 0.06
    assert abs(error(run, "E2E mean")) <= 0.08
    assert abs(error(run, "TTFT mean")) <= 0.14
    assert run.preemptions == 0
    assert max(row.running_predicted for row in run.series) == 128
