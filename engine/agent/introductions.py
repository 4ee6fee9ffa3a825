"""The parts that introduce the ranks of one engine to their peers (`engine.agent.transfers`). A shell."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from cluster.registry.registry import Registry
from engine.agent.rank import Rank
from engine.agent.transfers import MEETING_S, Transfers
from engine.vllm.spec import EngineSpec
from kvtransfer.asks import door_of
from kvtransfer.seal import Identity


class Introductions:
    """Makes the `Transfers` of one engine's ranks, and waits until they have met peers."""

    def __init__(
        self,
        registry: Registry,
        identities: Callable[[], Identity],
        agent: str,
        spec: EngineSpec,
        ranks: Sequence[Rank],
        *,
        models: Callable[[], Collection[str]],
        on_change: Callable[[], None],
    ) -> None:
        """`identities` gives the engine's identity. `agent`: the id of the agent's process. `models` gives the names
        that the engine serves, and `on_change` is called when what heartbeats say of peers changes.
        """
        self._registry: Final = registry
        self._identities: Final = identities
        self._agent: Final = agent
        self._spec: Final = spec
        self._ranks: Final = tuple(ranks)
        self._models: Final = models
        self._on_change: Final = on_change

    def begin(self, rank: Rank) -> Transfers:
        """Give a rank its `Transfers`. The caller runs it."""
        rank.transfers = Transfers(
            Path(door_of(self._spec.door, rank.number)),
            self._registry,
            rank.id,
            self._identities,
            self._agent,
            epoch=lambda: max(1, rank.machine.epoch),
            role=lambda: rank.machine.role,
            models=self._models,
            shares=self._spec.has_peers,
            on_change=self._on_change,
        )
        return rank.transfers

    async def meet_enough(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until each rank has met enough peers, at most `MEETING_S`, so that no request waits for a handshake.
        Returns false if that time was too short, and true where the wait was `interrupted`.
        """
        self._on_change()  # announce the models now, so that peers know to meet this engine
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEETING_S):
                for transfers in [rank.transfers for rank in self._ranks if rank.transfers is not None]:
                    while not transfers.acquainted.enough and not interrupted():
                        await transfers.looked()
            return True
        return False
