"""The command `baton plan`: objectives, power, several classes, fleets that survive a loss, reports, bad input."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.plan_cases import goal, random_task

from baton import clusterfile, planning
from baton.cli import main
from baton.commands import plan as command
from baton.plan_file import pools_of
from baton.planning import FleetResults
from baton.workload import workload
from cluster.errors import UsageError
from cluster.instance import Role
from cluster.spec import Model, instances, parse
from costs.hardware import gpu_named
from costs.shipped import model_named
from goodput.candidates import InstanceKind
from goodput.search import TOLERANCE, SearchState
from loadgen.arrival import Arrival
from sim.evaluate import Evaluation

FILE = """
models:
  - name: meta-llama/Llama-3.1-8B
    pools: {both: {env: {A: b}, engine_args: {max_num_batched_tokens: 512, max-num-seqs: 64}}}
slo:
  interactive: {ttft_ms: 600, tpot_ms: 60, attainment: 0.9}
hardware:
  L40S: {count: 3, price_per_hour: 1.0, power_w: 300}
  L4: {count: 3, price_per_hour: 0.4}
"""
LLAMA = "meta-llama/Llama-3.1-8B"
LOAD = ["--rate", "4", "--requests", "60", "--input-tokens", "1500", "--output-tokens", "60", "--processes", "1"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "baton.yaml"
    path.write_text(FILE)
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


class Resources(HTMLParser):
    """The resources that a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "srcset", "action"}]
        assert tag not in {"script", "iframe", "link", "object"}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_everything_and_loads_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = file.parent / "plan.html"
    found = planned(capsys, str(file), *LOAD, "--html", str(page))
    read = Resources()
    read.feed(page.read_text())
    assert read.loads
    assert all(each.startswith("data:") for each in read.loads)
    for told in (found["best"]["fleet"], "price an hour", "interactive", "J an output token"):
        assert told in read.text
    assert len(found["next_steps"]) == 3
    assert all(each["best"] or each["because"] for each in found["next_steps"])
    assert found["search"]["requests_simulated"] > 0
    assert found["limit"]


