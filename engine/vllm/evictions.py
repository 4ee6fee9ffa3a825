"""Counts what an engine has evicted from its KV cache, from vLLM's KV events. Pure: `engine.agent.kv_events` reads
them.

vLLM names blocks by hashes that cannot be computed from text, so events cannot tell which instance has which prompt
(`router.predict.prefix_cache` guesses that from earlier requests). They tell how much was evicted: routers forget as
much, also if other routers filled that cache. The events hold the prompts' tokens, so their socket is a file that only
its owner can open.
"""

from __future__ import annotations

from typing import Any

import msgspec

BATCHES_MAX = 1000
"""Batches that vLLM keeps for an agent that does not read; routers do not forget what is in lost batches."""


class _EvictedBlock(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_size: int


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: list[msgspec.Raw]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_EvictedBlock | _Removed | _Cleared]


_DECODER = msgspec.msgpack.Decoder(_Batch)


class Evictions:
    """Counts since the engine's start."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of blocks that were evicted one by one."""
        self.clears = 0
        """How often the whole cache was dropped."""
        self._block_tokens = 0

    def restart(self) -> None:
        """The engine starts anew."""
        self.tokens = self.clears = 0

    def hear(self, payload: bytes) -> None:
        """Take one batch of vLLM's (`vllm.distributed.kv_events.EventBatch`, msgpack).

        A model with several groups of layers evicts each block once for each group: only the first group counts. Blocks
        in a second tier (`medium`) are no prefix that a GPU has.

        Raises:
            msgspec.DecodeError: the batch has an unknown form.
        """
        try:
            events = _DECODER.decode(payload).events
        except RecursionError:
            raise msgspec.DecodeError("it is nested too deep") from None
        for event in events:
            match event:
                case _EvictedBlock():
                    self._block_tokens = event.block_size
                case _Removed() if not event.group_idx and event.medium in {None, "GPU"}:
                    self.tokens += len(event.block_hashes) * self._block_tokens
                case _Cleared():
                    self.clears += 1


def config_of(path: str) -> dict[str, Any]:
    """vLLM's `--kv-events-config` for a socket there."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{path}",
        "buffer_steps": 1,  # past batches are never asked for
        "hwm": BATCHES_MAX,
    }
