"""What is wrong in a cluster file: unknown keys, wrong units, contradictions, promises that cannot be kept.

Each problem has its line, field and value, and what to write instead. Ends with exit code 1 when there is an error;
warnings alone are 0. docs/cluster-file.md has every setting.

examples:
  baton lint                       # the file baton.yaml
  baton lint prod.yaml --json
"""

from __future__ import annotations

import argparse

from baton.clusterfile import DEFAULT, read
from baton.output import emit, say
from cluster.errors import UsageError
from cluster.spec import Parsed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton lint`."""
    parser.add_argument("files", nargs="*", default=[DEFAULT], metavar="FILE", help=f"default {DEFAULT}; - = stdin")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")


def run(args: argparse.Namespace) -> int:
    """Print every problem; 0 when there is no error.

    Raises:
        UsageError: a file cannot be read; all others were looked at.
    """
    if args.vllm_args:
        raise UsageError("`baton lint` takes no vLLM flags")
    unread: list[UsageError] = []
    errors = 0
    for name in args.files:
        try:
            parsed = read(name)
        except UsageError as error:  # the other files are looked at all the same
            unread.append(error)
            continue
        errors += len(parsed.errors)
        _show_json(parsed) if args.json else _show(parsed)
    for other in unread[:-1]:
        say(str(other))
    if unread:
        raise unread[-1]
    return 1 if errors else 0


def _show(parsed: Parsed) -> None:
    for problem in parsed.problems:
        print(problem)
    errors, warnings = len(parsed.errors), len(parsed.problems) - len(parsed.errors)
    if not parsed.problems:
        print(f"{parsed.file}: ok")
    else:
        print(f"{parsed.file}: {_count(errors, 'error')}, {_count(warnings, 'warning')}")


def _show_json(parsed: Parsed) -> None:
    for problem in parsed.problems:
        emit({"event": "problem", **problem.as_json()})
    errors, warnings = len(parsed.errors), len(parsed.problems) - len(parsed.errors)
    emit({"event": "linted", "file": parsed.file, "ok": not errors, "errors": errors, "warnings": warnings})


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
