"""The engines of `baton up`: what is left of those that have ended."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from baton.board import Board
from baton.members import LOGS_AGE_S, LOGS_KEPT, Members, remove_earlier_logs
from baton.plan import PlacedEngine, from_counts
from baton.ports import HeldPorts
from baton.state import log_folder
from cluster.instance import Role
from engine.vllm.placement import MachineShare

EXTRA = tuple(f"qwen-20250611-{at}" for at in range(LOGS_KEPT + 2))
"""Engines of an extra pool `qwen-20250611`, as they stand in the cluster file."""

OTHERS = ("decode-0", "decode-extra-19a1b2c3d4e-1", "prefill-19a1b2c3d4e-1", *EXTRA, "router")
"""Logs that are no later instance's of the pool decode."""


def _planned(name: str) -> PlacedEngine:
    wanted = replace(from_counts({Role.DECODE: 1}, "m", None, [])[0], name=name)
    return PlacedEngine(wanted=wanted, port=1, agent_port=2, side_channel_port=3, placed=MachineShare())


def _files(name: str) -> list[Path]:
    return [log_folder() / f"{name}{ending}" for ending in (".agent.log", ".log", ".log.1")]


def _writes(name: str, at_s: int) -> None:
    log_folder().mkdir(parents=True, exist_ok=True)
    for path in _files(name):
        path.write_text("said")
        os.utime(path, (at_s, at_s))


def test_logs_of_the_last_days_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another container or machine still writes them cannot be seen here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    names = [f"decode-{0x19A1B2C3D4E + at:x}-{at + 1}" for at in range(LOGS_KEPT + 3)]
    ages_s = [LOGS_AGE_S + 600, LOGS_AGE_S - 600]
    for name, age_s in zip(names, [*ages_s, *[0] * len(names)], strict=False):
        _writes(name, int(time.time() - age_s))
    os.utime(_files(names[0])[1], (1, 1))  # its last words count
    remove_earlier_logs(log_folder())
    assert [name for name in names if not any(path.exists() for path in _files(name))] == names[:1]


@pytest.mark.parametrize("failed", ["", "ended with exit code 1"])
def test_only_the_last_logs_of_later_engines_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    members = Members([], Board("chat", quiet=True), HeldPorts(), log_folder())  # it holds nothing
    foreign = [f"decode-{0x19A1B2C3000 + at:x}-{at + 1}" for at in range(LOGS_KEPT + 5)]
    for other in (*OTHERS, *foreign):
        _writes(other, 1)
    names = [f"decode-{0x19A1B2C3D4E + at:x}-{at + 1}" for at in range(LOGS_KEPT + 3)]
    for at, name in enumerate(names):
        _writes(name, 2 + at)
        members.add(_planned(name), "decode", later=True)
    running, *ended = members
    for leaving in ended:
        leaving.failed = failed
        members.remove(leaving)
    every = (*OTHERS, *foreign, *names)
    kept = {name for name in every if all(path.exists() for path in _files(name))}
    gone = {name for name in every if not any(path.exists() for path in _files(name))}
    assert gone == {*names[1:3]}
    assert kept == {*every} - gone
    assert running.name in kept


def test_the_logs_of_a_later_engine_with_an_earlier_ones_name_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cluster may have an engine of that name, too: all clusters have one log folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    members = Members([], Board("chat", quiet=True), HeldPorts(), log_folder())
    for at, name in enumerate(["decode-0", *(f"decode-{0x19A1B2C3D4E + at:x}-{at + 1}" for at in range(LOGS_KEPT))]):
        _writes(name, at)
        members.remove(members.add(_planned(name), "decode", later=True))
    assert all(path.exists() for path in _files("decode-0"))


def test_a_start_removes_logs_of_earlier_runs_but_for_the_last_of_each_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that scaling started have names of their own, so that each run left its own logs, for ever."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    remove_earlier_logs(log_folder())  # there is no folder yet
    runs = [f"decode-{0x19A1B2C3D4E + 1000 * run:x}-{at + 1}" for run in range(3) for at in range(10)]
    for at, name in enumerate(runs):
        _writes(name, 100 + at)
    for other in OTHERS:
        _writes(other, 1)
    with (log_folder() / f"{runs[2]}.log").open("a"):  # another cluster's engine, which says nothing
        remove_earlier_logs(log_folder())
    assert {name for name in runs if not any(path.exists() for path in _files(name))} == {*runs[:2], *runs[3:10]}
    kept = [*OTHERS, runs[2], *runs[-LOGS_KEPT:]]
    assert all(path.exists() for name in kept for path in _files(name))
