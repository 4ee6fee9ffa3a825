"""`baton load --html`: one page that holds everything, text, tables and pictures, and loads nothing from anywhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from baton import __version__
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
from cluster.errors import UsageError
from loadgen.record import Record
from loadgen.report import Report

BAD_SHOWN = 20

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #e4e4e4; }
th { color: #666; font-weight: normal; }
td:first-child, th:first-child, td.words, th.words { text-align: left; }
.note { color: #8a5a00; } .error { color: #a40000; } .faint { color: #666; }
img { max-width: 100%; height: auto; }
"""


def report_page(url: str, report: Report, records: Sequence[Record], bad: Sequence[str] = ()) -> str:
    """The page of one load."""
    parts = [_lines(heading(report)), _lines(target_lines(report)), _notes(report.notes)]
    columns = ("milliseconds", "mean", "p50", "p90", "p99", "max", "answers", "")
    rows = [
        [name, *map(in_ms, (each.mean, each.p50, each.p90, each.p99, each.max)), str(each.count), meaning]
        for name, each, meaning in latency_rows(report)
    ]
    parts.append(_section("Latencies", _table(columns, rows, words=(7,))))
    parts += [_section(title, _picture(title, svg)) for title, svg in pictures(records, report)]
    for stages in report.stages:
        title = f"{SUMS[stages.sum]}: {stages.count} {stages.way} requests"
        cells = [stage_cells(part, stages) for part in (*stages.parts, stages.total)]
        names = ("part, ms", "mean", "share", "p50", "p90", "p99", "requests that have it")
        parts.append(_section(title[0].upper() + title[1:], _table(names, cells)))
    parts.append(_errors(report))
    if report.faults:
        rows = [[f"{each.done_s:.1f}", each.what, each.error or "done"] for each in report.faults]
        parts.append(
            _section("What was done to the fleet", _table(("second", "what", "came of it"), rows, words=(1, 2)))
        )
    if bad:
        more = [f"and {len(bad) - BAD_SHOWN} more"] if len(bad) > BAD_SHOWN else []
        parts.append(_section(f"{len(bad)} bad rows of the trace were left out", _lines([*bad[:BAD_SHOWN], *more])))
    return _page(f"Load on {url}", parts)


def goodput_page(url: str, found: Goodput) -> str:
    """The page of a search."""
    told = [
        [
            "pilot" if each.repeat == 0 else f"load {each.repeat}",
            f"{each.rate:.4g}",
            f"{each.attained} of {each.counted}" + ("" if each.whole else ", ended early"),
            each.sender_late or ("attains" if each.holds else "does not"),
        ]
        for each in found.tries
    ]
    first, *more = goodput_lines(found)
    parts = [f"<p><strong>{html.escape(first)}</strong></p>", _lines(more), _notes(found.notes)]
    parts.append(_section("Trials", _picture("Share within all targets by offered rate", goodput_picture(found))))
    parts.append(_table(("load", "requests per second", "within all targets", "so it"), told, words=(2, 3)))
    return _page(f"Goodput of {url}", parts)


def write_page(path: Path, text: str) -> None:
    """To its file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}") from None


def _page(title: str, parts: Iterable[str]) -> str:
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    name = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{name}</title>\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{name}</h1>\n" + "\n".join(each for each in parts if each) + "\n"
        f'<p class="faint">baton load {html.escape(__version__)}. TTFT and E2E count from the moment a request was '
        "due.</p>\n</body>\n</html>\n"
    )


def _section(title: str, inside: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{inside}"


def _lines(lines: Sequence[str]) -> str:
    return f"<p>{'<br>'.join(map(html.escape, lines))}</p>" if lines else ""


def _notes(notes: Sequence[str]) -> str:
    return "\n".join(f'<p class="note">{html.escape(each)}</p>' for each in notes)


def _errors(report: Report) -> str:
    if not report.errors:
        return ""
    rows = [[each.kind, str(each.count), each.example] for each in report.errors]
    return _section("Errors", _table(("kind", "requests", "said the first time"), rows, words=(2,)))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """Columns of `words` begin at the left, numbers end at the right; the first column always begins at the left."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="words"' if at in words else "" for at in range(len(cells))]
        told = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(told)}</tr>"

    return "<table>\n" + "\n".join([row(columns, "th"), *(row(cells, "td") for cells in rows)]) + "\n</table>"


def _picture(title: str, svg: bytes) -> str:
    """As an image of its own: its names cannot meet another picture's, and nothing in it can run."""
    return f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
