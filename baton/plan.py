"""From flags or a cluster file to `baton engine` commands: which engines, on which part of the machine, which ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from baton.mock_command import mock_args, mock_ranks
from baton.ports import LOOPBACK, HeldPorts
from cluster.errors import UsageError
from cluster.instance import Role
from cluster.spec import Spec, flags, instances
from cluster.spec.plan import PlannedInstance, one_of_each
from cluster.spec.settings import NO_TIERS, POOL_MAX, KvTiers
from engine.tiny import NAME
from engine.vllm.command import workers
from engine.vllm.hardware import EngineHardware
from engine.vllm.placement import MachineShare, of_type, share
from engine.vllm.spec import ranks_in
from goodput.actuate.places import IDLE_MIB

ENGINE_PORT = 8100
AGENT_PORT = 8200
SIDE_CHANNEL_PORT = 5600
SIDE_CHANNEL_STEP = 32
"""vLLM adds the data-parallel rank to a side channel's port: leave room between two engines."""


TINY_NAME = NAME
"""In a cluster file: the model that ships."""


NOTHING_USED: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedEngine:
    """One engine that the user asked for. It has many fields: one for each flag of `baton engine` that is passed on."""

    name: str
    role: Role
    model: str | None
    """None: the model that ships."""
    served_name: str | None = None
    vllm_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    engine: str = "vllm"
    """What runs the model: ``vllm``, or ``mock`` for none at all."""
    ticket_keys_file: str | None = None
    """The engine's own key file for tickets; None: no guard."""
    kv_lease_s: int | None = None
    """Seconds that it keeps blocks that no engine pulls; None: `baton engine`'s default."""
    flips: bool = False
    """Whether it may take another role while it runs."""
    connector: str = "nixl"
    """What moves its KV cache: ``nixl``, vLLM's own connector, or ``baton``; from a file perhaps ``auto``."""
    door: str = ""
    """Path of the agent socket, if it has Baton's connector; empty: `baton engine` chooses one."""
    kv: KvTiers = NO_TIERS
    """Where KV blocks are kept that its KV cache drops."""
    digests: bool = False
    """Whether pulled blocks are compared with held ones, if it has Baton's connector."""
    peers: bool = True
    """Whether it shares prompts' beginnings with other instances, if it has Baton's connector."""
    tenants: tuple[str, ...] = ()
    """The only tenants whose requests it serves; none: all tenants."""
    gpu: str | None = None
    """Type of its GPUs; None: whatever the machine has."""
    drain_s: float | None = None
    """Seconds that its drain may take; None: `baton engine`'s default."""

    @property
    def ranks(self) -> int:
        """Data parallel ranks behind its port, each an instance of its own."""
        return mock_ranks(self.vllm_args) if self.engine == "mock" else ranks_in(self.vllm_args)

    @property
    def gpus(self) -> int:
        """GPUs of the engine, by its vLLM flags."""
        return workers(self.vllm_args)

    def counts_as(self, shape: int) -> int:
        """GPUs that a controller counts for it. Words after ``--`` win over the file's shape, so its flags count. A
        mock has no GPU: it counts as what it imitates, the `shape`.
        """
        return shape if self.engine == "mock" else self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEngine:
    """One engine with its part of the machine."""

    wanted: WantedEngine
    port: int
    agent_port: int
    side_channel_port: int
    placed: MachineShare

    @property
    def ports(self) -> tuple[int, ...]:
        """All ports that it listens on."""
        return (self.port, self.agent_port, self.side_channel_port)

    @property
    def url(self) -> str:
        """The engine's base URL."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def where(self) -> str:
        """The engine's address and its part of the machine, for people."""
        return f"{self.url} on {self.placed}"

    def words(self, registry: list[str]) -> list[str]:
        """The `baton engine` command of this engine, up to vLLM's own flags."""
        wanted = self.wanted
        words = [
            "engine",
            *([wanted.model] if wanted.model else []),
            "--name",
            wanted.name,
            "--role",
            wanted.role.value,
        ]
        words += ["--port", str(self.port), "--agent-port", str(self.agent_port)]
        words += ["--side-channel-port", str(self.side_channel_port), *self.placed.flags(), *registry]
        if wanted.engine != "vllm":
            words += ["--engine", wanted.engine]
        if wanted.served_name:
            words += ["--served-model-name", wanted.served_name]
        if wanted.ticket_keys_file is not None:
            words += ["--ticket-keys-file", wanted.ticket_keys_file]
        if wanted.kv_lease_s is not None:
            words += ["--kv-lease", str(wanted.kv_lease_s)]
        if wanted.flips:
            words += ["--flips"]
        if wanted.engine == "vllm":
            words += ["--transfer", wanted.connector]
            words += ["--digests"] if wanted.digests else []
        words += [] if wanted.peers else ["--no-peers"]
        if wanted.door:
            words += ["--door", wanted.door]
        words += flags.tier_words(wanted.kv) if wanted.engine == "vllm" else []
        if wanted.drain_s is not None:
            words += ["--drain-s", f"{wanted.drain_s:g}"]
        for tenant in wanted.tenants:
            words += ["--tenant", tenant]
        for name, value in wanted.env.items():
            words += ["--env", f"{name}={value}"]
        return words


