"""`make test`: pure tests on both cores, then everything that keeps time, alone.

Tests of values (tests/unit, property, playbook, sim) disturb nobody: two runs of pytest share them, and what the second
one says is printed when the first has ended. Servers, engines and faults come after them, one run, with the machine to
itself: their limits are on the wall clock. With words on the command line it is plain pytest. Standard library only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence

PURE = (("tests/unit", "tests/playbook"), ("tests/property", "tests/sim"))
"""Two halves that take about as long as each other: 75 s of CPU and 100 s."""
KEEP_TIME = ("tests/contract", "tests/live", "tests/chaos")


def pytest_of(folders: Sequence[str], *, alone: bool) -> list[str]:
    """The command; two runs at once do not share pytest's cache."""
    return [sys.executable, "-m", "pytest", *folders, *(() if alone else ("-p", "no:cacheprovider"))]


def both_halves() -> bool:
    """Whether all pure tests passed."""
    with tempfile.TemporaryFile() as said:
        beside = subprocess.Popen(pytest_of(PURE[1], alone=False), stdout=said, stderr=subprocess.STDOUT)
        try:
            here = subprocess.run(pytest_of(PURE[0], alone=False), check=False).returncode
            print(f"… and {' '.join(PURE[1])}, which ran beside them:", flush=True)
            there = beside.wait()
        finally:
            beside.kill()
            beside.wait()
        said.seek(0)
        sys.stdout.buffer.write(said.read())
        sys.stdout.flush()
    return here == there == 0


def main(words: list[str]) -> int:
    """Exit code as pytest's: 0 when everything passed."""
    if words:
        return subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode
    pure = both_halves()
    rest = subprocess.run(pytest_of(KEEP_TIME, alone=True), check=False).returncode
    return rest if pure else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
