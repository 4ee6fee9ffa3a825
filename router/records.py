"""Values that are written to decision logs, and read from them by the types of their fields. Pure.

They stand apart from what uses them since compiled classes (docs/compiled.md) forget those types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cluster.ids import InstanceId
from cluster.instance import Instance, Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a request's class promises it, and what becomes of it when that cannot be kept (`cluster.spec`)."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    """0: nothing."""
    sheds: bool = False
    degraded: Promise | None = None
    """Its second promise."""


NO_PROMISE: Final = Promise()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """An instance's own word, as its heartbeat brings it."""

    instance: Instance
    state: str
    accepting: bool
    credits: int
    load: Load
    models: tuple[dict[str, object], ...]
    grant: int | None = None
    """Legs of its credits that are this router's; None: its agent grants none by name."""
    shuns: tuple[InstanceId, ...] = ()
    """Producers that its engine pulls nothing from for now."""


class Sent(NamedTuple):
    """A prompt that went to an instance, for its answer to be compared with what had been expected."""

    row: int
    life: int
    chunks: Sequence[int]
    former_s: tuple[float, ...]
    """When each chunk that it was believed to hold was last used there."""
