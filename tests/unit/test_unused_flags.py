"""Flags without effect are refused in one line, which names the flag and the flag that it needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli import main

TRACE = [{"timestamp": 1000 * at, "input_length": 100, "output_length": 7, "hash_ids": []} for at in range(4)]
LOAD = ("load", "http://127.0.0.1:9")
PLAN = ("plan", "{tmp}/baton.yaml", "--no-steps")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((*LOAD, "--prefix-groups", "2"), "--prefix-tokens"),
        (("load", "--dry-run", "--prefix-groups", "1"), "--prefix-tokens"),
        (("simulate", "--prefix-groups", "2"), "--prefix-tokens"),
        ((*PLAN, "--rate", "2", "--prefix-groups", "2"), "--prefix-tokens"),
        ((*LOAD, "--trace", "{tmp}/trace", "--prefix-groups", "2"), "--trace"),
        (("simulate", "--trace", "{tmp}/trace", "--prefix-groups", "2"), "--trace"),
        ((*PLAN, "--trace", "{tmp}/trace", "--prefix-groups", "2"), "--trace"),
        ((*LOAD, "--sessions", "2", "--prefix-groups", "2"), "--sessions"),
        *(
            ((*LOAD, flag, value), "--find-goodput")
            for flag, value in (
                ("--attainment", "0.9"),
                ("--precision", "0.1"),
                ("--repeats", "6"),
                ("--trial-s", "5"),
                ("--top-rate", "9"),
                ("--search-s", "60"),
            )
        ),
        ((*LOAD, "--token-times"), "--out"),
        ((*LOAD, "--target", "prefill-0=http://h:1"), "--fault"),
        ((*LOAD, "--cluster", "blue"), "--fault"),
        ((*LOAD, "--cluster", "default"), "--fault"),
        (("load", "--dry-run", "--cluster", "blue"), "--fault"),
        *(
            (("load", "--dry-run", f"--{name}", f"{{tmp}}/x.{kind}"), "--dry-run")
            for name, kind in (("out", "jsonl"), ("html", "html"), ("plot", "png"))
        ),
        *(
            (("load", "--compare", "{tmp}/trace", "{tmp}/trace", flag, value), "--compare")
            for flag, value in (
                *(("--rate", "2"), ("--trace", "{tmp}/trace"), ("--out", "{tmp}/x"), ("--repeats", "2")),
                ("--cluster", "blue"),
            )
        ),
        *(
            (("load", "--compare", "{tmp}/trace", "{tmp}/trace", *flag), "--compare")
            for flag in (("--chat",), ("--header", "a: b"), ("--extra-body", '{{"a": 1}}'), ("--model", "m"))
        ),
        *(
            (("load", "--compare", "{tmp}/trace", "{tmp}/trace", flag, "3"), "--compare")
            for flag in ("--speed", "--rate-scale", "--from-s", "--senders", "--timeout-s", "--drain-s")
        ),
        (("load", "--find-goodput", "--dry-run", "--ttft-ms", "500"), "--find-goodput"),
        ((*LOAD, "--sessions", "2", "--tick-ms", "5"), "--sessions"),
        ((*LOAD, "--sessions", "2", "--from-s", "5"), "--sessions"),
        *(
            (("simulate", "--replay", "{tmp}/trace", flag, value), "--replay")
            for flag, value in (("--rate", "2"), ("--policy", "least_load"), ("--hop-us", "5"), ("--out", "{tmp}/x"))
        ),
        (("simulate", "--fault-every-s", "5"), "--faults one of"),
        (("simulate", "--faults", "{tmp}/faults", "--fault-every-s", "5"), "--faults one of"),
        (("simulate", "--trace-window", "1-2"), "--chrome-trace"),
        (("explain", "{tmp}/baton.yaml", "--last", "5"), "--scaling"),
        (("explain", "{tmp}/baton.yaml", "--held"), "--scaling"),
        (("explain", "{tmp}/baton.yaml", "--scaling", "{tmp}/log"), "--scaling"),
        (("logs", "router", "--json"), "router"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_a_flag_without_effect_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "trace").write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    (tmp_path / "baton.yaml").write_text(
        "models: [{name: meta-llama/Llama-3.1-8B}]\nslo: {a: {ttft_ms: 5000}}\nhardware: {H100-SXM: {count: 2}}\n"
    )
    given = [word.format(tmp=tmp_path) for word in words]
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    flags = [word for word in given if word.startswith("--")]
    assert named in err
    assert any(flag in err for flag in flags), err


def test_the_same_flags_are_accepted_with_the_flags_that_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["simulate", "--requests", "5", "--json"]
    assert main([*small, "--prefix-tokens", "64", "--prefix-groups", "2"]) == 0
    assert main([*small, "--chrome-trace", str(tmp_path / "t"), "--trace-window", "0-1"]) == 0
    assert main([*small, "--chrome-trace", str(tmp_path / "t")]) == 0
    assert main([*small, "--faults", "chaos", "--fault-every-s", "50"]) == 0
    assert capsys.readouterr().out
