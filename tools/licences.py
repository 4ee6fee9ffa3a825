"""List the licences of all that a lock installs, by the packages' own metadata; mark some. Run by `make licences`.

Copyleft licences and packages that do not say theirs are marked and counted; it decides nothing. Packages of the lock
that are not installed here (another machine's, another Python's) are named.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator
from email.message import Message
from pathlib import Path
from typing import NamedTuple, cast

ROOT = Path(__file__).resolve().parent.parent
COPYLEFT = re.compile(r"\b[AL]?GPL|Affero|Lesser General|GNU General|\bMPL|Mozilla|\bEPL|\bCDDL|\bEUPL", re.IGNORECASE)
LINE_CHARS = 60
"""Characters of a licence's name: some metadata hold the whole text, whose first line names it."""


class Licence(NamedTuple):
    """One package's licence, by its own metadata."""

    name: str
    version: str
    licence: str

    @property
    def mark(self) -> str:
        """Why it needs a look; empty: it needs none."""
        if not self.licence:
            return "unknown"
        return "copyleft" if COPYLEFT.search(self.licence) else ""


def licence_in(metadata: Message) -> str:
    """The SPDX expression if there is one, else classifiers, else the old field."""
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [str(each) for each in metadata.get_all("Classifier") or () if str(each).startswith("License ::")]
    named = [each.rpartition(" :: ")[2] for each in classifiers if each != "License :: OSI Approved"]
    if named:
        return " / ".join(named)
    lines = str(metadata.get("License") or "").strip().splitlines()
    text = lines[0].strip() if lines else ""
    return "" if text.upper() in {"", "UNKNOWN", "NONE"} else text[:LINE_CHARS]


def names_in(lock: str) -> list[str]:
    """Packages of a lock."""
    return re.findall(r"^([A-Za-z0-9._-]+)==", lock, flags=re.MULTILINE)


def licences(names: Iterable[str]) -> Iterator[Licence | str]:
    """The licence of each of these; the name alone if the package is not installed."""
    for name in names:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            yield name
            continue
        yield Licence(name, found.version, licence_in(cast("Message", found.metadata)))


def main() -> None:
    """Print a line for each package, those to look at once more at the end."""
    device = "gpu" if "gpu" in sys.argv[1:] else "cpu"
    found = list(licences(names_in((ROOT / "requirements" / f"{device}.txt").read_text())))
    told = [each for each in found if isinstance(each, Licence)]
    for each in told:
        print(f"{each.name:<36} {each.version:<16} {each.licence or '?':<60} {each.mark}".rstrip())
    for mark in ("unknown", "copyleft"):
        marked = [each.name for each in told if each.mark == mark]
        print(f"{mark}: {len(marked)}{': ' if marked else ''}{', '.join(marked)}")
    absent = [each for each in found if isinstance(each, str)]
    if absent:
        print(f"not installed here: {', '.join(absent)}")


if __name__ == "__main__":
    main()
