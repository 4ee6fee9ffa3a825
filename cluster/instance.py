"""What a fleet is made of: roles, instances and their load."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, Final, Literal

from cluster.ids import InstanceId, rank_of

Tier = Literal["host", "disk"]
"""The tiers below an engine's KV cache: host memory, and files."""

TIER_GB_S_MIN: Final = 1e-3
TIER_GB_S_MAX: Final = 1e4
"""The bounds of a tier's measured rate, in GB/s: slower than any disk, and faster than the memory of any host."""

TENANTS_MAX: Final = 64
"""Most tenants that one instance may be reserved for."""


class Role(StrEnum):
    """Which legs an instance runs. Each role can also serve whole requests (vLLM's consumers and producers do)."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        """Whether prefill legs may be sent here."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether decode legs may be sent here."""
        return self is not Role.PREFILL


MODELS_MAX: Final = 4096
"""Most models of one engine that are read: vLLM lists one entry for each adapter that it has loaded."""

MODEL_CHARS_MAX: Final = 512
"""Longest name of a model; an entry with a longer one is left out."""


def models_in(listed: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The entries of an engine's ``/v1/models`` that name a model, unchanged."""
    entries = listed.get("data")
    named = (each for each in entries if _names_a_model(each)) if isinstance(entries, list) else iter(())
    return tuple(islice(named, MODELS_MAX))


def _names_a_model(entry: object) -> bool:
    name = entry.get("id") if isinstance(entry, dict) else None
    return isinstance(name, str) and 0 < len(name) <= MODEL_CHARS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy an engine says it is, read from its ``/metrics``."""

    running: int = 0
    """Requests in the current batch."""
    waiting: int = 0
    """Requests queued in the engine."""
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1. Above 0 with nothing running means blocks held for a consumer."""
    external_kv_tokens: int = 0
    """Prompt tokens whose KV came from another engine, since the engine's start."""
    recomputed_tokens: int = 0
    """Prompt tokens that were to come from another engine but that this engine computed itself, since its start. Exact
    with Baton's connector. vLLM's own counts may include tokens whose pull is under way, or whose client has left
    (`engine.vllm.metrics`)."""
    kv_tokens: int = 0
    """Tokens that the whole KV cache holds; 0: the engine does not say."""
    deferred: int = 0
    """Waiting requests that have their blocks and wait for KV to arrive in them: a pull."""
    prompt_tokens: int = 0
    """Prompt tokens taken since the engine's start, cached or not."""
    generation_tokens: int = 0
    """Tokens generated since the engine's start."""


def total_load(loads: Sequence[Load]) -> Load:
    """The load of an engine: the sums over its data parallel ranks, and the mean `kv_usage`. `loads` is not empty."""
    return Load(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        kv_usage=sum(load.kv_usage for load in loads) / len(loads),
        external_kv_tokens=sum(load.external_kv_tokens for load in loads),
        recomputed_tokens=sum(load.recomputed_tokens for load in loads),
        kv_tokens=sum(load.kv_tokens for load in loads),
        deferred=sum(load.deferred for load in loads),
        prompt_tokens=sum(load.prompt_tokens for load in loads),
        generation_tokens=sum(load.generation_tokens for load in loads),
    )


SETTLED_LOOKS: Final = 5
"""The number of reports of one life of an engine before any counts. Reports are up to a second apart, a pull takes
milliseconds."""


class SettledTokens:
    """A counter of `Load.recomputed_tokens`, of one life of an engine. Reports may be too high for a moment, as they
    include pulls under way: the lowest of the last `SETTLED_LOOKS` counts, and a counted token is never taken back.
    """

    __slots__ = ("_reports", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._reports: Final[deque[int]] = deque(maxlen=SETTLED_LOOKS)

    @property
    def begun(self) -> bool:
        """Whether a report of this life has come."""
        return bool(self._reports)

    def hear(self, tokens: int) -> bool:
        """Take a report. Returns whether there are enough of them to count."""
        self._reports.append(tokens)
        if len(self._reports) < SETTLED_LOOKS:
            return False
        self.tokens = max(self.tokens, min(self._reports))
        return True

    def restart(self) -> None:
        """Another life begins, whose counts begin at 0."""
        self.tokens = 0
        self._reports.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One serving unit as the rest of the fleet addresses it."""

    id: InstanceId
    role: Role
    url: str
    """Base URL of the engine's HTTP server, no trailing slash."""
    epoch: int = 0
    """Which start of this instance's engine this is; 0: unknown, because another program started the engine."""
    pins: bool = False
    """Whether the engine can be told its answer's first token (`engine.vllm.pin`)."""
    early: bool = False
    """Whether the engine takes decode legs before their prompt is computed, and tells others when one is
    (`decode.early`)."""
    dtype: str = ""
    """The number format in which the engine computes and keeps KV and states, in vLLM's words (``float32``); several
    with a comma between. Empty: unknown."""
    weights: str = ""
    """Which weights the engine serves; compared for equality only. KV of other weights is useless. Empty: unknown, and
    taken as equal to those of any other instance."""
    node: str = ""
    """Which machine the instance is on; compared for equality only. Empty: unknown."""
    tenants: frozenset[str] = frozenset()
    """The only tenants whose requests the instance serves, at most `TENANTS_MAX`; empty: all tenants."""

    @property
    def rank(self) -> int | None:
        """The number of the data parallel rank that the instance is, behind a port that it shares with the others;
        None: it is a whole engine.
        """
        return rank_of(self.id)

    def serves(self, tenant: str | None) -> bool:
        """Whether the instance takes requests of this tenant (empty: a request without a tenant; None: of any
        tenant).
        """
        return tenant is None or not self.tenants or tenant in self.tenants
