"""What `make bench-tiers` runs, adds up and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import headlines, tiers, tiers_tables
from bench.tiers import DEFAULT, PARTS, QUICK, Step
from bench.tiers_tables import KNOWN, NONE, UNKNOWN, figures_of, merged, note, tables, targets

ROUNDS = {"back": [[1.0, 0.1, 0.05], [2.0, 0.4, 0.1], [1.0, 0.14, 0.06]], "gb_s": [{"host": 0.5}, {"host": 0.6}],
          "peer": [[1.0, 0.1, 0.2], [1.0, 0.1, 0.3], [1.0, 0.2, 0.4]], "peer_cache": [[2.0, 0.1, 0.2]] * 6}  # fmt: skip
FACTS = {"cpu": "c", "cores": 2}


def talked(computed: int, first_ms: float, said: str = "same") -> dict[str, Any]:
    return {"first_ms": first_ms, "computed": computed, "prompts": 1000, "said": said}


FOUND: dict[Step, dict[str, Any]] = {
    Step("evicted", ("larger", "host")): ROUNDS,
    Step("evicted", ("larger", "disk")): {**ROUNDS, "peer_cache": []},
    Step("talks", (KNOWN,), 0): talked(100, 50.0),
    Step("talks", (UNKNOWN,), 0): talked(200, 40.0),
    Step("talks", (NONE,), 0): talked(800, 100.0),
    Step("ranks", ("ranks",), 0): {"prompt": 100, "cached": 70, "by_place": [50, 50]},
    Step("ranks", ("instances",), 0): {"prompt": 100, "cached": 73, "by_place": [50, 50]},
}


def test_ratios_are_of_each_round_and_targets_of_their_medians() -> None:
    figures = figures_of(FOUND)
    pair = figures["evicted"]["larger"]["host"]
    assert pair["back_over_cold"]["median"] == 0.14  # of 0.10, 0.20 and 0.14; the ratio of medians is the same here
    assert pair["cold_ms"] == 1000 and pair["peer_over_cold"]["median"] == 0.3
    assert pair["peer_cache_over_cold"] == {
        "median": 0.1, "low": 0.1, "high": 0.1, "confidence": pytest.approx(0.969, abs=0.001), "repeats": 6,
    }  # fmt: skip
    found = targets(figures)
    assert {name: each["value"] for name, each in found.items()} == {
        "host_larger": 0.14, "peer_host_larger": 0.3, "peer_cache_larger": 0.1, "disk_larger": 0.14,
        "peer_disk_larger": 0.3, "talks_computed_over_unknown": 0.5, "talks_first_ms_over_unknown": 1.25,
        "talks_computed_over_no_tiers": 0.125, "hit_rate_of_ranks_off_instances": 0.03,
    }  # fmt: skip
    assert [name for name, each in found.items() if not each["met"]] == [
        "peer_host_larger", "peer_disk_larger", "talks_first_ms_over_unknown", "hit_rate_of_ranks_off_instances",
    ]  # fmt: skip


def test_every_target_has_its_headline() -> None:
    mine = [each for each in headlines.HEADLINES if each.bench == "tiers"]
    for name in targets(figures_of(FOUND)):
        assert sum(bool(headlines.re.fullmatch(each.targets, name)) for each in mine) == 1, name


def test_tables_show_the_parts_that_were_measured() -> None:
    shown = {table.title.partition(":")[0]: table.rows for table in tables(figures_of(FOUND))}
    assert len(shown) == 4
    assert shown["An evicted prompt of 1,800 tokens"] == [
        ["random, 8 layers of 384, 8 KiB", "1000 ms", "0.14", "0.14", "0.05"]
    ]
    alone = {step: told for step, told in FOUND.items() if step.part == "ranks"}
    assert [table.rows for table in tables(figures_of(alone))] == [[["ranks", "70.0%"], ["instances", "73.0%"]]]
    assert set(targets(figures_of(alone))) == {"hit_rate_of_ranks_off_instances"}


def test_a_part_is_published_beside_the_others_of_before_with_its_own_date() -> None:
    old = {"date": "2026-11-27", "cpu": "Xeon"}
    before = {"figures": figures_of(FOUND), "machine": old}
    ranks = {"ranks": {"prompt": 100, "cached": 70, "by_place": []}, "instances": {"prompt": 100, "cached": 71}}
    new = figures_of({Step("ranks", (name,), 0): told for name, told in ranks.items()})
    figures = merged(new, ["ranks"], {"date": "2026-11-30", "cpu": "EPYC"}, before)
    assert figures["ranks"] == new["ranks"] and figures["hit_rates"]["off"] == [pytest.approx(-0.01)]
    assert all(figures[name] == before["figures"][name] for name in ("evicted", "talks", "talks_ratios"))
    assert len(tables(figures)) == 4 and len(targets(figures)) == len(targets(figures_of(FOUND)))
    assert note(figures).endswith(
        "evicted prompts of 2026-11-27, Xeon; conversations of 2026-11-27, Xeon; ranks of 2026-11-30, EPYC"
    )
    again = merged(
        figures_of(FOUND), ["talks"], {"date": "2026-12-01", "cpu": "EPYC"}, {"figures": figures, "machine": old}
    )
    assert again["made"]["ranks"] == "2026-11-30, EPYC" and again["made"]["talks"] == "2026-12-01, EPYC"


def test_other_answers_in_another_setup_end_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="other answers"):
        figures_of({**FOUND, Step("talks", (NONE,), 0): talked(800, 100.0, "other")})


def test_setups_take_turns_and_each_repeat_begins_with_the_next() -> None:
    found = list(tiers.steps(DEFAULT, PARTS))
    assert len({step.key for step in found}) == len(found) == 2 * 2 + 6 * 3 + 6 * 2
    assert [step.names[0] for step in found if step.part == "talks"][:6] == [
        KNOWN, UNKNOWN, NONE, UNKNOWN, NONE, KNOWN,
    ]  # fmt: skip
    assert {step.part for step in tiers.steps(QUICK, ["ranks"])} == {"ranks"}


@pytest.mark.parametrize(
    "words", [["--publish", "--quick"], ["--publish", "--quick", "--only", "ranks"], ["--only", "prices"]]
)
def test_only_whole_parts_are_published(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tiers.parsed(words)
    assert ended.value.code == 2


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def taken(step: Step, _: Any) -> dict[str, Any]:
        ran.append(step.key)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return {"prompt": 100, "cached": 70, "by_place": [50, 50]}

    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    monkeypatch.setattr(tiers, "digest_of", lambda *_: "sources")
    monkeypatch.setattr(tiers, "taken", taken)
    monkeypatch.setattr(tiers.signal, "signal", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        tiers.main(["--quick", "--only", "ranks"])
    assert tiers.main(["--quick", "--only", "ranks"]) == 0
    assert ran == ["ranks / ranks / 0", "ranks / instances / 0", "ranks / instances / 0"]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["bench"] == "tiers" and last["targets"]["hit_rate_of_ranks_off_instances"]["value"] == 0
    assert tiers.main(["--quick", "--only", "ranks", "--fresh"]) == 0 and len(ran) == 5


def test_kept_steps_of_other_sources_or_machines_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "tiers.json"
    path.write_text(json.dumps({"sources": "a", "machine": FACTS, "steps": {"one": {}}}))
    assert tiers.resumed(path, "a", FACTS)["steps"] == {"one": {}}
    assert tiers.resumed(path, "b", FACTS) == {"sources": "b", "machine": FACTS, "steps": {}}
    assert tiers.resumed(path, "a", {**FACTS, "cores": 4})["steps"] == {}


def test_the_note_says_the_fewest_rounds() -> None:
    assert "3 rounds of each kind, 1 repeats" in tiers_tables.note(figures_of(FOUND))
