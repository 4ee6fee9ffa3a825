"""The rivals a benchmark measures beside us, each set in an environment of its own under .bench/, versions pinned.

    python -m bench.rivals router      makes .bench/router from requirements/bench-router.txt; at once when it is there

`make bench-router` and its like do this themselves; `make test` never does. If a rival cannot be installed, the
benchmark says so and runs without it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class NotInstalled(Exception):
    """In one line, why."""


def pinned(name: str) -> Path:
    """The list of packages of this set."""
    return ROOT / "requirements" / f"bench-{name}.txt"


def version_of(name: str, package: str) -> str:
    """Which version of a package the list pins."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", pinned(name).read_text(), re.MULTILINE)
    assert found, f"{pinned(name).name} does not pin {package}"
    return found[1]


def environment(name: str) -> Path:
    """The folder with the programs of this set, installed first if need be.

    Raises:
        NotInstalled: no index to be had, or no build for this machine.
    """
    folder = ROOT / ".bench" / name
    stamp = folder / "bench.stamp"
    key = hashlib.sha256(pinned(name).read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return folder / "bin"
    sys.stderr.write(f"installing {pinned(name).name} into {folder.relative_to(ROOT)}\n")
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--requirement", str(pinned(name))])
    stamp.write_text(key)
    return folder / "bin"


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise NotInstalled(next((line for line in lines if line.startswith("ERROR")), lines[-1]))


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{environment(sys.argv[1])}\n")
    except NotInstalled as error:
        sys.exit(f"rivals for {sys.argv[1]} are not installed: {error}")
