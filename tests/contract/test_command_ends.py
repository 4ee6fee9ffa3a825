"""How commands end: with a closed stdout, with nothing to do, with input that cannot be read twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli import main

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.0000000,100,10\n" for second in range(50)
)
LOAD = ["load", "--model", "m", "--chars-per-token", "4"]


@pytest.mark.parametrize("buffered", [True, False])
def test_a_closed_stdout_is_no_error(tmp_path: Path, buffered: bool) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("models: [{name: m, pools: {both: {}}}]\n")
    env = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    end, begin = os.pipe()
    os.close(end)
    words = [sys.executable, "-m", "baton", "explain", str(file)]
    try:
        done = subprocess.run(words, stdout=begin, stderr=subprocess.PIPE, env=env, check=False)
    finally:
        os.close(begin)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_trace_from_a_pipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its beginning was lost: 233 of 2,000 requests, and of a short file all."""
    pipe = tmp_path / "trace.csv"
    os.mkfifo(pipe)
    assert main([*LOAD, "--trace", str(pipe), "--dry-run"]) == 2
    assert "cannot be read twice" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--from-s", "1e6"], ["--from-s", "1e6", "--dry-run"]])
def test_nothing_to_send_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    assert main([*LOAD, "http://127.0.0.1:1", "--trace", str(trace), *more]) == 2
    assert "the load holds no request" in capsys.readouterr().err


def test_so_many_instances_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--url", "http://127.0.0.1:1", f"decode={'9' * 5000}"]) == 2
    assert "write ROLE=N" in capsys.readouterr().err
