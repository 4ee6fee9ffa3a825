"""A whole cluster on this machine: a registry, a router, prefill and decode engines, each engine a stock vLLM server.

Without a model it serves the tiny one that ships with Baton (`baton-tiny`): no GPU and no download needed. A cluster
file (docs/cluster-file.md) says the same and more. Everything after `--` goes to every vLLM verbatim. A killed engine
or agent is brought back. Pools of a file whose `min` is less than their `max` are resized to keep the file's promises
(docs/scaling.md; `--no-scale` leaves them). Ctrl-C finishes what is running and stops all of it; a second Ctrl-C stops
it at once.

examples:
  baton up
  baton up baton.yaml
  baton up Qwen/Qwen3-0.6B --prefill 1 --decode 1 -- --max-model-len 8192
  baton up --engine mock --prefill 2 --decode 2 -- --speed 10
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from baton.changing import Changing
from baton.cluster_flag import cluster_name
from baton.clusterfile import beside
from baton.descriptors import raise_descriptor_limit
from baton.file_kinds import is_file
from baton.fleet import Elsewhere, LocalFleet
from baton.members import remove_earlier_logs
from baton.mock_command import MOCK_MODEL
from baton.model_sizes import check_sizes
from baton.number_flags import port
from baton.output import say
from baton.plan import TINY_NAME, PlacedEngine, WantedEngine, from_counts, from_file, place, templates
from baton.ports import HeldPorts
from baton.registry import fleet_proofs
from baton.registry_child import RegistryChild, RegistryElsewhere
from baton.router_child import LocalRouter
from baton.signals import end_in_order
from baton.state import Running, born, log_folder, recorded
from baton.ticket_keys import add_ticket_keys_argument, files_for, later_files, named_file, open_fleet_keys
from baton.up_checks import check_model_folders, check_router
from cluster.callers import is_loopback
from cluster.errors import UsageError
from cluster.instance import Role
from cluster.registry.redis import RedisRegistry
from cluster.registry.registry import DEFAULT_CLUSTER
from cluster.spec import POLICY, Spec
from cluster.spec.plan import stems
from engine.vllm.hardware import EngineHardware, find_hardware, memory_used_mib
from engine.vllm.transfer import ASKED, connector_for
from router.scheduler.scoring.policies import POLICIES

if TYPE_CHECKING:
    from baton.local_fleet import LocalScaling
    from baton.scaling import ScalingPlan

FILE_ENDINGS = (".yaml", ".yml")

FLAGS_OF_ROLES = ("prefill", "decode", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton up`."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL|FILE",
        help="Hugging Face name, folder, or cluster file ending in .yaml (default: the bundled tiny model)",
    )
    add("--prefill", type=int, metavar="N", help="prefill instances (default 1)")
    add("--decode", type=int, metavar="N", help="decode instances (default 1)")
    add("--both", type=int, metavar="N", help="instances of role `both` (default 0)")
    add("--host", help="address of the router (default 127.0.0.1)")
    add("--port", type=port, help="port of the router, 0 = a free one (default 8000)")
    add("--admin-port", type=port, help="metrics and readiness, 0 = a free one (default 8001)")
    add("--policy", choices=sorted(POLICIES), help=f"how the router chooses (default {POLICY}; docs/policy.md)")
    add("--served-model-name", metavar="NAME", help="name in the API (default: MODEL)")
    add("--engine", choices=["vllm", "mock"], default="vllm", help="mock: no model at all (default %(default)s)")
    add(
        "--transfer",
        choices=ASKED,
        help="what moves KV cache: vLLM's connector or Baton's (default auto; `baton engine --help` says what it "
        "chooses)",
    )
    add(
        "--cluster",
        type=cluster_name,
        metavar="NAME",
        help=f"for `baton status` and `down` (default {DEFAULT_CLUSTER})",
    )
    add(
        "--demo",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask one question once it serves (default: with the bundled model)",
    )
    add("--on", metavar="ray|ray://HOST:PORT", help="start engines on a Ray cluster (docs/scaling-run.md)")
    add("--no-scale", action="store_true", help="keep every pool at its size, whatever the file's `min` and `max` say")
    add("--scale-dry-run", action="store_true", help="say what scaling would do, and do nothing")
    add_ticket_keys_argument(parser, "the fleet's", "new ones, where the registry is this command's own")
    add("--json", action="store_true", help="one JSON object a line on stdout")


def run(args: argparse.Namespace) -> int:
    """Start everything, serve until Ctrl-C or SIGTERM; 0 if it ended as asked, 1 if a part failed for good."""
    raise_descriptor_limit()
    end_in_order()
    changing = _cluster_file(args)
    spec = None if changing is None else changing.read()
    wanted = _from_flags(args) if spec is None else from_file(spec, args.vllm_args, args.engine)
    if args.engine == "vllm" and args.on is None:
        check_model_folders(each.model for each in wanted)
    if args.engine == "mock":
        check_sizes([each.model for each in wanted if each.model is not None], args.vllm_args)
    front = _front(args, spec)
    check_router(front)
    cluster = args.cluster or (spec.registry.cluster if spec is not None else DEFAULT_CLUSTER)
    with ExitStack() as closing:
        ports = closing.enter_context(HeldPorts())
        registry = closing.enter_context(_registry(args, spec, cluster, ports))
        hardware = find_hardware()
        plan = _scaling_plan(args, spec, hardware)
        pools = {} if spec is None or plan is None else templates(spec, args.vllm_args, args.engine)
        if args.on is not None:
            wanted = []  # a controller starts them there
        every = [replace(each, engine=args.engine, drain_s=_drain_s(plan)) for each in [*wanted, *pools.values()]]
        every = _with_ticket_keys(args, every, front, registry, closing)
        every, door = _with_doors(_with_connectors(every, hardware), closing)
        wanted, later = every[: len(wanted)], every[len(wanted) :]
        planned = _placed(wanted, hardware, ports, 0 if plan is None else _most(plan)) if wanted else []
        running = Running(
            cluster=cluster,
            pid=os.getpid(),
            born=born(os.getpid()),
            registry=registry.url,
            registry_password_file=str(registry.password_file or ""),
            registry_ca_file=str(registry.ca_file or ""),
            ticket_keys_file=front.ticket_keys_file or "",
        )
        fleet = LocalFleet(front, planned, running, registry, ports, _elsewhere(args, spec, front))
        if plan is not None and args.on is None:
            settings = dict(zip(pools, later, strict=True))
            fleet.scaling = _scaling(cluster, plan, settings, hardware, registry, front, door, closing, changing)
        with recorded(running):
            remove_earlier_logs(log_folder(cluster))
            return asyncio.run(fleet.run())


def _placed(wanted: list[WantedEngine], hardware: EngineHardware, ports: HeldPorts, most: int) -> list[PlacedEngine]:
    """The engines with their parts of the machine. Other programs' GPUs come last, if there is a choice."""
    takes = any(each.engine != "mock" for each in wanted)
    used_mib = memory_used_mib() if takes and len(hardware.gpus) > 1 else {}
    return place(wanted, hardware, ports, most, used_mib)


