"""Finds engines with a core that stands still while the API server goes on answering `/health`. Pure: a shell asks.

vLLM's health check says only that the core's process lives (0.32: `v1/engine/async_llm.check_health`). A core that
hangs in a kernel or in a collective keeps its counters, so it looks idle, and every router prefers it. So if the
counters stand still, the engine is asked for one token, as at its start. Such a check is known as a canary.

    canary = Canary(now)
    canary.reads(progress, now)        # again and again, from `/metrics`
    if canary.asks(now): ...           # begin to ask for a token
    canary.answered(now)               # whatever the answer was: an error is an answer
    canary.stuck_s(now) >= STUCK_S     # it stands still

Some engines look like that and are well, and are never judged: an engine that sleeps, counts nothing
(``--disable-log-stats``), has requests that wait for the memory of holds, or is paused (`core_watch` asks for that).
"""

from __future__ import annotations

import re
from typing import Final

from cluster.instance import Load

STILL_S: Final = 30.0
"""An engine whose counters stand still for so long is asked for a token; an idle engine makes one as often."""

STUCK_S: Final = 300.0
"""A core that shows nothing for so long after it was asked will not go on. vLLM itself waits as long for a step of its
workers (0.32: ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``)."""

STUCK_CPU_S: Final = 600.0
"""The same on CPUs, where one step of a large model takes minutes."""

Progress = tuple[float, ...]
"""What a working core changes. See `progress`."""

_ASLEEP: Final = re.compile(
    r'\nvllm:engine_sleep_state\{[^\n]*sleep_state="awake"[^\n]*\}[ \t]+0(?:\.0*)?[ \t]*$', re.MULTILINE
)


def progress(load: Load) -> Progress:
    """The part of a load that a working core changes. Counters of tokens move as a prompt or a token ends. The share of
    the KV cache in use moves with each chunk of a long prompt, which may fill all steps for minutes.
    """
    return (load.prompt_tokens, load.generation_tokens, load.kv_usage, load.running, load.waiting)


def tells_nothing(text: str) -> bool:
    """Whether nothing can be learned from an engine's `/metrics`: it sleeps, so that no token can be asked of it, or it
    counts nothing.
    """
    return "vllm:" not in text or _ASLEEP.search("\n" + text) is not None


def lacks_memory(load: Load) -> bool:
    """Whether a core's requests wait for memory alone. None runs, and a core that could begin one would: holds have its
    blocks, for as long as their leases last.
    """
    return load.waiting > 0 and not load.running and load.kv_usage > 0


class Canary:
    """One engine core's. See the module's docstring. All times in seconds of one clock."""

    def __init__(self, now: float) -> None:
        self._last: Progress = ()
        self._moved_at = now
        self._asked_at: float | None = None

    def reads(self, seen: Progress, now: float) -> None:
        """Take what the core shows now."""
        if seen != self._last:
            self._last, self._moved_at = seen, now

    def asks(self, now: float) -> bool:
        """Whether to ask for a token now; from then on it counts as asked."""
        if self._asked_at is not None or now - self._moved_at < STILL_S:
            return False
        self._asked_at = now
        return True

    def answered(self, now: float) -> None:
        """The core has answered, or could not be asked."""
        self._moved_at, self._asked_at = now, None

    def stuck_s(self, now: float) -> float:
        """For how long the core has shown nothing since it was asked; 0: it was not."""
        return 0.0 if self._asked_at is None else max(0.0, now - max(self._asked_at, self._moved_at))
