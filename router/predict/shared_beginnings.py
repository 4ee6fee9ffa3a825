"""The beginnings of prompts that several answers on one instance share in its KV cache. Pure.

An engine keeps a cached beginning once, however many requests under way begin with it. A system prompt of 3,000 tokens
that counted for each of 100 answers would be 300,000 tokens, and requests would wait in the router beside an empty
cache. A beginning is known by the name of its last chunk (`router.predict.chunks`: a name says all that comes before
it), and looked at in few lengths only (`LENGTHS`), so that a long prompt costs little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

LENGTHS: Final[tuple[int, ...]] = (1, 2, 3, *(each << power for power in range(17) for each in (4, 5, 6, 7)))
"""The lengths, in chunks, of beginnings that are told apart. A shared beginning counts as shared up to the longest of
these that fits into it: a tenth of it is missed in the mean, and never more than a fifth."""


def beginnings(chunks: Sequence[int]) -> tuple[int, ...]:
    """The names of a prompt's beginnings in the `LENGTHS` that it has. `chunks`: the names of its chunks."""
    count = len(chunks)
    return tuple([chunks[length - 1] for length in LENGTHS[: bisect_right(LENGTHS, count)]])


def lengths_within(chunks: int) -> int:
    """How many of the `LENGTHS` fit into so many chunks."""
    return bisect_right(LENGTHS, chunks)


class Beginnings:
    """Those of one answer's prompt."""

    __slots__ = ("cached", "chunk_tokens", "held", "names")

    def __init__(self, names: Sequence[int], cached: int, chunk_tokens: float) -> None:
        """The beginnings of an answer that has no place yet.

        Args:
            names: `beginnings` of its prompt.
            cached: how many of them are expected in the KV cache. Behind these the engine writes blocks of the
                request's own, though another request may have written the same.
            chunk_tokens: the tokens of a chunk.
        """
        self.names: Final = names
        self.cached: Final = cached
        self.chunk_tokens: Final = chunk_tokens
        self.held: list[int] = []
        """The names that count as held for it, while it has a place."""


class SharedBeginnings:
    """The beginnings of the answers on one instance."""

    __slots__ = ("_tokens", "_uses")

    def __init__(self) -> None:
        self._uses: Final[dict[int, int]] = {}
        """By name: the number of answers that hold this beginning."""
        self._tokens: Final[dict[int, float]] = {}
        """By name: the tokens between the next shorter beginning's end and its own."""

    def add(self, of: Beginnings) -> float:
        """One more answer. Returns the tokens of its prompt that others hold, too."""
        shared, before = 0.0, 0
        of.held.clear()  # it may have had a place on an instance that is gone
        for at, name in enumerate(of.names):
            uses = self._uses.get(name, 0)
            if not uses:
                self._tokens[name] = (LENGTHS[at] - before) * of.chunk_tokens
            elif at < of.cached:
                shared += self._tokens[name]
            before = LENGTHS[at]
            if not uses or at < of.cached:
                self._uses[name] = uses + 1
                of.held.append(name)
        return shared

    def drop(self, of: Beginnings) -> float:
        """An answer is over. Returns the tokens of its prompt that others still hold."""
        shared = 0.0
        for name in of.held:
            uses = self._uses[name] - 1
            if uses:
                self._uses[name] = uses
                shared += self._tokens[name]
            else:
                del self._uses[name], self._tokens[name]
        of.held.clear()
        return shared

    def among(self, names: Sequence[int], cached: int) -> float:
        """The tokens of a new prompt's beginnings that answers here hold already (`Beginnings` has the arguments)."""
        return sum([self._tokens[name] for name in names[:cached] if name in self._uses])

    def clear(self) -> None:
        """There are no answers."""
        self._uses.clear()
        self._tokens.clear()
