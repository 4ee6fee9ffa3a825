"""A fleet on Ray: the process that each actor starts, and the secret files that it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from baton.plan import PlacedEngine, WantedEngine
from cluster.ids import InstanceId
from cluster.registry.membership import Heartbeat
from cluster.spec import Spec
from cluster.spec.plan import stems
from cluster.text_file import text_in
from engine.vllm.placement import MachineShare
from goodput.actuate.agents import Agents
from goodput.actuate.ray_actor import Launch
from goodput.actuate.ray_cluster import RayActuator
from goodput.actuate.ray_tables import RayPool
from kvtransfer.keys import instance_text
from kvtransfer.seal import identity_text
from kvtransfer.ticket import SigningKey

AUTO: Final = "auto"
CPUS: Final = 1.0
"""Logical CPUs of one instance, for the agent and vLLM's own threads."""


def address_of(on: str) -> str:
    """``ray`` or ``ray://HOST:PORT`` as the address that `ray.init` takes."""
    return AUTO if on == "ray" else on


def launches(
    templates: Mapping[str, WantedEngine],
    registry: Sequence[str],
    password_file: Path | None,
    keys: Callable[[], tuple[SigningKey, ...]] | None,
) -> Callable[[str, str], Launch]:
    """A function that gives the process of an instance's actor, by the instance's name and pool. It raises UsageError
    if the password's file cannot be read.

    Args:
        templates: by pool, the settings of an engine.
        registry: flags that name the registry, without its password.
        password_file: the file with that password.
        keys: the fleet's ticket keys; None: tickets are off.
    """

    def launch(name: str, pool: str) -> Launch:
        wanted = templates[pool]
        named = WantedEngine(**{field: getattr(wanted, field) for field in wanted.__slots__} | {"name": name})
        planned = PlacedEngine(wanted=named, port=0, agent_port=0, side_channel_port=0, placed=MachineShare())
        files, flags = _secrets(name, password_file, keys)
        return Launch(
            instance=name,
            pool=pool,
            words=tuple(planned.words(list(registry))[1:]),
            vllm_args=named.vllm_args,
            files=files,
            file_flags=flags,
            takes_gpus=named.engine != "mock",
        )

    return launch


def _secrets(
    name: str, password_file: Path | None, keys: Callable[[], tuple[SigningKey, ...]] | None
) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of an instance's secret files by name, and the flags that name these files."""
    files: dict[str, str] = {}
    flags: dict[str, str] = {}
    if password_file is not None:
        files["registry"] = text_in(
            password_file, "--registry-password-file", "once it can be read, instances start again"
        )
        flags["--registry-password-file"] = "registry"
    if keys is not None:
        fleet = keys()
        files["tickets"] = instance_text(fleet, InstanceId(name))
        files["tickets.identity"] = identity_text(fleet, InstanceId(name))
        flags["--ticket-keys-file"] = "tickets"
    return files, flags


def ray_actuator(
    on: str,
    cluster: str,
    spec: Spec,
    templates: Mapping[str, WantedEngine],
    launch: Callable[[str, str], Launch],
    beats: Callable[[], Mapping[str, Heartbeat]],
    agents: Agents,
) -> RayActuator:
    """An actuator that starts and ends instances of a cluster file's pools on Ray; its connection is not open yet.
    `templates`: by pool, the settings of an engine.
    """
    kinds = {
        stem: RayPool(gpu=pool.gpu or "", gpus=templates[stem].counts_as(pool.shape.gpus), cpus=CPUS)
        for stem, (_, _, pool) in stems(spec).items()
    }
    return RayActuator(address_of(on), cluster, kinds, launch, beats, agents)
