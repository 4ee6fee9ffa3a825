"""One instance: a stock vLLM server that is started, watched, restarted when it dies, and stopped in order.

Without a model it serves the tiny one that ships with Baton (`baton-tiny`). Everything after `--` goes to vLLM
verbatim. SIGTERM or Ctrl-C lets it finish what it has; a second one ends it at once.

examples:
  baton engine --role prefill --port 8100
  baton engine Qwen/Qwen3-0.6B --role decode --gpu 1 -- --max-model-len 8192
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import math
import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from baton.checks import VLLM_PINNED
from baton.descriptors import raise_descriptor_limit
from baton.lifeline import watch_lifeline
from baton.mock_command import MOCK_MODEL, mock_command, mock_ranks
from baton.number_flags import above_zero, port, zero_or_more
from baton.output import announce_ready, emit, say
from baton.ports import LOOPBACK, HeldPorts
from baton.registry import UNIX_TIME, add_registry_arguments, open_registry
from baton.signals import stopping_signals
from baton.state import state_folder
from baton.tenant_keys import open_keys
from baton.ticket_keys import (
    add_ticket_keys_argument,
    check_instance_keys,
    has_identity,
    named_file,
    open_identity,
    open_instance_keys,
)
from cluster.callers import is_loopback
from cluster.errors import EngineFailed, UsageError
from cluster.ids import InstanceId
from cluster.instance import TENANTS_MAX, Role
from cluster.registry.membership import is_name
from cluster.spec.about import NAME
from cluster.spec.settings import TIER_GIB_MAX
from cluster.telemetry import configure_logging
from costs.memory import seqs_default
from decode.rules import DecodeRules
from engine.agent.agent import Agent
from engine.agent.config import AgentConfig
from engine.agent.kv_events import make_room
from engine.agent.node import this_node
from engine.agent.rules import RoleRules
from engine.vllm.child import EngineChange, EngineProcess, rules_for
from engine.vllm.command import workers
from engine.vllm.evictions import SOCKET, events_path
from engine.vllm.hardware import UNKNOWN, EngineHardware, find_hardware
from engine.vllm.logfile import default_path
from engine.vllm.placement import CudaGpu, measures_memory
from engine.vllm.spec import Connector, Device, EngineSpec, given, ranks_in, value_of
from engine.vllm.supervise import EngineState
from engine.vllm.tiers import GIB, Tiers, folder_name
from engine.vllm.transfer import ASKED, connector_for, left_by_flags
from engine.vllm.turns import StartTurns
from engine.vllm.weights import adapter_marks, adapter_of, weights_of
from kvtransfer.asks import door_for, door_of
from kvtransfer.door import PATH_BYTES_MAX
from kvtransfer.proving import InstanceProofs
from prefill.rules import PrefillRules

START_S = 1800.0
"""Default of --start-timeout, as `kubernetes.start_s`: 140 GB of weights take 19 minutes to come at 1 Gbit/s, then they
are loaded and compiled. An engine that dies is told at once; this limit ends one that hangs."""

WILDCARDS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104
"""A server that listens there is reached at every address of its machine."""

TINY_NAME = "baton-tiny"
"""Name in the API of the model that ships."""
TINY_TOKENS = 2048
"""Its longest prompt and answer together."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton engine`."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="Hugging Face name or folder (default: the bundled tiny model)")
    roles = [role.value for role in Role]
    add("--role", choices=roles, default="both", help="the legs that it runs (default %(default)s)")
    add("--flips", action="store_true", help="it may take another role while it runs: POST /role to its agent")
    add("--name", metavar="NAME", help="name of the instance (default: ROLE-0)")
    add("--host", default=LOOPBACK, help="address it listens on, and announces (default %(default)s)")
    add("--port", type=port, default=0, help="its port, 0 = a free one (default %(default)s)")
    add("--side-channel-host", metavar="HOST", help="address for NIXL handshakes (default: --host)")
    add("--side-channel-port", type=int, default=0, metavar="PORT", help="their port, 0 = a free one (default 0)")
    add("--cores", metavar="LIST", help="CPU engines: cores to bind to, such as 0,1 or 0-3 (default: vLLM's choice)")
    add("--threads", type=int, default=0, metavar="N", help="instead of --cores: N threads, bound to no core")
    add("--engine", choices=["vllm", "mock"], default="vllm", help="mock: no model at all (default %(default)s)")
    add("--gpu", metavar="LIST", help="GPUs to use, such as 0,1 (default: all visible ones)")
    add("--gpu-memory-share", type=float, metavar="S", help="part of each GPU's memory, 0 to 1 (default: vLLM's)")
    add("--served-model-name", metavar="NAME", help="name in the API (default: MODEL)")
    add(
        "--weights",
        metavar="NAME",
        help="name of the weights: hand over only to instances with the same name (default: a digest of the model's "
        "files)",
    )
    add(
        "--node",
        metavar="NAME",
        help="name of this machine: hand-overs within one machine are priced as local (default: the kernel's boot id)",
    )
    add("--tenant", action="append", default=[], metavar="NAME", help="serve only this tenant (may be given again)")
    add("--no-pinning", dest="pinning", action="store_false", help="load no logits processor of ours into vLLM")
    add(
        "--transfer",
        choices=ASKED,
        default="auto",
        help="what moves KV cache: vLLM's connector or Baton's (default auto: Baton's on CPU with a registry and keys)",
    )
    add(
        "--door",
        metavar="FILE",
        help="socket of Baton's connector (default: $XDG_STATE_HOME/baton/doors/NAME-PORT/door)",
    )
    add("--digests", action="store_true", help="with --transfer baton on CPU: compare pulled blocks with what was held")
    add("--no-peers", dest="peers", action="store_false", help="take no prompt's beginning from other engines' caches")
    add("--kv-host-gib", type=float, metavar="N", help="host memory for prompts that the KV cache drops (default none)")
    add("--kv-disk-gib", type=float, metavar="N", help="files for those that host memory drops, too (default none)")
    add("--kv-disk-folder", metavar="DIR", help="where they go (default: $XDG_STATE_HOME/baton/kv)")
    add("--kv-lease", type=int, metavar="SECONDS", help="how long unpulled blocks are kept (default: 30, CPU 120)")
    add(
        "--shutdown-timeout",
        type=int,
        default=30,
        metavar="SECONDS",
        help="vLLM's own drain, should it be told to stop",
    )
    add(
        "--start-timeout",
        type=above_zero,
        default=START_S,
        metavar="SECONDS",
        help="until the first token, a download included (default %(default)g)",
    )
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="environment of vLLM; no secrets: visible")
    add("--log-file", type=Path, metavar="FILE", help="vLLM's log (default: $XDG_STATE_HOME/baton/logs/NAME.log)")
    _add_agent_arguments(parser)
    add("--json", action="store_true", help="one JSON object a line on stdout")
    add("--lifeline", action="store_true", help="end at once when standard input (a pipe) ends: the parent died")
    add_ticket_keys_argument(parser, "this instance's")
    add_registry_arguments(parser)