def _scaling_plan(args: argparse.Namespace, spec: Spec | None, hardware: EngineHardware) -> ScalingPlan | None:
    """How to resize the fleet; None: it keeps its size. Models that cannot be resized are named on stderr."""
    from baton.scaling import plan_of, wants_scaling

    if spec is None or args.no_scale or not wants_scaling(spec):
        if args.scale_dry_run:
            say(f"baton: --scale-dry-run: there is nothing to say, {_unsized_because(args, spec)}")
        return None
    found = (hardware.gpus[0].name or None) if hardware.gpus else None
    plan = plan_of(spec, args.engine, found, args.vllm_args, dry=args.scale_dry_run)
    for model, because in plan.off.items():
        say(f"baton: {model} keeps its size: {because}")
    return plan if plan.pools else None


def _unsized_because(args: argparse.Namespace, spec: Spec | None) -> str:
    """Why nothing is resized, for --scale-dry-run: the end of a sentence."""
    if spec is None:
        return "as pools keep their size without a cluster file"
    return (
        "beside --no-scale" if args.no_scale else f"as no pool of {args.model} may change (`min` below `max`, `flips`)"
    )


def _elsewhere(args: argparse.Namespace, spec: Spec | None, front: LocalRouter) -> Elsewhere | None:
    """The controller that starts the engines on Ray; None: this command starts them itself."""
    if args.on is None:
        return None
    if spec is None:
        raise UsageError(f"--on {args.on}: name a cluster file (docs/cluster-file.md), which says what to start there")
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--on ray: Ray is not installed in this Python: pip install 'baton-serve[ray]'")
    words = ["controller", args.model, "--on", args.on, "--engine", args.engine, "--owns"]
    words += ["--dry-run"] if args.scale_dry_run else []
    words += ["--no-scale"] if args.no_scale else []
    if front.ticket_keys_file is not None:
        words += ["--ticket-keys-file", front.ticket_keys_file]
    pools = [(role, pool) for _, role, pool in stems(spec).values()]
    least = sum(min(pool.min, pool.at_start) for _, pool in pools)
    return Elsewhere(
        words=tuple(words),
        vllm_args=tuple(args.vllm_args),
        count=max(least, min(1, sum(pool.at_start for _, pool in pools))),
        model=spec.models[0].api_name,
        roles=frozenset(role for role, pool in pools if min(pool.min, pool.at_start)),
    )


