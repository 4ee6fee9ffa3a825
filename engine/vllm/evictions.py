"""What an engine has thrown out of its KV cache, from vLLM's KV events. Pure: `engine.agent.kv_events` hears them.

vLLM names blocks by hashes that no text leads to, so nobody can learn from events who has which prompt (that is
guessed from what went there, `router.predict.prefix_cache`). They say how much was thrown out: routers forget as much,
also where others filled that cache. The events hold the prompts' tokens: their socket is a file that its owner alone
can open.
"""

from __future__ import annotations

from typing import Any

import msgspec

BATCHES_MAX = 1000
"""That vLLM keeps for an agent which does not read; what is lost is not forgotten."""


class _Stored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_size: int


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: list[msgspec.Raw]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


_DECODER = msgspec.msgpack.Decoder(_Batch)


class Evictions:
    """Counts since the engine's start."""

    def __init__(self) -> None:
        self.tokens = 0
        """Of blocks that were thrown out one by one."""
        self.clears = 0
        """How often all were."""
        self._block_tokens = 0

    def restart(self) -> None:
        """The engine starts anew."""
        self.tokens = self.clears = 0

    def hear(self, payload: bytes) -> None:
        """One batch of vLLM's (`vllm.distributed.kv_events.EventBatch`, msgpack).

        Of a model with several groups of layers each block is thrown out once for each: the first one's count. What
        lies in a second tier (`medium`) is no prefix that a GPU has.

        Raises:
            msgspec.DecodeError: it is none that we know.
        """
        try:
            events = _DECODER.decode(payload).events
        except RecursionError:
            raise msgspec.DecodeError("it is nested too deep") from None
        for event in events:
            match event:
                case _Stored():
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
        "buffer_steps": 1,  # nobody asks for what is past
        "hwm": BATCHES_MAX,
    }
