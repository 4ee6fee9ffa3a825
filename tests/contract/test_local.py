"""Children of `baton up`: their pipes are read to the end, also with huge lines or a full disk; logs are bounded."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton import local
from baton.local import BoundedLog, Program


async def run(tmp_path: Path, code: str, log: Path | None = None) -> tuple[int, Program, list[Any]]:
    events: list[Any] = []
    path = tmp_path / "logs" / "x.log" if log is None else log
    program = Program("x", [sys.executable, "-c", code], lambda _, event: events.append(event), path)
    return await program.run(), program, events


async def test_a_line_of_any_length_stops_no_child(tmp_path: Path) -> None:
    long = "import sys; sys.{0}.write('x' * 5_000_000 + chr(10)); sys.{0}.flush()"
    code = f"{long.format('stderr')}; {long.format('stdout')}; print('{{\"event\": 1}}'); sys.stderr.write('end')"
    status, program, events = await run(tmp_path, code)
    assert (status, events) == (0, [{"event": 1}])
    assert program.last_words[-1] == "end"
    assert program.log.stat().st_size == 5_000_004


async def test_a_disk_that_takes_nothing_stops_no_child(tmp_path: Path) -> None:
    code = "import sys; sys.stderr.write('word' + chr(10)); sys.stderr.write('y' * 1_000_000)"
    status, program, _ = await run(tmp_path, code, Path("/dev/full"))
    assert status == 0
    assert program.last_words[0] == "word"


def test_a_log_is_bounded_while_its_child_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOG_BYTES_MAX", 1000)
    log = BoundedLog(tmp_path / "x.log")
    for number in range(1000):
        log.write(b"line %d\n" % number)
    log.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.log", "x.log.1"]
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 2100
    assert (tmp_path / "x.log").read_bytes().endswith(b"line 999\n")


@pytest.mark.parametrize("ask", [Program.stop, Program.close, Program.kill])
async def test_what_is_asked_while_a_child_is_started_is_not_lost(
    ask: Callable[[Program], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program("x", [sys.executable, "-c", "import sys; sys.stdin.read()"], lambda *_: None, tmp_path / "x.log")
    spawn = asyncio.create_subprocess_exec

    async def slow(*argv: Any, **more: Any) -> asyncio.subprocess.Process:
        child = await spawn(*argv, **more)
        ask(program)  # a signal arrives before the child is known
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    async with asyncio.timeout(20):
        assert await program.run() in {0, -signal.SIGTERM, -signal.SIGKILL}
