"""A source leg as vLLM's scheduler has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster import wire

BLOCK = 4
"""Tokens in a block."""


class Asked:
    """The attributes of vLLM's request that a source leg uses."""

    def __init__(self, tokens: int, pictures: tuple[int, ...] = ()) -> None:
        self.request_id = "asked"
        self.prompt_token_ids: list[int] | None = list(range(tokens))
        self._all_token_ids = list(range(tokens))
        self.num_prompt_tokens = tokens
        self.prompt_embeds: Any = None
        self.mm_features = [SimpleNamespace(mm_position=SimpleNamespace(offset=at)) for at in pictures]
        self.block_hashes = list(range(tokens // BLOCK))
        self.kv_transfer_params: dict[str, Any] | None = {"do_remote_decode": True, wire.CACHED_ONLY: True}

    def update_block_hashes(self) -> None:
        assert not self.block_hashes, "the hashes of the cut-off tokens are dropped first"
        self.block_hashes = list(range(len(self._all_token_ids) // BLOCK))
