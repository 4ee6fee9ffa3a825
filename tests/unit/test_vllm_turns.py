"""The locks with which engines that share a GPU start one after the other."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.vllm.turns import StartTurns

HOLDS = """
import subprocess, sys
from pathlib import Path
from engine.vllm.turns import StartTurns
held = StartTurns(Path(sys.argv[1]), "killed-0", ["0"], measures=True)
assert not held.take()
engine = subprocess.Popen(["sleep", "60"], pass_fds=held.descriptors, stdout=subprocess.DEVNULL)
print(engine.pid, flush=True)
engine.wait()
"""


@pytest.mark.parametrize(
    ("one", "other", "measures", "together"),
    [
        (("0", "1"), ("1", "2"), (True, True), False),
        (("0",), ("1",), (True, True), True),
        (("GPU-5f/0",), ("GPU-5f/0",), (True, True), False),
        (("0",), ("0",), (False, False), True),
        (("0",), ("0",), (True, False), False),
        (("0",), ("0",), (False, True), False),
        ((), (), (True, True), True),
        (("0", "0"), ("1",), (True, True), True),
    ],
)
def test_which_engines_start_one_after_the_other(
    tmp_path: Path, one: tuple[str, ...], other: tuple[str, ...], measures: tuple[bool, bool], *, together: bool
) -> None:
    """Engines whose KV cache has a given size measure nothing, and start together."""
    first = StartTurns(tmp_path / "gpus", "first-0", one, measures=measures[0])
    second = StartTurns(tmp_path / "gpus", "second-0", other, measures=measures[1])
    assert first.take() == ""
    assert second.take().partition(" ")[0] == ("" if together else "first-0")
    assert together or second.descriptors == (), "it holds no lock of its other GPUs"
    first.release()
    second.release()
    assert second.take() == ""
    second.release()


def test_two_starts_of_one_engine_differ(tmp_path: Path) -> None:
    """Each start is waited for as long as one may take."""
    first, second = (StartTurns(tmp_path, name, ["0"], measures=True) for name in ("first-0", "second-0"))
    seen = []
    for _ in range(2):
        assert first.take() == ""
        seen += [second.take(), second.take()]
        first.release()
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_a_lock_lasts_until_the_processes_of_a_killed_agent_have_ended(tmp_path: Path) -> None:
    waits = StartTurns(tmp_path, "next-0", ["0"], measures=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as agent:
        assert agent.stdout is not None
        engine = int(agent.stdout.readline())
        agent.kill()
        agent.wait(20)
        assert waits.take().startswith("killed-0 ")
        descriptor = os.pidfd_open(engine)
        os.kill(engine, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor)
        assert poll.poll(20_000)
        os.close(descriptor)
    assert waits.take() == ""
    waits.release()


def test_a_folder_that_cannot_be_written_keeps_no_engine_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gpus").write_text("")
    turns = StartTurns(tmp_path / "gpus", "e-0", ["0"], measures=True)
    assert turns.take() == "" and turns.descriptors == ()
    assert "e-0 starts without a turn on its GPU" in caplog.text
