"""An engine's log on disk: its path, headers, rotation, and reading new lines."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from baton.commands.logs import _print_new
from engine.vllm import logfile
from engine.vllm.logfile import LogFile, default_path


def test_the_log_is_in_the_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert default_path("p-0", {"XDG_STATE_HOME": "/state"}) == Path("/state/baton/logs/p-0.log")
    assert default_path("p-0", {}) == Path("/home/me/.local/state/baton/logs/p-0.log")
    assert default_path("p-0", {"XDG_STATE_HOME": "relative"}) == Path("/home/me/.local/state/baton/logs/p-0.log")


def start(log: LogFile, header: str, text: str) -> None:
    output = log.open(header)
    os.write(output, text.encode())
    os.close(output)


def test_each_start_is_appended_and_can_be_read_alone(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "new" / "p.log")
    start(log, "first", "a\nb\n")
    start(log, "second", "c\n")
    assert log.path.read_text() == "--- first\na\nb\n--- second\nc\n"
    assert log.this_start() == ["c"]
    assert log.path.stat().st_mode & 0o077 == 0, "a log may contain prompts"


def test_new_lines_are_whole_lines(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "p.log")
    output = log.open("x")
    assert log.new_lines() == []
    os.write(output, b"one\ntw")
    assert log.new_lines() == ["one"]
    os.write(output, b"o\n 50%\r100%\r\xff\n")
    assert log.new_lines() == ["two", " 50%", "100%", "\N{REPLACEMENT CHARACTER}"]
    os.close(output)


def test_a_long_log_is_rotated_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "ROTATE_BYTES", 20)
    log = LogFile(tmp_path / "p.log")
    for name in ("first", "second", "third"):
        start(log, name, "a line\na line\n")
    assert (tmp_path / "p.log").read_text().startswith("--- third\n")
    assert (tmp_path / "p.log.1").read_text().startswith("--- second\n")
    assert len(list(tmp_path.iterdir())) == 2
    assert log.this_start() == ["a line", "a line"]


def test_only_the_end_of_a_long_start_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "TAIL_BYTES", 14)
    log = LogFile(tmp_path / "p.log")
    start(log, "x", "first\nsecond\nlast\n")
    assert log.this_start()[-1] == "last"
    assert "first" not in log.this_start()


def test_a_missing_log_reads_as_empty(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "p.log")
    assert (log.this_start(), log.new_lines()) == ([], [])


def test_a_full_disk_does_not_stop_an_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = LogFile(tmp_path / "p.log")
    log.path.symlink_to("/dev/full")
    output = log.open("x")
    with pytest.raises(OSError, match="No space left"):
        os.write(output, b"a line")
    os.close(output)
    assert log.new_lines() == []
    assert "No space left" in caplog.text


def test_without_room_for_the_file_itself_its_lines_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = LogFile(tmp_path / "logs" / "p.log")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    output = log.open("x")
    assert os.write(output, b"a line") == 6
    os.close(output)
    assert (log.this_start(), log.new_lines()) == ([], [])
    assert str(log.path) in caplog.text


def test_an_impossible_log_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        LogFile(tmp_path / "file" / "p.log").open("x")


def test_a_long_run_is_cut_and_keeps_its_beginning_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logfile, "ROTATE_BYTES", 2000)
    monkeypatch.setattr(logfile, "HEAD_BYTES", 100)
    log = LogFile(tmp_path / "p.log")
    output = log.open("x")
    os.write(output, b"the settings\n")
    assert not log.bound()
    at = which = 0
    for number in range(2000):
        os.write(output, b"line %d\n" % number)
        if number % 50 == 0:
            log.bound()
            log.new_lines()
            at, which = _print_new(log.path, at, which)
    sizes = [each.stat().st_size for each in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) < 100 + 2 * 2000 + 3 * 700
    text = log.path.read_text()
    assert "the settings" in text and "--- cut: " in text and text.endswith("line 1999\n")
    assert all(each.stat().st_mode & 0o077 == 0 for each in tmp_path.iterdir()), "a log may contain prompts"
    os.write(output, b"the very last\n")
    assert log.new_lines()[-1] == "the very last"
    assert log.this_start()[-1] == "the very last"
    _print_new(log.path, at, which)
    followed = capsys.readouterr().out
    assert followed.count("line 1999\n") == followed.count("the settings\n") == followed.count("the very last\n") == 1
    os.close(output)


def test_a_long_log_is_cut_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logfile, "ROTATE_BYTES", 2000)
    monkeypatch.setattr(logfile, "HEAD_BYTES", 100)
    monkeypatch.setattr(logfile.shutil, "copyfileobj", full)
    log = LogFile(tmp_path / "p.log")
    output = log.open("x")
    os.write(output, b"a line\n" * 1000)
    assert log.bound()
    assert [each.name for each in tmp_path.iterdir()] == ["p.log"]
    assert log.path.stat().st_size < 300
    assert "lost: No space left" in log.path.read_text()
    os.close(output)


@pytest.mark.parametrize("moved_to", ["p.log.old", "p.log.1", ""])
def test_a_log_that_is_moved_or_deleted_is_still_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moved_to: str
) -> None:
    monkeypatch.setattr(logfile, "ROTATE_BYTES", 2000)
    monkeypatch.setattr(logfile, "HEAD_BYTES", 100)
    log = LogFile(tmp_path / "p.log")
    output = log.open("x")
    if moved_to:
        log.path.rename(tmp_path / moved_to)
    else:
        log.path.unlink()
    os.write(output, b"a line\n" * 1000)
    assert log.bound()
    assert os.fstat(output).st_size < 300
    os.write(output, b"the very last\n")
    assert log.this_start()[-1] == log.new_lines()[-1] == "the very last"
    if moved_to:
        assert (tmp_path / moved_to).read_text().startswith("--- x\na line\n")
    if moved_to == "p.log.1":
        assert "lost: the log itself was moved" in (tmp_path / moved_to).read_text()
    else:
        assert (tmp_path / "p.log.1").read_text().endswith("a line\n")
    assert caplog.text == ""
    os.close(output)


def test_a_log_that_cannot_be_cut_is_reported_once_for_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(logfile, "ROTATE_BYTES", 20)
    monkeypatch.setattr(logfile, "HEAD_BYTES", 10)
    monkeypatch.setattr(logfile.os, "ftruncate", fails)
    log = LogFile(tmp_path / "p.log")
    for _ in range(2):
        start(log, "x", "a line\n" * 100)
        assert (log.bound(), log.bound()) == (False, False)
    assert caplog.text.count("Input/output error: it cannot be cut") == 2


def test_a_start_whose_log_cannot_be_opened_has_no_lines_of_the_former_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_: LogFile) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    log = LogFile(tmp_path / "p.log")
    start(log, "x", "RuntimeError: the former start's\n")
    monkeypatch.setattr(LogFile, "_opened", forbidden)
    with pytest.raises(PermissionError):
        log.open("y")
    assert (log.this_start(), log.new_lines()) == ([], [])
