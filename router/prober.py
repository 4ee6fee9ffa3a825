"""Asks every engine how it is: alive, which models, how busy. One task an instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from cluster.ids import InstanceId
from cluster.instance import Instance, Load
from engine.vllm.metrics import parse_load
from router.upstream import Answer, EngineLost, Upstream
from router.view import View

logger = logging.getLogger("baton.router")

INTERVAL_S = 1.0
"""Between two probes. Load older than this is only used to break ties."""

PROBE_S = 5.0
"""A probe not answered within this has failed: a busy CPU engine still answers /health in well under a second."""


class Tell(Protocol):
    """Hears of an instance that came up or went down."""

    def __call__(self, instance: InstanceId, *, up: bool) -> None: ...


class Prober:
    """Keeps a `View` fresh until cancelled."""

    def __init__(
        self, view: View, upstream: Upstream, headers: Mapping[str, str], tell: Tell, *, read_metrics: bool
    ) -> None:
        self._view = view
        self._upstream = upstream
        self._headers = headers
        self._tell = tell
        self._read_metrics = read_metrics

    async def watch(self, instance: Instance) -> None:
        """Probe one instance as long as it is known."""
        while self._view.knows(instance.id):
            was_up = self._view.get(instance.id).up
            await self._probe(instance, was_up=was_up)
            if not self._view.knows(instance.id):
                return
            up = self._view.get(instance.id).up
            if up != was_up:
                logger.log(logging.INFO if up else logging.WARNING, "%s is %s", instance.id, "up" if up else "down")
                self._tell(instance.id, up=up)
            await asyncio.sleep(INTERVAL_S)

    async def _probe(self, instance: Instance, *, was_up: bool) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await self._get(instance, "/health")
                models = None if was_up and self._view.get(instance.id).models else await self._models(instance)
                load = _load(await self._get(instance, "/metrics")) if self._read_metrics else None
        except (EngineLost, TimeoutError, msgspec.DecodeError) as error:
            logger.debug("%s: probe failed: %s", instance.id, error)
            if self._view.knows(instance.id):
                self._view.probe_failed(instance.id)
            return
        if self._view.knows(instance.id):
            self._view.seen(instance.id, models, load)

    async def _models(self, instance: Instance) -> tuple[dict[str, object], ...]:
        return _models(await self._get(instance, "/v1/models"))

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
