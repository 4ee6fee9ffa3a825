"""`baton load --html`: one page with all text, tables and pictures inside; it loads nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from baton.load_arrivals import BAD_SHOWN
from baton.load_found import Goodput
from baton.load_plots import goodput_picture, pictures
from baton.load_view import (
    SUMS,
    goodput_lines,
    heading,
    in_ms,
    latency_rows,
    stage_cells,
    target_lines,
)
from baton.page import lines, page, picture, section, table
from cluster.errors import UsageError
from loadgen.record import Record
from loadgen.report import LoadReport

COMMAND, NOTE = "baton load", "TTFT and E2E count from the moment a request was due."


def report_page(url: str, report: LoadReport, records: Sequence[Record], bad: Sequence[str] = ()) -> str:
    """The page of one load."""
    parts = [lines(heading(report)), lines(target_lines(report)), _notes(report.notes)]
    columns = ("milliseconds", "mean", "p50", "p90", "p99", "max", "answers", "")
    rows = [
        [name, *map(in_ms, (each.mean, each.p50, each.p90, each.p99, each.max)), str(each.count), meaning]
        for name, each, meaning in latency_rows(report)
    ]
    parts.append(section("Latencies", table(columns, rows, words=(7,))))
    parts += [section(title, picture(title, svg)) for title, svg in pictures(records, report)]
    for stages in report.stages:
        title = f"{SUMS[stages.sum]}: {stages.count} {stages.way} requests"
        cells = [stage_cells(part, stages) for part in (*stages.parts, stages.total)]
        names = ("part, ms", "mean", "share", "p50", "p90", "p99", "requests that have it")
        parts.append(section(title[0].upper() + title[1:], table(names, cells)))
    parts.append(_errors(report))
    if report.faults:
        rows = [[f"{each.done_s:.1f}", each.what, each.error or "done"] for each in report.faults]
        parts.append(section("What was done to the fleet", table(("second", "what", "result"), rows, words=(1, 2))))
    if bad:
        more = [f"and {len(bad) - BAD_SHOWN} more"] if len(bad) > BAD_SHOWN else []
        parts.append(section(f"{len(bad)} bad rows of the trace were left out", lines([*bad[:BAD_SHOWN], *more])))
    return page(f"Load on {url}", parts, COMMAND, NOTE)


def goodput_page(url: str, found: Goodput) -> str:
    """The page of a search."""
    told = [
        [
            "pilot" if each.repeat == 0 else f"load {each.repeat}",
            f"{each.rate:.4g}",
            f"{each.attained} of {each.counted}" + ("" if each.whole else ", ended early"),
            each.sender_late or ("attains" if each.holds else "does not attain"),
        ]
        for each in found.tries
    ]
    first, *more = goodput_lines(found)
    parts = [f"<p><strong>{html.escape(first)}</strong></p>", lines(more), _notes(found.notes)]
    parts.append(section("Trials", picture("Share within all targets by offered rate", goodput_picture(found))))
    parts.append(table(("load", "requests per second", "within all targets", "result"), told, words=(2, 3)))
    return page(f"Goodput of {url}", parts, COMMAND, NOTE)


def write_page(path: Path, text: str) -> None:
    """Write a page to its file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}") from None


def _notes(notes: Sequence[str]) -> str:
    return "\n".join(f'<p class="note">{html.escape(each)}</p>' for each in notes)


def _errors(report: LoadReport) -> str:
    if not report.errors:
        return ""
    rows = [[each.kind, str(each.count), each.example] for each in report.errors]
    return section("Errors", table(("kind", "requests", "first message"), rows, words=(2,)))
