"""What the benchmarks of the hand-over run, start and add up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import connectors, connectors_tables, handoff, handoff_client, pair
from bench.connectors_fleet import Seen, summary
from bench.connectors_models import EIGHT_B, FAT, LENGTHS, TINY
from bench.connectors_tables import WAYS
from bench.handoff_client import Heard
from bench.pair import Engines
from bench.published import DOCS
from cluster.instance import Role
from engine.vllm.hardware import EngineHardware
from engine.vllm.placement import CudaGpu


def test_both_parts_run_unless_one_is_named_or_flags_belong_to_one() -> None:
    assert handoff.arguments([]).parts == ("client", "connectors")
    assert handoff.arguments(["--quick", "--part", "client"]).parts == ("client",)
    assert handoff.arguments(["--part", "connectors", "--only", "ours,push"]).only == ("ours", "push")
    assert handoff.arguments(["--part", "router", "--turns", "3"]).parts == ("router",)
    for words in (["--gpu"], ["--models", "fat"], ["--into", "x.json"], ["--only", "stock"]):
        assert handoff.arguments(words).parts == ("connectors",)


@pytest.mark.parametrize(
    ("gpus", "flags", "order"),
    [
        (("0",), (), "a ready(a) b"),
        (("0", "1"), (), "a b"),
        (("0",), ("--kv-cache-memory-bytes", "1G"), "a b"),
        ((), (), "a b"),
    ],
)
def test_engines_that_measure_one_gpu_start_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], flags: tuple[str, ...], order: str
) -> None:
    seen: list[str] = []

    def starts(engines: Engines, name: str, role: Role, number: int) -> Any:
        seen.append(name)
        return SimpleNamespace(name=name, spec=SimpleNamespace(gpus=engines._place(number).get("gpus", ())))

    monkeypatch.setattr(Engines, "_start", starts)
    monkeypatch.setattr(pair, "_wait", lambda engine: seen.append(f"ready({engine.name})"))
    monkeypatch.setattr(Engines, "stop", lambda _: None)
    roles = {"a": Role.PREFILL, "b": Role.DECODE}
    with Engines(tmp_path, "m", roles, gpus=gpus, flags=flags, introduced=False):
        assert " ".join(seen) == f"{order} ready(a) ready(b)"


@pytest.mark.parametrize(
    "words",
    [
        ["--part", "client", "--gpu"],
        ["--part", "router", "--models", "fat"],
        ["--part", "client", "--turns", "2"],
        ["--part", "router", "--publish"],
        ["--only", "mine"],
        ["--models", "tiny,huge"],
    ],
)
def test_arguments_that_no_part_knows_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        handoff.arguments(words)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--quick"], ""),
        (["--quick", "--part", "client"], ""),
        (["--only", "ours"], "stock of tiny, tuned of tiny, push of tiny, early of tiny, stock of fat"),
        (["--models", "fat"], "stock of tiny, tuned of tiny"),
        (["--gpu", "--models", "tiny"], "tuned of 8B"),
    ],
)
def test_only_a_whole_run_is_published(words: list[str], missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    handoff.arguments(words)
    with pytest.raises(SystemExit) as ended:
        handoff.arguments([*words, "--publish"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "only a whole run is published" in told and missing in told


def test_figures_that_are_kept_complete_a_run(tmp_path: Path) -> None:
    kept, names = tmp_path / "kept.json", list(connectors.CONTESTANTS)
    assert handoff.arguments(["--publish"]).parts == handoff.USUAL
    assert handoff.arguments(["--gpu", "--publish"]).publish
    words = ["--models", "fat", "--only", "ours,early", "--into", str(kept), "--publish"]
    with pytest.raises(SystemExit):
        handoff.arguments(words)
    kept.write_text(json.dumps({"tiny": {name: {} for name in names}, "fat": {name: {} for name in names[:3]}}))
    assert handoff.arguments(words).publish


def test_without_a_gpu_the_gpu_part_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        connectors, "find_hardware", lambda: EngineHardware(gpus=(), cores=(0, 1), vllm="0.32", nixl="1")
    )
    monkeypatch.setattr(connectors, "run", None)
    with pytest.raises(SystemExit) as ended:
        connectors.measure(gpu=True)
    assert ended.value.code == 2
    assert "--gpu: there is no GPU on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gib", "together"),
    [((), ["stock", "tuned push ours early"]), ((140,), ["stock", "tuned push ours early"]),
     ((80,), ["stock", "tuned push", "ours early"]), ((80, 80), ["stock", "tuned push ours early"]),
     ((24,), ["stock", "tuned", "push", "ours early"])],
)  # fmt: skip
def test_connectors_are_measured_by_turns_as_far_as_the_gpus_memory_goes(
    gib: tuple[int, ...], together: list[str]
) -> None:
    """An early leg has no engines of its own; the spinning connector is measured alone."""
    gpus = [CudaGpu(id=f"{number}", memory_mib=each << 10) for number, each in enumerate(gib)]
    groups = connectors.groups(tuple(connectors.CONTESTANTS), connectors.pairs_at_once(EIGHT_B, gpus))
    assert [" ".join(group) for group in groups] == together


def test_turns_are_a_number_above_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert handoff.arguments(["--turns", "3"]).parts == ("connectors",)
    with pytest.raises(SystemExit):
        handoff.arguments(["--turns", "0"])
    assert "--turns 0: at least 1" in capsys.readouterr().err


def test_engines_take_two_gpus_or_share_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    three = tuple(CudaGpu(id=f"{number}") for number in range(3))
    monkeypatch.setattr(
        connectors, "find_hardware", lambda: EngineHardware(gpus=three, cores=(0,), vllm="0.32", nixl="1")
    )
    assert connectors.gpus_here() == three[:2]
    made = connectors.engines(connectors.CONTESTANTS["tuned"], EIGHT_B, tmp_path, ("0", "1"))
    assert [made._place(number)["gpus"] for number in (0, 1)] == [("0",), ("1",)]
    assert "cuda" in made.transfer(Role.PREFILL)
    shared = Engines(tmp_path, "m", {"p": Role.PREFILL, "d": Role.DECODE}, gpus=("0",))
    assert [shared._place(number)["gpu_memory_share"] for number in (0, 1)] == [0.45, 0.45]
    alone = connectors.engines(connectors.CONTESTANTS["tuned"], TINY, tmp_path)
    assert alone._place(0)["device"] == "cpu"
    assert "cuda" not in alone.transfer(Role.DECODE)


@pytest.mark.parametrize(("model", "bytes_a_token"), [(FAT, 64 << 10), (EIGHT_B, 128 << 10)])
def test_models_have_the_kv_that_they_are_for(model: Any, bytes_a_token: int, tmp_path: Path) -> None:
    made = Path(model.path(tmp_path))
    told = json.loads((made / "config.json").read_text())
    width = {"float32": 4, "bfloat16": 2}[told["dtype"]]
    assert 2 * told["num_hidden_layers"] * told["num_key_value_heads"] * told["head_dim"] * width == bytes_a_token
    assert (made / "tokenizer.json").exists()
    assert not list(made.glob("*.safetensors"))
    assert model.flags == ("--load-format", "dummy")


NAMES = {name: each.name for name, each in connectors.CONTESTANTS.items()}


def test_the_time_of_a_hand_over_leaves_out_one_decode_step() -> None:
    told = summary([[Seen(100, 50 + at, [4, 4, 40]) for at in range(11)]])
    assert (told["step_ms"], told["hand_over_ms"], told["low_ms"], told["high_ms"]) == (4, 51, 47, 55)
    assert (told["prefill_ms"], told["count"]) == (100, 11)


def test_each_turn_leaves_its_median_beside_the_whole_runs() -> None:
    told = summary([[Seen(10, 5, [4]), Seen(90, 7, [4]), Seen(10, 30, [4])], [Seen(20, 8, [4])]])
    assert told["first_ms_by_turn"] == [7, 8]
    assert told["sent_ms_by_turn"] == [40, 28], "from sending: sums of each hand-over, not of medians"


def figures(hand_over_ms: float, **more: float) -> dict[str, Any]:
    way = {"hand_over_ms": hand_over_ms, "low_ms": 1, "high_ms": 99, "step_ms": 10, "prefill_ms": 5, "count": 15}
    return {"lengths": {str(length): dict.fromkeys(WAYS, way) for length in LENGTHS}, "bytes_per_s": 2e9,
            "idle_cores": 0.02, "holding_cores": 0.5, "free_after_s": 0.1, "left_after_s": 0.2, "storm": 200,
            "storm_held_blocks": 30, "storm_free_after_s": 19.5, "held_at_the_end": 0} | more  # fmt: skip


def by_turns(*first_ms: float, begun: str = "2026-01-01T00:00:00+00:00", prefill_ms: float = 5) -> dict[str, Any]:
    """Figures of a connector with these medians of turns, and one hand-over in each; a step takes 10 ms."""
    way = summary([[Seen(prefill_ms, each, [10])] for each in first_ms])
    return figures(0) | {"lengths": {str(length): dict.fromkeys(WAYS, way) for length in LENGTHS}, "begun": begun}


def test_every_connector_has_its_row_and_ours_is_held_to_the_tuned_one() -> None:
    result = {"fat": {name: figures(30) for name in connectors.CONTESTANTS} | {"ours": figures(14, left_after_s=1.5)}}
    times, ratios, rest = connectors_tables.tables(result, NAMES)
    assert len(times.rows) == len(LENGTHS) * len(connectors.CONTESTANTS)
    assert times.rows[0] == ["fat", "250", "vLLM pull, as it comes", *["30 (1–99) + 10"] * len(WAYS)]
    assert rest.rows[2][:2] == ["fat", "vLLM push, tuned"]
    assert rest.rows[2][2:] == ["2.00", "2 %", "50 %", "0.10", "0.20", "30 after 200", "19.5", "0"]
    assert all(len(row) == len(table.columns) for table in (times, ratios, rest) for row in table.rows)
    told = connectors_tables.targets(result)
    assert told["fat_250_alone_over_tuned"] == {"value": 0.6, "target": 1.0, "met": True}
    assert told["fat_1900_eight_over_tuned"]["target"] == 0.7
    assert told["fat_left_after_s"]["met"] is False
    assert told["fat_250_alone_choice_over_best"] == {"value": 1.0, "target": 1.05, "met": True}
    assert told["fat_250_early_over_pull_alone"]["value"] == 2.143
    assert told["fat_250_eight_choice_over_best"]["value"] == 0.6, "eight holds exist first: no leg is early"
    assert connectors_tables.targets({"fat": {"ours": figures(1)}}) == {}


def test_ratios_are_of_turns_side_by_side_and_have_an_interval() -> None:
    """The machine is three times as slow in half of the turns. Side by side ours takes 1.2 to 1.3 ×; the medians of
    both, taken apart, would say 1.23 and could not say how sure that is.
    """
    theirs = [20, 60] * 5
    ours = [each * (1.2 if at < 7 else 1.3) for at, each in enumerate(theirs)]
    found = connectors_tables.ratio(by_turns(*ours), by_turns(*theirs), 250, "alone")
    assert (found["median"], found["low"], found["high"], found["repeats"]) == (1.2, 1.2, 1.3, 10)
    assert found["confidence"] == pytest.approx(0.979, abs=5e-4)
    result = {"tiny": {name: by_turns(*theirs) for name in NAMES} | {"ours": by_turns(*ours)}}
    told = connectors_tables.targets(result)
    assert told["tiny_250_alone_over_tuned"] == {"value": 1.2, "target": 1.0, "met": False, "low": 1.2, "high": 1.3}
    rows = {row[2]: row[3] for row in connectors_tables.tables(result, NAMES)[1].rows}
    assert rows["Baton pull / vLLM pull"] == "1.20 (1.20 to 1.30)"


def test_turns_of_two_calls_or_fewer_than_six_have_no_interval() -> None:
    """Only connectors of one call took turns; figures kept by `--into` from another call ran at another time."""
    ours, theirs = by_turns(*[24.0] * 10), by_turns(*[20.0] * 10, begun="2026-01-02T00:00:00+00:00")
    bare = {"median": 1.2, "low": None, "high": None, "confidence": None, "repeats": 0}
    assert connectors_tables.ratio(ours, theirs, 250, "busy") == bare
    assert connectors_tables.ratio(by_turns(*[24.0] * 5), by_turns(*[20.0] * 5), 250, "busy") == bare
    assert connectors_tables.ratio(by_turns(*[24.0] * 6), by_turns(*[20.0] * 6), 250, "busy")["low"] == 1.2
    without_a_step = connectors_tables.ratio(by_turns(*[14.0] * 9, 8.0), by_turns(*[12.0] * 9, 9.0), 250, "alone",
                                             "hand_over")  # fmt: skip
    assert without_a_step == {**bare, "median": 2.0}, "a turn below a step divides by nothing"


def test_the_choice_is_held_to_the_rival_that_it_is_slowest_against() -> None:
    """From P's answer push is ahead; from sending it is not, as P answers later with it."""
    result = {"tuned": by_turns(*[20] * 10), "push": by_turns(*[10] * 10, prefill_ms=30),
              "early": by_turns(*[15] * 10), "ours": by_turns(*[20] * 10)}  # fmt: skip
    found, rival = connectors_tables.over_best(result, 250, "alone")
    assert (found["median"], found["low"], rival) == (1.5, 1.5, "push")
    found, rival = connectors_tables.over_best(result, 250, "alone", "sent")
    assert (found["median"], rival) == (0.8, "pull")
    rows = [row[2:4] for row in connectors_tables.tables({"tiny": result}, NAMES)[1].rows[:5]]
    assert rows == [
        ["as Baton starts / vLLM pull or push, the better", "1.50 (1.50 to 1.50) push"],
        ["as Baton starts / vLLM pull or push, the better, from sending", "0.80 (0.80 to 0.80) pull"],
        ["Baton pull / vLLM pull", "1.00 (1.00 to 1.00)"],
        ["Baton pull / vLLM push", "2.00 (2.00 to 2.00)"],
        ["early leg / Baton pull, less the step", "0.50 (0.50 to 0.50)"],
    ]


