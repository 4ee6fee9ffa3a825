"""A source leg: the engine holds what its KV cache has of a prompt, so that a peer can pull it, and computes one token.

vLLM has no request that only looks into the cache. It has one that is cut before it is scheduled: its own connector
does so with prompts of hybrid models (``NixlBaseConnectorScheduler._truncate_request_for_prefill``). So a source leg is
cut to the cached blocks and the token after them, which vLLM computes in one step. Its hold has the cached blocks only.
"""

from __future__ import annotations

from typing import Any

from cluster.wire import FROM_CACHE


def cut_to_cached(request: Any, core: Any, block_size: int) -> int:
    """Cut a new request to what the cache has of its prompt. Returns the number of these tokens.

    Where that is nothing, or cannot be told, one token is left and no hold is asked for.

    Args:
        request: vLLM's, before it is scheduled.
        core: the engine core, whose scheduler knows the cache; None: it was not found.
        block_size: tokens in a block.
    """
    had = 0
    if core is not None and request.prompt_token_ids is not None and request.prompt_embeds is None:
        had = int(core.scheduler.kv_cache_manager.get_computed_blocks(request)[1])
        # A picture's place is not cut in two: its end would be computed without its beginning.
        first = min([each.mm_position.offset for each in request.mm_features or ()], default=had)
        had = min(had, first) // block_size * block_size
    if not had:
        request.kv_transfer_params = None
    if request.prompt_token_ids is not None:
        keep = had + 1
        del request.prompt_token_ids[keep:], request._all_token_ids[keep:]  # noqa: SLF001 - as vLLM's connector does
        request.num_prompt_tokens = len(request.prompt_token_ids)
        request.mm_features = []
        request.block_hashes.clear()
        request.update_block_hashes()
    return had


def only_whole_blocks(fields: dict[str, Any], block_size: int) -> None:
    """Leave the computed token out of the fields of a source leg's hold, and mark these (`FROM_CACHE`)."""
    tokens = fields["remote_num_tokens"] // block_size * block_size
    fields["remote_num_tokens"] = tokens
    fields["remote_block_ids"] = tuple(list(group)[: tokens // block_size] for group in fields["remote_block_ids"])
    fields[FROM_CACHE] = True