def _add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the agent, the engine's parent."""
    add = parser.add_argument
    add(
        "--agent-host",
        metavar="HOST",
        help="address of the agent's own HTTP (default: --host with --ticket-keys-file or --admin-key-file, "
        "else 127.0.0.1)",
    )
    add("--agent-port", type=port, default=0, metavar="PORT", help="its port, 0 = a free one (default 0)")
    add(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="SHA-256 lines of operators' keys, to ask the agent from other machines (`baton key new`)",
    )
    add(
        "--drain-s",
        type=zero_or_more,
        default=30.0,
        metavar="S",
        help="time for what runs after SIGTERM (default %(default)s)",
    )
    add(
        "--linger-s",
        type=zero_or_more,
        default=0.0,
        metavar="S",
        help="seconds after SIGTERM during which the instance still takes work; for deployments that stop routers at "
        "the same time (default 0)",
    )


def run(args: argparse.Namespace) -> int:
    """Run until stopped: 0. 1 when the engine cannot be started or kept alive, with the last lines of its log."""
    configure_logging("WARNING")
    raise_descriptor_limit()
    with HeldPorts() as ports:
        return _run(spec_of(args, os.environ, ports), args)


def _run(spec: EngineSpec, args: argparse.Namespace) -> int:
    left = left_by_flags(spec.extra_args)
    if spec.connector == "nixl" and left is not None:
        say(f"baton: {spec.instance}: vLLM's own connector hands its KV cache over: {left}")
    log_path = args.log_file or default_path(spec.instance, os.environ)
    return asyncio.run(_Instance(spec, log_path, args).run())