def test_figures_of_several_days_say_so() -> None:
    tiny, fat = by_turns(20), by_turns(20, begun="2026-01-02T00:00:00+00:00")
    assert connectors_tables.dates({"tiny": {"ours": tiny}, "fat": {"ours": tiny}}) == ""
    told = connectors_tables.dates({"tiny": {"ours": tiny, "tuned": tiny}, "fat": {"ours": fat}})
    assert told == "; measured: tiny on 2026-01-01; fat on 2026-01-02"
    told = connectors_tables.dates({"tiny": {"stock": figures(20), "ours": tiny, "push": tiny}})
    assert told == "; measured: stock of tiny on an earlier day; ours, push of tiny on 2026-01-01"


def test_the_page_says_what_the_published_json_says() -> None:
    """The tables are the JSON's, and so is each range of the section's first paragraph."""
    told = json.loads((DOCS / "benchmarks" / "connectors.json").read_text())
    page = (DOCS / "benchmarks.md").read_text()
    block = page.partition("<!-- connectors: begin -->")[2].partition("<!-- connectors: end -->")[0]
    assert all(table.markdown() in block for table in connectors_tables.tables(told["figures"], NAMES))
    assert connectors_tables.targets(told["figures"]) == told["targets"]

    def ends(values: list[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f} ×"

    met, missed = (
        [each["value"] for name, each in told["targets"].items()
         if name.endswith("_choice_over_best") and each["met"] is kept]
        for kept in (True, False)
    )  # fmt: skip
    pulls = [each for name, each in told["targets"].items() if name.endswith("_over_tuned")]
    to_push = [connectors_tables.ratio(by_name["ours"], by_name["push"], length, "alone")["median"]
               for by_name in told["figures"].values() for length in LENGTHS]  # fmt: skip
    first = " ".join(page.partition("## vLLM's connectors and ours")[2].split("**")[1].split())
    assert f"(early legs) takes {ends(met)} the time" in first
    assert f"push in {len(met)} of {len(met + missed)} places" in first
    assert f"it takes {ends(missed)}, where" in first
    assert f"{ends([each['value'] for each in pulls])} the time of vLLM's tuned pull" in first
    assert f"({sum(each['met'] for each in pulls)} of {len(pulls)} targets met)" in first
    assert f"alone {ends(to_push)} that of push" in first


def test_a_clients_ratios_are_of_rounds_and_have_an_interval() -> None:
    def heard(*first_ms: float) -> list[Heard]:
        return [Heard(each, each + 20, 10, "") for each in first_ms]

    rounds = [100.0, 200.0] * 4
    found = handoff_client.compared(
        {"alone": heard(*rounds), "plain": heard(*(each + 30 for each in rounds)),
         "seeded": heard(*(each * 1.1 for each in rounds))}
    )  # fmt: skip
    assert found["seeded_first_over_alone"] == pytest.approx(1.1)
    told = found["intervals"]["seeded_first_over_alone"]
    assert (told["median"], told["low"], told["high"], told["repeats"]) == (1.1, 1.1, 1.1, 8)
    middle = {way: {"first_ms": 1.0, "second_ms": 2.0, "step_ms": 3.0} for way in handoff_client.WAYS}
    times, ratios = handoff_client.tables({"250": {**middle, **found}}, 8)
    assert times.rows[0] == ["250", "alone", "1.0", "2.0", "3.0"]
    assert ratios.rows[0][:2] == ["250", "1.10 (1.10 to 1.10)"]
    assert ratios.rows[0][3] == "0.50"
