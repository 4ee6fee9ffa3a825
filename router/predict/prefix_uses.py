"""How often requests share a beginning of their prompts, for what a copy of it is worth. Pure.

A price that charges each request for its own time alone keeps all requests with one system prompt at the few instances
that have it: to compute it once more costs the request more than it waits there. Later requests would wait less.
So a request that makes a copy is charged for its share of that, by how many requests use the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.predict.prefix_cache import Match

WITHIN_S: Final = 3.0
"""Uses are counted over so many seconds. A copy is used for longer, as long as it is not evicted; counting over longer
times copies more, and 10 s cost chats on four instances 1 ms (docs/policy.md, "Copies of shared beginnings")."""

USES_MIN: Final = 8.0
"""A beginning with fewer uses for each copy is not worth one more. A conversation's own turns are fewer."""


class PrefixUses:
    """Counts uses of beginnings, by the name of the last chunk. Only where a request's match ends at some instance is a
    beginning counted: that is as far as others share it.
    """

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}
        """Uses since `_began`, by name."""
        self._former: dict[int, int] = {}
        """Uses in the `WITHIN_S` before that."""
        self._began = 0.0

    def count(self, chunks: Sequence[int], match: Match, now: float) -> None:
        """A request with these names goes to an instance. `match`: what instances held of it."""
        self._pass(now)
        uses = self._uses
        for depth, _ in match.levels:
            name = chunks[depth - 1]
            uses[name] = uses.get(name, 0) + 1

    def shared(self, chunks: Sequence[int], match: Match, now: float, routers: int = 1) -> list[tuple[int, float]]:
        """The beginnings of a prompt that are worth one more copy, longest first: their chunks, and the uses that each
        copy would have within `WITHIN_S`. `routers`: each of so many sees its share of the uses.
        """
        self._pass(now)
        found: list[tuple[int, float]] = []
        past, copies = min(1.0, 1.0 - (now - self._began) / WITHIN_S), 1
        for depth, bits in match.levels:
            copies += bits.bit_count()
            name = chunks[depth - 1]
            uses = routers * (self._uses.get(name, 0) + past * self._former.get(name, 0)) / copies
            if uses >= USES_MIN:
                found.append((depth, uses))
        return found

    def _pass(self, now: float) -> None:
        """Begin to count anew once `WITHIN_S` are over: names that are used no more are forgotten by that."""
        over_s = now - self._began
        if over_s < WITHIN_S:
            return
        self._former = self._uses if over_s < 2 * WITHIN_S else {}
        self._uses, self._began = {}, now if over_s >= 2 * WITHIN_S else self._began + WITHIN_S
