"""The credits of a prefill instance. A leg is short, and leaves a hold that lasts until a decode instance pulls it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.instance import Load

LEGS_MAX = 64
"""Legs in flight at most. Prefill is bound by compute: legs beyond a full batch only wait in the engine's own queue,
where no router can reorder or move them any more."""

HOLDS_HIGH = 0.8
"""From this share of KV in use on, fewer legs are admitted: the rest of the memory is for prompts already on
their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRules:
    """Credits shrink as unpulled holds fill the KV cache (vLLM issue 29906: they exhaust it)."""

    legs_max: int = LEGS_MAX

    def credits(self, load: Load) -> int:
        """All credits up to `HOLDS_HIGH`, then fewer and fewer, one at a full cache."""
        free = min(1.0, (1.0 - load.kv_usage) / (1.0 - HOLDS_HIGH))
        return max(1, int(self.legs_max * free))

    def unfinished(self, load: Load) -> str | None:
        """Legs that run or wait, and blocks held although no leg runs: consumers still have to pull those blocks."""
        if load.running or load.waiting:
            return f"{load.running + load.waiting} prefill legs and {load.kv_usage:.1%} of the KV cache"
        return f"holds of {load.kv_usage:.1%} of the KV cache" if load.kv_usage > 0 else None
