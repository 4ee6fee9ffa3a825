"""Parses the command's name, imports that command alone, and turns usage errors into one line and exit code 2.

Kept free of heavy imports: `baton --help` answers in under 0.3 s.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from baton import __version__, compiled
from cluster.errors import UsageError

COMMANDS = {
    "up": "a whole cluster on this machine: router, prefill and decode engines",
    "controller": "sizes a fleet to keep its promises: starts, flips and drains instances",
    "scale": "pause or resume a controller, order sizes by hand, see what it decides",
    "router": "the router alone, in front of engines that already run",
    "engine": "one instance: a watched vLLM server",
    "mock": "engines without a model: vLLM's API, timing and KV hand-over, and faults on demand",
    "status": "list instances and routers, and whether each answers",
    "logs": "show the logs of a cluster's programs",
    "down": "stop what `baton up` started",
    "load": "open-loop load on any OpenAI endpoint, and a report",
    "simulate": "a trace through a simulated fleet, and the same report",
    "plan": "the cheapest fleet that keeps the promises of a cluster file",
    "profile": "fit what a step costs on a running engine",
    "validate": "measured runs of real engines beside what the twin predicts",
    "lint": "what is wrong in a cluster file, and what to write instead",
    "explain": "what a cluster file promises, in words",
    "key": "make keys of tenants, operators and tickets",
    "doctor": "what is found and what is missing on this machine",
    "operator": "the Kubernetes operator: clusters follow their resources",
    "k8s": "show what the operator would change, and check its prerequisites",
}
"""Command names and what `baton --help` says of them. Each lives in `baton/commands/NAME.py`."""

EPILOG = """\
examples:
  baton up                                   # serve the bundled tiny model, disaggregated, on this machine
  baton up Qwen/Qwen3-0.6B -- --max-model-len 8192
  baton router --prefill-url http://a:8100 --decode-url http://b:8100
  baton doctor

`baton COMMAND --help` tells more about one command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    words, engine_words = _split(words)
    try:
        _take_compiled()
        parser = _parser(words[0] if words else None)
        args, unknown = parser.parse_known_args(words)
        if unknown:
            _refuse(args.command, unknown, parser)
        if args.command is None:
            parser.print_help()
            return 2
        args.vllm_args = engine_words
        command = importlib.import_module(f"baton.commands.{args.command}")
        code = int(command.run(args))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout has ended: no error (`baton.output`)
        _write_nowhere()
        return 0
    except UsageError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _write_nowhere() -> None:
    """Lead stdout to nowhere: Python flushes it at the end, and would complain of the closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _take_compiled() -> None:
    """Use compiled modules where there are some. Call it before any command is imported.

    Raises:
        UsageError: ``BATON_COMPILED=1`` asks for compiled modules, and they cannot be used.
    """
    because = compiled.use()
    if because and os.environ.get(compiled.OFF) == "1":
        raise UsageError(f"{compiled.OFF} is 1, and nothing compiled is used: {because}; run make compile")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Baton's own words, and vLLM's: those after the first ``--``, verbatim."""
    if "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return words, []


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the whole usage of a command with many flags would hide it."""

    chosen: argparse.ArgumentParser | None = None
    """The command's own parser, if a command was named."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (flags: {self.prog} --help)\n")


def _refuse(command: str | None, unknown: list[str], parser: _Parser) -> NoReturn:
    """End with code 2 for unknown arguments. argparse itself would name `baton --help`, which lists no flag of the
    command.
    """
    flags = [] if parser.chosen is None else re.findall(r"--[a-z0-9-]+", parser.chosen.format_help())
    near = [(word, meant) for word in unknown if word.startswith("--") and (meant := _meant(word, flags))]
    hint = "".join(f"; did you mean {meant} for {word}?" for word, meant in near)
    told = f"unrecognized arguments: {' '.join(unknown)}{hint}"
    _Parser(prog=f"baton {command}" if command else "baton").error(told)


def _meant(word: str, flags: list[str]) -> str | None:
    """The flag that was probably meant."""
    found = difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.75)
    return found[0] if found else None


def _parser(chosen: str | None) -> _Parser:
    parser = _Parser(
        prog="baton",
        description="Serve large language models on separate prefill and decode pools.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}, {compiled.told()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )  # a flag with a missing letter would be another flag
        if name == chosen:
            module = importlib.import_module(f"baton.commands.{name}")
            sub.description = (module.__doc__ or summary).strip()
            module.add_arguments(sub)
            parser.chosen = sub
    return parser
