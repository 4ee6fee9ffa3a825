"""The router alone: in front of vLLM servers that already run, or of the fleet that meets in a registry.

Engines need vLLM's NixlConnector (`baton engine` starts them with it). A request is prefilled on one instance, its KV
cache pulled by another, which answers. OpenAI's endpoints are below the address printed on stdout.

Example:
  baton router --prefill-url http://10.0.0.1:8100 --decode-url http://10.0.0.2:8100 --port 8000
  baton router http://10.0.0.1:8100 http://10.0.0.2:8100                 # engines that run both legs
  baton router --registry redis://10.0.0.9:6379 --registry-password-file keys/registry
  baton router --config baton.yaml --registry redis://10.0.0.9:6379     # its classes and tenants (docs/admission.md)
  baton router --registry redis://10.0.0.9:6379 --processes 4           # on four cores, admin sides on 8001 to 8004
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from baton import compiled
from baton.changing import Changing
from baton.clusterfile import beside
from baton.decisions_again import opened_log
from baton.descriptors import raise_descriptor_limit
from baton.lifeline import watch_lifeline
from baton.makes import makes_of
from baton.memory import map_large_blocks
from baton.output import announce_ready, say
from baton.processes import ServerProcesses
from baton.registry import add_registry_arguments, fill_from_file, fleet_proofs, open_registry
from baton.setting_flags import add_settings
from baton.signals import stopping_signals
from baton.tenant_keys import open_all_keys, open_tenant_keys
from baton.ticket_keys import add_ticket_keys_argument, named_file, open_fleet_keys
from cluster.errors import UsageError
from cluster.ids import InstanceId, engine_of, rank_of
from cluster.instance import Instance, Role
from cluster.registry.registry import Registry
from cluster.spec import Limits, RouterSettings, Spec
from cluster.spec.about import settings_of
from cluster.telemetry import configure_logging
from cluster.urls import PORT_MAX
from router.api import reference_cycles
from router.api.app import serve
from router.api.config import Renewed, RouterConfig
from router.scheduler.scoring.policies import POLICIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton router`."""
    parser.add_argument(
        "urls", nargs="*", metavar="[NAME=]URL", help="an engine that runs both legs (repeatable): as --both-url"
    )
    for role in Role:
        parser.add_argument(
            f"--{role.value}-url",
            action="append",
            default=[],
            metavar="[NAME=]URL",
            help=f"an engine that runs {_LEGS[role]} (repeatable)",
        )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a cluster file: its classes and tenants, what it says of the router, and its hardware; flags win",
    )
    add_settings(parser, RouterSettings, ("port", "admin_port", "processes", *_FILES))
    add_settings(parser, RouterSettings, (*_HOSTS, "admin_key_file"), action="append")
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="another name that clients may use for a model (repeatable)",
    )
    add_settings(parser, RouterSettings, ("policy",), choices=sorted(POLICIES))
    add_settings(parser, Limits, settings_of(Limits))
    add_settings(parser, RouterSettings, ("explain_last",))
    _add_engine_arguments(parser)
    parser.add_argument(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="what each choice depended on, and the choice, one JSON object a line (large: for finding out why)",
    )
    add_ticket_keys_argument(parser, "the fleet's")
    parser.add_argument(
        "--accept-unproven",
        action="store_true",
        help="with ticket keys: accept heartbeats without proofs, too, while a fleet is upgraded",
    )
    add_registry_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    parser.add_argument("--lifeline", action="store_true", help="stop when stdin ends: for a parent that may be killed")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags about the engines."""
    parser.add_argument(
        "--no-seeding",
        dest="seeding",
        action="store_false",
        help="do not give clients the first token before the handoff",
    )
    parser.add_argument(
        "--no-prove-pairs",
        dest="proves",
        action="store_false",
        help="hand over between pairs without proving them first; wrong answers go unnoticed",
    )
    parser.add_argument(
        "--pins",
        action="store_true",
        help="engines given by URL were started with --logits-processors engine.vllm.pin:PinFirstToken, "
        "and without --enable-force-include-usage",
    )


_LEGS = {Role.PREFILL: "prefill legs", Role.DECODE: "decode legs", Role.BOTH: "both legs"}

_HOSTS = ("host", "admin_host")
"""These flags may be given several times: the router listens on each address, and announces the last one."""
_FILES = ("tls_cert_file", "tls_key_file")
_SETTINGS = ("host", "port", "admin_host", "admin_port", "policy", "explain_last", *settings_of(Limits))
"""Settings that a flag or the file may give; `RouterConfig` has the defaults."""


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    if args.vllm_args:
        raise UsageError(
            f"`-- {' '.join(args.vllm_args)}`: the router starts no engine; give vLLM flags to `baton engine`"
        )
    ticket_keys = open_fleet_keys(named_file(args, os.environ))
    changing = None if args.config is None else Changing(args.config)
    spec = None if changing is None else changing.read()
    named = tuple(instances(args))
    if spec is not None and named:
        named = reserved(named, spec)
    if spec is not None and not named:
        fill_from_file(args, spec, args.config)
    config = RouterConfig(
        instances=named,
        has_registry=args.registry is not None,
        seeding=args.seeding,
        proves=args.proves,
        ticket_keys=None if ticket_keys is None else ticket_keys.get,
        engine_key=os.environ.get("VLLM_API_KEY") or None,
        aliases=_aliases(args, spec),
        **_files(args, spec),
        **({} if spec is None else _promises(spec, args.config)),
        renewed=None if changing is None else _renewed(changing, args.config),
        **_settings(args, spec),
    )
    processes = _processes(args, spec, config)
    proofs = fleet_proofs(ticket_keys, accepts_unproven=args.accept_unproven)
    opened_registry = partial(open_registry, args, proofs)
    configure_logging(args.log_level)
    compiled.log_it()
    raise_descriptor_limit()
    with ExitStack() as closing:
        if args.decision_log is not None:
            log = opened_log(args.decision_log, "--decision-log", closing, buffered=False)
            config = replace(config, decision_log=log)
        map_large_blocks()
        reference_cycles.begin()
        announce = partial(_announce, config, as_json=args.json)
        if processes > 1:
            return _run_processes(processes, config, args, opened_registry, announce)
        uvloop.run(_serve(config, opened_registry(), announce, lifeline=args.lifeline))
    return 0


def _processes(args: argparse.Namespace, spec: Spec | None, config: RouterConfig) -> int:
    """How many processes share the port.

    Raises:
        UsageError: more than one, for a setting that only one process can have.
    """
    count: int = (1 if spec is None else spec.router.processes) if args.processes is None else args.processes
    if count < 1:
        raise UsageError(f"--processes {count}: give 1 or more")
    if count > 1 and args.registry is None:
        raise UsageError(f"--processes {count} without --registry: the processes would not know of one another")
    if count > 1 and config.admin_port + count - 1 > PORT_MAX:
        raise UsageError(
            f"--processes {count} with --admin-port {config.admin_port}: there are not so many ports after it"
        )
    if count > 1 and config.hosts_beside:
        raise UsageError(f"--host {config.hosts_beside[0]}: with --processes {count} give --host once")
    if count > 1 and args.decision_log is not None:
        raise UsageError(f"--decision-log with --processes {count}: a log is one process's")
    return count


def _run_processes(
    count: int,
    config: RouterConfig,
    args: argparse.Namespace,
    registry: Callable[[], Registry | None],
    announce: Callable[[str, str], None],
) -> int:
    """Run `count` processes on one port. Each is a whole router: it finds its peers in the registry, and shares credits
    with them.
    """

    def serve_one(number: int, port: int, tell: Callable[[str, str], None]) -> None:
        uvloop.run(_serve(_one_of(config, number, port), registry(), tell, lifeline=True))

    processes = ServerProcesses(count, serve_one, announce, config.drain_s)
    return processes.run(config.host, config.port, lifeline=args.lifeline)


def _settings(args: argparse.Namespace, spec: Spec | None) -> dict[str, Any]:
    """Values of `_SETTINGS`, where a flag or the file gives one; the flag wins."""
    said = {} if spec is None else {**asdict(spec.limits), **asdict(spec.router)}
    hosts: dict[str, list[str]] = {name: getattr(args, name) or [] for name in _HOSTS}
    flags = {name: getattr(args, name) for name in _SETTINGS}
    flags |= {name: given[-1] if given else None for name, given in hosts.items()}
    found = {
        name: said[name] if flag is None else flag for name, flag in flags.items() if flag is not None or name in said
    }
    return found | {f"{name}s_beside": tuple(given[:-1]) for name, given in hosts.items() if len(given) > 1}


def _aliases(args: argparse.Namespace, spec: Spec | None) -> dict[str, str]:
    """Models' names in the API by their other names, from the file and from --alias, which wins."""
    said = {} if spec is None else {alias: model.api_name for model in spec.models for alias in model.aliases}
    for given in args.alias:
        alias, separator, model = given.partition("=")
        if not separator or not alias or not model:
            raise UsageError(f"--alias {given}: write NAME=MODEL")
        said[alias] = model
    return said


