"""Block digests in the scheduler half: the names of prompts' blocks, and which prompts a step completes.

`kvtransfer.block_digests` defines names and digests; the workers write the digests (`digests`). vLLM's requests and
steps are read by the names of their fields only.
"""

from __future__ import annotations

from typing import Any, Final

from kvtransfer.block_digests import Computing, names


class VouchedPrompts:
    """The prefill legs of one engine whose blocks will get digests."""

    def __init__(self, block_size: int) -> None:
        self._block_size: Final = block_size
        self._computing: Final = Computing()

    def begin(self, request: Any) -> None:
        """A prefill leg has arrived."""
        tokens = len(request.prompt_token_ids or ())
        self._computing.begin(request.request_id, tokens, self.names(request, tokens))

    def end(self, request: str) -> None:
        """The leg has ended."""
        self._computing.end(request)

    def names(self, request: Any, tokens: int) -> tuple[bytes, ...]:
        """The names of a prompt's first blocks, including what else in the request their KV depends on."""
        prompt = (request.prompt_token_ids or ())[:tokens]
        adapter, seen = request.lora_request, request.mm_features or ()
        if adapter is None and not seen:
            return names(prompt, self._block_size)
        places = [(each.identifier, each.mm_position.offset, each.mm_position.length) for each in seen]
        about = ("" if adapter is None else adapter.lora_name, places)
        return names(prompt, self._block_size, repr(about).encode())

    def step(self, output: Any) -> dict[str, tuple[tuple[int, ...], tuple[bytes, ...]]]:
        """The prompts that this step completes, by request: their blocks, and the blocks' names. `output`: vLLM's for
        the step, the only place from which a connector learns a request's blocks.
        """
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._computing.given(new.req_id, new.block_ids[0], anew=True)
            computed[new.req_id] = new.num_computed_tokens
        more = output.scheduled_cached_reqs
        for request, blocks, tokens in zip(more.req_ids, more.new_block_ids, more.num_computed_tokens, strict=True):
            if blocks is not None:
                self._computing.given(request, blocks[0], anew=request in more.resumed_req_ids)
            computed[request] = tokens
        scheduled = output.num_scheduled_tokens
        ended = {name: self._computing.step(name, tokens + scheduled[name]) for name, tokens in computed.items()}
        return {name: done for name, done in ended.items() if done is not None}
