"""Counts what an engine has evicted from its KV cache, from vLLM's KV events. Pure: `engine.agent.kv_events` reads
them.

vLLM names blocks by hashes that cannot be computed from text, so events cannot tell which instance has which prompt.
(`router.predict.prefix_cache` guesses that from earlier requests.) They tell how much was evicted: routers forget as
much, also if other routers filled that cache. The events hold the prompts' tokens, so their socket is a file that only
its owner can open.

With tiers below the KV cache (`engine.vllm.tiers`) a block counts as evicted when the last tier drops it. With tiers
the agent remembers for each block which of them have it. Blocks that no tier below has ever had do not count: they are
of answers, as vLLM offloads prompts alone (0.32: ``offload_prompt_only``), and routers know that answers leave with
the KV cache.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.instance import Tier

SOCKET = "inproc"
"""The name of the socket's file; `events_path` says why vLLM needs this word in it."""

BATCHES_MAX = 1000
"""Batches that vLLM keeps for an agent that does not read. Evictions in lost batches are not counted."""


BLOCKS_MAX = 2_000_000
"""Blocks whose tiers are remembered, about 150 bytes each. Beyond that, blocks stored longest ago count as dropped."""

_DEVICE, _HOST, _DISK, _KEPT = 1, 2, 4, 8
_TIERS = {None: _DEVICE, "GPU": _DEVICE, "CPU": _HOST, "STORAGE": _DISK}
"""By vLLM's word for a medium; in vLLM 0.32 ``GPU`` means the KV cache on CPUs, too."""


class _Stored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_hashes: list[msgspec.Raw]
    block_size: int
    medium: str | None = None
    group_idx: int | None = None


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
    """Counts of evicted tokens since the engine's start. `tiered`: there are tiers below its KV cache."""

    def __init__(self, *, tiered: bool = False) -> None:
        self.tokens = 0
        """Tokens of blocks that were evicted one by one; with tiers, from the last one that had them."""
        self.clears = 0
        """How often the whole cache was dropped. Always 0 with tiers: their blocks stay."""
        self._block_tokens = 0
        self._tiered = tiered
        self._where: dict[bytes, int] = {}
        """With tiers: by block, the tiers that have it, as bits, and whether one below has had it (`_KEPT`)."""
        self._blocks = dict.fromkeys((_DEVICE, _HOST, _DISK), 0)

    @property
    def kept(self) -> dict[Tier, int]:
        """Tokens in each tier below the KV cache, by its name."""
        named: dict[Tier, int] = {"host": _HOST, "disk": _DISK} if self._tiered else {}
        return {name: self._blocks[tier] * self._block_tokens for name, tier in named.items()}

    def restart(self) -> None:
        """The engine starts anew, with an empty cache: all counts begin at 0."""
        self.tokens = self.clears = 0
        self._where.clear()
        self._blocks = dict.fromkeys(self._blocks, 0)

    def hear(self, payload: bytes) -> None:
        """Take one batch of vLLM's (`vllm.distributed.kv_events.EventBatch`, msgpack).

        A model with several groups of layers evicts each block once for each group: only the first group counts.
        Events of tiers below give no block size: the KV cache's counts.

        Raises:
            msgspec.DecodeError: the batch has an unknown form.
        """
        try:
            events = _DECODER.decode(payload).events
        except RecursionError:
            raise msgspec.DecodeError("it is nested too deep") from None
        for event in events:
            match event:
                case _Stored() | _Removed() if event.group_idx:
                    continue
                case _Stored():
                    self._stored(event)
                case _Removed():
                    self._removed(event)
                case _Cleared():
                    self._cleared()

    def _stored(self, event: _Stored) -> None:
        tier = _TIERS.get(event.medium, 0)
        if tier == _DEVICE and event.block_size > 0:
            self._block_tokens = event.block_size
        for name in event.block_hashes if self._tiered else ():
            self._move(bytes(name), add=tier)
        while len(self._where) > BLOCKS_MAX:
            oldest = next(iter(self._where))
            self._move(oldest, drop=self._where[oldest])

    def _removed(self, event: _Removed) -> None:
        tier = _TIERS.get(event.medium, 0)
        if self._tiered:
            for name in event.block_hashes:
                self._move(bytes(name), drop=tier)
        elif tier == _DEVICE:
            self.tokens += len(event.block_hashes) * self._block_tokens

    def _cleared(self) -> None:
        if not self._tiered:
            self.clears += 1
            return
        for name in [name for name, tiers in self._where.items() if tiers & _DEVICE]:
            self._move(name, drop=_DEVICE)

    def _move(self, name: bytes, *, add: int = 0, drop: int = 0) -> None:
        """Record that a block is in (`add`) or no longer in (`drop`) a tier. In no tier any more: it counts as evicted,
        once.
        """
        before = self._where.get(name, 0)
        after = (before | add | (_KEPT if add & ~_DEVICE else 0)) & ~drop
        for tier in self._blocks:
            self._blocks[tier] += bool(after & tier) - bool(before & tier)
        if after & ~_KEPT:
            self._where[name] = after
        elif before:
            del self._where[name]
            self.tokens += self._block_tokens if before & _KEPT else 0


def events_path(path: str, rank: int) -> str:
    """The socket's path of a data parallel rank, if rank 0 has `path`. vLLM appends this suffix only to an address that
    has ``inproc`` in it (`SOCKET`), and refuses other ``ipc`` addresses.
    """
    return path if rank == 0 else f"{path}_dp{rank}"


def config_of(path: str) -> dict[str, Any]:
    """vLLM's `--kv-events-config` for a socket at this path."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{path}",
        "buffer_steps": 1,  # past batches are never asked for
        "hwm": BATCHES_MAX,
    }