def _weights(named: str | None, spec: EngineSpec) -> str:
    """The name of the weights: `named`, else a digest of the model's files and of flags that change answers."""
    if named is not None:
        return named
    found = weights_of(spec.model, value_of(spec.extra_args, "--revision"), {**os.environ, **spec.extra_env})
    more = [(flag, value) for flag in CHANGES_ANSWERS if (value := value_of(spec.extra_args, flag)) is not None]
    return f"{found}+{blake2b(repr(more).encode(), digest_size=6).hexdigest()}" if found and more else found


CHANGES_ANSWERS = (
    "--chat-template", "--chat-template-content-format", "--default-chat-template-kwargs", "--generation-config",
    "--hf-config-path", "--hf-overrides", "--override-generation-config", "--quantization", "--tokenizer",
    "--tokenizer-mode", "--tokenizer-revision",
)  # fmt: skip
"""Flags of vLLM that change prompts or answers although the model's files are the same: they count as other weights."""


def agent_rules(spec: EngineSpec) -> dict[Role, RoleRules]:
    """The rules of an agent in each role. Role `both` has those of `decode`, since streams occupy it longest."""
    decode = DecodeRules(streams_max=spec.seqs_max)
    return {Role.PREFILL: PrefillRules(), Role.DECODE: decode, Role.BOTH: decode}


def seqs_max(vllm_args: tuple[str, ...], gpus: tuple[CudaGpu, ...], mine: tuple[str, ...]) -> int:
    """Requests that an engine, or each of its ranks, runs at once: --max-num-seqs, else vLLM's default for the smallest
    of its GPUs (`mine`: their ids; empty, or none of them known: all).

    Without a GPU 256, twice vLLM's default there: too many requests wait in the engine, too few leave it idle. For the
    same reason a GPU of unknown size counts as a large one.
    """
    said = value_of(vllm_args, "--max-num-seqs")
    own = [gpu for gpu in gpus if gpu.id in mine] or gpus or [CudaGpu(id=each) for each in mine]
    each = min((seqs_default(gpu.name, gpu.memory_mib / 1024 or math.inf) for gpu in own), default=256)
    if said is not None and said.isdecimal() and int(said) > 0:
        each = int(said)
    return each


