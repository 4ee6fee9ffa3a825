"""Decode: a stream stays for long and grows; one too many makes the engine preempt, and a preempted one starts over."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.instance import Load

STREAMS_MAX = 256
"""Streams in flight at most where nobody says how many the engine runs at once: vLLM's default on smaller GPUs. Its own
``max_num_seqs`` is what an agent should be given: with fewer credits a large GPU idles, with more they wait in it."""

KV_HIGH = 0.9
"""Share of KV in use from which no stream is added: what runs needs the rest to grow into. A preempted request on a
decode instance prefills its whole context again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRules:
    """Credits end where the KV cache is nearly full."""

    streams_max: int = STREAMS_MAX

    def credits(self, load: Load) -> int:
        """All of them below `KV_HIGH`; above it only what is there already."""
        if load.kv_usage < KV_HIGH:
            return self.streams_max
        return max(1, min(self.streams_max, load.running + load.waiting))

    def unfinished(self, load: Load) -> str | None:
        """Streams that run or wait, and KV on its way in."""
        if load.running or load.waiting:
            return f"{load.running + load.waiting} streams"
        return f"{load.kv_usage:.1%} of the KV cache, on its way in" if load.kv_usage > 0 else None
