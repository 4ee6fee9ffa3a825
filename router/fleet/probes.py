"""Probes every engine: whether it is alive, which models it serves, how busy it is. One task for each instance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, models_in
from engine.vllm.metrics import parse_load, parse_loads
from router.core.engine_answers import object_in
from router.fleet import events as d
from router.fleet.engine_paths import Catalogue, paths_in
from router.fleet.view import FleetView
from router.http.tasks import Tasks
from router.http.upstream import Answer, EngineLost

logger = logging.getLogger("baton.router")

INTERVAL_S = 1.0
"""Time between two probes. Older load figures are only used to break ties."""

PROBE_S = 5.0
"""A probe without an answer within this time has failed: a busy CPU engine still answers /health in well under a
second."""

MODELS_EVERY_S = 10.0
"""Models are read again after this: LoRA adapters are loaded and unloaded while an engine runs."""


class Unreadable(Exception):
    """An engine's report about itself is not JSON."""


class Tell(Protocol):
    """Called when an instance came up or went down."""

    def __call__(self, instance: InstanceId, *, up: bool) -> None: ...


class Ask(Protocol):
    """GETs this path of an instance; raises `EngineLost`."""

    def __call__(self, instance: Instance, path: str) -> Awaitable[Answer]: ...


class Prober:
    """Keeps a `FleetView` fresh until cancelled."""

    def __init__(
        self,
        view: FleetView,
        ask: Ask,
        tell: Tell,
        *,
        read_metrics: bool,
        catalogue: Catalogue | None = None,
        fold: Callable[[d.FleetEvent, float], object] | None = None,
    ) -> None:
        """`catalogue`: takes the engines' paths. `fold`: takes the probes' results for the view; None: `view`
        itself.
        """
        self._view = view
        self._fold = view.handle if fold is None else fold
        self._ask = ask
        self._tell = tell
        self._read_metrics = read_metrics
        self._catalogue = Catalogue() if catalogue is None else catalogue
        self._said: dict[InstanceId, str] = {}
        """Why each instance's last probe failed, as logged."""

    async def watch(self, instance: Instance) -> None:
        """Probe one instance as long as it is known."""
        asked_at, told, fell = -MODELS_EVERY_S, False, False
        while self._view.knows(instance.id):
            seen = self._view.get(instance.id)
            was_up, downs = seen.up, seen.downs
            now = time.monotonic()
            ask = (
                not was_up
                or fell
                or not seen.models
                or (
                    self._read_metrics and now - asked_at >= MODELS_EVERY_S  # agents report these
                )
            )
            asked_at = now if ask else asked_at
            paths = fell or not (told and was_up)  # the agent may have reported the engine up before the first probe
            told = await self._probe(instance, models=ask, paths=paths)
            if not self._view.knows(instance.id):
                return
            seen = self._view.get(instance.id)
            # A leg may have found it down during the probe, whose connection was open: it may be another engine now.
            up, fell = seen.up, seen.downs != downs
            if up != was_up or (up and fell):
                logger.log(logging.INFO if up else logging.WARNING, "%s is %s", instance.id, "up" if up else "down")
                self._tell(instance.id, up=up)
            await asyncio.sleep(INTERVAL_S)

    async def _probe(self, instance: Instance, *, models: bool, paths: bool) -> bool:
        """Probe once; returns whether everything was answered."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._get(instance, "/health")
                served = await self._models(instance) if models else None
                load = _load(await self._get(instance, "/metrics"), instance.rank) if self._read_metrics else None
        except (EngineLost, TimeoutError, Unreadable) as error:
            self._say(instance, str(error) or f"no answer in {PROBE_S:g} s")
            if isinstance(error, EngineLost) and error.ours:
                return False
            if self._view.knows(instance.id):
                self._fold(d.ProbeFailed(instance.id), time.monotonic())
            return False
        self._said.pop(instance.id, None)
        told = not paths or await self._tell_paths(instance)
        if self._view.knows(instance.id):
            self._fold(d.ProbeSucceeded(instance.id, served, load), time.monotonic())
        return told

    def _say(self, instance: Instance, because: str) -> None:
        """Log why an instance's probes fail: once, and again when the reason changes or the instance was well."""
        if self._said.get(instance.id) != because:
            self._said[instance.id] = because
            logger.warning("%s at %s fails its probe: %s", instance.id, instance.url, because)

    async def _models(self, instance: Instance) -> tuple[dict[str, object], ...]:
        return _models(await self._get(instance, "/v1/models"))

    async def _tell_paths(self, instance: Instance) -> bool:
        """Tell the catalogue which paths the engine has, or that it does not list them (``--disable-fastapi-docs``);
        returns whether the engine has answered. If it does not, that is no failure: the health probe decides.
        """
        try:
            async with asyncio.timeout(PROBE_S):
                answer = await self._ask(instance, "/openapi.json")
        except (EngineLost, TimeoutError):
            return False
        found = paths_in(object_in(answer.body)) if answer.status == 200 else None
        if self._view.knows(instance.id):
            self._catalogue.told(instance.id, found)
        return True

    async def _get(self, instance: Instance, path: str) -> Answer:
        answer = await self._ask(instance, path)
        if answer.status != 200:
            raise EngineLost(f"GET {path}: HTTP {answer.status}", reached=True)
        return answer


class Probing:
    """One probing task for each present instance, none for the others."""

    def __init__(self, view: FleetView, prober: Prober, tasks: Tasks, catalogue: Catalogue) -> None:
        """`catalogue`: forgets the paths of instances that have left."""
        self.prober = prober
        self.tasks: Final[dict[InstanceId, tuple[Instance, asyncio.Task[None]]]] = {}
        self._view: Final = view
        self._keep: Final = tasks.keep
        self._catalogue: Final = catalogue

    def follow(self) -> None:
        """Start and stop tasks: the fleet may have changed."""
        wanted = {seen.id: seen.instance for seen in self._view.all() if seen.state != "gone"}
        for name, (instance, task) in list(self.tasks.items()):
            if wanted.get(name) != instance:
                task.cancel()
                del self.tasks[name]
                self._catalogue.forget(name)
        for name, instance in wanted.items():
            if name not in self.tasks:
                self.tasks[name] = (instance, self._keep(partial(self.prober.watch, instance), name))


def _models(answer: Answer) -> tuple[dict[str, object], ...]:
    listed = object_in(answer.body)
    if listed is None:
        raise Unreadable("GET /v1/models: no JSON object")
    return models_in(listed)


def _load(answer: Answer, rank: int | None) -> Load:
    """An engine's load, or that of one of its data parallel ranks."""
    text = answer.body.decode(errors="replace")
    return parse_load(text) if rank is None else parse_loads(text, max(2, rank + 1))[rank]
