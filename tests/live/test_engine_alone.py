"""`baton engine` by itself, with the real vLLM: its contract with the program that starts it, and its end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.cluster import START_S, alive, descendants, shared_names, within

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The folder of temporary files; the paths of pytest's own folders are too long for Unix sockets."""
    with TemporaryDirectory(prefix="live-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[Start]:
    """A function that starts `baton engine`; processes that a failed test leaves are ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton", "engine", "--name", "alone", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(temporary)},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def events_until(process: subprocess.Popen[str], kind: str) -> list[dict[str, Any]]:
    """Events up to the first of this kind, which comes last."""
    assert process.stdout is not None
    seen: list[dict[str, Any]] = []
    for line in process.stdout:
        seen.append(json.loads(line))
        if seen[-1]["event"] == kind:
            return seen
    raise AssertionError(f"it ended with {process.wait()}: {seen}")


def complete(url: str) -> dict[str, Any]:
    body = {"model": "baton-tiny", "prompt": "What is", "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        made: dict[str, Any] = json.loads(answer.read())
        return made


@pytest.mark.long
def test_a_flag_vllm_does_not_know_is_told_in_one_line(start: Start) -> None:
    process = start("--", "--no-such-flag")
    said, words = process.communicate(timeout=START_S)
    assert (process.returncode, said) == (1, "")
    told = [line for line in words.splitlines() if line.startswith("baton: ")]
    assert told == ["baton: alone failed: the process ended with exit code 2: unrecognized arguments: --no-such-flag"]
    assert "Traceback" not in words


@pytest.mark.long
@pytest.mark.timeout(2 * START_S)
def test_an_engine_whose_core_dies_starts_again_and_leaves_nothing_when_killed(start: Start, temporary: Path) -> None:
    shared = shared_names()
    process = start("--json")
    ready = events_until(process, "ready")[-1]
    assert (ready["instance"], ready["role"], ready["epoch"], ready["model"]) == ("alone", "both", 1, "baton-tiny")
    assert complete(ready["endpoint"])["usage"]["completion_tokens"] == 4

    core = next(pid for pid in descendants(process.pid) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(core, signal.SIGKILL)
    again = events_until(process, "ready")
    assert "restarting" in {event.get("state") for event in again}
    assert (again[-1]["endpoint"], again[-1]["epoch"]) == (ready["endpoint"], 2)
    assert complete(ready["endpoint"])["usage"]["completion_tokens"] == 4

    everybody = descendants(process.pid)
    process.kill()
    process.wait()
    within(10, lambda: not alive(everybody))
    assert not alive(everybody)
    within(10, lambda: not list(temporary.glob("baton-engine-*")))  # the keeper removes it last
    assert shared_names() <= shared
