"""A source leg: the engine holds what it has of a prompt, so that a peer can pull it, and computes one token.

vLLM has no request that only looks into the cache. It has one that is cut before it is scheduled: its own connector
does so with prompts of hybrid models (``NixlBaseConnectorScheduler._truncate_request_for_prefill``). So a source leg is
cut to the cached blocks and the token after them, which vLLM computes in one step. Its hold has the cached blocks only.

Where vLLM's offloading has tiers below the KV cache, the leg is cut later: when vLLM asks how much of the prompt can be
loaded (`SourceLegs.looked_up`), because a look-up in a tier of files takes several steps. vLLM then loads what the
tiers have, as for any request.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from cluster.wire import CACHED_ONLY, FROM_CACHE
from engine.vllm.connector.vouched import VouchedPrompts


class SourceLegs:
    """The source legs of one engine, until they are cut."""

    def __init__(
        self, core: Any, block_size: int, kv_cache_config: Any, counts: Counter[str], vouched: VouchedPrompts | None
    ) -> None:
        """Legs are counted in `counts`.

        Args:
            core: vLLM's engine core; None: it was not found.
            block_size: tokens in a block.
            kv_cache_config: vLLM's. With several groups of layers, what one group has may be of no use, so tiers are
                left out.
            counts: where legs are counted.
            vouched: the prompts that get digests for their blocks; None: none do.
        """
        self._core: Final = core
        self._block_size: Final = block_size
        self._one_group: Final = len(kv_cache_config.kv_cache_groups) == 1
        self._counts: Final = counts
        self._vouched: Final = vouched

    def arrived(self, request: Any) -> None:
        """Cut a new source leg to what the KV cache has, unless there are tiers to look into."""
        if request.prompt_embeds is None and self._below() is not None:
            _cut(request, _before_media(request, len(request.prompt_token_ids)), self._block_size)
            return
        self._count(cut_to_cached(request, self._core, self._block_size))

    def looked_up(self, request: Any, cached: int) -> bool:
        """Cut a source leg to what the KV cache and the tiers have. Returns whether the tiers know that already: if
        not, vLLM asks again at its next step.

        Args:
            request: vLLM's. One that was cut before is cut again, if the tiers have dropped something meanwhile.
            cached: the prompt's tokens that are in the KV cache, a whole number of blocks.
        """
        tiers = self._below()
        if tiers is None:
            return True
        more = tiers.tokens_below(request, cached)
        if more is None:
            return False
        _cut(request, cached + more, self._block_size)
        if self._vouched is not None:
            self._vouched.begin(request)  # its blocks are those that are left
        return True

    def ended(self, request: Any) -> bool:
        """A leg has ended. Returns whether it has anything to hold: a source leg may have found nothing."""
        if not is_source(request):
            return True
        had = int(request.num_prompt_tokens) // self._block_size
        if self._below() is not None:
            self._count(had)
        return had > 0

    def brings(self, request: Any) -> None:
        """The connector brings this request's tokens. vLLM asks the tiers next, and they need not look for them."""
        tiers = self._below()
        if tiers is not None:
            tiers.brought = request.request_id

    def _below(self) -> Any:
        """vLLM's offloading beside this connector; None: there is none, or it is left out."""
        if self._core is None or not self._one_group:
            return None
        connectors = getattr(self._core.scheduler.connector, "sub_connectors", ())
        return next((each for each in connectors if hasattr(each, "tokens_below")), None)

    def _count(self, had: int) -> None:
        self._counts["asked as a source" if had else "asked as a source, and had nothing"] += 1


def is_source(request: Any) -> bool:
    """Whether a request is a source leg that asks for a hold."""
    fields = request.kv_transfer_params
    return isinstance(fields, dict) and bool(fields.get("do_remote_decode") and fields.get(CACHED_ONLY))


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
        had = _before_media(request, int(core.scheduler.kv_cache_manager.get_computed_blocks(request)[1]))
        had = had // block_size * block_size
    if not had:
        request.kv_transfer_params = None
    if request.prompt_token_ids is not None:
        _cut(request, had, block_size)
    return had


def _before_media(request: Any, tokens: int) -> int:
    """A picture's place is not cut in two: its end would be computed without its beginning."""
    return min([tokens, *(int(each.mm_position.offset) for each in request.mm_features or ())])


def _cut(request: Any, tokens: int, block_size: int) -> None:
    """Leave the whole blocks of a prompt's first `tokens`, and the token after them."""
    keep = tokens // block_size * block_size + 1
    if keep >= len(request.prompt_token_ids):
        return
    del request.prompt_token_ids[keep:], request._all_token_ids[keep:]  # noqa: SLF001 - as vLLM's connector does
    request.num_prompt_tokens = len(request.prompt_token_ids)
    request.mm_features = []
    request.block_hashes.clear()
    request.update_block_hashes()


def only_whole_blocks(fields: dict[str, Any], block_size: int) -> None:
    """Leave the computed token out of the fields of a source leg's hold, and mark these (`FROM_CACHE`)."""
    tokens = fields["remote_num_tokens"] // block_size * block_size
    fields["remote_num_tokens"] = tokens
    fields["remote_block_ids"] = tuple(list(group)[: tokens // block_size] for group in fields["remote_block_ids"])
    fields[FROM_CACHE] = True
