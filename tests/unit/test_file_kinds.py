"""Paths that the system does not let a command look at: one line with the reason, and no other input is lost."""

from __future__ import annotations

import argparse
import errno
from pathlib import Path

import pytest

from baton import clusterfile, file_kinds
from baton.cli import main
from baton.commands import profile, up, validate
from baton.model_sizes import sizes_of
from baton.scaling_log import log_of
from baton.written import check_folders
from cluster.errors import UsageError

LONG = "x" * 300
"""Longer than a file system takes; as for a folder that may not be entered, looking at it raises OSError."""


def test_what_cannot_be_looked_at_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, expected in (("file", (True, True, False)), (".", (True, False, True)), (LONG, (False, False, False))):
        path = tmp_path / name
        assert (file_kinds.exists(path), file_kinds.is_file(path), file_kinds.is_folder(path)) == expected, name


def test_a_model_of_an_impossible_name_has_no_shipped_sizes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="do not ship"):
        sizes_of(LONG)
    with pytest.raises(UsageError, match="do not ship"):
        sizes_of(str(tmp_path / LONG / "config.json"))
    assert not up._names_file(LONG)
    with pytest.raises(UsageError, match="neither a file nor a cluster"):
        log_of(LONG)


@pytest.mark.parametrize("flag", ["--html", "--out"])
def test_a_result_that_cannot_be_looked_at_is_refused_before_the_work(tmp_path: Path, flag: str) -> None:
    for path in (tmp_path / LONG, tmp_path / LONG / "run.html"):
        with pytest.raises(UsageError, match=f"{flag} .*: File name too long; name a file that can be written"):
            check_folders({flag: path})


def test_a_file_that_a_cluster_file_names_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(f"models: [{{name: org/model}}]\ntenants: {{acme: {{key_file: {LONG}}}}}\n")
    (told,) = map(str, clusterfile.read(str(file)).problems)
    assert "no file" in told and LONG in told


def test_an_engine_whose_folder_cannot_be_looked_at_is_known_by_its_name() -> None:
    engine = profile.EngineDescription("http://h:1", "Qwen/Qwen3-14B", f"/{LONG}", 4096, None, "0.32", says_load=True)
    assert profile._shape(None, engine).layers == 40


def test_a_trace_that_cannot_be_looked_at_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / LONG
    assert main(["load", "--trace", str(path), "--dry-run"]) == 2
    assert capsys.readouterr().err == f"baton: {path}: file name too long; give a trace file, or a folder of ServeGen\n"


def test_a_folder_of_traces_that_may_not_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    assert main(["load", "--trace", str(tmp_path), "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith(f"baton: --trace {tmp_path}: Permission denied; give a folder")


def test_a_folder_that_may_not_be_entered_costs_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, table = tmp_path / "closed", tmp_path / "table.csv"
    closed.mkdir()
    table.write_text("exp_id\n")
    look = Path.is_file

    def is_file(path: Path) -> bool:
        if path.parent == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return look(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    left_out: list[UsageError] = []
    parser = argparse.ArgumentParser()
    validate.add_arguments(parser)
    words = [str(tmp_path), str(tmp_path / LONG)]
    assert validate._of_all(list(map(Path, words)), parser.parse_args(words), left_out) == []
    assert [str(each).removeprefix(f"{tmp_path}/")[:25] for each in left_out] == [
        "closed: Permission denied",
        "table.csv:1: no column 'm",
        "x" * 25,
    ]
