"""Asks every engine how it is: alive, which models, how busy. One task an instance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from cluster.ids import InstanceId
from cluster.instance import Instance, Load
from engine.vllm.metrics import parse_load
from router.paths import Catalogue, paths_in
from router.upstream import Answer, EngineLost, Upstream
from router.view import View

logger = logging.getLogger("baton.router")

INTERVAL_S = 1.0
"""Between two probes. Load older than this is only used to break ties."""

PROBE_S = 5.0
"""A probe not answered within this has failed: a busy CPU engine still answers /health in well under a second."""

MODELS_EVERY_S = 10.0
"""LoRA adapters are loaded and unloaded while an engine runs: its models are asked for again after this."""


class Tell(Protocol):
    """Hears of an instance that came up or went down."""

    def __call__(self, instance: InstanceId, *, up: bool) -> None: ...


class Prober:
    """Keeps a `View` fresh until cancelled."""

    def __init__(
        self,
        view: View,
        upstream: Upstream,
        headers: Mapping[str, str],
        tell: Tell,
        *,
        read_metrics: bool,
        catalogue: Catalogue | None = None,
    ) -> None:
        """`catalogue`: is told which paths engines have."""
        self._view = view
        self._upstream = upstream
        self._headers = headers
        self._tell = tell
        self._read_metrics = read_metrics
        self._catalogue = Catalogue() if catalogue is None else catalogue

    async def watch(self, instance: Instance) -> None:
        """Probe one instance as long as it is known."""
        asked_at = -MODELS_EVERY_S
        while self._view.knows(instance.id):
            was_up = self._view.get(instance.id).up
            now = time.monotonic()
            ask = (
                not was_up
                or not self._view.get(instance.id).models
                or (
                    self._read_metrics and now - asked_at >= MODELS_EVERY_S  # agents tell of their engines' themselves
                )
            )
            asked_at = now if ask else asked_at
            await self._probe(instance, models=ask, paths=not was_up)
            if not self._view.knows(instance.id):
                return
            up = self._view.get(instance.id).up
            if up != was_up:
                logger.log(logging.INFO if up else logging.WARNING, "%s is %s", instance.id, "up" if up else "down")
                self._tell(instance.id, up=up)
            await asyncio.sleep(INTERVAL_S)

    async def _probe(self, instance: Instance, *, models: bool, paths: bool) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await self._get(instance, "/health")
                served = await self._models(instance) if models else None
                if paths:
                    self._catalogue.told(instance.id, await self._paths(instance))
                load = _load(await self._get(instance, "/metrics")) if self._read_metrics else None
        except (EngineLost, TimeoutError, msgspec.DecodeError) as error:
            logger.debug("%s: probe failed: %s", instance.id, error)
            if self._view.knows(instance.id):
                self._view.probe_failed(instance.id)
            return
        if self._view.knows(instance.id):
            self._view.seen(instance.id, served, load)

    async def _models(self, instance: Instance) -> tuple[dict[str, object], ...]:
        return _models(await self._get(instance, "/v1/models"))

    async def _paths(self, instance: Instance) -> frozenset[str] | None:
        """Which paths it has; None where it does not say (``--disable-fastapi-docs``)."""
        answer = await self._upstream.call(instance, "GET", "/openapi.json", None, self._headers)
        try:
            return paths_in(msgspec.json.decode(answer.body)) if answer.status == 200 else None
        except msgspec.DecodeError:
            return None

    async def _get(self, instance: Instance, path: str) -> Answer:
        answer = await self._upstream.call(instance, "GET", path, None, self._headers)
        if answer.status != 200:
            raise EngineLost(f"GET {path}: HTTP {answer.status}", reached=True)
        return answer


def _models(answer: Answer) -> tuple[dict[str, object], ...]:
    listed = msgspec.json.decode(answer.body)
    entries = listed.get("data") if isinstance(listed, dict) else None
    return tuple(entry for entry in entries or () if isinstance(entry, dict))


def _load(answer: Answer) -> Load:
    return parse_load(answer.body.decode(errors="replace"))
