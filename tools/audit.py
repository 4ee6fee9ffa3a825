"""Ask pip-audit for known vulnerabilities of the locked packages. `make audit`.

pip-audit comes into an environment of its own (.bench/audit): it is no dependency of Baton. Ends with pip-audit's own
code (1: there are vulnerabilities), and with 2 if it or the advisory database is not available, which says nothing
about packages.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".bench" / "audit"
UNREACHABLE = re.compile(r"ConnectionError|Max retries|Failed to (?:resolve|connect)|ServiceError|timed out|HTTPError")


def installed() -> Path | None:
    """The program, installed on first use; None if it cannot be installed."""
    program = HOME / "bin" / "pip-audit"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        python = str(HOME / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "pip-audit"], check=False)
    return program if program.exists() else None


def main() -> int:
    """Audit both locks."""
    program = installed()
    if program is None:
        print("audit: pip-audit cannot be installed from here; nothing was checked", file=sys.stderr)
        return 2
    code = 0
    for device in ("cpu", "gpu"):
        lock = ROOT / "requirements" / f"{device}.txt"
        print(f"audit: requirements/{device}.txt", flush=True)
        words = [
            str(program),
            "--requirement",
            str(lock),
            "--require-hashes",
            "--disable-pip",
            "--progress-spinner=off",
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode and UNREACHABLE.search(done.stderr):
            print("audit: the advisory database cannot be reached from here; nothing was checked", file=sys.stderr)
            return 2
        print(done.stdout + done.stderr, end="", flush=True)
        code = max(code, done.returncode, not_audited(done.stdout, lock.read_text()))
    return code


def not_audited(said: str, lock: str) -> int:
    """2 if the database does not know some packages (it names each), which is no clean result; else 0."""
    skipped, all_of = said.count("could not be audited"), len(re.findall(r"^\S+==", lock, flags=re.MULTILINE))
    if skipped:
        said_of = f"{skipped} of {all_of} packages were not checked"
        print(f"audit: {said_of}: the database has no word of them", file=sys.stderr)
    return 2 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
