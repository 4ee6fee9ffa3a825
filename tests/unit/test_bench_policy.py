"""What the benchmark of choosing compares, and what it makes of its results."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import (
    breakeven,
    policy,
    policy_bound,
    policy_cell,
    policy_figures,
    policy_loads,
    policy_sustained,
    policy_tables,
)
from bench import policy_grid as grid
from bench.sources import reached
from cluster.instance import Role
from costs import shipped
from loadgen.arrival import Arrival
from loadgen.report import Targets
from sim.baselines import BASELINES
from sim.experiments.breakeven import Regret
from sim.experiments.contest import splits, whole
from sim.experiments.loads import Size, UnitLoad
from sim.experiments.systems import EqualInstances, Shelf
from sim.experiments.tuning import Case

# --- the grid ---------------------------------------------------------------------------------------------------------


def test_the_grid_has_24_cells_of_four_traces_three_targets_and_two_fleets() -> None:
    cells = list(grid.cells())
    assert len({cell.name for cell in cells}) == len(cells) == 24
    assert {(cell.trace.name, cell.factor, cell.fleet.name) for cell in cells} == {
        (trace.name, factor, fleet) for trace in grid.TRACES for factor in (2, 5, 10) for fleet in ("A", "B")
    }
    assert {fleet.count for fleet in grid.FLEETS} == {4}


def test_every_rival_takes_part() -> None:
    assert {*grid.RIVALS, *grid.SAME} == {*BASELINES, *grid.WEIGHTED}
    for cell in grid.cells():
        taking = {each for each in grid.RIVALS if grid.differs(each, cell)}
        assert ("weighted_requests" in taking) == (cell.fleet.name == "B")
        assert "dynamo_conditional" in taking, "its queue differs from Dynamo's, whether prompts are cached or not"
    for name, same in grid.SAME.items():
        assert BASELINES[name]() is BASELINES[same](), "not the same rule any more: it has to run, too"


def test_nothing_is_tuned_on_what_is_reported() -> None:
    assert grid.TUNING_WINDOW not in grid.WINDOWS
    assert len(grid.WINDOWS) >= 5
    for cell in grid.cells():
        windows = cell.windows(grid.FULL)
        assert len(windows) >= grid.WINDOWS_MIN
        assert not {*cell.tuning_windows} & {*windows}
        blind = [each for each in windows if each in grid.BLIND]
        assert list(windows[: len(blind)]) == blind, "the first ones are those that nothing of Baton is tuned on"
        assert blind == ([2] if cell.name.startswith("Azure conversation, 10 ×") else [2, 4])
        assert {*blind} <= {*cell.windows(grid.QUICK)}
        assert {*windows, *cell.tuning_windows} <= {grid.TUNING_WINDOW, *grid.WINDOWS}
        assert len(cell.tuning_windows) == (1 if cell.name.startswith("Azure conversation, 10 ×") else 2)
        assert not cell.trace.rows or (max(*windows, *cell.tuning_windows) + 1) * cell.requests <= cell.trace.rows
    assert {*grid.QUICK.cells} < {cell.name for cell in grid.cells()}


def test_targets_are_multiples_of_the_slower_gpu_s_latency() -> None:
    cell = next(each for each in grid.cells() if each.name == "Azure conversation, 5 ×, fleet B")
    assert (cell.targets.ttft_ms, cell.targets.tpot_ms) == (884.0, 63.95)


@pytest.mark.parametrize("trace", grid.TRACES, ids=lambda trace: trace.name)
@pytest.mark.parametrize("gpu", ["H100", "A100-80G-SXM"])
def test_an_unloaded_latency_is_that_of_some_prompt_and_context(trace: grid.Trace, gpu: str) -> None:
    """`bench.policy_grid` says which prompt and context count. Only a run with the traces can check these lengths."""
    costs = Shelf(shipped.models(), shipped.profiles()).costs(
        grid.MODEL, EqualInstances(role=Role.BOTH, count=1, tp=1, gpu=gpu)
    )
    prompt, context = {
        "Azure code": (5188, 2062),
        "Azure conversation": (2734, 1260),
        "Mooncake conversation": (27_367, 12_206),
        "ServeGen R1": (1235, 1694),
    }[trace.name]
    ttft_ms, tpot_ms = trace.unloaded(gpu)
    assert ttft_ms == pytest.approx(costs.prefill_ms(prompt) + costs.first_token_ms, rel=0.01)
    assert tpot_ms == pytest.approx(costs.decode_step_ms(1, context), rel=0.01)


# --- loads and arrangements -------------------------------------------------------------------------------------------


def test_windows_of_a_trace_are_disjoint(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    lines = [
        f"2023-11-16 18:17:{at // 4:02d}.{at % 4 * 25:02d}00000,{1000 + at},{3000 if at % 2 else 5}" for at in range(60)
    ]
    (tmp_path / "traces" / "x.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    trace = grid.Trace(name="x", file="x.csv", requests=10, unloaded_ms=(), answer_max=2048)
    windows = [policy_loads.load(tmp_path, trace, window) for window in range(6)]
    prompts = [[each.input_tokens for each in window.arrivals] for window in windows]
    assert prompts == [[1000 + 10 * window + at for at in range(10)] for window in range(6)]
    for window in windows:
        assert window.arrivals[0].at_s == 0
        assert window.arrivals[-1].at_s == pytest.approx(9)
        assert {each.output_tokens for each in window.arrivals} == {5, 2048}


def test_windows_for_tuning_follow_one_another_at_one_rate() -> None:
    rows = [Arrival(at_s=float(at), input_tokens=100 + at, output_tokens=5) for at in range(10)]
    load = policy_loads.joined([UnitLoad("a", rows), UnitLoad("b", rows[:4])])
    assert [each.at_s for each in load.arrivals] == [float(at) for at in range(14)]
    assert [each.input_tokens for each in load.arrivals] == [*range(100, 110), *range(100, 104)]


def test_an_arrangement_names_its_roles_and_gpus() -> None:
    cell = next(each for each in grid.cells() if each.fleet.name == "B")
    pools, shelf = policy_cell.pools_of(cell), Shelf(shipped.models(), shipped.profiles())
    load = UnitLoad("x", [Arrival(at_s=0.0, input_tokens=1000, output_tokens=100)])
    case = Case(
        name="x",
        model=grid.MODEL,
        load=load,
        targets=Targets(100, None, 30, None),
        size=Size(fewest=1, most=1, lives=1),
        tolerance=0.04,
    )
    one = whole(pools, [512], "dynamo", admission=False).systems[0]
    assert policy_cell.arrangement(one) == "2× H100 (512) + 2× A100 (512)"
    for order, said in zip(
        policy_cell.orders(pools), ("2P H100 + 1P A100 + 1D A100", "2P A100 + 1P H100 + 1D H100"), strict=True
    ):
        for rival in ("dynamo", "splitwise"):
            system = splits(case, shelf, order, rival, admission=False).systems[2]
            assert policy_cell.arrangement(system) == said


# --- results ----------------------------------------------------------------------------------------------------------


def run(attained: float, lives: float) -> dict[str, Any]:
    return {
        "attained": attained,
        "by_length": [1.0] * 9 + [0.5],
        "ttft_ms": {"50": 100.0, "99": 900.0},
        "dropped": 0.05,
        "lives": lives,
    }


def row(cell: str, ours: float, rival: float, admitted: float, bound: float = 20.0) -> dict[str, Any]:
    def found(rate: float, at: float) -> dict[str, Any]:
        return {
            "rates": {"0.9": rate * at, "0.95": rate * at * 0.9, "0.99": 0.0},
            "curve": [[rate * at, 0.9]],
            "there": run(0.9, 4.5),
        }

    system = {"policy": "p", "arrangement": "8× H100"}
    classes = {"ours": ours, "rival": rival, "rival_admitted": admitted, "ours_like_rival": admitted}
    return {
        "cell": cell,
        "gpus": 8,
        "targets": {"ttft_ms": 100.0, "tpot_ms": 10.0},
        "classes": dict.fromkeys(classes, system),
        "windows": [
            {"number": number, **{name: found(rate, at) for name, rate in {**classes, "bound": bound}.items()}}
            for number, at in ((2, 1.0), (4, 1.1), (1, 0.9))
        ],
        "cpu_s": 1.0,
    }


def test_an_interval_is_student_s() -> None:
    mean, half = policy_tables.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3
    assert half == pytest.approx(2.776 * math.sqrt(2.5 / 5))


def test_the_gap_to_the_bound_and_the_cells_that_are_lost() -> None:
    rows = [row("a", 16, 8, 12), row("b", 9, 10, 10), row("c", 0, 0, 0), row("d", 5, 0, 6)]
    told = {**policy_tables.figures(rows, "full"), "sources": "x", "missing": []}
    assert told["counted"] == 3
    assert [cell["gap_closed"] for cell in told["cells"]] == [0.5, -0.1, 0.0, pytest.approx(-1 / 14, abs=1e-3)]
    assert told["share_half_closed"] == pytest.approx(1 / 3, abs=1e-3)
    assert told["least_ratio"] == pytest.approx(5 / 6, abs=1e-3)
    assert told["below_gate"] == told["lost_to_admitted"] == ["b", "d"]
    assert told["geometric_mean_over_admitted"] == pytest.approx((16 / 12 * 0.9 * 5 / 6) ** (1 / 3), abs=1e-3)
    targets = policy_tables.targets(told)
    assert not targets["share_of_cells_with_half_the_gap_closed"]["met"]
    assert not targets["least_ratio_over_any_rival"]["met"]
    assert [len(table.rows) for table in policy_tables.tables(told)] == [4, 7, 4, 4, 8]
    assert policy_tables.line(rows[0]).startswith(
        "a: 1.33 (1.33, 1.33), all windows 1.33 ± 0.00, over p with our admission"
    )
    assert "4.5 mean answers" in policy_tables.how(told)
    json.dumps(told, allow_nan=False)


def test_the_first_table_is_the_comparison_with_admission_and_the_bound() -> None:
    first = policy_tables.tables({**policy_tables.figures([row("a", 16, 8, 12)], "full"), "sources": "x"})[0]
    (found,) = first.rows
    assert found[:5] == ["a", "100 / 10", "1.50 (p, 8× H100)", "2.00 (8× H100)", "2.50"]
    assert found[5:] == ["1.33 (1.33, 1.33)", "50%", "2.00 (2.00, 2.00)", "1.33 ± 0.00"]


def test_the_headline_is_of_the_windows_that_nothing_was_tuned_on() -> None:
    one = row("a", 12, 10, 10)
    looked_at = one["windows"][2]
    looked_at["ours"]["rates"]["0.9"] *= 2
    told = policy_tables.figures([one], "quick")
    cell = told["cells"][0]
    assert cell["over_admitted"]["blind"] == 1.2
    assert cell["over_admitted"]["mean"] == 1.6
    assert cell["gap_closed"] == 0.2
    assert (told["geometric_mean_over_admitted"], told["geometric_mean_all_windows"]) == (1.2, 1.6)
    assert told["least_ratio"] == 1.2
    assert "1.20 × the goodput" in policy_tables.said(told)


def test_costs_that_are_off_are_shown_beside_the_true_ones() -> None:
    one = row("a", 10, 8, 9)
    for window, attained in zip(one["windows"], (0.9, 0.8, 0.7), strict=True):
        window["costs_off"] = {"1": 0.9, **dict.fromkeys(("0.4", "0.8", "1.2", "2.5"), attained)}
    table = policy_tables.tables(policy_tables.figures([one], "full"))[5]
    assert table.rows == [["a", "0.900", *["0.800"] * 4]]


def test_harder_worlds_show_which_share_of_its_rate_each_system_keeps() -> None:
    one = row("a", 10, 8, 10)
    for window in one["windows"]:
        rates = {name: window[name]["rates"]["0.9"] for name in ("rival_admitted", "ours")}
        window["harder"] = {"rough": {name: rate / 2 for name, rate in rates.items()}, "three routers": {}}
    table = policy_tables.tables(policy_tables.figures([one], "full"))[5]
    assert table.rows == [["a", "rough", "0.50", "0.50", "1.00", "1.00"]]


def test_curves_are_averaged_where_all_windows_have_runs() -> None:
    def window(whole: float, *attained: float) -> tuple[Any, Any]:
        return np.array([0.5, 1.0, 1.5]) * whole, np.array(attained)

    at, mean, half = policy_figures.averaged([window(1.0, 1.0, 0.9, 0.5), window(1.0, 1.0, 0.8, 0.9)])
    assert (at[0], at[-1]) == pytest.approx((0.6, 1.5))
    middle = int(np.argmin(abs(at - 1.0)))
    assert mean[middle] == pytest.approx((0.9 + 0.85) / 2), "the second window's curve falls: 0.85 from 1.0 on"
    assert half[middle] == pytest.approx(12.706 * np.std([0.9, 0.85], ddof=1) / math.sqrt(2))
    alone = policy_figures.averaged([window(1.0, 1.0, 0.9, 0.5)])
    assert not alone[2].any()
    assert not len(policy_figures.averaged([])[0])


def test_finished_cells_are_kept_by_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "KEPT", tmp_path / "work" / "policy.jsonl")
    monkeypatch.setattr(policy, "PUBLISHED", tmp_path / "none.json")
    for sources in ("old", "new"):
        for plan in ("full", "quick"):
            policy.keep({"cell": f"{sources} {plan} cell", "sources": sources, "plan": plan})
    with policy.KEPT.open("a") as out:
        out.write('{"cell": "cut off')
    assert list(policy.kept("new", "quick")) == ["new quick cell"]


def test_published_cells_of_these_sources_do_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long benchmark goes on where another machine ended."""
    monkeypatch.setattr(policy, "KEPT", tmp_path / "none.jsonl")
    monkeypatch.setattr(policy, "PUBLISHED", tmp_path / "policy.json")
    cells = [{"cell": f"{name} {plan}", "sources": name, "plan": plan} for name in "ab" for plan in ("full", "quick")]
    policy.PUBLISHED.write_text(json.dumps({"figures": {"cells": cells}}))
    assert policy.kept("b", "full") == {"b full": cells[2]}


