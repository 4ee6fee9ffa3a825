"""Symbolic texts: the content of a prompt, the right KV of each block, and the tokens that follow from it.

A prompt is a row of segments, each named by a number: equal segments are equal text. The digest of a block covers
everything up to its end, as the KV of a token depends on all tokens before it. Tokens follow from the whole prompt and
their position, so an engine that has read one wrong block visibly makes wrong tokens from there on.

All numbers are 64 bits wide and the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

_MASK: Final = (1 << 64) - 1
_ROOT: Final = 0x243F6A8885A308D3
"""The digest before the first block."""
_STRIDE: Final = 0xD1342543DE82EF95
"""The growth of the digest from one token of a segment to the next (odd, so no two are equal within 2⁶⁴ tokens)."""
VOCABULARY: Final = 32_000
"""The number of different tokens, unless set otherwise."""
MIX_OF_NOTHING: Final = 0x9E3779B97F4A7C15
"""`mix` of no value."""


def mix(*values: int) -> int:
    """One number that depends on all of these and their order (splitmix64's steps)."""
    return mix_on(MIX_OF_NOTHING, *values)


def mix_on(state: int, *values: int) -> int:
    """`mix` of more values after those that came to `state`."""
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        state ^= state >> 29
    return state


class Segment(NamedTuple):
    """`tokens` tokens of the text called `seed`, from its token `first` on."""

    seed: int
    tokens: int
    first: int = 0


Prompt = tuple[Segment, ...]


def prompt_of(token_ids: Sequence[int], block_size: int) -> Prompt:
    """A prompt from real token ids, cut so that equal blocks after equal beginnings get equal digests."""
    blocks = (tuple(token_ids[at : at + block_size]) for at in range(0, len(token_ids), block_size))
    return tuple(Segment(mix(*block), len(block)) for block in blocks)


def length(prompt: Prompt) -> int:
    """Tokens of a prompt."""
    return sum(segment.tokens for segment in prompt)


def beginning(prompt: Prompt, tokens: int) -> Prompt:
    """The first tokens of a prompt; all of it if it has no more."""
    found: list[Segment] = []
    for segment in prompt:
        if tokens <= 0:
            break
        found.append(Segment(segment.seed, min(segment.tokens, tokens), segment.first))
        tokens -= segment.tokens
    return tuple(found)


def answer_key(prompt: Prompt, seed: int = 0) -> int:
    """The key from which every token of the right answer follows; also the name of the answer as a segment of a later
    prompt.
    """
    return key_after(mix(seed), prompt)


def key_after(key: int, more: Prompt) -> int:
    """`answer_key` of a prompt that goes on with these segments, from that of its beginning."""
    return mix_on(key, *(part for segment in more for part in segment))


def token(key: int, index: int, vocabulary: int = VOCABULARY) -> int:
    """The answer's token at `index`, the first being 0."""
    return mix(key, index) % vocabulary


class Text:
    """A prompt and its answer, of any length, in blocks of `block_size` tokens.

    A digest is that of all text before its segment, mixed with the segment's name, plus a stride for each token: so any
    block's digest takes constant time, and a row of them costs no more than the numbers themselves.
    """

    __slots__ = ("_bases", "_ends", "_key", "_prompt", "_seed", "_starts", "block_size", "prompt_tokens")

    def __init__(self, prompt: Prompt, seed: int, block_size: int) -> None:
        self.block_size: Final = block_size
        self.prompt_tokens: Final = length(prompt)
        self._prompt, self._seed = prompt, seed
        self._key: int | None = None
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._bases: list[int] = []

    @property
    def key(self) -> int:
        """The key of the right answer."""
        if self._key is None:
            self._key = answer_key(self._prompt, self._seed)
        return self._key

    def chain(self, block: int) -> int:
        """The digest of a full block; that of block -1 is the same for all texts."""
        return self._at((block + 1) * self.block_size) if block >= 0 else _ROOT

    def chains(self, first: int, last: int) -> list[int]:
        """The digests of the full blocks from `first` up to `last`, without `last`."""
        size, found = self.block_size, []
        while first < last:
            start, end, base = self._segment((first + 1) * size)
            until = last if end is None else min(last, end // size)
            low = base + ((first + 1) * size - start) * _STRIDE
            found += [value & _MASK for value in range(low, low + (until - first) * size * _STRIDE, size * _STRIDE)]
            first = until
        return found

    def digest(self, block: int, end: int) -> int:
        """The digest of a block that is filled up to the text's token `end`, or to its own end."""
        return self._at(min(end, (block + 1) * self.block_size))

    def _at(self, end: int) -> int:
        """The digest of the text up to its token `end`."""
        if end > self.prompt_tokens and self._bases:
            return (self._bases[-1] + (end - self.prompt_tokens) * _STRIDE) & _MASK
        start, _, base = self._segment(end)
        return (base + (end - start) * _STRIDE) & _MASK

    def _segment(self, end: int) -> tuple[int, int | None, int]:
        """The start, the end and the base of the segment with the last token before `end`."""
        if not self._bases:
            self._join()
        if end > self.prompt_tokens:
            return self.prompt_tokens, None, self._bases[-1]
        number = bisect_left(self._ends, end)
        return self._starts[number], self._ends[number], self._bases[number]

    def _join(self) -> None:
        """Lay the segments end to end; a segment that continues the one before it joins it."""
        at, seed, first = 0, None, 0
        for segment in (*self._prompt, Segment(self.key, 0)):
            if segment.tokens and segment.seed == seed and segment.first == first + at - self._starts[-1]:
                self._ends[-1] = at = at + segment.tokens
            elif segment.tokens or segment.seed == self.key:
                seed, first = segment.seed, segment.first
                before = self._bases[-1] + (at - self._starts[-1]) * _STRIDE if self._bases else _ROOT
                self._bases.append(mix(before & _MASK, seed, first))
                self._starts.append(at)
                at += segment.tokens
                self._ends.append(at)
        self._ends.pop()  # the answer's end is open