def _files(args: argparse.Namespace, spec: Spec | None) -> dict[str, Any]:
    """Certificate and operators' keys: by flags, else the cluster file's paths, relative to it."""
    found: dict[str, str | None] = {name: getattr(args, name) for name in _FILES}
    operators = [Path(each) for each in args.admin_key_file or ()]
    if spec is not None:
        for name in _FILES:
            said = getattr(spec.router, name)
            if found[name] is None and said is not None:
                found[name] = str(beside(args.config, said))
        if not operators and spec.router.admin_key_file is not None:
            operators = [beside(args.config, spec.router.admin_key_file)]
    return {**found, "admin_keys": open_all_keys("--admin-key-file", operators) if operators else None}


def _promises(spec: Spec, file: str) -> dict[str, Any]:
    """What the file promises: classes with latency targets, tenants with their keys; and its instances' costs."""
    return {
        "classes": spec.slo,
        "tenants": spec.tenants,
        "tenant_keys": open_tenant_keys(spec, file),
        "makes": makes_of(spec),
    }


def _renewed(changing: Changing, file: str) -> Callable[[], Renewed | str | None] | None:
    """A function that reads the cluster file again if it was edited; None for standard input, which is read once."""
    if file == "-":
        return None
    refused: Spec | None = None  # the file is good, but its key files cannot be read yet

    def look() -> Renewed | str | None:
        nonlocal refused
        found = changing.look()
        if isinstance(found, str):
            refused = None
            return found
        wanted = refused if found is None else found
        if wanted is None:
            return None
        try:
            keys = open_tenant_keys(wanted, file)
        except UsageError as error:
            told, refused = refused is wanted, wanted
            return None if told else f"{file} has changed and is not used: {error}; it is tried again"
        refused = None
        return Renewed(classes=wanted.slo, tenants=wanted.tenants, tenant_keys=keys)

    return look


