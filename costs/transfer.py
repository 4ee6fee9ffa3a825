"""Costs of moving the KV cache of a prompt: bytes, streams, time.

    time = latency + bytes / (paths × bandwidth / sharers)

Bytes are those of whole blocks, because connectors move blocks. A *path* is a pair of GPUs that moves data at the same
time as the others; `sharers` transfers that use the same NICs get equal parts (max-min fairness among equals).

With different tensor parallelism, heads are split over ranks: each rank of the narrower side talks to several of the
wider one, and the narrower side's NICs bound the time. K and V heads that a rank holds as copies are sent to each
holder. Every rank holds latent attention (MLA) whole, so every rank of D pulls all of it.

Not modelled: many small pieces (a block has one piece per layer, and per head between different parallelism), which
some transports slow down on; registration and handshakes; a NIC shared with other traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from costs.hardware import Dtype, Gpu
from costs.model import ModelShape
from costs.shape import CostShape

BLOCK_TOKENS = 16
"""vLLM's block size on GPUs."""

NIC_EFFICIENCY = 0.72
"""Part of a NIC's rate that one stream reaches: 35.9 of 50 GB/s between two H100 nodes (vidur's send/recv table)."""

NIC_LATENCY_MS = 0.019
"""Latency of one message between nodes (vidur, H100: 0.019 ms; A100: 0.029 ms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One path between two GPUs."""

    latency_ms: float
    gb_s: float
    """Bandwidth that is reached, one way."""

    def ms(self, size_bytes: float, *, paths: int = 1, sharers: int = 1) -> float:
        """Time of one transfer over `paths` such links at once, each shared with `sharers` − 1 others."""
        assert paths >= 1 and sharers >= 1
        return self.latency_ms + size_bytes * sharers / (self.gb_s * paths) * 1e-6 if size_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """The bytes and streams of moving one prompt from one shape to another."""

    size_bytes: int
    paths: int

    def ms(self, link: Link, *, sharers: int = 1) -> float:
        """Time over `link` if `sharers` hand-overs use it at once."""
        return link.ms(self.size_bytes, paths=self.paths, sharers=sharers)


def nic(source: Gpu, target: Gpu) -> Link:
    """The link between nodes: the slower of the two NICs."""
    return Link(latency_ms=NIC_LATENCY_MS, gb_s=NIC_EFFICIENCY * min(source.nic_gb_s, target.nic_gb_s))


def whole_blocks(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Tokens of the blocks that hold `tokens`."""
    return -(-tokens // block_tokens) * block_tokens


def handoff(
    model: ModelShape,
    tokens: int,
    source: CostShape,
    target: CostShape,
    *,
    kv_dtype: Dtype | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> Handoff:
    """The bytes and streams of moving the KV cache of a prompt of `tokens` tokens from `source` to `target`."""
    once = model.kv_bytes_per_token(kv_dtype) * whole_blocks(tokens, block_tokens)
    return Handoff(size_bytes=once * copies(model, target), paths=paths(model, source, target))


def copies(model: ModelShape, target: CostShape) -> int:
    """How often the target holds each byte: once, except for latents and for fewer KV heads than ranks."""
    if model.latent:
        return target.tp
    return max(1, -(-target.tp // model.kv_heads))


def paths(model: ModelShape, source: CostShape, target: CostShape) -> int:
    """Pairs of GPUs that move data at once: as many as the side with fewer ranks with data of their own.

    Ranks of P that hold the same latent share the work of sending it. Each pipeline stage moves its own layers.
    """
    senders = source.tp if model.latent else min(source.tp, model.kv_heads)
    return min(senders, target.tp) * min(source.pp, target.pp)
