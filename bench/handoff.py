"""The cost of a hand-over: for a client, and for the two engines.

    make bench-handoff                                   the first two parts: about 100 minutes
    make bench-handoff ARGS="--part client"              one engine alone, plain, seeded (bench/handoff_client.py)
    make bench-handoff ARGS="--part connectors"          vLLM's connectors and ours (bench/connectors.py)
    make bench-handoff ARGS="--part router"              early legs or pulls, chosen (bench/connectors_router.py)
    make bench-handoff ARGS=--gpu                        the same connectors on GPUs, a model of 8B's layers

Each part ends with its line of JSON.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import connectors, connectors_router, handoff_client
from bench.connectors_models import MODELS

PARTS = ("client", "connectors", "router")
USUAL = PARTS[:2]
"""The parts that run, and are published, if none is named."""


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; `parts` are the parts to run.

    Raises:
        SystemExit: 2, for words that no part knows.
    """
    parser = argparse.ArgumentParser(prog="make bench-handoff", description=(__doc__ or "").splitlines()[0])
    told = "one of the three (default: the first two, or the one that flags belong to)"
    parser.add_argument("--part", choices=PARTS, help=told)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--publish", action="store_true", help="write docs/benchmarks.md and its JSON, from a whole run"
    )
    mine = parser.add_argument_group("connectors")
    mine.add_argument("--only", type=_names, metavar="A,B", help=f"of {', '.join(connectors.CONTESTANTS)}")
    mine.add_argument("--models", type=_names, metavar="A,B", help=f"of {', '.join(MODELS)} (default tiny,fat)")
    mine.add_argument("--into", type=Path, metavar="FILE", help="keep figures in FILE, and go on with what it has")
    told = f"turns of five hand-overs each (default {connectors.TURNS}); router: default {connectors_router.TURNS}"
    mine.add_argument("--turns", type=int, metavar="N", help=told)
    mine.add_argument("--gpu", action="store_true", help="engines on GPUs, 8B layers of random weights")
    args = parser.parse_args(words)
    for given, known in ((args.only, connectors.CONTESTANTS), (args.models, MODELS)):
        for name in set(given or ()) - set(known):
            parser.error(f"{name} is none of {', '.join(known)}")
    of_connectors = bool(args.only or args.models or args.into or args.gpu)
    if of_connectors and args.part not in {None, "connectors"}:
        parser.error("--only, --models, --into and --gpu belong to --part connectors")
    if args.turns is not None and (args.turns < 1 or args.part == "client"):
        parser.error(f"--turns {args.turns}: at least 1, and not with --part client")
    if args.publish:
        _whole_run(parser, args)
    of_connectors = of_connectors or args.turns is not None
    args.parts = (args.part,) if args.part else ("connectors",) if of_connectors else USUAL
    return args


def _whole_run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with an error if these arguments make a run that is not published."""
    if args.part == "router":
        parser.error("--part router is not published: its figures stand in the text of docs/benchmarks.md")
    if args.quick:
        parser.error("only a whole run is published: leave out --quick")
    if missing := connectors.missing(args.only, args.models, args.into, gpu=args.gpu):
        parser.error(f"only a whole run is published: {', '.join(missing)} would be missing: leave out --only and "
                     "--models, or name a file with the others by --into")  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts."""
    args = arguments(sys.argv[1:] if words is None else words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engines end with it
    if "client" in args.parts:
        handoff_client.measure(quick=args.quick, publishes=args.publish)
    if "connectors" in args.parts:
        connectors.measure(
            only=args.only,
            models=args.models,
            turns=args.turns or (1 if args.quick else connectors.TURNS),
            storm=40 if args.quick else 200,
            publishes=args.publish,
            into=args.into,
            gpu=args.gpu,
        )
    if "router" in args.parts:
        connectors_router.measure(turns=args.turns or (2 if args.quick else connectors_router.TURNS))
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