def from_counts(
    counts: dict[Role, int], model: str | None, served: str | None, vllm_args: list[str]
) -> list[WantedEngine]:
    """The engines of ``--prefill N --decode N --both N``, all of one model.

    Raises:
        UsageError: a count below 0 or above `POOL_MAX`, or nothing at all.
    """
    for role, count in counts.items():
        if count < 0:
            raise UsageError(f"--{role.value} is {count}: it must be 0 or more")
        if count > POOL_MAX:
            most = f"at most {POOL_MAX}"
            raise UsageError(
                f"--{role.value} is {count}: it must be {most}; write a number that is {most}, or leave it out"
            )
    if not any(counts.values()):
        raise UsageError("--prefill, --decode and --both are all 0: nothing would serve")
    return [
        WantedEngine(
            name=f"{role.value}-{number}", role=role, model=model, served_name=served, vllm_args=tuple(vllm_args)
        )
        for role, count in counts.items()
        for number in range(count)
    ]


def from_file(spec: Spec, vllm_args: list[str], engine: str = "vllm") -> list[WantedEngine]:
    """The instances that a cluster file starts with. `vllm_args`, the words after ``--``, come last, so that they win.

    With `engine` ``mock``, mocks imitate them: the file's GPUs, with the timing of the cost model.
    """
    return [_wanted(spec, each, vllm_args, engine) for each in instances(spec)]


def templates(spec: Spec, vllm_args: list[str], engine: str = "vllm") -> dict[str, WantedEngine]:
    """By pool of a cluster file, the settings of one more instance."""
    return {each.name: _wanted(spec, each, vllm_args, engine) for each in one_of_each(spec)}


def _wanted(spec: Spec, each: PlannedInstance, vllm_args: list[str], engine: str) -> WantedEngine:
    own = mock_args(each, spec.hardware) if engine == "mock" else each.vllm_args
    return WantedEngine(
        name=each.name,
        role=each.role,
        model=None if each.model == TINY_NAME and engine != "mock" else each.model,
        served_name=each.served_name,
        vllm_args=(*own, *vllm_args),
        engine=engine,
        env=dict(each.env),
        kv_lease_s=each.kv_lease_s,
        flips=each.flips,
        connector=each.connector,
        kv=each.kv,
        digests=each.digests,
        peers=each.peers,
        tenants=each.tenants,
        gpu=each.gpu,
    )


def with_ports(wanted: WantedEngine, placed: MachineShare, ports: HeldPorts) -> PlacedEngine:
    """An engine on its part of the machine, with free ports of its own, held in `ports`.

    Raises:
        OSError: no port is free.
    """
    return PlacedEngine(
        wanted=wanted,
        port=ports.take(ENGINE_PORT),
        agent_port=ports.take(AGENT_PORT),
        side_channel_port=ports.take(SIDE_CHANNEL_PORT, step=SIDE_CHANNEL_STEP),
        placed=placed,
    )


def place(
    wanted: list[WantedEngine],
    hardware: EngineHardware,
    ports: HeldPorts,
    most: int = 0,
    used_mib: Mapping[str, int] = NOTHING_USED,
) -> list[PlacedEngine]:
    """Give each engine its cores or GPUs and its ports.

    Args:
        wanted: the engines to start.
        hardware: of this machine.
        ports: those that this command holds.
        most: most engines that there may be later: without GPUs, each gets its share of the cores among so many.
        used_mib: memory in use on each GPU, by its id: GPUs on which other programs have a model come last.

    Raises:
        UsageError: an engine needs more GPUs than the machine has.
        OSError: no port is free.
    """
    gpus = sorted(hardware.gpus, key=lambda gpu: used_mib.get(gpu.id, 0) > IDLE_MIB)
    for each in wanted if gpus else ():
        fits = of_type(gpus, each.gpu)
        if each.gpus > len(fits):
            which = "GPUs" if len(fits) == len(gpus) else f"GPUs of type {each.gpu}"
            raise UsageError(
                f"instance {each.name} needs {each.gpus} {which}, and {len(fits)} can be used here (`baton doctor`): "
                "lower its shape (tp, pp, dp), or -tp/-pp/-dp after --"
            )
    shares = share(
        len(wanted) if gpus else max(most, len(wanted)),
        gpus,
        hardware.cores,
        gpus_each=[each.gpus for each in wanted],
        types=[each.gpu for each in wanted],
    )[: len(wanted)]
    return [with_ports(each, placed, ports) for each, placed in zip(wanted, shares, strict=True)]