def test_rows_depend_on_what_a_simulation_can_reach() -> None:
    names = {str(each.relative_to(policy.ROOT)) for each in reached([policy.ROOT / policy.SOURCES[0]], policy.ROOT)}
    assert {"sim/experiments/contest.py", "router/scheduler/scheduler.py", "router/__init__.py"} <= names
    assert not {"router/api/server.py", "router/http/legs.py", "bench/policy_tables.py"} & names
    assert not {"bench/policy_sustained.py", "bench/policy_bound.py"} & names, "a second bound makes no cell void"


def test_no_cell_begins_after_the_time_is_up() -> None:
    assert list(policy.rows_of(["a", "b"], lambda _name: {}, 1, -math.inf)) == []


def test_prose_says_what_the_published_figures_say() -> None:
    docs = policy.ROOT / "docs"
    told = json.loads((docs / "benchmarks" / "policy.json").read_text())["figures"]
    for page in (policy.ROOT / "README.md", docs / "benchmarks.md"):
        text = " ".join(page.read_text().split())
        assert policy_tables.said(told) in text, f"{page.name}: {policy_tables.said(told)}"
    for name in [*told["lost_to_admitted"], *told["below_gate"], *told["missing"]]:
        assert name in (docs / "benchmarks.md").read_text()


# --- the bound of loads that last -------------------------------------------------------------------------------------