class _Instance:
    """One instance of this process: its agent and engine, its signals and its output."""

    def __init__(self, spec: EngineSpec, log_path: Path, args: argparse.Namespace) -> None:
        self.spec = spec
        self.args = args
        self.announced = False
        rules = rules_for(spec, start_max_s=args.start_timeout)
        start = partial(EngineProcess, spec, log_path, on_change=self._pass_on, rules=rules)
        self.process = (
            start(argv=mock_command(spec), first_stage="starting a mock engine")
            if args.engine == "mock"
            else start(turns=turns_of(spec, os.environ))
        )
        ticket_keys = open_instance_keys(_path(spec.ticket_keys_file))
        admin_keys = None if args.admin_key_file is None else open_keys("--admin-key-file", args.admin_key_file)
        config = AgentConfig(
            host=agent_host(args.agent_host, spec.host, guarded=(ticket_keys or admin_keys) is not None),
            port=args.agent_port,
            drain_s=args.drain_s,
            linger_s=args.linger_s,
            weights=partial(_weights, args.weights, spec),
            adapter=adapter_of,
            adapter_marks=adapter_marks,
            node=this_node() if args.node is None else args.node,
            tenants=tenants_of(args.tenant),
            ticket_keys=None if ticket_keys is None else lambda: ticket_keys.get().keys,
            admin_keys=admin_keys,
        )
        rules_by_role = agent_rules(spec)
        flips = rules_by_role if spec.flips else None
        identities = open_identity(_path(spec.ticket_keys_file), spec.instance)
        proofs = None if ticket_keys is None else InstanceProofs(ticket_keys.get, UNIX_TIME)
        registry = open_registry(args, proofs)
        self.agent = Agent(self.process, rules_by_role[spec.role], config, registry, self.tell, say, flips, identities)

    def _pass_on(self, change: EngineChange) -> None:
        self.agent.engine_changed(change)

    async def run(self) -> int:
        with stopping_signals(self.agent.ask_leave):
            if self.args.lifeline:
                watch_lifeline(self.agent.ask_stop)
            try:
                return await self.agent.run()
            except EngineFailed as failure:
                self._show_failure(failure)
                return 1

    def tell(self, change: EngineChange) -> None:
        """Report one change of the engine, to programs on stdout or to people on stderr."""
        with contextlib.suppress(OSError):  # an engine serves on while the disk under its log is full
            if self.args.json:
                said = {"instance": change.instance, "state": change.state}
                emit({"event": "state", **said, "detail": change.detail, "epoch": change.epoch})
            else:
                say(f"{change.instance} {change.state}{': ' if change.detail else ''}{change.detail}")
        if change.state is EngineState.READY and (self.args.json or not self.announced):
            self.announced = True
            more = {"role": self.spec.role, "epoch": change.epoch, "model": self.process.model, "agent": self.agent.url}
            announce_ready(change.instance, self.spec.url, as_json=self.args.json, instance=change.instance, **more)

    def _show_failure(self, failure: EngineFailed) -> None:
        say(f"baton: {self.spec.instance} failed: {failure}")
        say(f"last lines of {self.process.log_path}:")
        for line in failure.log_tail:
            say(f"  {line}")


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def agent_host(asked: str | None, engine: str, *, guarded: bool) -> str:
    """The address where the agent listens: beside its engine if it checks keys (`guarded`), else on this machine only.

    Raises:
        UsageError: other machines could reach the agent, and it would ask for no key.
    """
    if guarded or (asked is None and is_loopback(engine)):
        return asked or engine
    if asked is None:
        return LOOPBACK
    if not is_loopback(asked):
        raise UsageError(
            f"--agent-host {asked}: any program that reaches this address could drain the instance. Give "
            "--ticket-keys-file (see `baton key tickets`) or --admin-key-file (`baton key new`), or leave "
            "--agent-host out"
        )
    return asked


# -- from flags to a spec --


def _device(hardware: EngineHardware, named: str | None) -> Device:
    """The device of an engine; `named`: the GPUs that the user names, if any.

    Raises:
        UsageError: vLLM's build needs a GPU, and none is found; or it can use none, and the user names one.
    """
    if named and hardware.cpu_build:
        raise UsageError(
            f"--gpu {named}: this Python has vLLM's build for CPUs ({hardware.vllm}), which uses no GPU. Install "
            "vLLM's build for GPUs (`make clean` and `make setup DEVICE=gpu` in Baton's folder), or leave --gpu out"
        )
    if named:
        return "gpu"
    if hardware.lacks_gpu:
        raise UsageError(
            "this Python has vLLM's build for GPUs, and no GPU is found: nvidia-smi is missing, fails or lists none, "
            "or CUDA_VISIBLE_DEVICES hides them. Name them (CUDA_VISIBLE_DEVICES=0, or --gpu 0), or install vLLM's "
            "build for CPUs"
        )
    return hardware.device