def test_simulated_requests_are_counted_without_the_fixed_effort_of_trials(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    verdict = planning.Planner.verdict

    def judged(self: planning.Planner, seen: Any) -> Any:
        counted.append(seen.spent)
        return verdict(self, seen)

    monkeypatch.setattr(planning.Planner, "verdict", judged)
    search = planned(capsys, str(file), *LOAD, "--no-steps")["search"]
    assert search["fleets_simulated"] == len(counted)
    assert search["requests_simulated"] == sum(counted) <= 60 * len(counted)
    assert search["effort_spent"] == sum(counted) + planning.TRIAL_REQUESTS * len(counted)
    counted.clear()
    assert main(["plan", str(file), *LOAD, "--no-steps"]) == 0
    assert f"{len(counted)} fleets simulated ({sum(counted):,} requests)" in capsys.readouterr().err


def test_the_figures_belong_together(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = planned(capsys, str(file), *LOAD, "--no-steps")["best"]
    seconds = 3600 * sum(best["gpu_hours"].values()) / best["gpus"]
    assert best["mean_power_w"] * seconds / 3.6e6 == pytest.approx(best["kwh"], rel=0.05)
    assert best["joules_per_output_token"] == pytest.approx(best["kwh"] * 3.6e6 / (60 * 60), rel=0.05)
    each = best["attainment"]["interactive"]
    assert each["low"] < each["share"] <= each["high"]
    watts = {"L40S": 300, "L4": 72}
    most = sum(watts[pool["gpu"]] * pool["instances"] * pool["tp"] for pool in best["pools"])
    assert best["power_w_max"] <= most


def test_a_load_begins_with_its_first_request(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record keeps its times: the GPUs once waited an hour for a part of one, and drew more than their limit."""
    trace = file.parent / "trace.jsonl"
    rows = [{"at_s": 3600 + at, "input_tokens": 500, "output_tokens": 20} for at in range(20)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = planned(capsys, str(file), "--trace", str(trace), "--no-steps", "--processes", "1")["best"]
    assert sum(best["gpu_hours"].values()) < best["gpus"] * 30 / 3600
    assert best["mean_power_w"] <= best["power_w_max"]


def test_flags_that_are_not_simulated_are_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`quantization: fp8` halves the weights, and the plan takes them whole."""
    file.write_text(FILE.replace("max-num-seqs: 64", "max-num-seqs: 64, quantization: fp8, enforce_eager: true"))
    words = ["plan", str(file), *LOAD[:2], "--requests", "5", "--no-steps", "--processes", "1"]
    assert main(words) == 0
    told = "not simulated, so no figure has what they change: --quantization, --enforce-eager"
    assert told in capsys.readouterr().err
    assert planned(capsys, *words[1:])["not_simulated"] == ["--quantization", "--enforce-eager"]


def test_energy_as_the_objective_takes_no_more_of_it_than_any_other_plan(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = (*LOAD, "--no-steps", "--effort", "3000", "--gpus", "L40S=2,L4=1")
    joules = {
        objective: planned(capsys, str(file), *few, "--objective", objective)["best"]["joules_per_output_token"]
        for objective in ("energy", "cost", "gpus", "power")
    }
    assert joules["energy"] <= min(joules.values()) * (1 + TOLERANCE), joules


def test_a_power_budget_is_kept_with_caps(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = planned(capsys, str(file), *LOAD, "--no-steps", "--gpus", "L40S=3")["best"]
    watts = free["power_w_max"] * 0.8
    found = planned(capsys, str(file), *LOAD, "--no-steps", "--gpus", "L40S=3", "--power-w", f"{watts}")["best"]
    assert found["power_w_max"] <= watts
    assert any(pool["power_cap_w"] for pool in found["pools"])


def test_a_fleet_that_survives_has_one_more_than_it_needs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = planned(capsys, str(file), *LOAD, "--no-steps", "--gpus", "L40S=3")["best"]
    safe = planned(capsys, str(file), *LOAD, "--no-steps", "--gpus", "L40S=3", "--survive", "1")["best"]
    assert sum(pool["instances"] for pool in safe["pools"]) >= 2
    assert safe["price_per_hour"] > alone["price_per_hour"]


WORKLOAD = """
duration_s: 15
parts:
  interactive: {rate: 3, input_tokens: "lognormal:p50=500,p90=1500", output_tokens: 40}
  batch: {rate: 0.5, arrivals: gamma, cv: 2, input_tokens: 3000, output_tokens: "uniform:50-100"}
"""


def test_a_workload_has_several_classes_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(FILE.replace("hardware:", "  batch: {ttft_ms: 20000, attainment: 0.8}\nhardware:"))
    load = file.parent / "workload.yaml"
    load.write_text(WORKLOAD)
    found = planned(capsys, str(file), "--workload", str(load), "--no-steps", "--processes", "1")
    seen = found["best"]["attainment"]
    assert set(seen) == {"interactive", "batch"}
    assert sum(each["requests"] for each in seen.values()) == found["requests"]


def test_a_part_is_named_as_its_class_in_the_cluster_file(tmp_path: Path) -> None:
    """The cluster file's YAML rules apply: `on`, `0123`, a date and `1.10` are names, and `1_0` is no number."""
    load = tmp_path / "workload.yaml"
    names = ["on", "0123", "2026-11-26", "1.10"]
    load.write_text("parts:\n" + "".join(f"  {name}: {{rate: 1.5, input_tokens: 10}}\n" for name in names))
    assert {each.slo_class for each in workload(load, 1)} == {*names}
    load.write_text("parts: {a: {rate: 1_0}}")
    with pytest.raises(UsageError, match=r"parts\.a\.rate is '1_0': must be a number above 0"):
        workload(load, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("parts: {interactive: {rate: 0}}", "parts.interactive.rate is 0: must be a number above 0"),
        ("parts: {interactive: {rat: 3}}", "parts.interactive.rat: unknown; there is rate"),
        ("parts: {interactive: {arrivals: x}}", "parts.interactive.arrivals x: there is poisson"),
        ("parts: {interactive: {input_tokens: soon}}", "parts.interactive: --input-tokens"),
        ("parts: {interactive: {prefix_tokens: -1}}", "parts.interactive.prefix_tokens is -1: must be a whole number"),
        ("parts: {interactive: {prefix_tokens: true}}", "prefix_tokens is True: must be a whole number of 0 at least"),
        (
            "parts: {interactive: {prefix_groups: 4}}",
            "parts.interactive.prefix_groups is 4: says how many prefixes there are, and prompts have none: write "
            "prefix_tokens beside it",
        ),
        ("parts: {interactive: {prefix_tokens: 0, prefix_groups: 1}}", "prefix_groups is 1: says how many prefixes"),
        (
            "parts: {interactive: {cv: 3}}",
            "parts.interactive.cv is 3: shapes gamma and weibull arrivals, and these are poisson: write arrivals:",
        ),
        ("parts: {gold: {rate: 3}}", "requests of class gold; "),
        ("duration_s: -1\nparts: {interactive: {}}", "duration_s is -1"),
        ("parts: [", "workload.yaml:1:9: something is missing before this → check commas"),
        ("parts:\n  a: {rate: 1}\n  a: {rate: 2}", ":3:3: error: parts.a: given twice, first on line 2"),
        ("parts: {}", "write `parts:"),
        ("durations: 3\nparts: {interactive: {}}", "durations: unknown"),
        ("parts: {interactive: {rate: 0.0000001}}", "the load holds no request"),
        ("seed: soon\nparts: {interactive: {}}", "seed is 'soon': must be a whole number of 0 at least"),
        ("seed: -1\nparts: {interactive: {}}", "seed is -1: must be a whole number of 0 at least"),
        (
            "duration_s: 1.0e+300\nparts: {interactive: {rate: 1.0e-299}}",
            "duration_s is 1e+300: a load lasts up to 1e+09 s",
        ),
        ("parts: " + "[" * 5000, "nested more than 32 levels deep"),
    ],
)
def test_a_wrong_workload_is_one_line(text: str, told: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = file.parent / "workload.yaml"
    load.write_text(text)
    assert main(["plan", str(file), "--workload", str(load)]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--workload", "a", "--trace", "b"], 2, "give one of them"),
        (["--out", "{}/baton.yaml"], 2, "there is such a file; name another"),
        (["--html", "{}/none/x.html"], 2, "there is no folder"),
        (["--plot", "{}/x.gif"], 2, "name it .png, .svg, .pdf"),
        (["--gpus", "L9=1"], 2, "Nothing is known about the GPU 'L9'"),
        (["--gpus", "L4=0"], 2, "--gpus L4=0: write TYPE=N"),
        (["--gpus", ""], 2, "--gpus : write TYPE=N"),
        (["--gpus", "L4=1,l4=2"], 2, "--gpus names L4 twice"),
        (["--on", "ray://"], 2, "--on ray://: write ray"),
        (["--dry-run"], 2, "--dry-run is `baton load`'s"),
        (["--html", "{}/" + "x" * 300], 2, "File name too long"),
        (["--out", "{}/one.html", "--html", "{}/one.html"], 2, "--out and --html name one file"),
        (["--power-w", "30"], 1, "may draw 72 W, and all GPUs together may draw 30 W (--power-w)"),
        (["--objective", "energy", "--objective", "cost"], 2, "--objective energy and --objective cost: give one"),
    ],
)
def test_wrong_flags_are_told_and_the_cluster_file_stays_as_it_is(
    words: list[str], code: int, told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [each.replace("{}", str(file.parent)) for each in words]
    assert main(["plan", str(file), *([] if "--trace" in words else LOAD), *words]) == code
    said = capsys.readouterr()
    assert told in said.out + said.err
    assert file.read_text() == FILE


@pytest.mark.parametrize("flag", ["--rate=3", "--arrivals=gamma", "--cv=1", "--input-tokens=9", "--output-tokens=9",
                                  "--prefix-tokens=9", "--prefix-groups=2", "--requests=5", "--duration-s=5",
                                  "--speed=2", "--rate-scale=2", "--format=azure", "--from-s=3",
                                  "--tick-ms=0"])  # fmt: skip
def test_flags_that_a_workload_would_ignore_are_refused(
    flag: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = file.parent / "workload.yaml"
    load.write_text("parts: {interactive: {rate: 3}}")
    assert main(["plan", str(file), "--workload", str(load), flag]) == 2
    assert f"{flag.partition('=')[0]} beside --workload" in capsys.readouterr().err


def test_a_plan_is_printed_even_if_its_file_cannot_be_written(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UsageError("--out x: No space left on device")

    monkeypatch.setattr("baton.plan_file.write", full)
    assert main(["plan", str(file), *LOAD, "--no-steps", "--out", str(file.parent / "x.yaml")]) == 2
    said = capsys.readouterr()
    assert "the cheapest fleet" in said.out
    assert said.err.endswith("baton: --out x: No space left on device\n")


def test_a_plan_without_a_load_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file)]) == 2
    assert capsys.readouterr().err == (
        "baton: no load to plan for: give --trace FILE, --workload FILE, or --rate with lengths\n"
    )


def test_a_promise_below_the_roofline_is_wrong_input_and_an_impossible_one_is_not(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(FILE.replace("tpot_ms: 60", "tpot_ms: 2"))
    assert main(["plan", str(file), *LOAD]) == 2
    assert "slo.interactive.tpot_ms 2 is below the roofline" in capsys.readouterr().err
    file.write_text(FILE.replace("ttft_ms: 600", "ttft_ms: 60"))
    assert main(["plan", str(file), *LOAD]) == 1
    assert re.search(r"no plan: TTFT 60 ms: 100\.0% of the requests take longer alone", capsys.readouterr().out)


def test_strict_refuses_a_trace_with_a_bad_row(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = file.parent / "trace.jsonl"
    trace.write_text('{"at_s": 0, "input_tokens": 100, "output_tokens": 10}\n{"at_s": "x"}\n')
    words = ["plan", str(file), "--trace", str(trace), "--no-steps", "--processes", "1"]
    assert main([*words, "--strict"]) == 1
    assert "line 2" in capsys.readouterr().err
    assert main(words) == 0, "one bad row does not stop a plan"
    assert "line 2" in capsys.readouterr().err


def test_of_many_bad_rows_the_first_and_their_number_are_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = file.parent / "trace.jsonl"
    trace.write_text('{"at_s": 0, "input_tokens": 100, "output_tokens": 10}\n' + '{"at_s": "x"}\n' * 500)
    words = ["plan", str(file), "--trace", str(trace), "--no-steps", "--processes", "1"]
    assert main([*words, "--strict"]) == 1
    refused = capsys.readouterr().err
    assert main([*words, "--json"]) == 0
    said = capsys.readouterr()
    for told in (refused, said.err):
        assert "line 2" in told
        assert "500 bad rows in all (--strict makes no plan)" in told
        assert told.count("\n") < 30
    assert len(json.loads(said.out)["bad_rows"]) == 500


def test_a_load_that_is_larger_than_the_effort_is_planned_on_stretches_of_it(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SAMPLE_REQUESTS", 30)
    load = ["--rate", "4", "--requests", "400", *LOAD[4:]]
    found = planned(capsys, str(file), *load, "--no-steps", "--effort", "600")
    assert found["requests"] == 400
    seen = found["best"]["attainment"]["interactive"]["requests"]
    assert seen == 120
    assert found["search"]["requests_left_out"] == 400 - seen
    assert found["search"]["requests_of_the_sample"] > 0
    assert main(["plan", str(file), *load, "--no-steps", "--effort", "600"]) == 0
    assert "280 requests of the load were not simulated" in capsys.readouterr().err


def test_a_search_that_ended_by_its_effort_does_not_say_that_nothing_holds() -> None:
    planner = planning.Planner(random_task(301, small=True))
    assert planner.spaces
    assert "none of the 3 fleets that were tried" in planner.why_not(SearchState(trials=3))
    assert "no fleet within the GPUs" in planner.why_not(SearchState(trials=3, proven=True))


def test_a_limit_of_the_search_is_no_lack_of_gpus(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer once said that 64 of 400 instances are the most there is, or that its fleet is the cheapest."""
    monkeypatch.setattr(planning, "INSTANCES_MAX", 1)
    few = ["plan", str(file), "--no-steps", "--processes", "1"]
    load = ["--requests", "60", "--input-tokens", "1500", "--output-tokens", "60"]
    assert main([*few, *load, "--rate", "100", "--gpus", "L4=40"]) == 1
    told = capsys.readouterr().out
    assert "no more than 64 instances of a kind are tried" in told
    assert "is the most there is" not in told
    found = planned(capsys, *few[1:], *load, "--rate", "1", "--gpus", "L4=40,L40S=1")
    cheaper = [each for each in found["presumed"] if "nothing cheaper has more" in each]
    assert bool(cheaper) == (found["best"]["price_per_hour"] > 2 * 0.4)
    few_there = planned(capsys, *few[1:], *load, "--rate", "1", "--gpus", "L4=1,L40S=1")
    assert not any("nothing cheaper" in each for each in few_there["presumed"])


@pytest.mark.parametrize(
    ("decode", "prefill", "told"),
    [
        (2, None, "not enough GPUs: 2 × decode H100-SXM tp1 is the most there is"),
        (None, None, "no more than 64 instances of a kind are tried: 1 × prefill L40S tp1 + 1 × decode H100-SXM tp1"),
        (9, 40, "no more than 64 instances of a kind are tried: 1 × prefill L40S tp1 + 1 × decode H100-SXM tp1"),
    ],
)
def test_the_users_gpus_are_named_where_they_are_the_limit(
    decode: int | None, prefill: int | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the search was blamed wherever another kind's type had no `count`, whatever decode lacked."""
    monkeypatch.setattr(planning, "INSTANCES_MAX", 1)
    l40s, h100 = gpu_named("L40S"), gpu_named("H100-SXM")
    task = replace(
        random_task(301, small=True),
        shape=model_named("Llama-3.1-8B"),
        gpus=((h100, decode), (l40s, prefill)),
        arrivals=tuple(
            Arrival(at_s=at / 200, input_tokens=500, output_tokens=1000, slo_class="interactive") for at in range(2000)
        ),
        goals={"interactive": goal(1000, 30, 0.9)},
        survive=0,
        power_w=None,
    )
    kinds = (InstanceKind(role=Role.PREFILL, gpu=l40s), InstanceKind(role=Role.DECODE, gpu=h100))
    why = planning.Planner(task, only=[kinds]).why_not(SearchState())
    assert why.startswith(told)
    assert ("64" in why) == ("64" in told)


def test_one_request_is_a_load(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = file.parent / "one.html"
    words = [*LOAD[:2], "--requests", "1", *LOAD[4:], "--html", str(page)]
    found = planned(capsys, str(file), *words)
    assert found["best"]["attainment"]["interactive"]["low"] < 0.3, "one request proves little"
    assert "data:image/svg" in page.read_text()
    assert "1 request, 1,500 tokens in and 60 out on average" in page.read_text()


def test_without_a_plan_there_is_a_report_and_no_cluster_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, out = file.parent / "none.html", file.parent / "none.yaml"
    planned(capsys, str(file), *LOAD, "--power-w", "40", "--html", str(page), "--out", str(out), code=1)
    assert "no plan: " in page.read_text()
    assert not out.exists()


def test_the_file_to_run_is_made_of_the_text_that_was_read(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard input can be read only once, and FILE may change while the plan is made."""
    planned_ = command._planned

    def edited(*given: Any) -> Any:
        file.write_text("models: [")
        return planned_(*given)

    monkeypatch.setattr(command, "_planned", edited)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(FILE.encode())))
    texts = []
    for name in ("-", str(file)):
        file.write_text(FILE)
        out = file.parent / f"planned-{len(texts)}.yaml"
        assert main(["plan", name, *LOAD, "--no-steps", "--out", str(out)]) == 0
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    (model,) = parse(texts[0], "planned.yaml").usable().models
    assert sum(pool.at_start for _, pool in model.pools.every().values()) > 0
    assert "wrote" in capsys.readouterr().err


SAME_NAME = """
models:
  - name: meta-llama/Llama-3.1-8B
    served_name: chat
    pools: {both: {start: 2, gpu: L40S}}
  - name: meta-llama/Llama-3.1-8B
    served_name: batch
    pools: {both: {start: 5, gpu: L40S}}
  - name: Qwen/Qwen3-32B
    served_name: meta-llama/Llama-3.1-8B
    pools: {both: {start: 7, gpu: H100-SXM}}
slo: {interactive: {ttft_ms: 600, tpot_ms: 60, attainment: 0.9}}
hardware: {L40S: {count: 40}, H100-SXM: {count: 40}}
"""
"""Two models with the same `name`, and a third whose `served_name` is that `name`."""


def test_of_two_models_with_one_name_only_the_planned_one_gets_the_plan(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(SAME_NAME)
    out = file.parent / "planned.yaml"
    words = ("--gpus", "L40S=3", "--model", "batch", "--out", str(out))
    assert planned(capsys, str(file), *LOAD, "--no-steps", *words)["model"] == "batch"
    pools = {each.api_name: each.pools for each in parse(out.read_text(), "planned.yaml").usable().models}
    given = {each.api_name: each.pools for each in parse(SAME_NAME, "f").usable().models}
    assert pools.pop("batch") != given.pop("batch")
    assert pools == given


def test_a_model_is_named_by_its_name_in_the_api_first() -> None:
    spec = parse(SAME_NAME, "f").usable()
    named = {name: clusterfile.named_model(spec, name, "f").name for name in ("chat", "batch", "Qwen/Qwen3-32B")}
    assert named == {"chat": LLAMA, "batch": LLAMA, "Qwen/Qwen3-32B": "Qwen/Qwen3-32B"}
    assert clusterfile.named_model(spec, None, "f").api_name == "chat"
    assert clusterfile.named_model(spec, LLAMA, "f").name == "Qwen/Qwen3-32B"
    with pytest.raises(UsageError, match=r"--model none: f has chat, batch, meta-llama/Llama-3.1-8B"):
        clusterfile.named_model(spec, "none", "f")
    spec = replace(spec, models=spec.models[:2])
    with pytest.raises(
        UsageError, match=f"--model {LLAMA}: f has several models of this name: give one of chat, batch"
    ):
        clusterfile.named_model(spec, LLAMA, "f")


def test_ctrl_c_gives_the_best_so_far(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = planning.Planner.verdict

    def verdict(self: planning.Planner, seen: Any) -> Any:
        if held:
            raise KeyboardInterrupt
        if seen.holds:
            held.append(seen)
        return learned(self, seen)

    held: list[Any] = []
    monkeypatch.setattr(planning.Planner, "verdict", verdict)
    found = planned(capsys, str(file), *LOAD)
    assert found["stopped"]
    assert not found["proven"]
    assert any("not all neighbours of the answer were simulated" in each for each in found["presumed"])
    assert found["best"]["holds"]


def model_of(pools: dict[str, Any]) -> Model:
    """The only model of a cluster file with these pools."""
    return parse(json.dumps({"models": [{"name": "m", "pools": pools}]}), "f").usable().models[0]


def test_flags_that_all_pools_must_share_are_those_of_a_role_that_the_file_lacks() -> None:
    """A KV cache in fp8 is simulated and written for each role of the plan; otherwise `lint` would refuse the plan."""
    own = {role: {"engine_args": {"kv_cache_dtype": "fp8", "seed": 1}} for role in ("prefill", "decode")}
    model = model_of(own)
    kinds = (
        InstanceKind(role=Role.PREFILL, gpu=gpu_named("L40S")),
        InstanceKind(role=Role.BOTH, gpu=gpu_named("L40S"), batched_tokens=2048),
    )
    seen = Evaluation(classes={}, seconds=1, gpu_seconds={}, energy_j=0, output_tokens=0, prompt_tokens=0)
    pools = pools_of(FleetResults(arrangement=kinds, counts=(1, 1), seen=seen), own, model)
    assert pools["prefill"]["engine_args"] == {"kv_cache_dtype": "fp8", "seed": 1}
    assert pools["both"]["engine_args"] == {"kv-cache-dtype": "fp8", "max-num-batched-tokens": 2048}
    text = json.dumps({"models": [{"name": "m", "pools": pools}], "hardware": {"L40S": {}}})
    assert not parse(text, "planned.yaml").problems
    assert planning.args_of(model, Role.BOTH) == {"kv-cache-dtype": "fp8"}
    extra = model_of({"extra": {"decode-a": {"role": "decode", "engine_args": {"kv_cache_dtype": "fp8"}}}})
    assert planning.args_of(extra, Role.PREFILL) == {"kv-cache-dtype": "fp8"}


def test_several_types_of_one_role_are_pools_that_lint_and_up_understand(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [
        InstanceKind(role=Role.BOTH, gpu=gpu_named("L40S"), batched_tokens=2048, power_cap=0.75),
        InstanceKind(role=Role.BOTH, gpu=gpu_named("L4"), tp=2, batched_tokens=2048),
    ]
    seen = Evaluation(classes={}, seconds=1, gpu_seconds={}, energy_j=0, output_tokens=0, prompt_tokens=0)
    answer = FleetResults(arrangement=tuple(kinds), counts=(2, 1), seen=seen)
    own = {"both": {"env": {"A": "b"}, "engine_args": {"max_num_batched_tokens": 512}}}
    pools = pools_of(answer, own, model_of(own))
    text = json.dumps({"models": [{"name": "m", "pools": pools}], "hardware": {"L40S": {}, "L4": {}}})
    parsed = parse(text, "planned.yaml")
    assert not parsed.problems
    listed = instances(parsed.usable())
    assert [(str(each.name), each.gpu, each.gpus, each.power_cap_w) for each in listed] == [
        ("both-0", "L40S", 1, 262.5),
        ("both-1", "L40S", 1, 262.5),
        ("both-l4-0", "L4", 2, None),
    ]
    assert all(each.env == {"A": "b"} for each in listed)
    assert all("2048" in each.vllm_args for each in listed)