def bounds(cell: str, four: float, sixteen: float) -> dict[str, Any]:
    def found(rate: float, lives: float) -> dict[str, Any]:
        return {"rates": {"0.9": rate}, "requests": 2000, "lives": lives}

    return {
        "cell": cell,
        "sources": "x",
        "windows": [
            {"number": number, "life_s": 50.0, "sustained_4": found(four, 4.2), "sustained_16": found(sixteen, 16.2)}
            for number in (2, 4, 1)
        ],
    }


def test_both_bounds_stand_beside_the_published_goodputs() -> None:
    cells = [{**row(name, ours, 8, 12), "requests": 1000} for name, ours in (("a", 15), ("b", 12), ("c", 15))]
    made = {name: bounds(name, four, 16.0) for name, four in (("a", 18.0), ("b", 12.0))}
    told = {**policy_bound.figures(cells, made), "sources": "x", "policy_sources": "y"}
    one, other = told["cells"]
    assert (one["first"]["gap_closed"], one["first"]["over_admitted"]) == (0.375, pytest.approx(20 / 12, abs=1e-3))
    assert one["first"]["lives_least"] == pytest.approx(1000 / 22 / 50, abs=1e-2)
    assert one["sustained_4"]["over_admitted"] == pytest.approx(18 / 12.6, abs=1e-3)
    assert one["sustained_4"]["gap_closed"] == pytest.approx((15 - 12) * 1.05 / (18 - 12 * 1.05), abs=1e-3)
    assert not one["exceeded"]
    assert other["exceeded"], "ours at 13.2 in one window, a run of a few lives; the bound is of a load that lasts"
    assert other["sustained_4"]["gap_closed"] is None, "the rival exceeds the bound on these windows: no gap"
    assert (told["counted"], told["share_half_closed"], told["exceeded"], told["missing"]) == (2, 1.0, ["b"], ["c"])
    assert policy_bound.targets(told)["share_of_cells_with_half_the_gap_closed"]["met"]
    (table,) = policy_bound.tables(told)
    assert table.rows[0] == [
        "a", "0.91 lives", "2,000", "1.50", "1.88", "2.50", "2.25", "2.00", "1.43", "38%", "58%", "93%",
    ]  # fmt: skip
    assert "lasts less than 4 lives in 2 of the cells" in policy_bound.how(told)
    json.dumps(told, allow_nan=False)


