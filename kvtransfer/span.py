"""The blocks of a hold that a consumer pulls: all, some or none; its prompt may be longer than the tokens held."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A run of the hold's blocks, and how much of the prompt is present once they have arrived."""

    first: int
    """Index of the first block to read, the same in the hold and in the prompt."""
    blocks: int
    """The number of blocks to read, and so to allocate."""
    tokens: int
    """The prompt's KV is present up to this token afterwards; the engine computes the rest."""


def pull_span(*, held_tokens: int, prompt_tokens: int, cached_tokens: int, block_tokens: int) -> Span:
    """The blocks worth reading.

    Args:
        held_tokens: the tokens whose KV the producer holds: more than our prompt has, or fewer. (With one token fewer,
            at a block's edge, stock vLLM asked for a block that the producer did not hold, and the engine ended.)
        prompt_tokens: the length of our prompt.
        cached_tokens: how many of them this instance has in its own prefix cache; only whole blocks count.
        block_tokens: tokens in a block, the same on both sides.

    Raises:
        ValueError: a number of tokens is negative, or `block_tokens` is below 1.
    """
    if min(held_tokens, prompt_tokens, cached_tokens) < 0 or block_tokens < 1:
        raise ValueError("token counts cannot be negative and a block holds at least one token")
    usable = min(held_tokens, prompt_tokens)
    first = cached_tokens // block_tokens
    end = -(-usable // block_tokens)
    if usable <= cached_tokens or end <= first:
        return Span(first, 0, min(cached_tokens, prompt_tokens))
    return Span(first, end - first, usable)