def _drain_s(plan: ScalingPlan | None) -> float | None:
    return None if plan is None else plan.rules.drain_s


def _most(plan: ScalingPlan) -> int:
    return sum(pool.max for pools in plan.pools.values() for pool in pools)


def _scaling(
    cluster: str,
    plan: ScalingPlan,
    settings: dict[str, WantedEngine],
    hardware: EngineHardware,
    registry: RegistryChild | RegistryElsewhere,
    front: LocalRouter,
    door: Callable[[str], str],
    closing: ExitStack,
    changing: Changing | None,
) -> LocalScaling:
    """The controller that resizes the fleet while it serves.

    `settings`: by pool, the settings of one more instance; `door`: makes the socket path of an instance; `changing`:
    the cluster file.
    """
    from baton.local_fleet import LocalScaling

    keys = None if front.ticket_keys_file is None else open_fleet_keys(Path(front.ticket_keys_file))
    folder = Path(closing.enter_context(TemporaryDirectory(prefix="baton-tickets-", ignore_cleanup_errors=True)))
    make = None if front.ticket_keys_file is None else later_files(Path(front.ticket_keys_file), folder)

    def open_registry() -> RedisRegistry:
        return RedisRegistry.open(
            registry.url,
            cluster=cluster,
            password_file=registry.password_file,
            ca_file=registry.ca_file,
            proofs=fleet_proofs(keys),
        )

    return LocalScaling(
        cluster,
        plan,
        settings,
        hardware,
        open_registry,
        None if keys is None else keys.get,
        lambda name: None if make is None else make(name),
        door,
        changing,
    )


def _names_file(model: str) -> bool:
    """Whether the argument names a cluster file: by its ending, or as a file that no engine takes as a model's."""
    return model.endswith(FILE_ENDINGS) or (is_file(Path(model)) and not model.endswith(".gguf"))


def _cluster_file(args: argparse.Namespace) -> Changing | None:
    """The cluster file, if one was named.

    Raises:
        UsageError: flags repeat what the file says.
    """
    if args.model is None or not _names_file(args.model):
        return None
    for name in (*FLAGS_OF_ROLES, "served_model_name", "transfer"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} beside a cluster file: say it in {args.model}")
    return Changing(args.model)


def _from_flags(args: argparse.Namespace) -> list[WantedEngine]:
    given = {role: getattr(args, role.value) for role in Role}
    defaults = {Role.PREFILL: 1, Role.DECODE: 1, Role.BOTH: 0}
    counts = {role: defaults[role] if count is None else count for role, count in given.items()}
    wanted = from_counts(counts, args.model, args.served_model_name, args.vllm_args)
    return [replace(each, connector=args.transfer or "auto") for each in wanted]


