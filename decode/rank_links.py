"""The link of one engine with another, from the states that its ranks report, each when it has tried. Pure.

A prompt is pulled by all ranks: one rank that cannot read makes every pull fail. So the link is met only when every
rank has met its part, and while one has not, it stands as that rank says. An agent repeats the introduction until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from decode.peers import MET

GONE: Final = "gone"
"""The state that a rank reports once it has dropped the engine."""


class RankLinks:
    """The links of an engine's ranks, by the other engine's id."""

    def __init__(self, ranks: int) -> None:
        """`ranks`: the number of ranks that report."""
        self._ranks: Final = ranks
        self._states: Final[dict[str, dict[int, str]]] = {}

    def told(self, reports: Mapping[str, Mapping[int, str]]) -> dict[str, str]:
        """Take the states that ranks report, by engine. Returns the state of each link of which enough is known now."""
        links = {engine: self._of(engine, by_rank) for engine, by_rank in reports.items()}
        return {engine: link for engine, link in links.items() if link}

    def _of(self, engine: str, by_rank: Mapping[int, str]) -> str:
        """The state of one link; empty: not every rank has reported."""
        states = self._states.setdefault(engine, {})
        states.update(by_rank)
        if GONE in by_rank.values():
            del self._states[engine]
            return GONE
        because = next((state for _, state in sorted(states.items()) if state != MET), "")
        return because or (MET if len(states) >= self._ranks else "")