def instances(args: argparse.Namespace) -> list[Instance]:
    """The instances of ``--prefill-url``, ``--decode-url`` and ``--both-url``; without NAME= numbered within a role.

    Raises:
        UsageError: a text that is no URL, a port that cannot be one, or a URL that is given twice.
    """
    found: list[Instance] = []
    given_as = {role: getattr(args, f"{role.value}_url") for role in Role}
    given_as[Role.BOTH] = [*given_as[Role.BOTH], *args.urls]
    for role, all_given in given_as.items():
        for number, given in enumerate(all_given):
            name, url = _named(given, f"{role.value}-{number}")
            flag = given if given in args.urls else f"--{role.value}-url {given}"
            _check_url(flag, url)
            if any(name == other.id or (url == other.url and not _beside(name, other)) for other in found):
                raise UsageError(f"{flag}: given twice")
            found.append(Instance(id=InstanceId(name), role=role, url=url, pins=args.pins))
    return found


def reserved(named: tuple[Instance, ...], spec: Spec) -> tuple[Instance, ...]:
    """The instances by URL, reserved for the tenants of the file's models. They do not say so themselves, and which one
    serves which model is not known before they answer.

    Raises:
        UsageError: the file's models are reserved for different tenants.
    """
    wanted = {frozenset(model.tenants) for model in spec.models}
    if len(wanted) > 1:
        at = next(number for number, model in enumerate(spec.models) if model.tenants)
        raise UsageError(
            f"models[{at}].tenants: engines given by URL do not announce for which tenants they are, and the file has "
            "models for others, too; start them with `baton engine --tenant NAME --registry URL`, or run two routers"
        )
    tenants = next(iter(wanted), frozenset())
    return tuple(replace(each, tenants=tenants) for each in named) if tenants else named


def _check_url(flag: str, url: str) -> None:
    """Raises UsageError if no engine can be at this URL. `flag`: names the flag with its value."""
    try:
        parts = urlsplit(url)
    except ValueError:  # half a bracket
        parts = urlsplit("")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{flag}: not a URL; write http://HOST:PORT")
    try:
        port = parts.port
    except ValueError:  # out of range, or no number
        port = 0
    if port == 0:
        raise UsageError(f"{flag}: the port is not a number from 1 to 65535; write http://HOST:PORT")
    if parts.path.endswith("/v1") or parts.query or parts.fragment:
        raise UsageError(
            f"{flag}: the router adds the APIs' paths itself; write http://HOST:PORT, without `/v1` or `?`"
        )


def _beside(name: str, other: Instance) -> bool:
    """Whether both are data parallel ranks of one engine, behind one URL."""
    mine = InstanceId(name)
    return None not in {rank_of(mine), other.rank} and engine_of(mine) == engine_of(other.id)


def _named(given: str, default: str) -> tuple[str, str]:
    name, separator, url = given.partition("=")
    if separator and "/" not in name:
        return name, url.rstrip("/")
    return default, given.rstrip("/")


def _one_of(config: RouterConfig, number: int, port: int) -> RouterConfig:
    """The configuration of process `number`: the shared `port`, and an admin port of its own."""
    admin_port = config.admin_port + number if config.admin_port else 0
    return replace(config, port=port, admin_port=admin_port, shares_port=True)


def _announce(config: RouterConfig, endpoint: str, admin: str, *, as_json: bool) -> None:
    listed = [{"id": each.id, "role": each.role.value, "url": each.url} for each in config.instances]
    if not as_json:
        say(f"admin side {admin} (/ui, /metrics, /explain)")
    announce_ready("router", endpoint, as_json=as_json, admin=admin, instances=listed)


async def _serve(
    config: RouterConfig, registry: Registry | None, announce: Callable[[str, str], None], *, lifeline: bool
) -> None:
    stop = asyncio.Event()
    with stopping_signals(stop.set):
        if lifeline:
            watch_lifeline(stop.set)
        await serve(config, announce, stop, registry)
