"""What a cluster file promises, in words: its pools, its classes, its tenants, and what was left at defaults and why.

With `--scaling`: why a fleet was resized, decision by decision, from its controller's kept log (docs/scaling-run.md).

Warnings go to stderr; a file with errors is not explained (exit code 1).

examples:
  baton explain baton.yaml
  baton explain --scaling
  baton explain --scaling other-cluster --last 50
"""

from __future__ import annotations

import argparse
from collections import deque

from baton.clusterfile import DEFAULT, read
from baton.output import emit, say
from baton.unused_flags import refuse_given
from cluster.errors import UsageError
from cluster.registry.registry import DEFAULT_CLUSTER
from cluster.spec import as_json, as_text, explain

LAST = 20
"""Decisions that --scaling shows by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton explain`."""
    parser.add_argument("file", nargs="?", metavar="FILE", help=f"default {DEFAULT}; - = stdin")
    parser.add_argument(
        "--scaling",
        nargs="?",
        const=DEFAULT_CLUSTER,
        metavar="CLUSTER|LOG",
        help=f"instead: the decisions of a controller's log (default: of the cluster `{DEFAULT_CLUSTER}`)",
    )
    parser.add_argument("--last", type=int, metavar="N", help=f"with --scaling: the last N decisions (default {LAST})")
    parser.add_argument("--held", action="store_true", help="with --scaling: also decisions that changed nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; with --scaling one a line")


def run(args: argparse.Namespace) -> int:
    """Print the explanation; 1 if the file has errors, which are printed instead."""
    if args.vllm_args:
        raise UsageError("`baton explain` takes no vLLM flags")
    if args.scaling is not None:
        return _scaling(args)
    refuse_given(args, ["last", "held"], "selects a controller's decisions: give --scaling")
    parsed = read(args.file or DEFAULT)
    for problem in parsed.problems:
        say(str(problem))
    if parsed.spec is None:
        say(f"{parsed.file}: correct the errors above first")
        return 1
    parts = explain(parsed)
    if args.json:
        emit({"file": parsed.file, "parts": as_json(parts)})
    else:
        print(as_text(parts), end="")
    return 0


def _scaling(args: argparse.Namespace) -> int:
    from baton.scaling_log import decisions, log_of, words

    if args.file is not None:
        raise UsageError(f"{args.file} beside --scaling: a file is explained, or a controller's decisions: give one")
    last = LAST if args.last is None else args.last
    if last < 1:
        raise UsageError(f"--last {last}: give 1 or more")
    log = log_of(args.scaling)
    found = deque(decisions(log, held=args.held), maxlen=last)
    for each in found:
        if args.json:
            emit({"at": each.at, "model": each.model, **each.decision})
        else:
            print("\n".join(words(each)))
    if not found:
        say(f"{log}: no decision yet that changed anything; --held shows why")
    return 0