def test_a_window_has_a_bound_for_each_length_of_load(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(each for each in grid.cells() if each.name == "ServeGen R1, 2 ×, fleet B")
    arrivals = [Arrival(at_s=float(at), input_tokens=200 + at, output_tokens=50) for at in range(40)]
    case = Case(
        name="x",
        model=grid.MODEL,
        load=UnitLoad("x", arrivals),
        targets=cell.targets,
        size=Size(fewest=40, most=40, lives=1),
        tolerance=0.04,
    )
    monkeypatch.setattr(policy_sustained, "LIVES", (1.0, 2.0))
    told = policy_sustained.of_window(cell, case, Shelf(shipped.models(), shipped.profiles()))
    short, longer = (told[name] for name in policy_sustained.BOUNDS)
    assert told["life_s"] == pytest.approx(case.life_s, abs=1e-3)
    assert short["lives"] >= 1
    assert longer["lives"] >= 2
    assert 0 < longer["rates"]["0.9"] < short["rates"]["0.9"]


def test_finished_bounds_are_kept_by_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_bound, "KEPT", tmp_path / "policy-bound.jsonl")
    assert policy_bound.kept("new") == {}
    lines = [json.dumps({"cell": name, "sources": name}) for name in ("old", "new")]
    policy_bound.KEPT.write_text("\n".join([*lines, '{"cell": "cut off']))
    assert list(policy_bound.kept("new")) == ["new"]


