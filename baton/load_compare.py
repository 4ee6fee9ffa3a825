"""`baton load --compare A B`: compares two files of --out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.load_goodput import FLAGS
from baton.load_run import targets_of
from baton.output import emit, say
from baton.unused_flags import refuse_given
from cluster.errors import UsageError
from cluster.text_file import rows_in
from loadgen.compare import LEAST, LoadComparison, QuantityDifference, compare
from loadgen.record import Record

BAD_SHOWN = 3

_OF_A_LOAD = (
    *("rate", "arrivals", "cv", "input_tokens", "output_tokens", "prefix_tokens", "prefix_groups", "requests"),
    *("duration_s", "trace", "format", "sessions", "think_s", "turns", "fault", "faults", "target", "cluster"),
    *("out", "token_times", "model", "tick_ms", "skip_bad", "strict", "chat", "token_ids", "chars_per_token"),
    *("no_ignore_eos", "extra_body", "header", "api_key_file", "max_concurrency", "no_stages"),
    *FLAGS,
)
"""Flags that a comparison refuses, by their names in the parsed arguments."""

_WITH_DEFAULTS = {"speed": 1.0, "rate_scale": 1.0, "from_s": 0.0, "senders": 1, "timeout_s": 600.0, "drain_s": 10.0}
"""The same, of those that have a value if they are not given."""


def compare_files(args: argparse.Namespace) -> int:
    """Print how B differs from A. 0: nothing is surely worse (beyond its interval); 1: something is; 2: the loads
    cannot be compared.
    """
    if args.url is not None or args.find_goodput or args.dry_run or args.html is not None or args.plot is not None:
        raise UsageError("--compare sends nothing: give it two --out files, targets and perhaps --json, no more")
    refuse_given(args, _OF_A_LOAD, "belongs to a load, and --compare sends none")
    for name, usual in _WITH_DEFAULTS.items():
        if getattr(args, name) != usual:
            raise UsageError(f"--{name.replace('_', '-')} belongs to a load, and --compare sends none")
    first, second = args.compare
    told = compare(_records(first), _records(second), targets_of(args), args.seed)
    if args.json:
        worse = {"worse": told.worse, "verdicts": {each.name: each.verdict for each in told.differences}}
        emit({**msgspec.to_builtins(told), **worse})
    else:
        _print(told, first, second)
    if told.unlike:
        return 2
    return 1 if told.worse else 0


def _records(path: Path) -> list[Record]:
    """The records of a file; other lines are left out and reported.

    Raises:
        UsageError: the file cannot be read, or has no record.
    """
    decoder = msgspec.json.Decoder(Record)
    found: list[Record] = []
    bad: list[str] = []
    lines = rows_in(path, "--compare", "give a file of `baton load --out`").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(decoder.decode(line))
        except UnicodeError:
            bad.append(f"line {number}: not UTF-8")
        except (msgspec.DecodeError, RecursionError) as error:
            bad.append(f"line {number}: {error}")
    if not found:
        raise UsageError(
            f"--compare {path}: holds no record of `baton load --out`" + "".join(f": {e}" for e in bad[:1])
        )
    for each in bad[:BAD_SHOWN]:
        say(f"left out: {path}: {each}")
    if bad:
        say(f"left out: {len(bad)} lines of {path}")
    return found


def _print(told: LoadComparison, first: Path, second: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    how = "the same requests" if told.paired else "different requests"
    console.print(
        escape(f"A {first}: {told.requests_a} requests; B {second}: {told.requests_b}; {how}"), soft_wrap=True
    )
    for reason in told.unlike:
        console.print(f"[red]not comparable[/]: {escape(reason)}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for column in ("A", "B", "B − A", f"{told.confidence:.0%} interval"):
        table.add_column(column, justify="right")
    table.add_column("B is")
    for each in told.differences:
        table.add_row(*_cells(each, judged=not told.unlike))
    console.print(table)
    _say_what_it_means(console.print, told)


def _say_what_it_means(say_line: object, told: LoadComparison) -> None:
    assert callable(say_line)
    if told.unlike:
        say_line("differences are of the loads as much as of the servers: send one load to both (same --seed)")
    else:
        say_line("intervals hold together; they tell these two runs apart, not how much another run would differ")
    if min(told.requests_a, told.requests_b) < LEAST:
        say_line(f"fewer than {LEAST} requests: no intervals")


def _cells(each: QuantityDifference, *, judged: bool) -> Sequence[str]:
    def told(value: float | None, *, sign: bool = False) -> str:
        if value is None:
            return "–"
        shown = value * 100 if each.unit == "share" else value
        return f"{shown:+,.2f}" if sign else f"{shown:,.2f}"

    unit = "%" if each.unit == "share" else "ms"
    between = "–" if each.low is None else f"{told(each.low, sign=True)} to {told(each.high, sign=True)}"
    verdict = each.verdict if judged else ""
    return (f"{each.name}, {unit}", told(each.a), told(each.b), told(each.change, sign=True), between, verdict)
