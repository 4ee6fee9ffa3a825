"""What a cluster file promises, in words: its pools, its classes, its tenants, and what was left at defaults and why.

Warnings go to stderr; a file with errors is not explained (exit code 1).

example:
  baton explain baton.yaml
"""

from __future__ import annotations

import argparse

from baton.clusterfile import DEFAULT, read
from baton.output import emit, say
from cluster.errors import UsageError
from cluster.spec import as_json, as_text, explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton explain`."""
    parser.add_argument("file", nargs="?", default=DEFAULT, metavar="FILE", help="default %(default)s; - = stdin")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Print it; 1 when the file has errors, which are printed instead."""
    if args.vllm_args:
        raise UsageError("`baton explain` takes no vLLM flags")
    parsed = read(args.file)
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