def test_bounds_depend_on_the_relaxation_and_not_on_their_table() -> None:
    names = {
        str(each.relative_to(policy.ROOT)) for each in reached([policy.ROOT / policy_bound.SOURCES[0]], policy.ROOT)
    }
    assert {"sim/experiments/ceiling.py", "bench/policy_cell.py", "bench/policy_loads.py"} <= names
    assert not {"bench/policy_bound.py", "bench/policy_tables.py"} & names


def test_published_bounds_are_of_the_published_cells() -> None:
    docs = policy.ROOT / "docs" / "benchmarks"
    compared, bound = (
        json.loads((docs / f"{name}.json").read_text())["figures"] for name in ("policy", "policy-bound")
    )
    assert bound["policy_sources"] == compared["sources"], "run: make bench-bound ARGS=--publish"
    assert [each["cell"] for each in bound["cells"]] == [each["cell"] for each in compared["cells"]]
    for one, other in zip(bound["cells"], compared["cells"], strict=True):
        assert one["goodput"]["ours"] == policy_tables.rates(other, "ours"), "run: make bench-bound ARGS=--publish"


# --- handing off or not -----------------------------------------------------------------------------------------------


def test_auto_is_compared_with_the_better_of_always_and_never() -> None:
    def mode(attained: float, latency_ms: float, spread: float = 0.0) -> dict[str, Any]:
        stretches = [attained - spread, attained + spread] * 5
        return {"attainment": attained, "stretches": stretches, "latency_ms": latency_ms}

    modes = {"always": mode(0.8, 20), "never": mode(0.9, 30), "auto": mode(0.855, 22, spread=0.09)}
    lost, half, added = breakeven.worse_by(modes)
    assert lost == pytest.approx(0.05)
    assert half == pytest.approx(2.262 * 0.1 / 3)  # ten samples, 0.1 of 0.9 to either side: Student's t for nine
    assert added == pytest.approx(0.1)