def _check_packages(hardware: EngineHardware, vllm_args: tuple[str, ...], name: str) -> None:
    """Raise UsageError if vLLM or NIXL is missing. Without NIXL, vLLM would end after it has loaded the weights. Say if
    Baton is not tested with this vLLM. `name`: the instance's.
    """
    if hardware.vllm is None:
        raise UsageError("vLLM is not installed in this Python: `pip install vllm`, or `make setup` in Baton's folder")
    if hardware.nixl is None and not given(vllm_args, "--kv-transfer-config"):
        raise UsageError(
            "NIXL is not installed in this Python, and engines hand their KV caches over with it: `pip install nixl`, "
            "or `make setup` in Baton's folder"
        )
    if hardware.vllm != UNKNOWN and not hardware.vllm.startswith(VLLM_PINNED):
        say(f"baton: {name}: vLLM {hardware.vllm}; Baton is tested with {VLLM_PINNED}")


def spec_of(args: argparse.Namespace, environ: Mapping[str, str], ports: HeldPorts) -> EngineSpec:
    """The engine that the flags describe. Ports that this command chooses are held in `ports`.

    Raises:
        UsageError: flags contradict each other, or this machine cannot start the engine.
    """
    role = Role(args.role)
    hardware = find_hardware(environ)
    mocked = args.engine == "mock"
    if not mocked:
        _check_packages(hardware, tuple(args.vllm_args), args.name or f"{role}-0")
    gpus = tuple(word.strip() for word in args.gpu.split(",")) if args.gpu else ()
    side_channel_port = args.side_channel_port or _port_in(environ, "VLLM_NIXL_SIDE_CHANNEL_PORT")
    side_channel_host = args.side_channel_host or environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or _reachable(args.host)
    if mocked:
        model, served_name = args.model or MOCK_MODEL, args.served_model_name
    else:
        model, served_name = (_folder_or_name(args.model), args.served_model_name) if args.model else _tiny(args)
    if args.name and not is_name(args.name):
        raise UsageError(f"--name {args.name[:200]}: a name has up to 128 letters, digits, `.`, `_` and `-`")
    instance, ticket_keys = InstanceId(args.name or f"{role}-0"), named_file(args, environ)
    _warn_unreachable(args)
    port = _port(args.host, args.port, "--port", ports)
    check_instance_keys(ticket_keys, instance)
    device: Device = "gpu" if mocked else _device(hardware, args.gpu)
    ranks = ranks_in(tuple(args.vllm_args)) if not mocked else mock_ranks(tuple(args.vllm_args))
    connector = connector_for(
        args.transfer,
        vllm=hardware.vllm,
        meets=bool(args.registry) and has_identity(ticket_keys),
        vllm_args=tuple(args.vllm_args),
    )
    if args.digests and connector != "baton":
        raise UsageError(
            "--digests compares what Baton's connector pulls, and this engine gets vLLM's: --transfer baton"
        )
    return EngineSpec(
        instance=instance,
        role=role,
        model=model,
        served_name=served_name,
        python=sys.executable,
        device=device,
        host=args.host,
        port=port,
        side_channel_host=side_channel_host,
        side_channel_port=_port(side_channel_host, side_channel_port, "--side-channel-port", ports),
        cores=parse_cores(args.cores) if args.cores else (),
        unbound_threads=_threads(args),
        gpus=gpus,
        gpu_memory_share=args.gpu_memory_share,
        dtype=None if args.model else "float32",
        max_model_len=None if args.model else TINY_TOKENS,
        kv_lease_s=args.kv_lease,
        shutdown_timeout_s=args.shutdown_timeout,
        seqs_max=seqs_max(tuple(args.vllm_args), hardware.gpus, gpus),
        flips=args.flips,
        peers=args.peers,
        pinning=args.pinning,
        connector=connector,
        ranks=ranks,
        door=_door(args, connector, instance, port, ranks),
        kv_events=_events(instance, port, ranks) if args.registry and not mocked else "",  # no registry: no router
        tiers=_tiers(args, instance, port, mocked=mocked),
        digests=args.digests,
        ticket_keys_file=None if ticket_keys is None else str(ticket_keys),
        extra_args=tuple(args.vllm_args),
        extra_env=dict(_env_pair(word) for word in args.env),
    )


