"""The result of `baton load --find-goodput`, for all parts that show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from loadgen.report import Targets
from loadgen.search import Limit, SearchFinished, Try


@dataclass(frozen=True, slots=True)
class Goodput:
    """The goodput found, and the trials behind it."""

    finished: SearchFinished
    tries: tuple[Try, ...]
    targets: Targets
    attainment: float
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if goodput was found, 130 if the user stopped the search, else 1."""
        if self.finished.limit is Limit.STOPPED:
            return 130
        return 0 if self.finished.limit is Limit.SERVER else 1

    def as_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found: dict[str, Any] = msgspec.to_builtins(self.finished)
        more = {"targets": self.targets, "attainment": self.attainment, "tries": self.tries, "notes": self.notes}
        return {"goodput": found, **msgspec.to_builtins(more)}
