"""Lets a controller resize the fleet of `baton up`: its engine processes, free hardware, settings of new engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from baton.changing import Changing
from baton.fleet import LocalFleet
from baton.plan import WantedEngine
from baton.scaling import ScalingPlan, ScalingShell
from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.registry.membership import Heartbeat
from cluster.registry.registry import Registry
from engine.vllm.hardware import EngineHardware, memory_used_mib
from engine.vllm.placement import MachineShare
from goodput.actuate.agents import Agents
from goodput.actuate.local import Child, LocalActuator, LocalPool
from goodput.actuate.places import Places
from kvtransfer.ticket import SigningKey


class LocalChildren:
    """The engine processes of `baton up`, for the actuator (`goodput.actuate.local.Children`)."""

    def __init__(self, fleet: LocalFleet, make: Callable[[str, str], WantedEngine]) -> None:
        """`make`: the settings of a new instance by its name and pool."""
        self._fleet: Final = fleet
        self._make: Final = make

    def listed(self) -> Iterable[Child]:
        return [
            Child(
                name=InstanceId(each.name),
                pool=each.pool,
                asked_s=each.asked_s,
                leaving=each.leaving,
                failed=each.failed,
                share=each.planned.placed,
            )
            for each in self._fleet.members
        ]

    def begin(self, name: InstanceId, pool: str, share: MachineShare) -> None:
        self._fleet.begin_engine(self._make(name, pool), share, pool)

    def drain(self, name: InstanceId, deadline_s: float) -> None:
        self._fleet.members.drain(name, deadline_s)

    def end(self, name: InstanceId) -> None:
        self._fleet.members.end(name)


class LocalScaling:
    """The controller inside `baton up` (`baton.fleet.Scaling`)."""

    def __init__(
        self,
        cluster: str,
        plan: ScalingPlan,
        templates: Mapping[str, WantedEngine],
        hardware: EngineHardware,
        open_registry: Callable[[], Registry],
        keys: Callable[[], tuple[SigningKey, ...]] | None,
        keys_file: Callable[[str], Path | None],
        door: Callable[[str], str],
        changing: Changing | None,
    ) -> None:
        """Make the controller of one cluster.

        Args:
            cluster: its name.
            plan: the pools to size, and the rules.
            templates: by pool, the settings of an engine, still without name, keys and socket.
            hardware: of this machine.
            open_registry: opens the registry, with the fleet's proofs.
            keys: the fleet's ticket keys, which sign requests to agents.
            keys_file: makes the key file of an instance; None if tickets are off.
            door: makes the path of an instance's agent socket; empty: it has none.
            changing: the cluster file, whose classes may be edited; None: there is no file.
        """
        plan = replace(plan, kept={})  # `baton up` brings its engines back itself
        self._shell: Final = ScalingShell(cluster, plan, open_registry, say=self._say, changing=changing)
        self._templates: Final = templates
        self._hardware: Final = hardware
        self._keys: Final = keys
        self._keys_file: Final = keys_file
        self._door: Final = door
        self._fleet: LocalFleet | None = None

    @property
    def running(self) -> bool:
        """Whether resizing has begun."""
        return self._shell.running

    async def run(self, fleet: LocalFleet) -> None:
        """Resize `fleet` until cancelled."""
        self._fleet = fleet
        agents = Agents(self._keys)
        try:
            await self._shell.run(self._actuator(fleet, agents), self._announce)
        except UsageError as error:
            self._say(f"scaling: the fleet keeps its size: {error}")
        finally:
            await agents.close()

    def _actuator(self, fleet: LocalFleet, agents: Agents) -> LocalActuator:
        pools = [pool for each in self._shell.plan.pools.values() for pool in each]
        kinds = {}
        for pool in pools:
            template, footprint = self._templates[pool.name], pool.footprint
            kinds[pool.name] = LocalPool(
                gpu=footprint.gpu, gpus=template.counts_as(footprint.gpus), takes=template.engine != "mock"
            )
        places = Places(self._hardware.gpus, self._hardware.cores, sum(pool.max for pool in pools))
        used_mib = memory_used_mib if self._hardware.gpus else dict
        return LocalActuator(LocalChildren(fleet, self._wanted), kinds, places, self._beats, agents, used_mib=used_mib)

    def _wanted(self, name: str, pool: str) -> WantedEngine:
        keys = self._keys_file(name)
        template = self._templates[pool]
        door = self._door(name) if template.door else ""
        return replace(template, name=name, ticket_keys_file=None if keys is None else str(keys), door=door)

    def _beats(self) -> Mapping[str, Heartbeat]:
        scaler = self._shell.scaler
        return {} if scaler is None else scaler.beats

    def _announce(self, url: str) -> None:
        assert self._fleet is not None
        self._fleet.scaled_at(url)

    def _say(self, line: str) -> None:
        if self._fleet is not None:
            self._fleet.board.say(line)
