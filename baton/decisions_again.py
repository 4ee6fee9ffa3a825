"""A router's decision log: opened for `--decision-log`, and replayed for `baton simulate --replay`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from baton.output import emit, say
from cluster.errors import UsageError
from cluster.text_file import unreadable
from router.core.journey import Chosen
from router.fleet.events import Came, Decided, Entry, Outcome, entry_of
from router.scheduler.scoring.policies import Policy
from sim.replay import Difference, ReplayedChoices, replay

SHOWN = 5
"""Differences that are printed; later ones often follow from the first."""


def opened_log(path: Path, flag: str, closing: ExitStack, *, buffered: bool = True) -> Callable[[bytes], object]:
    """Open a log for writing until `closing` closes.

    Args:
        path: of the file.
        flag: the flag that named it.
        closing: closes the file.
        buffered: True: a failed write ends the command, with a UsageError. False: a failed write raises OSError at
            once, for a caller that goes on without the log (`router.scheduler.log_writer`).

    Raises:
        UsageError: the file cannot be opened.
    """
    with _named(path, flag):
        if not buffered:
            return closing.enter_context(path.open("wb", buffering=0)).write
        file = path.open("wb")

    def write(data: bytes) -> object:
        with _named(path, flag):
            return file.write(data)

    def close() -> None:
        with _named(path, flag):
            file.close()

    closing.callback(close)
    return write


@contextmanager
def _named(path: Path, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def replay_file(path: Path, policies: Mapping[str, Policy], *, as_json: bool) -> int:
    """Make a log's choices again and print the differences; 1 if there are any, or if the log has a gap.

    Raises:
        UsageError: the file cannot be read, or is no decision log from its router's start.
    """
    try:
        found = replay(_entries(path), policies)
    except (ValueError, KeyError, AssertionError) as error:
        raise UsageError(f"--replay {path}: {error}") from None
    if not found.entries and not found.missing:
        raise UsageError(
            f"--replay {path}: no entry of a decision log is in it (`baton router --decision-log` makes one)"
        )
    _tell(found, as_json=as_json)
    return 1 if found.differences or found.missing else 0


def _entries(path: Path) -> Iterator[Entry]:
    """Whole lines only: the last one is cut if the router was killed."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    say(f"--replay {path}: line {number} is cut off, and left out")
                    return
                try:
                    yield entry_of(line)
                except msgspec.DecodeError as error:
                    raise ValueError(f"line {number} is no entry of a decision log: {error}") from None
    except OSError as error:
        raise unreadable(path, "--replay", error, "give a file of `baton router --decision-log`") from None


def _tell(found: ReplayedChoices, *, as_json: bool) -> None:
    if as_json:
        differences = [
            {"entry": each.entry, "logged": _said(each.logged), "here": _said(each.here)} for each in found.differences
        ]
        gap = {"missing": found.missing} if found.missing else {}
        emit({"entries": found.entries, "choices": found.choices, "differences": differences, **gap})
        return
    count = len(found.differences)
    came = "all came out the same" if not count else f"{count:,} came out otherwise"
    print(f"{found.entries:,} entries, {found.choices:,} choices made again: {came}")
    for each in found.differences[:SHOWN]:
        print(_line(each))
    if found.missing:
        print(
            f"line {found.entries + 1}: the log has a gap of {found.missing:,} entries; nothing after it is made again"
        )


def _line(difference: Difference) -> str:
    there, here = (_said(each) or "nothing" for each in (difference.logged, difference.here))
    return f"line {difference.entry + 1}: the log has {there}; here it is {here}"


def _said(outcome: Outcome | None) -> str | None:
    match outcome:
        case Decided(_, wanted, chosen):
            return f"{_chosen(chosen)} for a request of {wanted.prompt_tokens} tokens"
        case Came(chosen, called):
            asked = f"requests {', '.join(map(str, called))} called" if called else "no request called"
            return asked if chosen is None else f"{_chosen(chosen)}, {asked}"
        case None:
            return None


def _chosen(chosen: Chosen) -> str:
    return f"`{chosen.because}`"
