"""`make test`: pure tests on all cores, then everything that keeps time, alone.

Tests of values (tests/unit, property, playbook, sim) disturb nobody: three runs of pytest share them, and what the
others say is printed when the first has ended. Servers, engines and faults come after them, one run, with the machine
to itself: their limits are on the wall clock. With words on the command line it is plain pytest. Standard library only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

PURE: tuple[tuple[str, ...], ...] = (("tests/unit", "tests/playbook"), ("tests/property",), ("tests/sim",))
"""Thirds that take about as long as each other: 70 to 80 s of CPU."""
KEEP_TIME = ("tests/contract", "tests/live", "tests/chaos")


def pytest_of(folders: Sequence[str], *, alone: bool) -> list[str]:
    """The command; runs at one time do not share pytest's cache."""
    return [sys.executable, "-m", "pytest", *folders, *(() if alone else ("-p", "no:cacheprovider"))]


def pure() -> bool:
    """Whether all pure tests passed."""
    beside: list[tuple[Sequence[str], subprocess.Popen[bytes], IO[bytes]]] = []
    try:
        for others in PURE[1:]:
            out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            command = pytest_of(others, alone=False)
            beside.append((others, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT), out))
        passed = subprocess.run(pytest_of(PURE[0], alone=False), check=False).returncode == 0
        for folders, running, said in beside:
            print(f"{' '.join(folders)}, beside them:", flush=True)
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
    passed = pure()
    rest = subprocess.run(pytest_of(KEEP_TIME, alone=True), check=False).returncode
    return rest if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
