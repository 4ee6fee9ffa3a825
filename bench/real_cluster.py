"""Runs `baton up` on this machine for as long as a benchmark needs it, with state and logs in a folder of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bench.published import say

LOG_CHARACTERS = 1500
"""Characters from the end of each log, printed when a benchmark fails."""
STOP_S = 90.0
"""A drain, and engines that end by themselves."""


@contextmanager
def up(words: Sequence[str], bench: str) -> Iterator[dict[str, Any]]:
    """`baton up` with these words; its ready line (`endpoint`, `admin`, `model`, `instances`), and `state`, its folder.

    Raises:
        SystemExit: it ended before it was ready.
    """
    with tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as state:
        log = Path(state) / "up.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "baton", "up", *words, "--port", "0", "--admin-port", "0", "--json",
                 "--no-demo"],
                stdout=subprocess.PIPE,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "XDG_STATE_HOME": state},
            )  # fmt: skip
        try:
            assert process.stdout is not None
            ready = _ready(process.stdout, f"{bench}: `baton up {' '.join(words)}` ended before it was ready")
            yield {**ready, "state": state}
        except BaseException:  # an interrupt too: the folder with the reason is about to be removed
            for path in sorted(Path(state).rglob("*.log")):
                say(f"--- {path.name}\n{path.read_text(errors='replace')[-LOG_CHARACTERS:]}")
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_S)


def _ready(lines: IO[bytes], otherwise: str) -> dict[str, Any]:
    for told in map(json.loads, lines):
        if told["event"] == "ready":
            found: dict[str, Any] = told
            return found
    raise SystemExit(otherwise)
