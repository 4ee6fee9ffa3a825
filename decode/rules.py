"""The credits of a decode instance. A stream is long and its KV grows: one stream too many makes the engine preempt,
and a preempted stream is prefilled again.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.instance import Load

STREAMS_MAX = 256
"""Streams in flight at most, if the engine's limit is not known: vLLM's default on smaller GPUs. Give the agent the
engine's own ``max_num_seqs``: with fewer credits a large GPU idles, with more the streams wait inside the engine."""

KV_HIGH = 0.9
"""From this share of KV in use on, no stream is added: running streams need the rest to grow. A preempted request on a
decode instance prefills its whole context again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRules:
    """Credits end where the KV cache is nearly full."""

    streams_max: int = STREAMS_MAX

    def credits(self, load: Load) -> int:
        """All credits below `KV_HIGH`; above it only the streams that are already there."""
        if load.kv_usage < KV_HIGH:
            return self.streams_max
        return max(1, min(self.streams_max, load.running + load.waiting))

    def unfinished(self, load: Load) -> str | None:
        """Streams that run or wait, and KV on its way in."""
        if load.running or load.waiting:
            return f"{load.running + load.waiting} streams"
        return f"{load.kv_usage:.1%} of the KV cache, on its way in" if load.kv_usage > 0 else None
