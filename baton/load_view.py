"""What `baton load` shows: progress on stderr, the report as a table, and a picture for those who have matplotlib."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from baton.output import say
from cluster.errors import UsageError
from loadgen.record import Record
from loadgen.replay import Load
from loadgen.report import Report, Spread
from loadgen.summary import Summary

PLAIN_EVERY_S = 5.0
"""Without a terminal, a line so often."""


class Progress:
    """One line that lives on a terminal, or plain lines in a log. On stderr, so that stdout holds the result alone."""

    def __init__(self, planned: int, span_s: float) -> None:
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

    def tick(self, load: Load) -> None:
        """Show where the load stands; called ten times a second."""
        if self._status is not None:
            self._status.update(self._line(load))
        elif load.elapsed_s - self._said_s >= PLAIN_EVERY_S:
            self._said_s = load.elapsed_s
            say(self._line(load))

    def _line(self, load: Load) -> str:
        failed = f", {load.failed} failed" if load.failed else ""
        ending = " · stopping, Ctrl-C again to cut" if load.stopped else ""
        rate = load.tokens / load.elapsed_s if load.elapsed_s > 0 else 0.0
        return (
            f"{load.elapsed_s:.0f} s of {self._span_s:.0f} s: {load.sent}/{self._planned} sent, {load.open} open, "
            f"{load.done} done{failed}, {rate:,.0f} tokens/s{ending}"
        )


def print_report(report: Report) -> None:
    """The report for people."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file has no edge to fold at
    for line in _heading(report):
        console.print(escape(line), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("milliseconds", "mean", "p50", "p90", "p99", "max", ""):
        table.add_column(column, justify="left" if column in {"milliseconds", ""} else "right")
    for name, spread, meaning in _rows(report):
        table.add_row(name, *map(_ms, (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)), meaning)
    console.print(table)
    for line in _targets(report):
        console.print(escape(line), soft_wrap=True)
    for kind in report.errors:
        said = f": {escape(kind.example)}" if kind.example else ""
        console.print(f"[red]✗[/] {kind.count} × {escape(kind.kind)}{said}", soft_wrap=True)
    for note in report.notes:
        console.print(f"[yellow]•[/] {escape(note)}", soft_wrap=True)


def print_summary(summary: Summary) -> None:
    """What would be sent."""
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


def _heading(report: Report) -> list[str]:
    failed = f", {report.failed} failed ({report.shed} shed)" if report.failed else ""
    cut = f", {report.interrupted} interrupted" if report.interrupted else ""
    return [
        f"{report.sent} requests sent, {report.completed} completed{failed}{cut}, in {report.elapsed_s:.1f} s",
        f"offered {_number(report.offered_rate)} req/s, completed {_number(report.completed_rate)} req/s; "
        f"{_number(report.output_tokens_s)} output tokens/s, {_number(report.total_tokens_s)} with prompts",
    ]


def _rows(report: Report) -> list[tuple[str, Spread, str]]:
    return [
        ("TTFT", report.ttft_ms, "to the first token, from when it was to be sent"),
        ("TTFT as sent", report.ttft_sent_ms, "the same from when it was sent"),
        ("TT2T", report.tt2t_ms, "from the first token to the second"),
        ("TPOT", report.tpot_ms, "per token after the first"),
        ("ITL", report.itl_ms, "between chunks"),
        ("E2E", report.e2e_ms, "to the end of the answer"),
        ("sent late", report.late_ms, "by this sender"),
    ]


def _targets(report: Report) -> list[str]:
    lines = []
    if report.attained is not None:
        named = {name: getattr(report.targets, name) for name in report.targets.__struct_fields__}
        told = ", ".join(f"{name.removesuffix('_ms').upper()} ≤ {ms:g} ms" for name, ms in named.items() if ms)
        share = "–" if report.attainment is None else f"{report.attainment:.1%}"
        lines.append(f"attainment {share}: {report.attained} of {report.sent - report.interrupted} met {told}")
    if report.prompt_tokens_off is not None:
        lines.append(f"prompts are {report.prompt_tokens_off:.1%} off their wanted length on average")
    if report.short_answers:
        lines.append(f"{report.short_answers} answers are shorter than asked for")
    return lines


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"


def need_matplotlib() -> None:
    """Before the load rather than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def plot(path: Path, records: Sequence[Record]) -> None:
    """TTFT over time, and the distributions of TTFT and TPOT."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (over_time, shares) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    seen = [(r.at_s, r.ttft_s * 1000) for r in records if r.error is None and r.ttft_s is not None]
    over_time.plot([at for at, _ in seen], [ms for _, ms in seen], ".", markersize=3)
    lost = [r.at_s for r in records if r.error is not None]
    over_time.plot(lost, [0.0] * len(lost), "rx", markersize=4)
    over_time.set(xlabel="sent, s", ylabel="TTFT, ms")
    tpot = [r.tpot_s * 1000 for r in records if r.error is None and r.tpot_s is not None]
    for name, values in (("TTFT", [ms for _, ms in seen]), ("TPOT", tpot)):
        ordered = sorted(values)
        shares.plot(ordered, [(at + 1) / len(ordered) for at in range(len(ordered))], label=name)
    shares.set(xlabel="ms", ylabel="share of answers", xscale="log")
    shares.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
