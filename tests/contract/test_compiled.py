"""Compiled modules decide as their sources do: a simulation gives the same bytes with either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton import compiled

RUN = "simulate --prefill 2 --decode 5 --rate 40 --duration-s 8 --input-tokens 900 --output-tokens 120 --seed 7"


def _simulate(out: Path, used: str, words: list[str]) -> tuple[str, bytes]:
    command = [sys.executable, "-m", "baton", *RUN.split(), *words, "--json", "--out", str(out)]
    environ = {**os.environ, compiled.OFF: used}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout, out.read_bytes()


@pytest.mark.parametrize("words", ["--policy least_load", "--policy workload", "--policy workload --faults chaos"])
def test_a_simulation_is_the_same_byte_for_byte(tmp_path: Path, words: str) -> None:
    if because := compiled.why_not(environ={}):
        pytest.skip(f"{because}; run make compile")
    told, rows = _simulate(tmp_path / "interpreted", "0", words.split())
    assert rows.count(b"\n") > 200
    assert _simulate(tmp_path / "compiled", "1", words.split()) == (told, rows)
