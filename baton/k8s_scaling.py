"""Goodput controllers beside the operator: one for each cluster with a pool that may have more or fewer instances.

They run in the operator that leads, find routers and agents in the cluster's registry, and act through the operator.
If a BatonPool sizes one of a cluster's pools, its controller only reports what it would do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.registry import UNIX_TIME
from baton.scaling import ScalingPlan, ScalingShell, plan_of, wants_scaling
from baton.state import state_folder
from baton.ticket_keys import write_private
from cluster.errors import BatonError
from cluster.registry.registry import Registry
from cluster.spec import Spec
from goodput.actuate.kubernetes import KubernetesActuator
from kvtransfer.proving import FleetProofs
from kvtransfer.ticket import SigningKey

if TYPE_CHECKING:
    from k8s.operator.client import ApiClient
    from k8s.operator.controller import Operator
    from k8s.operator.scaling import ClusterSeen, Place, ScalingBoard

logger = logging.getLogger("baton.controller")

LOOK_S: Final = 2.0
"""Seconds between two looks at the list of clusters."""
ADVICE_S: Final = 60.0
"""Seconds between two changes of a condition that reports what a controller would do: each is a write."""


@dataclass(slots=True, kw_only=True)
class _Running:
    """The controller of one cluster."""

    mark: str
    """What the controller was made of (`_mark`); after a change of it a new controller is made."""
    shell: ScalingShell
    task: asyncio.Task[None]
    advised_at: float = -ADVICE_S
    """When its advice was last written, seconds on the clock of `Controllers`."""


class Controllers:
    """The controllers of all clusters of one operator, by namespace and name."""

    def __init__(self, operator: Operator, board: ScalingBoard, client: ApiClient, clock: Callable[[], float]) -> None:
        """`clock` is monotonic, s."""
        self._operator: Final = operator
        self._board: Final = board
        self._client: Final = client
        self._clock: Final = clock
        self._running: Final[dict[Place, _Running]] = {}

    async def run(self) -> None:
        """Look every `LOOK_S` until cancelled; then end all controllers."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            for key in tuple(self._running):
                await self._end(key)

    async def look(self) -> None:
        """Begin, renew and end controllers as clusters come, change and go."""
        there = self._operator.clusters()
        self._board.keep(there)
        for key in sorted(there.union(self._running)):
            try:
                await self._look_at(key, there)
            except Exception as error:  # one cluster must never stop the others
                if self._told(key, f"{type(error).__name__}: {error}"):
                    logger.exception("%s/%s is not sized: a fault of the operator's", *key)
        if not self._operator.may_act():
            self._board.forget()

    async def _look_at(self, key: Place, there: frozenset[Place]) -> None:
        """Begin, renew or end the controller of one cluster."""
        seen = self._operator.seen(*key) if key in there else None
        spec = None if seen is None else seen.resource.spec
        if seen is not None and spec is not None and wants_scaling(spec):
            if seen.access.fleet != ():
                await self._keep(key, seen, spec)
            return
        if spec is not None:
            self._board.of(*key).advice = ""
        if key in self._running:
            await self._end(key)

    def _told(self, key: Place, fault: str) -> bool:
        """Show a fault in the cluster's status. Returns whether it is another one than at the last look."""
        wanted = self._board.of(*key)
        before, wanted.advice = wanted.advice, fault[:300]
        return wanted.advice != before

    async def _keep(self, key: Place, seen: ClusterSeen, spec: Spec) -> None:
        mark = _mark(seen)
        known, failed = self._running.get(key), ""
        if known is not None and (known.mark != mark or known.task.done()):
            failed = await self._end(key)
            known = None
        if known is None:
            plan = _plan(seen, spec)
            told = [f"{model}: {why}" for model, why in plan.off.items()] + ([failed] if failed else [])
            self._board.of(*key).advice = "; ".join(told)[:300]
            if not plan.pools:
                return
            try:
                self._running[key] = await self._begun(key, seen, plan, mark)
            except (BatonError, OSError) as error:  # a full disk keeps no password, for example
                logger.warning("%s/%s is not sized: %s", *key, error)
                self._board.of(*key).advice = str(error)[:300]
            return
        await known.shell.renew(_plan(seen, spec).promises)
        self._advise(key, known)

    async def _begun(self, key: Place, seen: ClusterSeen, plan: ScalingPlan, mark: str) -> _Running:
        from k8s.operator.scaling import OperatorWorld

        opened, wanted = await self._registry(key, seen), self._board.of(*key)
        wanted.scales = True
        world = OperatorWorld(self._operator, *key, wanted)
        shell = ScalingShell(_file_name(key), plan, opened, say=logger.info)
        task = asyncio.get_running_loop().create_task(shell.run(KubernetesActuator(world)), name=f"size {key[1]}")
        return _Running(mark=mark, shell=shell, task=task)

    async def _registry(self, key: Place, seen: ClusterSeen) -> Callable[[], Registry]:
        """A function that opens the registry of a cluster, any number of times.

        Raises:
            UsageError: the registry's files cannot be used.
        """
        from cluster.registry.redis import RedisRegistry
        from k8s.operator.scaling import registry_place

        place = await registry_place(self._client, seen)
        folder = state_folder() / "k8s" / _file_name(key)
        files: dict[str, Path | None] = {
            name: None if text is None else write_private(folder / name, text)
            for name, text in (("password", place.password), ("ca", place.ca))
        }

        def keys() -> tuple[SigningKey, ...]:
            now = self._operator.seen(*key)
            return () if now is None else now.access.fleet

        def opened() -> Registry:
            return RedisRegistry.open(
                place.url,
                cluster=place.cluster,
                password_file=files["password"],
                ca_file=files["ca"],
                proofs=FleetProofs(keys, UNIX_TIME, steady=time.monotonic),
            )

        return opened

    def _advise(self, key: Place, known: _Running) -> None:
        """Report what the controller would do, if it may not act."""
        now, scaler, wanted = self._clock(), known.shell.scaler, self._board.of(*key)
        if scaler is None or not wanted.scales or now - known.advised_at < ADVICE_S:
            return
        known.advised_at = now
        wanted.advice = "; ".join(each.because for each in scaler.last.values() if each.dry and each.actions)[:300]

    async def _end(self, key: Place) -> str:
        """End a controller. Returns the error with which it had ended by itself; empty: it had not. Such an error (the
        Secret may not have the registry's password yet) must not end the controllers of other clusters, nor must one of
        its goodbye.
        """
        known = self._running[key]
        by_itself = known.task.done()
        self._board.of(*key).scales = False
        if not known.task.cancelling():
            known.task.cancel()
        await asyncio.wait({known.task})  # if it is cancelled here, `run` ends this controller
        del self._running[key]
        error = None if known.task.cancelled() else known.task.exception()
        if error is None:
            return ""
        unexpected = None if isinstance(error, BatonError) else error
        logger.warning("the controller of %s ended: %s", "/".join(key), error, exc_info=unexpected)
        return str(error) or type(error).__name__ if by_itself else ""


