"""Stop the cluster that `baton up` runs on this machine: what is running is finished first.

example:
  baton down
  baton down --now
"""

from __future__ import annotations

import argparse
import os
import signal
import time

from baton.cluster_flag import cluster_name
from baton.output import emit, say
from baton.state import must_load
from cluster.registry.registry import DEFAULT_CLUSTER

WAIT_S = 120.0
"""Least time to wait for the end of `baton up`. If its drain may take longer (`limits.drain_s`), its record says so."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton down`."""
    parser.add_argument(
        "--cluster", type=cluster_name, default=DEFAULT_CLUSTER, metavar="NAME", help="which one (default %(default)s)"
    )
    parser.add_argument("--now", action="store_true", help="do not wait for what is running")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Ask the cluster to stop and wait for its end; 1 if it does not end."""
    running = must_load(args.cluster)
    wait_s = max(WAIT_S, running.stop_s)
    os.kill(running.pid, signal.SIGTERM)
    say(f"stopping cluster {args.cluster} (pid {running.pid})")
    started = time.monotonic()
    hurried = False
    while running.alive:
        took = time.monotonic() - started
        if args.now and not hurried and took > 0.2:  # two signals at once could be delivered as one
            os.kill(running.pid, signal.SIGTERM)
            hurried = True
        if took > wait_s:
            say(f"baton: it still runs after {wait_s:.0f} s; try `baton down --now`")
            return 1
        time.sleep(0.1)
    took = time.monotonic() - started
    if args.json:
        emit({"event": "stopped", "cluster": args.cluster, "seconds": round(took, 1)})
    else:
        say(f"stopped after {took:.1f} s")
    return 0
