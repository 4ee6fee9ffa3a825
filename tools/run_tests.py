"""`make test`: tests of values and on mocks on all cores, then tests that measure time, one after the other.

Tests of values (tests/unit, property, playbook, sim) need the processor and no clock; tests on mocks (tests/contract)
mostly wait: five runs of pytest share them, and what the others say is printed when the first has ended. What measures
(the mark `timed`), real engines and faults come after them, one run, with the machine to itself: their limits are on
the wall clock. What failed in the first part is said again at the very end, as minutes of other output follow it. With
words on the command line it is plain pytest. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

CONTRACT = tuple(str(path) for path in sorted(Path("tests/contract").glob("test_*.py")))
TOGETHER: tuple[tuple[str, ...], ...] = (
    ("tests/unit", "tests/playbook"), ("tests/property", "tests/fuzz"), ("tests/sim",), CONTRACT[::2], CONTRACT[1::2],
)  # fmt: skip
"""Folders of the five runs: three take 70 to 80 s of CPU each, and two wait longer than they compute."""
ALONE = ("tests/contract", "tests/live", "tests/chaos")
LAST_BYTES = 12_000
"""Bytes of a failed run's output that are said again."""
LOOK_S = 0.2
"""Seconds between two looks at what a run says."""
BESIDE_OTHERS = "not long and not timed and not live"
BY_ITSELF = "not long and (timed or live)"


def pytest_of(folders: Sequence[str], *, alone: bool) -> list[str]:
    """The command of one run; runs at the same time do not share pytest's cache."""
    marks = BY_ITSELF if alone else BESIDE_OTHERS
    return [sys.executable, "-u", "-m", "pytest", "-m", marks, *folders, *(() if alone else ("-p", "no:cacheprovider"))]


class Run:
    """One of the runs at the same time; what it says is kept in a file."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = folders
        self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        command = pytest_of(folders, alone=False)
        self._running = subprocess.Popen(command, stdout=self._out, stderr=subprocess.STDOUT)

    def follow(self) -> None:
        """Print what it says, as it comes, until it has ended."""
        told = 0
        while True:
            ended = self._running.poll() is not None
            said = os.pread(self._out.fileno(), 1 << 20, told)
            sys.stdout.buffer.write(said)
            sys.stdout.flush()
            told += len(said)
            if said:
                continue
            if ended:
                return
            time.sleep(LOOK_S)

    def failures(self) -> bytes:
        """The end of what a run said that failed: its failures, or why it did not begin. Empty when it passed."""
        if self._running.wait() == 0:
            return b""
        said = os.pread(self._out.fileno(), os.fstat(self._out.fileno()).st_size, 0)
        found = [said.find(title) for title in (b"= FAILURES =", b"= ERRORS =") if title in said]
        return said[min(found, default=0) :][-LAST_BYTES:]

    def close(self) -> None:
        """End the run if it goes on, and forget what it said."""
        self._running.kill()
        self._running.wait()
        self._out.close()


def together() -> bytes:
    """Run `TOGETHER`; what failed, empty when all tests passed."""
    runs: list[Run] = []
    try:
        runs.extend(map(Run, TOGETHER))
        for run in runs:
            print(f"{run.folders[0]}{' …' * (len(run.folders) > 1)}:", flush=True)
            run.follow()
        return b"\n".join(filter(None, (run.failures() for run in runs)))
    finally:
        for run in runs:
            run.close()


def main(words: list[str]) -> int:
    """Exit code as pytest's: 0 when everything passed."""
    if words:
        return subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode
    failed = together()
    rest = subprocess.run(pytest_of(ALONE, alone=True), check=False).returncode
    if failed:
        print("failed before those that ran alone:", flush=True)
        sys.stdout.buffer.write(failed)
        sys.stdout.flush()
    return rest or int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
