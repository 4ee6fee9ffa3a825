"""Texts without text: what a prompt says, what the KV of each block must be, and which tokens follow from it.

A prompt is a row of segments, each named by a number: the same segments are the same text. The digest of a block
covers everything up to its end, as the KV of a token depends on all tokens before it. Tokens follow from the whole
prompt and their position, so that an engine which read one wrong block makes wrong tokens, visibly, from there on.

All numbers are 64 bits wide and the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

_MASK: Final = (1 << 64) - 1
_ROOT: Final = 0x243F6A8885A308D3
"""What comes before the first block."""
VOCABULARY: Final = 32_000
"""How many different tokens there are, unless said otherwise."""


def mix(*values: int) -> int:
    """One number that depends on all of these and their order (splitmix64's steps)."""
    state = 0x9E3779B97F4A7C15
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
    """A prompt from real token ids, cut so that equal blocks of equal beginnings are seen to be equal."""
    blocks = (tuple(token_ids[at : at + block_size]) for at in range(0, len(token_ids), block_size))
    return tuple(Segment(mix(*block), len(block)) for block in blocks)


def length(prompt: Prompt) -> int:
    """Tokens of a prompt."""
    return sum(segment.tokens for segment in prompt)


def answer_key(prompt: Prompt, seed: int = 0) -> int:
    """What every token of the right answer follows from; also the name of the answer as a segment of a later prompt."""
    return mix(seed, *(part for segment in prompt for part in segment))


def token(key: int, index: int, vocabulary: int = VOCABULARY) -> int:
    """The answer's token at `index`, the first being 0."""
    return mix(key, index) % vocabulary


class Text:
    """A prompt and its answer, however long that becomes, in blocks of `block_size` tokens."""

    def __init__(self, prompt: Prompt, seed: int, block_size: int) -> None:
        self.key: Final = answer_key(prompt, seed)
        self.block_size: Final = block_size
        self.prompt_tokens: Final = length(prompt)
        self._segments = [segment for segment in prompt if segment.tokens]
        self._starts: list[int] = []
        at = 0
        for segment in self._segments:
            self._starts.append(at)
            at += segment.tokens
        self._starts.append(at)
        self._chain: list[int] = []

    def chain(self, block: int) -> int:
        """The digest of a full block; that of block -1 is the same for all texts."""
        if block < 0:
            return _ROOT
        while len(self._chain) <= block:
            self._chain.append(self._digest(len(self._chain), (len(self._chain) + 1) * self.block_size))
        return self._chain[block]

    def digest(self, block: int, end: int) -> int:
        """The digest of a block that is filled up to the text's token `end`, or to its own end."""
        return self.chain(block) if end >= (block + 1) * self.block_size else self._digest(block, end)

    def _digest(self, block: int, end: int) -> int:
        state, at = self.chain(block - 1), block * self.block_size
        while at < end:
            number = bisect_right(self._starts, at) - 1
            offset = at - self._starts[number]
            if number == len(self._segments):
                seed, taken, first = self.key, end - at, offset
            else:
                segment = self._segments[number]
                seed, taken, first = segment.seed, min(end - at, segment.tokens - offset), segment.first + offset
            state = mix(state, seed, first, taken)
            at += taken
        return state
