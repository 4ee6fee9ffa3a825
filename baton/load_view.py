"""The terminal output of `baton load`: progress on stderr, the report or a search's result on stdout."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any, Self

from baton.load_found import Goodput
from baton.output import say
from loadgen.replay import RunningLoad
from loadgen.report import LoadReport, Spread, Targets
from loadgen.search import Limit
from loadgen.stages import StagePart, Stages
from loadgen.summary import Summary

PLAIN_EVERY_S = 5.0
"""Seconds between two lines of progress where there is no terminal."""


class LoadProgress:
    """A live line on a terminal, or plain lines in a log. On stderr, so that stdout holds the result alone."""

    def __init__(self, planned: int | None, span_s: float) -> None:
        self._planned, self._span_s = planned, span_s
        self._said_s = 0.0
        self._tokens = self._told_s = 0.0
        self._status: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("sending")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tick(self, load: RunningLoad) -> None:
        """Show the progress of the load; called ten times a second."""
        if self._status is not None:
            self._status.update(self._line(load))
        elif load.elapsed_s - self._said_s >= PLAIN_EVERY_S:
            self._said_s = load.elapsed_s
            say(self._line(load))

    def _line(self, load: RunningLoad) -> str:
        failed = f", {load.failed} failed" if load.failed else ""
        ending = " · stopping, Ctrl-C again to cut" if load.stopped else ""
        rate = load.tokens / load.elapsed_s if load.elapsed_s > 0 else 0.0
        span = f" of {self._span_s:.0f} s" if math.isfinite(self._span_s) else ""
        planned = "" if self._planned is None else f"/{self._planned}"
        return (
            f"{load.elapsed_s:.0f} s{span}: {load.sent}{planned} sent, {load.open} open, "
            f"{load.done} done{failed}, {rate:,.0f} tokens/s{ending}"
        )


def print_report(report: LoadReport) -> None:
    """Print the report for people."""
    from rich.markup import escape
    from rich.table import Table

    console = _console()
    for line in heading(report):
        console.print(escape(line), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("milliseconds", "mean", "p50", "p90", "p99", "max", ""):
        table.add_column(column, justify="left" if column in {"milliseconds", ""} else "right")
    for name, spread, meaning in latency_rows(report):
        table.add_row(name, *map(in_ms, (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)), meaning)
    console.print(table)
    for stages in report.stages:
        _print_stages(console, stages)
    for line in target_lines(report):
        console.print(escape(line), soft_wrap=True)
    for kind in report.errors:
        said = f": {escape(kind.example)}" if kind.example else ""
        console.print(f"[red]✗[/] {kind.count} × {escape(kind.kind)}{said}", soft_wrap=True)
    for fault in report.faults:
        failed = f": could not be done: {fault.error}" if fault.error else ""
        console.print(f"[red]↯[/] at {fault.done_s:.1f} s: {escape(fault.what + failed)}", soft_wrap=True)
    for note in report.notes:
        console.print(f"[yellow]•[/] {escape(note)}", soft_wrap=True)


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False, emoji=False)  # texts of servers are shown as they are
    if not console.is_terminal:
        console.width = 120  # a file has no edge to fold at
    return console


SUMS = {"ttft": "first token, in the router", "tt2t": "then to the second token"}
"""Titles of the sums of timing parts, by `Stages.sum`."""


def _print_stages(console: Any, stages: Stages) -> None:
    """Print the parts of one sum that the router measured: the means of the parts add up to the mean of the sum. The
    router's words are shown as they are.
    """
    from rich.table import Table
    from rich.text import Text

    title = f"{SUMS[stages.sum]}: {stages.count} {stages.way} requests, ms"
    console.print(Text(title))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("part")
    for column in ("mean", "share", "p50", "p90", "p99", "requests"):
        table.add_column(column, justify="right")
    for part in (*stages.parts, stages.total):
        table.add_row(*map(Text, stage_cells(part, stages)))
    console.print(table)


def stage_cells(part: StagePart, stages: Stages) -> list[str]:
    """A part's row: name, mean, share of the total, percentiles, requests that have the part."""
    share = f"{part.mean / stages.total.mean:.0%}" if stages.total.mean > 0 else "–"
    return [part.name, in_ms(part.mean), share, *map(in_ms, (part.p50, part.p90, part.p99)), str(part.count)]


def print_goodput(found: Goodput) -> None:
    """Print a search's result for people."""
    from rich.markup import escape

    console = _console()
    for line in goodput_lines(found):
        console.print(escape(line), soft_wrap=True)
    for note in found.notes:
        console.print(f"[yellow]•[/] {escape(note)}", soft_wrap=True)


def goodput_lines(found: Goodput) -> list[str]:
    """The result first, then its parts."""
    end = found.finished
    promise = f"{found.attainment:.4g} of requests within {told_targets(found.targets)}"
    lines = [f"{_headline(found)} ({promise})"]
    if end.loads:
        each = ", ".join(f"{held:.4g}–{failed:.4g}" for held, failed in end.loads)
        lines.append(f"{len(end.loads)} loads of {end.requests} requests, each between attaining and not: {each}")
    late = f"; {end.late} of them spoilt by the sender" if end.late else ""
    lines.append(f"{end.trials} trials{late}; ended: {end.because}")
    return lines