def _front(args: argparse.Namespace, spec: Spec | None) -> LocalRouter:
    """The router's settings: flags first, then the file, then the defaults."""
    router = {} if spec is None else asdict(spec.router)
    limits = {} if spec is None else asdict(spec.limits)
    return LocalRouter(
        title=f"baton up {args.model or (MOCK_MODEL if args.engine == 'mock' else TINY_NAME)}",
        host=args.host or router.get("host", "127.0.0.1"),
        port=router.get("port", 8000) if args.port is None else args.port,
        admin_host=router.get("admin_host", "127.0.0.1"),
        admin_port=router.get("admin_port", 8001) if args.admin_port is None else args.admin_port,
        policy=args.policy or router.get("policy"),
        config=None if spec is None else str(Path(args.model).absolute()),
        limits=limits,
        demo=args.model is None and args.engine == "vllm" if args.demo is None else args.demo,
        as_json=args.json,
    )


def _with_ticket_keys(
    args: argparse.Namespace,
    wanted: list[WantedEngine],
    front: LocalRouter,
    registry: RegistryChild | RegistryElsewhere,
    closing: ExitStack,
) -> list[WantedEngine]:
    """Turn tickets on if this command makes the whole fleet, or was given the fleet's keys. A registry that runs
    already may have routers without these keys: then tickets stay off until the user names a file for all.
    """
    fleet = named_file(args, os.environ)
    if fleet is None and not isinstance(registry, RegistryChild):
        return wanted
    router, engines = closing.enter_context(files_for([each.name for each in wanted], fleet))
    front.ticket_keys_file = str(router)
    return [replace(each, ticket_keys_file=str(engines[each.name])) for each in wanted]


def _with_connectors(wanted: list[WantedEngine], hardware: EngineHardware) -> list[WantedEngine]:
    """Choose the connector of each instance for which the user names none. All instances of a model get the same one,
    since instances with different connectors hand nothing over to each other.
    """
    chosen = [
        connector_for(
            each.connector,
            vllm=hardware.vllm,
            meets=each.ticket_keys_file is not None,
            vllm_args=each.vllm_args,
        )
        for each in wanted
    ]
    left = {
        each.model
        for each, connector in zip(wanted, chosen, strict=True)
        if each.connector == "auto" and connector == "nixl"
    }
    return [
        replace(each, connector="nixl" if each.connector == "auto" and each.model in left else connector)
        for each, connector in zip(wanted, chosen, strict=True)
    ]


def _with_doors(wanted: list[WantedEngine], closing: ExitStack) -> tuple[list[WantedEngine], Callable[[str], str]]:
    """Make a private folder for the sockets of engines with Baton's connector; its path is short, because a socket's
    path must be. Also gives the socket path of an engine that comes later.
    """
    if all(each.connector != "baton" or each.engine == "mock" for each in wanted):
        return wanted, lambda _: ""
    folder = closing.enter_context(TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True))

    def door(name: str) -> str:
        return f"{folder}/{name}/door"

    return [replace(each, door=door(each.name)) for each in wanted], door


def _registry(
    args: argparse.Namespace, spec: Spec | None, cluster: str, ports: HeldPorts
) -> RegistryChild | RegistryElsewhere:
    """The registry that the file names, else a new one that this command starts."""
    if spec is None or spec.registry.url is None:
        host = urlsplit(args.on or "").hostname
        if host is not None and not is_loopback(host):
            raise UsageError(
                f"--on {args.on}: engines on other machines cannot reach a registry of this command's own, which is on "
                "127.0.0.1; name one in the file: registry: {url: redis://HOST:6379} (docs/operations.md)"
            )
        return RegistryChild(cluster, ports)

    def path(name: str | None) -> Path | None:
        return None if name is None else beside(args.model, name)

    return RegistryElsewhere(cluster, spec.registry.url, path(spec.registry.password_file), path(spec.registry.ca_file))