def _file_name(key: Place) -> str:
    """The cluster's own name for files. With a hyphen two clusters of an operator that acts in all namespaces could
    have one: `a-chat` in `team`, and `chat` in `team-a`. No name in Kubernetes has an underscore.
    """
    return "_".join(key)


def _mark(seen: ClusterSeen) -> str:
    """What a controller is made of, as text: the file without its targets, which a running controller takes over, and
    the resource's identity: one that was deleted and made again has another registry, with other passwords.
    """
    from k8s.operator.scaling import internal_of
    from k8s.plan.keys import content_of

    file = {name: value for name, value in seen.resource.file.items() if name != "slo"}
    secret = internal_of(seen)
    settings = seen.resource.kubernetes
    told = "" if secret is None else content_of(secret)
    made_of = [seen.resource.uid, told, settings.engine.value, settings.start_s]
    return json.dumps([file, made_of, _elsewhere(seen)], sort_keys=True)


def _elsewhere(seen: ClusterSeen) -> list[str]:
    """Names of the pools that BatonPools size. A BatonPool that names no pool sizes none."""
    return sorted(stem for stem, by in seen.look.scaled.items() if by == "BatonPool")


def _plan(seen: ClusterSeen, spec: Spec) -> ScalingPlan:
    """The pools to size, named as workloads are; the operator keeps those that cannot be sized. Instances that come and
    go without the controller are the operator's replacements (a rollout, an eviction): people order sizes.
    """
    from k8s.operator.scaling import pool_name

    made_for = seen.resource.kubernetes
    dry = bool(_elsewhere(seen))
    made = plan_of(spec, made_for.engine.value, None, [], dry=dry, by_hand=False, start_max_s=made_for.start_s)
    pools = {
        model: tuple(replace(each, name=pool_name(seen.resource.name, each.name)) for each in named)
        for model, named in made.pools.items()
    }
    return replace(made, pools=pools, kept={})
