"""`make test`: tests of values and on mocks on all cores, then tests that measure time, one after the other.

Tests of values (tests/unit, property, playbook, sim) need the processor and no clock; tests on mocks (tests/contract)
mostly wait: five runs of pytest share them, and what the others say is printed when the first has ended. What measures
(the mark `timed`), real engines and faults come after them, one run, with the machine to itself: their limits are on
the wall clock. With words on the command line it is plain pytest. Standard library only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

CONTRACT = tuple(str(path) for path in sorted(Path("tests/contract").glob("test_*.py")))
TOGETHER: tuple[tuple[str, ...], ...] = (
    ("tests/unit", "tests/playbook"), ("tests/property", "tests/fuzz"), ("tests/sim",), CONTRACT[::2], CONTRACT[1::2],
)  # fmt: skip
"""Folders of the five runs: three take 70 to 80 s of CPU each, and two wait longer than they compute."""
ALONE = ("tests/contract", "tests/live", "tests/chaos")
BESIDE_OTHERS = "not long and not timed and not live"
BY_ITSELF = "not long and (timed or live)"


def pytest_of(folders: Sequence[str], *, alone: bool) -> list[str]:
    """The command of one run; runs at the same time do not share pytest's cache."""
    marks = BY_ITSELF if alone else BESIDE_OTHERS
    return [sys.executable, "-m", "pytest", "-m", marks, *folders, *(() if alone else ("-p", "no:cacheprovider"))]


def together() -> bool:
    """Run `TOGETHER`; whether all tests passed."""
    beside: list[tuple[Sequence[str], subprocess.Popen[bytes], IO[bytes]]] = []
    try:
        for others in TOGETHER[1:]:
            out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            command = pytest_of(others, alone=False)
            beside.append((others, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT), out))
        passed = subprocess.run(pytest_of(TOGETHER[0], alone=False), check=False).returncode == 0
        for folders, running, said in beside:
            print(f"{folders[0]}{' …' * (len(folders) > 1)}, beside them:", flush=True)
            passed &= running.wait() == 0
            said.seek(0)
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
    finally:
        for _, running, said in beside:
            running.kill()
            running.wait()
            said.close()
    return passed


def main(words: list[str]) -> int:
    """Exit code as pytest's: 0 when everything passed."""
    if words:
        return subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode
    passed = together()
    rest = subprocess.run(pytest_of(ALONE, alone=True), check=False).returncode
    return rest if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
