"""Parts in the connector's scheduler half: blocks that a consumer reads while their producer computes the rest.

Passes vLLM's steps to `prefill.parts`, and its questions about early legs to `decode.early_reads`. vLLM's requests and
steps are read by the names of their fields only. Runs inside vLLM's engine core, on vLLM's own thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from decode.early_reads import EarlyReads, PartRead, Place
from kvtransfer.early_notes import Part
from prefill.parts import Parts


class PartsHere:
    """As P: the parts of the prefill legs under way."""

    def __init__(self, block_size: int) -> None:
        self._parts: Final = Parts(block_size)
        self._number = 0

    def begin(self, request: Any, name: str | None) -> None:
        """A prefill leg has arrived."""
        if name is not None:
            self._parts.begin(request.request_id, name, len(request.prompt_token_ids or ()))

    def end(self, request: str) -> int:
        """The leg has ended. Returns its life (`kvtransfer.early_notes.Part.life`)."""
        return self._parts.end(request)

    def step(self, output: Any) -> int:
        """A step is planned. Returns its number, if its end is to be reported; else 0. `output`: vLLM's for the step,
        the only place from which a connector learns a request's blocks.
        """
        legs = self._parts.requests
        if not legs:
            return 0
        number, now = self._number + 1, time.monotonic()
        scheduled, reports = output.num_scheduled_tokens, False
        for new in output.scheduled_new_reqs:
            mine, before = new.req_id, new.num_computed_tokens
            if mine in legs:
                blocks = list(new.block_ids[0])
                reports |= self._parts.step(number, mine, before, scheduled[mine], blocks, now, anew=True)
        more = output.scheduled_cached_reqs
        for mine, blocks, before in zip(more.req_ids, more.new_block_ids, more.num_computed_tokens, strict=True):
            if mine in legs:
                added, anew = list(blocks[0]) if blocks is not None else [], mine in more.resumed_req_ids
                reports |= self._parts.step(number, mine, before, scheduled[mine], added, now, anew=anew)
        if not reports:
            return 0
        self._number = number
        return number

    def computed(self, number: int, asking: Callable[[str], tuple[str, ...]]) -> list[tuple[str, Part]]:
        """The output of this step is there. Returns the consumers to tell, and what."""
        return self._parts.computed(number, time.monotonic(), asking)


class EarlyBlocks:
    """As D: the early legs that have blocks while they wait, or may get them."""

    def __init__(self, block_size: int, *, reads: bool) -> None:
        """`reads`: whether anything is read early at all."""
        self._block_size: Final = block_size
        self._reads: Final = reads
        self._early: Final = EarlyReads(block_size)
        self._wanted = ""
        """The request that vLLM was just asked to give blocks to."""
        self.counts: Final = self._early.counts
        self.told: Final = self._early.told
        self.has: Final = self._early.has
        self.ends: Final = self._early.ends
        self.ended: Final = self._early.ended
        self.rates: Final = self._early.rates

    @property
    def busy(self) -> bool:
        """Whether the ranks have reads to end."""
        return self._early.ending > 0

    def wants(self, request: Any, cached_tokens: int, core: Any) -> int:
        """How many tokens of a waiting early leg blocks are wanted for now; 0: none. `core`: vLLM's engine core."""
        self._wanted = ""
        if not self._reads or core is None:
            return 0
        free = int(core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        prompt = len(request.prompt_token_ids or ())
        tokens = self._early.wants(request.request_id, prompt, cached_tokens, free)
        if tokens:
            self._wanted = request.request_id
        return tokens

    def wanted(self, request: str, tokens: int) -> bool:
        """vLLM has given a request blocks for so many tokens. Returns whether `wants` was asked for them."""
        wanted, self._wanted = self._wanted, ""
        return bool(tokens) and wanted == request

    def reserved(self, request: Any, blocks: Any) -> None:
        """The blocks that vLLM has given a waiting early leg are filled from now on."""
        (group,) = blocks.blocks
        cached = sum(block.block_hash is not None and not block.is_null for block in group)
        (local,) = blocks.get_unhashed_block_ids_all_groups()
        needed = -(-len(request.prompt_token_ids) // self._block_size) - cached
        self._early.reserved(request.request_id, Place(tuple(local[:needed]), cached))

    def ready(self, request: Any, life: int) -> Place | None:
        """The hold of an early leg is there, and its fields are the request's: the blocks that its pull goes on to
        fill. None: it has none, or gives them back.
        """
        fields = request.kv_transfer_params
        groups, tokens = fields.get("remote_block_ids"), fields.get("remote_num_tokens")
        blocks = groups[0] if isinstance(groups, list | tuple) and groups else ()
        readable = isinstance(blocks, list | tuple) and type(tokens) is int
        return self._early.ready(
            request.request_id,
            str(fields.get("remote_request_id")),
            life,
            tokens if readable and isinstance(tokens, int) else 0,
            blocks if readable else (),
        )

    def timed(self, engine: str, blocks: int, seconds: float) -> None:
        """So many blocks were pulled from this engine, in so many seconds on the wire."""
        self.rates.saw(engine, blocks * self._block_size, seconds)

    def take(self) -> tuple[dict[str, PartRead], dict[str, PartRead]]:
        """What the ranks read now, and which legs get no more reads, by request. Each once."""
        return self._early.take_reads(), self._early.take_over()
