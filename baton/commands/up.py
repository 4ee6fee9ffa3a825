"""A whole cluster on this machine: a registry, a router, prefill and decode engines, each engine a stock vLLM server.

Without a model it serves the tiny one that ships with Baton (`baton-tiny`): no GPU and no download needed. Everything
after `--` goes to every vLLM verbatim. A killed engine or agent is brought back. Ctrl-C finishes what is running and
stops all of it; a second Ctrl-C stops it at once.

examples:
  baton up
  baton up Qwen/Qwen3-0.6B --prefill 1 --decode 1 -- --max-model-len 8192
"""

from __future__ import annotations

import argparse
import asyncio
import os

from baton.fleet import Fleet
from baton.plan import from_counts, place
from baton.registry_child import RegistryChild
from baton.state import Running, born, recorded
from cluster.instance import Role
from cluster.registry.registry import DEFAULT_CLUSTER
from engine.vllm.hardware import find_hardware


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton up`."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="Hugging Face name or folder (default: the bundled tiny model)")
    add("--prefill", type=int, default=1, metavar="N", help="prefill instances (default %(default)s)")
    add("--decode", type=int, default=1, metavar="N", help="decode instances (default %(default)s)")
    add("--both", type=int, default=0, metavar="N", help="instances of both roles (default %(default)s)")
    add("--host", default="127.0.0.1", help="address of the router (default %(default)s)")
    add("--port", type=int, default=8000, help="port of the router, 0 = a free one (default %(default)s)")
    add("--admin-port", type=int, default=8001, help="metrics and readiness, 0 = free (default %(default)s)")
    add("--served-model-name", metavar="NAME", help="name in the API (default: MODEL)")
    add(
        "--cluster", default=DEFAULT_CLUSTER, metavar="NAME", help="for `baton status` and `down` (default %(default)s)"
    )
    add(
        "--demo",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask one question once it serves (default: with the bundled model)",
    )
    add("--json", action="store_true", help="one JSON object a line on stdout")


def run(args: argparse.Namespace) -> int:
    """Start everything, serve until Ctrl-C or SIGTERM; 0 when it ended as asked, 1 when a part failed for good."""
    counts = {Role.PREFILL: args.prefill, Role.DECODE: args.decode, Role.BOTH: args.both}
    planned = place(from_counts(counts, args.model, args.served_model_name, args.vllm_args), find_hardware())
    if args.demo is None:
        args.demo = args.model is None
    running = Running(cluster=args.cluster, pid=os.getpid(), born=born(os.getpid()))
    with RegistryChild(args.cluster) as registry:
        running = Running(
            cluster=args.cluster,
            pid=os.getpid(),
            born=born(os.getpid()),
            registry=registry.url,
            registry_password_file=str(registry.password_file),
        )
        with recorded(running):
            return asyncio.run(Fleet(args, planned, running, registry).run())