def turns_of(spec: EngineSpec, environ: Mapping[str, str]) -> StartTurns | None:
    """The locks with which this engine starts apart from other engines on its GPUs; None: it has no GPU."""
    if spec.device != "gpu":
        return None
    gpus = spec.gpus or tuple(gpu.id for gpu in find_hardware(environ).gpus[: workers(spec.extra_args)])
    return StartTurns(state_folder() / "gpus", spec.instance, gpus, measures=measures_memory(spec.extra_args))


def _warn_unreachable(args: argparse.Namespace) -> None:
    """Say which addresses mean nothing on another machine, if the registry is on one: its readers may be there, too."""
    place = None
    with contextlib.suppress(ValueError):  # `open_registry` reports it
        place = urlsplit(args.registry or "").hostname
    if place is None or is_loopback(place) or _cannot_open(place, 0) is None:
        return
    for flag, host in (("--host", args.host), ("--agent-host", args.agent_host)):
        if host in WILDCARDS:
            say(
                f"baton: {flag} {host or repr(host)}: this is every address of this machine; routers on other "
                f"machines cannot reach what is announced: give {flag} the address under which they do"
            )
    if is_loopback(args.host) and not args.lifeline:  # `baton up` has a router of its own on this machine
        say(
            f"baton: --host {args.host}: only this machine reaches it, and --registry is on {place}: routers and "
            "instances on other machines cannot reach what is announced: give --host the address under which they do"
        )


def _door(args: argparse.Namespace, connector: Connector, instance: InstanceId, port: int, ranks: int) -> str:
    """Path of the agent socket of Baton's connector, with a place for the rank if there are several; empty without that
    connector.
    """
    if connector != "baton" or args.engine == "mock":
        return ""
    door = Path(args.door) if args.door else state_folder() / "doors" / f"{instance}-{port}" / "door"
    path = door_for(str(door.absolute()), ranks)
    if len(os.fsencode(door_of(path, ranks))) > PATH_BYTES_MAX:
        raise UsageError(f"--door {door}: a socket's path has at most {PATH_BYTES_MAX} bytes; name a shorter one")
    return path


def _tiers(args: argparse.Namespace, instance: InstanceId, port: int, *, mocked: bool) -> Tiers | None:
    """The tiers that the flags ask for, with a folder of this instance's own. A mock has none."""
    host, disk = ((size or 0.0) for size in (args.kv_host_gib, args.kv_disk_gib))
    for flag, gib in (("--kv-host-gib", host), ("--kv-disk-gib", disk)):
        if not 0 <= gib <= TIER_GIB_MAX:
            raise UsageError(f"{flag} {gib:g}: give a size from 0 to {TIER_GIB_MAX:,.0f} GiB, or leave it out")
    if mocked:
        return None
    if args.kv_disk_folder and not disk:
        raise UsageError("--kv-disk-folder has no effect without --kv-disk-gib")
    if not host and not disk:
        return None
    if given(tuple(args.vllm_args), "--kv-transfer-config"):
        raise UsageError(
            "--kv-host-gib or --kv-disk-gib beside a --kv-transfer-config of your own: name the tiers there, or leave "
            "--kv-transfer-config out"
        )
    base = Path(args.kv_disk_folder) if args.kv_disk_folder else state_folder() / "kv"
    folder = (base / folder_name(instance, port, os.uname().nodename)).absolute()
    if disk:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--kv-disk-folder {base}: {error.strerror}") from None
    return Tiers(host_bytes=int(host * GIB), disk_bytes=int(disk * GIB), folder=str(folder) if disk else "")


