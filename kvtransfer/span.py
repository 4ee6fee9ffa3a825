"""Which blocks of a hold a consumer pulls: all of them, fewer, or none; its prompt may be longer than what is held."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A run of the hold's blocks, and what the prompt has once they are here."""

    first: int
    """Index of the first block to read, in the hold and in the prompt alike."""
    blocks: int
    """How many blocks to read, and so to allocate."""
    tokens: int
    """Up to which token the prompt's KV is there afterwards; what follows is computed."""


def pull_span(*, held_tokens: int, prompt_tokens: int, cached_tokens: int, block_tokens: int) -> Span:
    """The blocks worth reading.

    Args:
        held_tokens: how many of its tokens the producer holds KV for: more than our prompt has, or fewer. (One token
            fewer, at a block's edge, made stock vLLM ask for a block that nobody held, and took the engine down.)
        prompt_tokens: the length of our prompt.
        cached_tokens: how many of them this instance has in its own prefix cache; only whole blocks count.
        block_tokens: tokens in a block, the same on both sides (`kvtransfer.layout` translates where they differ).
    """
    if min(held_tokens, prompt_tokens, cached_tokens) < 0 or block_tokens < 1:
        raise ValueError("token counts cannot be negative and a block holds at least one token")
    usable = min(held_tokens, prompt_tokens)
    first = cached_tokens // block_tokens
    end = -(-usable // block_tokens)
    if usable <= cached_tokens or end <= first:
        return Span(first, 0, min(cached_tokens, prompt_tokens))
    return Span(first, end - first, usable)