def _headline(found: Goodput) -> str:
    end = found.finished
    if end.limit is Limit.SENDER:
        least = "no rate" if end.at_least is None else f"{end.at_least:.4g} req/s"
        return f"goodput not found: the sender is the limit; the server attains at {least}, and more could not be sent"
    if end.limit is Limit.TOP:
        return f"goodput not found: the server attains at {end.at_least or 0:.4g} req/s, the highest rate allowed"
    if end.limit is Limit.NEVER:
        return "goodput 0: the promise is missed at every rate"
    if end.limit is Limit.LOST:
        return "goodput not found: one load misses the promise at every rate, though the pilot kept it"
    if end.rate is None:
        return "goodput not found"
    known = "" if end.limit is Limit.SERVER else " as far as known"
    if end.low is None or end.high is None or end.confidence is None:
        return f"goodput {end.rate:.4g} req/s{known}, without an interval: that needs six loads"
    return f"goodput {end.rate:.4g} req/s{known}, {end.confidence:.1%} interval {end.low:.4g} to {end.high:.4g}"


def told_targets(targets: Targets) -> str:
    """`TTFT ≤ 500 ms, TPOT ≤ 40 ms`."""
    named = {name: getattr(targets, name) for name in targets.__struct_fields__}
    return ", ".join(f"{name.removesuffix('_ms').upper()} ≤ {ms:g} ms" for name, ms in named.items() if ms)


def print_summary(summary: Summary) -> None:
    """Print the load that would be sent."""
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(_told(summary)))


def _told(summary: Summary) -> Iterator[str]:
    rate, varied = _number(summary.rate), _number(summary.gap_cv)
    yield f"{summary.requests} requests in {summary.span_s:,.1f} s, {rate} per second, CV of gaps {varied}"
    for name, mean, found in (
        ("input", summary.input_mean, summary.input_p50_p90_p99),
        ("output", summary.output_mean, summary.output_p50_p90_p99),
    ):
        if found is not None:
            yield f"{name} tokens: mean {_number(mean)}, p50/p90/p99 {'/'.join(f'{each:.0f}' for each in found)}"
    if summary.shared is not None:
        yield f"{summary.shared:.1%} of the prompts' tokens repeat the beginning of an earlier prompt"
    if summary.without_output:
        yield f"{summary.without_output} requests generated nothing; one token is asked for"


def heading(report: LoadReport) -> list[str]:
    """Two lines: how many requests were sent and completed, and at which rates."""
    failed = f", {report.failed} failed ({report.shed} shed)" if report.failed else ""
    cut = f", {report.interrupted} interrupted" if report.interrupted else ""
    sent = f"{report.sent} request{'s' * (report.sent != 1)} sent"
    return [
        f"{sent}, {report.completed} completed{failed}{cut}, in {report.elapsed_s:.1f} s",
        f"offered {_number(report.offered_rate)} req/s, completed {_number(report.completed_rate)} req/s; "
        f"{_number(report.output_tokens_s)} output tokens/s, {_number(report.total_tokens_s)} with prompts",
    ]


def latency_rows(report: LoadReport) -> list[tuple[str, Spread, str]]:
    """Name, distribution and meaning of each latency."""
    return [
        ("TTFT", report.ttft_ms, "to the first token, from when it was to be sent"),
        ("TTFT as sent", report.ttft_sent_ms, "the same from when it was sent"),
        ("TT2T", report.tt2t_ms, "from the first token to the second"),
        ("TPOT", report.tpot_ms, "per token after the first"),
        ("ITL", report.itl_ms, "between chunks"),
        ("E2E", report.e2e_ms, "to the end of the answer"),
        ("sent late", report.late_ms, "by this sender"),
    ]


def target_lines(report: LoadReport) -> list[str]:
    """Lines on attainment, and on how well lengths were kept."""
    lines = []
    if report.attained is not None:
        told = "the targets of their class" if report.classes else told_targets(report.targets)
        lines.append(f"attainment {_share(report.attained, report.sent - report.interrupted)} met {told}")
    for each in report.classes:
        name, told = each.name or "of requests without a class", told_targets(each.targets)
        met = f"met {told}" if told else "were served whole (no targets)"
        lines.append(f"attainment {name} {_share(each.attained, each.requests)} {met}")
    if report.prompt_tokens_off is not None:
        lines.append(f"prompts are {report.prompt_tokens_off:.1%} off their wanted length on average")
    if report.short_answers:
        lines.append(f"{report.short_answers} answers are shorter than asked for")
    return lines


def _share(part: int, whole: int) -> str:
    """`95.0%: 19 of 20`."""
    return f"{f'{part / whole:.1%}' if whole else '–'}: {part} of {whole}"


def in_ms(value: float | None) -> str:
    """Milliseconds for a table; a dash for none."""
    return "–" if value is None else f"{value:,.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"