def _events(instance: InstanceId, port: int, ranks: int) -> str:
    """Path of the socket for vLLM's KV events; empty if the path is too long for a socket, or its folder cannot be made
    (a full disk): then there are no events.
    """
    path = str((state_folder() / "events" / f"{instance}-{port}" / SOCKET).absolute())
    if len(os.fsencode(events_path(path, ranks - 1))) > PATH_BYTES_MAX:
        return ""
    try:
        make_room(Path(path))
    except OSError as error:
        say(f"baton: {instance}: its KV cache tells no events: {error}")
        return ""
    return path


def _tiny(args: argparse.Namespace) -> tuple[str, str]:
    from engine.tiny import model_path

    return str(model_path()), args.served_model_name or TINY_NAME


def _folder_or_name(model: str) -> str:
    """The model for vLLM. A folder is checked here, where the message is one line; vLLM looks a name up itself."""
    if not model.startswith(("/", "./", "../", "~")):
        return model
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "does not exist"
        raise UsageError(f"MODEL {model}: the folder {what}; give a Hugging Face name or a model's folder")
    return str(folder.resolve())


def _threads(args: argparse.Namespace) -> int:
    threads: int = args.threads
    if threads < 0:
        raise UsageError(f"--threads is {threads}: it must be 1 or more")
    if threads and args.cores:
        raise UsageError("--cores and --threads were both given: threads are bound to cores, or to none")
    return threads


def parse_cores(text: str) -> tuple[int, ...]:
    """``0,2-4`` -> (0, 2, 3, 4).

    Raises:
        UsageError: no list of CPU numbers, or a core that this process may not use.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            raise UsageError(f"--cores {text}: write CPU numbers as 0,1 or 0-3")
        cores += range(int(first), int(last) + 1)
    usable = os.sched_getaffinity(0)
    foreign = [core for core in cores if core not in usable]
    if foreign or not cores:
        raise UsageError(f"--cores {text}: not usable here: {foreign}; usable: {sorted(usable)}")
    return tuple(dict.fromkeys(cores))


def tenants_of(names: list[str]) -> tuple[str, ...]:
    """The tenants that the instance is reserved for, each once.

    Raises:
        UsageError: a name that no tenant can have, or too many.
    """
    for name in names:
        if NAME.fullmatch(name) is None:
            raise UsageError(f"--tenant {name}: letters, digits, `.`, `_` and `-` make a tenant's name, 63 at most")
    if len(names) > TENANTS_MAX:
        raise UsageError(f"--tenant is given {len(names)} times: {TENANTS_MAX} is the most")
    return tuple(dict.fromkeys(names))


def _env_pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not name or not equals:
        raise UsageError(f"--env {word}: write NAME=VALUE")
    return name, value


def _reachable(host: str) -> str:
    """The address under which others reach an engine that listens on `host`; NIXL's peers cannot connect to a
    wildcard.
    """
    return "127.0.0.1" if host in WILDCARDS else host


def _port_in(environ: Mapping[str, str], name: str) -> int:
    """The port in an environment variable; 0 if it is not set."""
    text = environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise UsageError(f"{name}={text}: a port is a number from 0 to 65535")
    return int(text or 0)


def _port(host: str, port: int, flag: str, ports: HeldPorts) -> int:
    """`port` if a server can listen on it; for 0 a free one, held in `ports`. `flag` names it in errors."""
    if not 0 <= port <= 65535:
        raise UsageError(f"{flag} {port}: a port is a number from 0 to 65535")
    if port:
        problem = _cannot_open(host, port)
        if problem is None and not ports.serve(host, port):  # another engine starts, and listens later
            problem = os.strerror(errno.EADDRINUSE).lower()
        if problem is None:
            return port
        raise UsageError(f"{flag} {port} on {host}: {problem}; choose another port, or 0 for a free one")
    try:
        return ports.take_any(lambda port: _cannot_open(host, port) is None)
    except OSError as error:
        problem = _cannot_open(host, 0)
        said = f"{problem}; give --host an address of this machine" if problem else str(error)
        raise UsageError(f"{flag} 0: {said}") from None


def _cannot_open(host: str, port: int) -> str | None:
    """Why a server cannot listen there; None if it can, also if old connections are still in TIME_WAIT."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
