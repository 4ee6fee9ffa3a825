"""What an agent reads of its engine: how busy it is, its models and adapters, and the weights in its files. A shell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, Final

from cluster.instance import Load
from engine.agent.announced import announced
from engine.agent.config import AgentConfig
from engine.vllm.adapters import Adapters
from engine.vllm.metrics import parse_loads, parse_tiers
from engine.vllm.probe import Probe, Unwell
from engine.vllm.spec import EngineSpec
from engine.vllm.tier_speeds import TierCounts

logger = logging.getLogger("baton.agent")

LOOK_EVERY_S = 0.5
"""Seconds between two readings of the engine's metrics: the figures in a heartbeat are never older than this plus one
heartbeat."""

MODELS_EVERY_LOOKS = 20
"""Readings of the metrics between two of the models: adapters are loaded and unloaded while an engine runs (ten
seconds)."""

ADAPTERS_EVERY_LOOKS = 2
"""The same for an engine that has adapters (one second): a name with new weights is noticed within that time."""


class EngineReadings:
    """The readings of one engine."""

    def __init__(
        self,
        spec: EngineSpec,
        config: AgentConfig,
        *,
        serves: Callable[[], bool],
        loaded: Callable[[tuple[Load, ...], tuple[TierCounts, ...]], None],
        changed: Callable[[], None],
    ) -> None:
        """Nothing is known at first.

        Args:
            spec: the engine.
            config: says how weights and adapters are identified.
            serves: whether the engine may have requests; otherwise nothing is read.
            loaded: takes the loads of the engine's ranks at each reading, and what they have loaded from their tiers;
                without tiers nothing.
            changed: called when the digests of the engine's adapters have changed.
        """
        self.models: tuple[dict[str, Any], ...] = ()
        """The engine's ``/v1/models`` entries."""
        self.announced: tuple[dict[str, Any], ...] = ()
        """Those that its heartbeats list."""
        self.weights = ""
        """Identifies its weights; empty: unknown."""
        self._spec: Final = spec
        self._name_weights: Final = config.weights
        self._adapters: Final = Adapters(config.adapter, config.adapter_marks)
        self._serves: Final = serves
        self._loaded: Final = loaded
        self._changed: Final = changed
        self._now: Final = asyncio.Event()
        self._over = False
        self._warned = False
        """It was said that heartbeats do not list all models."""

    @property
    def adapters(self) -> dict[str, str]:
        """Digests of its adapters' files, by adapter name; empty: unknown."""
        return self._adapters.digests

    @property
    def announced_adapters(self) -> dict[str, str]:
        """Digests of the adapters that its heartbeats list."""
        digests = self.adapters
        return {name: digests[name] for entry in self.announced if (name := str(entry.get("id"))) in digests}

    def names(self) -> list[str]:
        """The names of its models."""
        return [str(entry["id"]) for entry in self.models if "id" in entry]

    async def restart(self) -> None:
        """The engine starts: identify its weights, as the files may have changed."""
        self._adapters.restart()
        self.weights = await asyncio.to_thread(self._name_weights)

    async def learn_models(self) -> None:
        """The engine is ready: ask it for its models."""
        if not self.weights:
            self.weights = await asyncio.to_thread(self._name_weights)  # the engine may have downloaded them
        async with self._probe() as probe:
            with contextlib.suppress(Unwell):
                await self._hear_models(await probe.models())

    def look(self) -> None:
        """Read its load now."""
        self._now.set()

    def stop(self) -> None:
        """Read nothing any more."""
        self._over = True

    async def run(self) -> None:
        """Read its load and its models again and again, until cancelled or `stop`."""
        looks = 0
        async with self._probe() as probe:
            while not self._over:
                if self._serves():
                    with contextlib.suppress(Unwell):
                        self._heard(await probe.metrics())
                        looks += 1
                        if await self._adapters_changed():
                            self._changed()
                        if looks % (ADAPTERS_EVERY_LOOKS if self.adapters else MODELS_EVERY_LOOKS) == 0:
                            await self._hear_models(await probe.models())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._now.wait()
                self._now.clear()

    async def _adapters_changed(self) -> bool:
        """Whether files of a loaded adapter have changed. Where no thread can be started, the next look asks."""
        if not self.adapters:
            return False
        with contextlib.suppress(RuntimeError):
            return await asyncio.to_thread(self._adapters.check)
        return False

    async def _hear_models(self, entries: tuple[dict[str, Any], ...]) -> None:
        """Publish the models only if one is new or gone: vLLM gives its entries a new date at every reading."""
        before = self.adapters
        await asyncio.to_thread(self._adapters.look, entries)
        if [_meaning(entry) for entry in entries] != [_meaning(entry) for entry in self.models]:
            self.models, self.announced = entries, announced(entries, self.adapters)
            if len(self.announced) < len(entries) and not self._warned:
                self._warned = True
                logger.warning(
                    "%s serves %d models and adapters, and its heartbeats have room for %d; routers know no more",
                    self._spec.instance,
                    len(entries),
                    len(self.announced),
                )
        if before != self.adapters:
            self._changed()

    def _heard(self, text: str) -> None:
        """Take the text of the engine's metrics."""
        ranks = len(self._spec.instances)
        self._loaded(parse_loads(text, ranks), parse_tiers(text, ranks) if self._spec.tiers is not None else ())

    def _probe(self) -> Probe:
        return Probe(self._spec.url, self._spec.api_key(os.environ))


def _meaning(entry: dict[str, Any]) -> tuple[object, ...]:
    """The meaning of a ``/v1/models`` entry: the model and its name, without dates."""
    return entry.get("id"), entry.get("root"), entry.get("parent")
