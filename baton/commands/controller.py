"""Sizes a fleet: looks at what arrives and how it fares, and starts, flips and drains instances to keep the promises.

One controller at a time leads, by a lock in the registry; others stand by and take over. `--on ray` starts instances
on a Ray cluster and goes on with those that exist already; without it this controller only asks agents that run for
other roles, and ends nothing that it could not start again. `baton up` has a controller of its own. docs/scaling.md
says how it decides.

examples:
  baton controller baton.yaml --on ray --registry redis://10.0.0.9:6379 --registry-password-file keys/registry
  baton controller baton.yaml --dry-run
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from baton import compiled
from baton.changing import Changing
from baton.lifeline import watch_lifeline
from baton.number_flags import port
from baton.output import emit, say
from baton.plan import WantedEngine, templates
from baton.registry import add_registry_arguments, cluster_of, fill_from_file, fleet_proofs, open_registry
from baton.registry_child import RegistryElsewhere
from baton.scaling import ScalingPlan, ScalingShell, plan_of
from baton.signals import stopping_signals
from baton.ticket_keys import add_ticket_keys_argument, named_file, open_fleet_keys
from cluster.errors import UsageError
from cluster.registry.membership import Heartbeat
from cluster.registry.registry import Registry
from cluster.spec import Spec
from cluster.spec.plan import stems
from cluster.telemetry import configure_logging
from goodput.actuate.agents import Agents
from goodput.actuate.agents_only import AgentsOnly
from goodput.actuate.protocol import Actuator
from goodput.actuate.ray_cluster import RayActuator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton controller`."""
    add = parser.add_argument
    add("file", metavar="FILE", help="the cluster file")
    add(
        "--on",
        metavar="ray|ray://HOST:PORT",
        help="where instances are started and ended (default: nowhere, flips alone)",
    )
    add("--engine", choices=["vllm", "mock"], default="vllm", help="what instances run (default %(default)s)")
    add("--dry-run", action="store_true", help="say what would be done, and do nothing")
    add("--no-scale", action="store_true", help="keep every pool at its size, whatever the file's `min` and `max` say")
    add("--owns", action="store_true", help="end all instances when this controller ends (`baton up --on ray` does)")
    add("--host", default="127.0.0.1", help="address of its own HTTP (default %(default)s)")
    add("--port", type=port, default=0, help="port of its own HTTP, 0 = a free one (default 0)")
    add_ticket_keys_argument(parser, "the fleet's")
    add_registry_arguments(parser)
    add("--json", action="store_true", help="one JSON object a line on stdout")
    add("--lifeline", action="store_true", help="stop when stdin ends: for a parent that may be killed")
    add("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """The parts of one controller."""

    args: argparse.Namespace
    spec: Spec
    plan: ScalingPlan
    shell: ScalingShell
    agents: Agents
    keys: Any

    def beats(self) -> Mapping[str, Heartbeat]:
        scaler = self.shell.scaler
        return {} if scaler is None else scaler.beats


def run(args: argparse.Namespace) -> int:
    """Size the fleet until SIGTERM or Ctrl-C; 0. Instances go on, unless --owns.

    Raises:
        UsageError: a flag or the file cannot be used, or the port is taken.
    """
    if args.on is not None and args.on != "ray" and not args.on.startswith("ray://"):
        raise UsageError(f"--on {args.on}: give `ray` for this machine's Ray cluster, or ray://HOST:PORT")
    configure_logging(args.log_level)
    compiled.log_it()
    changing = Changing(args.file)
    spec = changing.read()
    fill_from_file(args, spec, args.file)
    if args.registry is None:
        raise UsageError(
            "--registry: neither this flag nor the file names one; give redis://HOST:PORT of the fleet's registry"
        )
    plan = plan_of(spec, args.engine, None, args.vllm_args, dry=args.dry_run, resizes=not args.no_scale)
    ca_file = args.registry_ca_file
    with RegistryElsewhere(cluster_of(args), args.registry, args.registry_password_file, ca_file) as registry:
        args.registry, args.registry_password_file = (
            registry.url,
            registry.password_file,
        )  # as `launches` passes them on
        return asyncio.run(_run(args, spec, plan, changing))


async def _run(args: argparse.Namespace, spec: Spec, plan: ScalingPlan, changing: Changing) -> int:
    keys = open_fleet_keys(named_file(args, os.environ))
    tell = (lambda line: emit({"event": "scaling", "said": line})) if args.json else say

    def opened() -> Registry:
        registry = open_registry(args, fleet_proofs(keys))
        assert registry is not None
        return registry

    if _only_says(args):
        plan = replace(plan, kept={})
    starts = args.on is not None and not _only_says(args)
    at_start = {stem: pool.at_start for stem, (_, _, pool) in stems(spec).items()} if starts else None
    shell = ScalingShell(
        cluster_of(args),
        plan,
        opened,
        say=tell,
        host=args.host,
        port=args.port,
        at_start=at_start,
        changing=changing,
    )
    made = _Made(
        args=args, spec=spec, plan=plan, shell=shell, agents=Agents(None if keys is None else keys.get), keys=keys
    )
    actuator = await _actuator(made)
    stop = asyncio.Event()
    with stopping_signals(stop.set):
        if args.lifeline:
            watch_lifeline(stop.set)
        try:
            await _until(stop, shell, actuator, args)
        finally:
            await made.agents.close()
            if isinstance(actuator, RayActuator):
                if args.owns and shell.ran:  # a second controller that ends at its start leaves the fleet alone
                    await actuator.stop_all()
                await asyncio.to_thread(actuator.connection.close)
    return 0


def _only_says(args: argparse.Namespace) -> bool:
    """Whether this controller starts and ends no instance: a dry run. With --owns, a dry run still starts the fleet as
    the file has it, since no other program would, and then only reports what it would change.
    """
    return bool(args.dry_run and not args.owns)


async def _until(stop: asyncio.Event, shell: ScalingShell, actuator: Actuator, args: argparse.Namespace) -> None:
    def announce(url: str) -> None:
        if args.json:
            emit({"event": "ready", "endpoint": url})
        else:
            print(f"ready controller {url}", flush=True)

    wrong: list[UsageError] = []

    async def sized() -> None:
        try:
            await shell.run(actuator, announce)
        except UsageError as error:
            wrong.append(error)
            stop.set()

    async with asyncio.TaskGroup() as group:
        running = group.create_task(sized(), name="scaling")
        await stop.wait()
        running.cancel()
    if wrong:
        raise wrong[0]


async def _actuator(made: _Made) -> Actuator:
    if made.args.on is None:
        return AgentsOnly(stems(made.spec), made.beats, made.agents)
    from baton.ray_fleet import launches, ray_actuator

    args = made.args
    registry = ["--registry", args.registry, "--cluster", cluster_of(args)]
    if args.registry_ca_file is not None:
        registry += ["--registry-ca-file", str(args.registry_ca_file)]
    keys = None if made.keys is None else made.keys.get
    pools = _templates(made)
    launch = launches(pools, registry, args.registry_password_file, keys)
    actuator = ray_actuator(args.on, cluster_of(args), made.spec, pools, launch, made.beats, made.agents)
    await actuator.connection.connect()
    return actuator


def _templates(made: _Made) -> dict[str, WantedEngine]:
    found = templates(made.spec, made.args.vllm_args, made.args.engine)
    drain_s = made.plan.rules.drain_s
    return {pool: replace(each, drain_s=drain_s) for pool, each in found.items()}
