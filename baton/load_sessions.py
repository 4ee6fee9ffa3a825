"""`baton load --sessions`: from flags to conversations in a closed loop."""

from __future__ import annotations

import argparse
import math

from baton.load_arrivals import REQUESTS, PlannedLoad, lengths_from
from baton.unused_flags import refuse_given
from cluster.errors import UsageError
from loadgen.body import Asking
from loadgen.sessions import SessionPlan, Sessions, Think, think_of

TURNS = 4
"""Messages of a conversation by default."""
THINK_S = "1"
"""Seconds from an answer to the next message by default, as --think-s has it."""


def check(args: argparse.Namespace) -> None:
    """Refuse flags that do not fit --sessions, and flags of conversations without it.

    Raises:
        UsageError: the message names the flags.
    """
    if args.sessions is None:
        for flag in ("think_s", "turns"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} belongs to conversations: give --sessions N")
        return
    for flag in ("trace", "rate", "arrivals", "cv", "prefix_tokens", "prefix_groups", "token_ids", "max_concurrency"):
        if getattr(args, flag) is not None:
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} belongs to an open loop, --sessions to a closed one: give one")
    refuse_given(args, ("format", "tick_ms"), "is of a trace, and --sessions makes its load up")
    if args.from_s:
        raise UsageError("--from-s is of a trace, and --sessions makes its load up")
    if args.senders > 1:
        raise UsageError("--senders shares a schedule, and --sessions has none: leave one out")
    if args.speed != 1 or args.rate_scale != 1:
        raise UsageError("--speed and --rate-scale change a schedule, and --sessions has none")
    _think(args)


def planned(args: argparse.Namespace) -> PlannedLoad:
    """How long the conversations go on; their turns are made during the load.

    Raises:
        UsageError: flags cannot be used.
    """
    check(args)
    notes: list[str] = []
    for text, flag in ((args.input_tokens, "--input-tokens"), (args.output_tokens, "--output-tokens")):
        if text:
            lengths_from(text, flag, strict=args.strict, tell=notes.append)
    if args.requests is None and args.duration_s is None:
        args.requests = REQUESTS
    return PlannedLoad([], notes=tuple(notes), count=args.requests, lasts_s=args.duration_s)


def conversations(args: argparse.Namespace, asking: Asking) -> Sessions:
    """The conversations that the flags describe. `asking`: has the salt and the prompt lengths of this run."""
    return Sessions(
        SessionPlan(
            sessions=args.sessions,
            turns=args.turns or TURNS,
            think=_think(args),
            inputs=lengths_from(args.input_tokens or "512", "--input-tokens", tell=_told_already),
            outputs=lengths_from(args.output_tokens or "128", "--output-tokens", tell=_told_already),
            requests=args.requests,
            until_s=math.inf if args.duration_s is None else args.duration_s,
            seed=args.seed,
            salt=asking.salt,
            fit=asking.fit,
        )
    )


def _told_already(_: str) -> None:
    """Say nothing: `planned` has read the same files, and told of their bad rows."""


def _think(args: argparse.Namespace) -> Think:
    try:
        return think_of(args.think_s or THINK_S)
    except ValueError as error:
        raise UsageError(f"--think-s: {error}") from None
