"""Logs of a cluster's programs: engines, agents, the router. Without a name, lists the logs that there are.

examples:
  baton logs
  baton logs prefill-0 -n 200
  baton logs router -f
  baton logs --cluster other router
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
import time
from pathlib import Path

from baton.cluster_flag import cluster_name
from baton.output import emit, say
from baton.state import log_folder, logged_clusters
from baton.unused_flags import refuse_given
from cluster.errors import UsageError
from cluster.registry.registry import DEFAULT_CLUSTER
from engine.vllm.logfile import CUT

CHUNK_BYTES = 1 << 16
FOLLOW_EVERY_S = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton logs`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="an instance, or `router`")
    parser.add_argument(
        "-n", "--lines", type=int, default=50, metavar="N", help="how many of the last lines (default 50)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on as it grows, until Ctrl-C")
    parser.add_argument(
        "--cluster",
        type=cluster_name,
        default=DEFAULT_CLUSTER,
        metavar="NAME",
        help="name of the cluster (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="list as JSON")


def run(args: argparse.Namespace) -> int:
    """Print a log, or the list."""
    folder = log_folder(args.cluster)
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    others = ", ".join(f"--cluster {name}" for name in logged_clusters() if name != args.cluster)
    elsewhere = f"; other clusters' logs: {others}" if others else ""
    if args.name is None:
        if not found and not args.json:
            say(f"no logs yet in {folder}{elsewhere}")
        return _list(found, as_json=args.json)
    refuse_given(args, ["json"], f"lists the logs there are, and {args.name} prints one: leave one out")
    if args.name not in found:
        near = difflib.get_close_matches(args.name, found, n=1)
        hint = f"; do you mean `{near[0]}`?" if near else f"; there are: {', '.join(found) or 'none'}{elsewhere}"
        raise UsageError(f"no log of `{args.name}` in {folder}{hint}")
    if args.lines < 0:
        raise UsageError(f"-n {args.lines}: must be 0 or more")
    path = found[args.name]
    at = _print_tail(path, args.lines)
    if args.follow:
        _follow(path, at)
    return 0


def _list(found: dict[str, Path], *, as_json: bool) -> int:
    if as_json:
        emit({"logs": {name: str(path) for name, path in found.items()}})
        return 0
    for name, path in found.items():
        print(f"{name:<24} {path.stat().st_size / 1024:8.0f} KiB  {path}")
    return 0


def _print_tail(path: Path, lines: int) -> int:
    """Print the last lines; return the size of the file in bytes, where `_follow` goes on."""
    with path.open("rb") as file:
        end = at = file.seek(0, os.SEEK_END)
        tail = b""
        while at > 0 and tail.count(b"\n") <= lines:
            step = min(CHUNK_BYTES, at)
            at = file.seek(at - step)
            tail = file.read(step) + tail
    for line in tail.splitlines()[-lines:] if lines else []:
        print(line.decode(errors="replace"))
    sys.stdout.flush()
    return end


def _follow(path: Path, at: int) -> None:
    which = path.stat().st_ino
    while True:
        with contextlib.suppress(FileNotFoundError):  # the file is being rotated at this moment
            at, which = _print_new(path, at, which)
        time.sleep(FOLLOW_EVERY_S)


def _print_new(path: Path, at: int, which: int) -> tuple[int, int]:
    """Print what is new since byte `at` of the file with inode `which`; return both as they are now."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_ino != which:
            at = 0  # a new start, or a new file of a long run
        elif status.st_size < at:
            at = max(0, file.read().rfind(CUT))  # the file was cut while its engine ran
        file.seek(at)
        fresh = file.read()
    sys.stdout.write(fresh.decode(errors="replace"))
    sys.stdout.flush()
    return at + len(fresh), status.st_ino
