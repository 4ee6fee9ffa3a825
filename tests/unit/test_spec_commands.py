"""`baton lint` and `baton explain`: their output and their exit codes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.cli import main
from cluster.keys import key_line

BARE = "models: [{name: org/model}]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_lint_of_a_clean_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "baton.yaml").write_text(BARE)
    assert main(["lint"]) == 0
    assert capsys.readouterr() == ("baton.yaml: ok\n", "")


def test_lint_prints_a_line_for_each_problem_of_each_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.yaml").write_text(BARE + "limits: {stall_ms: 5000}\nrouter: {port: 80000}\n")
    (here / "b.yaml").write_text(BARE)
    assert main(["lint", "a.yaml", "b.yaml"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a.yaml:2:10: error: limits.stall_ms: wrong unit, `stall_s` is in seconds (5000) → write `stall_s: 5`",
        "a.yaml:3:16: error: router.port: must be at most 65535 (80000)"
        " → write a number that is at most 65535, or leave it out",
        "a.yaml: 2 errors, 0 warnings",
        "b.yaml: ok",
    ]


def test_a_file_that_cannot_be_read_hides_no_other_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.yaml").write_text(BARE + "router: {port: 80000}\n")
    (here / "b.yaml").write_text(BARE)
    assert main(["lint", "gone.yaml", "a.yaml", "nowhere.yaml", "b.yaml"]) == 2
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1:] == ["a.yaml: 1 error, 0 warnings", "b.yaml: ok"]
    assert "gone.yaml" in shown.err and "nowhere.yaml" in shown.err


def test_warnings_alone_exit_with_0(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "baton.yaml").write_text(BARE + "tenants: {acme: {}}\n")
    assert main(["lint"]) == 0
    out = capsys.readouterr().out
    assert "baton.yaml:2:17: warning: tenants.acme.key_file: no file keys/acme here → " in out
    assert out.endswith("baton.yaml: 0 errors, 1 warning\n")


def test_files_are_looked_for_beside_the_cluster_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = here / "deploy"
    (folder / "keys").mkdir(parents=True)
    (folder / "keys" / "acme").write_text(key_line("sk-acme"))
    (folder / "prod.yaml").write_text(BARE + "tenants: {acme: {}}\n")
    assert main(["lint", "deploy/prod.yaml"]) == 0
    assert capsys.readouterr().out == "deploy/prod.yaml: ok\n"
    (folder / "keys" / "acme").unlink()
    assert main(["lint", "deploy/prod.yaml"]) == 0
    assert "`baton key new acme --file deploy/keys/acme` makes one" in capsys.readouterr().out


def test_lint_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "baton.yaml").write_text(BARE + "router: {policy: least-load}\n")
    assert main(["lint", "--json"]) == 1
    problem, summary = objects(capsys.readouterr().out)
    assert problem["event"] == "problem"
    assert (problem["line"], problem["field"], problem["fix"]) == (2, "router.policy", "did you mean `least_load`?")
    assert summary == {"event": "linted", "file": "baton.yaml", "ok": False, "errors": 1, "warnings": 0}


def test_standard_input(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + BARE.encode())))
    assert main(["lint", "-"]) == 0
    assert capsys.readouterr().out == "-: ok\n"


@pytest.mark.parametrize("command", ["lint", "explain"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.yaml", "missing.yaml: no such file or directory; give the path of a cluster file"),
        (".", ".: is a directory; give the path of a cluster file"),
        ("latin1.yaml", "latin1.yaml: line 2 is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, name: str, said: str
) -> None:
    (here / "latin1.yaml").write_bytes(b"models: []\n# Gr\xfc\xdfe\n")
    assert main([command, name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"baton: {said}")
    assert captured.err.count("\n") == 1


def test_a_huge_file_is_not_read_whole(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "baton.yaml").write_bytes(b"#" * (8 << 20))
    assert main(["lint"]) == 1
    assert "the file is larger than 256 KiB" in capsys.readouterr().out


def test_explain(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "baton.yaml").write_text(BARE + "router: {host: 0.0.0.0}\n")
    assert main(["explain"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("model org/model\n  prefill: starts with 1 instance")
    assert captured.err.startswith("baton.yaml:2:16: warning: router.host: ")


def test_explain_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "baton.yaml").write_text(BARE)
    assert main(["explain", "--json"]) == 0
    (told,) = objects(capsys.readouterr().out)
    assert told["file"] == "baton.yaml"
    assert told["parts"][0]["title"] == "model org/model"


def test_a_wrong_file_is_not_explained(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "baton.yaml").write_text("models: []\n")
    assert main(["explain"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "baton.yaml:1:9: error: models: is empty ([…]) → write `models: [{name: Qwen/Qwen3-0.6B}]`",
        "baton.yaml: correct the errors above first",
    ]


@pytest.mark.parametrize(("words", "prog"), [(["lint", "--bogus"], "baton lint"), (["--bogus"], "baton")])
def test_an_unknown_flag_names_the_help_that_lists_flags(
    capsys: pytest.CaptureFixture[str], words: list[str], prog: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"{prog}: unrecognized arguments: --bogus (flags: {prog} --help)\n"


def test_help_says_what_lint_reads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lint", "--help"])
    assert "default baton.yaml; - = stdin" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "listed"), [("load", True), ("simulate", False), ("plan", False)])
def test_commands_that_send_nothing_do_not_list_dry_run(
    capsys: pytest.CaptureFixture[str], command: str, listed: bool
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert ("--dry-run" in capsys.readouterr().out) is listed


@pytest.mark.parametrize("words", [["lint"], ["explain"], ["key", "new", "acme"]])
def test_flags_for_vllm_are_refused(here: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main([*words, "--", "--seed", "1"]) == 2
    assert "takes no vLLM flags" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["lint", "explain", "key"])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "example" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no ordinary file"),
        (b"\xff\x00\x80", "no key file: its text is not UTF-8"),
        (b"", "holds no key, so that no key works"),
        (b"# none yet\n", "holds no key, so that no key works"),
        (b"sk-baton-secret\n", "line 1 is a key itself"),
    ],
)
def test_lint_reads_key_files_as_the_router_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("acme", "admin"):
        Path(name).mkdir() if content is None else Path(name).write_bytes(content)
    text = "models: [{name: m}]\ntenants: {acme: {key_file: acme}}\nrouter: {admin_key_file: admin}\n"
    Path("baton.yaml").write_text(text)
    assert main(["lint"]) == 0
    out = capsys.readouterr().out
    assert f"warning: tenants.acme.key_file: acme: {said}" in out
    assert f"warning: router.admin_key_file: admin: {said}" in out
    assert "baton.yaml: 0 errors, 2 warnings" in out


def test_lint_says_that_a_certificate_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cert").write_bytes(b"\xff\x00")
    Path("key").mkdir()
    Path("baton.yaml").write_text("models: [{name: m}]\nrouter: {tls_cert_file: cert, tls_key_file: key}\n")
    assert main(["lint"]) == 0
    out = capsys.readouterr().out
    assert "router.tls_cert_file: cert: holds nothing in PEM format" in out
    assert "router.tls_key_file: key: no ordinary file" in out