def test_regret_is_against_the_better_way() -> None:
    right = Regret(auto=True, latency_ms=(110.0, 100.0), missed=(3, 1))
    wrong = Regret(auto=False, latency_ms=(110.0, 100.0), missed=(3, 1))
    assert (right.relative, right.more_missed) == (0, -2)
    assert right.gain == pytest.approx(0.1)
    assert wrong.relative == pytest.approx(0.1)
    assert wrong.gain == pytest.approx(-1 / 11)
    rows = [{**asdict(each), "relative": each.relative, "gain": each.gain} for each in (right, wrong, right)]
    told = breakeven.summed(rows)
    assert told["worse"] == pytest.approx(1 / 3)
    assert told["regret_mean"] == pytest.approx(0.1 / 3)
    assert told["more_missed_each"] == pytest.approx((-2 + 2 - 2) / 3)


def test_the_jobs_take_500_decisions_and_every_trace_on_both_fleets() -> None:
    jobs = breakeven.jobs(breakeven.PARTS)
    both = [(trace, fleet) for parts, trace, fleet in jobs if parts == ("traces", "regret")]
    assert len(set(both)) == len(both) == 8
    assert sum(breakeven.DECISIONS // 8 + (fleet == breakeven.FLEETS[0]) for _, fleet in both) >= 500
    assert [window for parts, window, _ in jobs if parts == ("mixed",)] == list(grid.WINDOWS)
    assert {parts for parts, _, _ in breakeven.jobs(["regret"])} == {("regret",)}


def test_what_break_even_tells_of_its_parts() -> None:
    mode = {"attainment": 0.9, "stretches": [0.9] * 10, "latency_ms": 20.0, "handed_over": 0.5}
    named = {"trace": "t", "fleet": "f", "system": "4P H100 + 4D H100", "rate": 10.0, "cpu_s": 1.0}
    auto = {**mode, "latency_ms": 21.0}
    one = Regret(auto=True, latency_ms=(110.0, 100.0), missed=(3, 1))
    decisions = [{**asdict(one), "relative": one.relative, "gain": one.gain}] * 2
    latency = {"workload": 9.0, "round_robin": 10.0, "least_requests": 9.0}
    rows = [
        {**named, "part": "traces", "modes": {"always": mode, "never": mode, "auto": auto}},
        {**named, "part": "regret", "decisions": decisions},
        *(
            {"part": "mixed", "window": at, "latency_s": {"0.7": latency, "0.9": latency}, "cpu_s": 1.0}
            for at in range(5)
        ),
    ]
    found = breakeven.figures_of(rows)
    targets = breakeven.targets_of(found)
    assert targets["worse_attainment"]["met"]
    assert (targets["worse_latency"]["value"], targets["worse_latency"]["met"]) == (0.05, False)
    assert (targets["latency_gain"]["value"], targets["latency_gain"]["met"]) == (0.1, False)
    assert [len(table.rows) for table in breakeven.tables_of(found)] == [1, 2, 4]
    json.dumps(found, allow_nan=False)
