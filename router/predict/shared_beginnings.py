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

    __slots__ = ("cached", "chunk_tokens", "held", "named", "names", "prompt_tokens")

    def __init__(self, names: Sequence[int], cached: int, chunk_tokens: float, prompt_tokens: float) -> None:
        """The beginnings of an answer that has no place yet.

        Args:
            names: `beginnings` of its prompt.
            cached: how many of them are expected in the KV cache. Behind these the engine writes blocks of the
                request's own, though another request may have written the same.
            chunk_tokens: the tokens of a chunk.
            prompt_tokens: those of the prompt; its chunks have no more together, as a trace's last block may be short.
        """
        self.names: Final = names
        self.cached: Final = cached
        self.chunk_tokens: Final = chunk_tokens
        self.prompt_tokens: Final = prompt_tokens
        self.held: list[int] = []
        """The names that count as held for it, while it has a place."""
        self.named: float = 0.0
        """The tokens of its own prompt that these stand for."""


class SharedBeginnings:
    """The beginnings of the answers on one instance.

    Tokens of a chunk are a mean over the whole prompt, so two prompts with one beginning may count it differently. What
    all need is each answer's private part, by its own count, and each beginning once, by the count of the answer that
    brought it. An answer takes with it just what it has added: so the sum is never less than the private parts.
    """

    __slots__ = ("_tokens", "_uses")

    def __init__(self) -> None:
        self._uses: Final[dict[int, int]] = {}
        """By name: the number of answers that hold this beginning."""
        self._tokens: Final[dict[int, float]] = {}
        """By name: the tokens between the next shorter beginning's end and its own."""

    def add(self, of: Beginnings) -> float:
        """One more answer. Returns the tokens of its prompt that others hold, too: what it needs is so much less."""
        brought, named, before = 0.0, 0.0, 0.0
        users, tokens, held = self._uses, self._tokens, of.held
        held.clear()  # it may have had a place on an instance that is gone
        each, most, cached = of.chunk_tokens, of.prompt_tokens, of.cached
        for at, name in enumerate(of.names):
            uses = users.get(name, 0)
            end = LENGTHS[at] * each
            end = min(end, most)
            if not uses or at < cached:
                span = end - before
                if not uses:
                    tokens[name] = span
                    brought += span
                users[name] = uses + 1
                held.append(name)
                named += span
            before = end
        of.named = named
        return named - brought

    def drop(self, of: Beginnings) -> float:
        """An answer is over. Returns the tokens of its prompt that stay, as others hold them. They are negative if more
        go than it had: beginnings that an answer with more tokens a chunk has brought, and this one held last.
        """
        gone = 0.0
        for name in of.held:
            uses = self._uses[name] - 1
            if uses:
                self._uses[name] = uses
            else:
                gone += self._tokens.pop(name)
                del self._uses[name]
        named, of.named = of.named, 0.0
        of.held.clear()
        return named - gone

    def among(self, names: Sequence[int], cached: int, chunk_tokens: float, prompt_tokens: float) -> float:
        """What `add` would return for this prompt (`Beginnings` has the arguments)."""
        shared, before = 0.0, 0.0
        for at, name in enumerate(names[:cached]):
            end = min(LENGTHS[at] * chunk_tokens, prompt_tokens)
            if name in self._uses:
                shared += end - before
            before = end
        return shared

    def clear(self) -> None:
        """There are no answers."""
        self._uses.clear()
        self._tokens.clear()
