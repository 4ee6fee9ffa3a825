"""Pictures of a load, drawn by matplotlib, which only this module imports, and only when a picture is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from baton.load_found import Goodput
from cluster.errors import UsageError
from loadgen.record import Record
from loadgen.report import LoadReport, Targets
from loadgen.stages import RESIDUAL, Stages

DPI: Final = 120
LINES_MAX: Final = 4000
"""Most points of one curve, so that a picture of a million requests is no larger than one of so many."""

BINS: Final = 60
"""Intervals of the time axis in the picture of rates."""

PALE: Final = "0.6"

TICKS_MAX: Final = 12
"""If the highest rate is this many times the lowest, or more, the axis has numbers at powers of ten alone."""


def need_matplotlib(flag: str) -> None:
    """Check for matplotlib before the load rather than after it. `flag` is the flag that needs it.

    Raises:
        UsageError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{flag} needs matplotlib, which is not installed: pip install 'baton-serve[plots]'")


def plot(path: Path, records: Sequence[Record], report: LoadReport) -> None:
    """Draw latencies over time, and their distributions, into one file (PNG, SVG or PDF).

    Raises:
        UsageError: the file cannot be written, or its ending names no format.
    """
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    _latency_over_time(left, records, report)
    _shares(right, records, report.targets)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=DPI)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)


def pictures(records: Sequence[Record], report: LoadReport) -> list[tuple[str, bytes]]:
    """(title, SVG) of each picture of a load."""
    found = [
        ("Latency over time", _drawn(lambda axes: _latency_over_time(axes, records, report))),
        ("Requests over time", _drawn(lambda axes: _rates_over_time(axes, records, report))),
        ("Distributions", _drawn(lambda axes: _shares(axes, records, report.targets))),
    ]
    if report.stages:
        found.append(("Where the time went", _drawn(lambda axes: _stages(axes, report.stages))))
    return found


def goodput_picture(found: Goodput) -> bytes:
    """Attainment of every trial by its rate, and the interval, as SVG."""
    return _drawn(lambda axes: _tries(axes, found))


def _pyplot() -> Any:
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _drawn(draw: Callable[[Any], None]) -> bytes:
    """One picture as SVG, the same bytes for the same values."""
    pyplot = _pyplot()
    with pyplot.rc_context({"svg.hashsalt": "baton", "font.size": 10, "svg.fonttype": "path"}):
        figure, axes = pyplot.subplots(figsize=(9, 3.6))
        try:
            draw(axes)
            axes.grid(visible=True, color="0.9")
            axes.set_axisbelow(True)
            figure.tight_layout()
            held = io.BytesIO()
            figure.savefig(held, format="svg", metadata={"Date": None, "Creator": None})
        finally:
            pyplot.close(figure)
    return held.getvalue()


def _latency_over_time(axes: Any, records: Sequence[Record], report: LoadReport) -> None:
    for name, of, colour in (("TTFT", _ttft, "C0"), ("E2E", _e2e, PALE)):
        seen = _thinned([(r.at_s, ms) for r in records if (ms := of(r)) is not None])
        axes.plot([at for at, _ in seen], [ms for _, ms in seen], ".", color=colour, markersize=3, label=name)
    lost = _thinned([(r.at_s, 0.0) for r in records if r.error is not None])
    if lost:
        axes.plot([at for at, _ in lost], [0.0] * len(lost), "rx", markersize=5, label="failed", clip_on=False)
    if report.targets.ttft_ms is not None:
        axes.axhline(report.targets.ttft_ms, color="C0", linestyle=":", label="TTFT promised")
    _mark_faults(axes, report)
    axes.set(xlabel="when the request was due, s", ylabel="latency, ms")
    axes.set_ylim(bottom=0)
    _legend_above(axes)
    _say_empty(axes, records)


def _rates_over_time(axes: Any, records: Sequence[Record], report: LoadReport) -> None:
    """Requests due, answered and open over time."""
    end = max((record.end_s for record in records), default=1.0) or 1.0
    width = end / BINS
    due, answered = [0] * (BINS + 1), [0] * (BINS + 1)
    for record in records:
        due[min(BINS, max(0, int(record.at_s / width)))] += 1
        if record.error is None:
            answered[min(BINS, max(0, int(record.end_s / width)))] += 1
    at = [width * each for each in range(BINS + 1)]
    axes.step(at, [each / width for each in due], where="post", color=PALE, label="due")
    axes.step(at, [each / width for each in answered], where="post", color="C0", label="answered")
    axes.set(xlabel="time, s", ylabel="requests per second")
    axes.set_ylim(bottom=0)
    beside = axes.twinx()
    steps = _open_over_time(records)
    beside.step([each for each, _ in steps], [count for _, count in steps], where="post", color="C1", label="open")
    beside.set_ylabel("open requests")
    beside.set_ylim(bottom=0)
    _mark_faults(axes, report)
    lines, names = axes.get_legend_handles_labels()
    more, named = beside.get_legend_handles_labels()
    _legend_above(axes, [*lines, *more], [*names, *named])
    _say_empty(axes, records)


def _open_over_time(records: Sequence[Record]) -> list[tuple[float, float]]:
    changes = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    found, count = [(0.0, 0.0)], 0
    for at, change in changes:
        count += change
        found.append((at, float(count)))
    return _thinned(found)


def _shares(axes: Any, records: Sequence[Record], targets: Targets) -> None:
    """The distributions of latencies: which share of answers was within how many milliseconds."""
    for name, of, promised, colour in (
        ("TTFT", _ttft, targets.ttft_ms, "C0"),
        ("TPOT", _tpot, targets.tpot_ms, "C1"),
        ("E2E", _e2e, targets.e2e_ms, PALE),
    ):
        values = sorted(ms for record in records if (ms := of(record)) is not None and ms > 0)
        shown = _thinned([(ms, (at + 1) / len(values)) for at, ms in enumerate(values)])
        if shown:
            shown = [(shown[0][0], 0.0), *shown]
            axes.step([ms for ms, _ in shown], [share for _, share in shown], where="post", color=colour, label=name)
        if promised is not None:
            axes.axvline(promised, color=colour, linestyle=":", label=f"{name} promised")
    axes.set(xlabel="latency, ms", ylabel="share of answers", xscale="log")
    axes.set_ylim(0, 1.02)
    if axes.get_legend_handles_labels()[0]:
        _legend_above(axes)
    _say_empty(axes, records)


def _stages(axes: Any, stages: Sequence[Stages]) -> None:
    """A bar for each sum, its parts one after the other."""
    found = dict.fromkeys(part.name for each in stages for part in each.parts if part.name != RESIDUAL)
    names = [*found, RESIDUAL]
    colours = importlib.import_module("matplotlib").colormaps["tab20"]
    labels = [f"{each.way}, {each.sum.upper()}\n{each.count} requests" for each in stages]
    left = [0.0] * len(stages)
    for at, name in enumerate(names):
        widths = [next((part.mean for part in each.parts if part.name == name), 0.0) for each in stages]
        if not any(widths):
            continue
        colour = "0.8" if name == RESIDUAL else colours((2 * at) % 20 + (at >= 10))
        starts = [start if width >= 0 else start + width for start, width in zip(left, widths, strict=True)]
        axes.barh(labels, [abs(each) for each in widths], left=starts, color=colour, edgecolor="white", label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="mean, ms")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _tries(axes: Any, found: Goodput) -> None:
    end = found.finished
    missed = [each for each in found.tries if not each.holds and not each.sender_late]
    for label, marker, colour, kept in (
        ("attains", "o", "C0", [each for each in found.tries if each.holds and not each.sender_late]),
        ("does not attain", "x", "C3", [each for each in missed if each.whole]),
        ("does not attain (ended early: at least this share)", "^", "C3", [each for each in missed if not each.whole]),
        ("sender late", "s", PALE, [each for each in found.tries if each.sender_late]),
    ):
        if kept:
            shares = [each.attained / each.counted if each.counted else 0.0 for each in kept]
            axes.plot([each.rate for each in kept], shares, marker, color=colour, label=label, markersize=5)
    axes.axhline(found.attainment, color="0.4", linestyle=":", label="promised")
    if end.rate:
        axes.axvline(end.rate, color="C2", label="goodput")
    if end.low is not None and end.high is not None:
        axes.axvspan(end.low, end.high, color="C2", alpha=0.2, label="interval")
    axes.set(xlabel="offered rate, requests per second", ylabel="share within all targets")
    if found.tries and all(each.rate > 0 for each in found.tries):
        axes.set_xscale("log")
        ticker = importlib.import_module("matplotlib.ticker")
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        few = max(each.rate for each in found.tries) < TICKS_MAX * min(each.rate for each in found.tries)
        axes.xaxis.set_minor_formatter(ticker.FormatStrFormatter("%g") if few else ticker.NullFormatter())
    axes.set_ylim(-0.02, 1.05)
    _legend_above(axes)


def _legend_above(axes: Any, *entries: Any) -> None:
    """A legend in a row above the axes, where it hides no point. `entries`: lines and names, instead of all."""
    count = len(entries[1]) if entries else len(axes.get_legend_handles_labels()[1])
    axes.legend(*entries, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncol=max(1, count), fontsize=8, frameon=False)


def _mark_faults(axes: Any, report: LoadReport) -> None:
    for fault in report.faults:
        axes.axvline(fault.done_s, color="C3", linestyle="--", linewidth=1)
        axes.annotate(
            fault.what, (fault.done_s, 1.0), xycoords=("data", "axes fraction"), rotation=90,
            va="top", ha="right", fontsize=8, color="C3",
        )  # fmt: skip


def _say_empty(axes: Any, records: Sequence[Record]) -> None:
    if not records:
        axes.text(0.5, 0.5, "no request was sent", transform=axes.transAxes, ha="center", va="center", color="0.5")


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Every n-th point of too many, always with the last one."""
    step = max(1, math.ceil(len(points) / LINES_MAX))
    return points if step == 1 else [*points[::step], points[-1]]


def _ttft(record: Record) -> float | None:
    return _good_ms(record, record.ttft_s)


def _tpot(record: Record) -> float | None:
    return _good_ms(record, record.tpot_s)


def _e2e(record: Record) -> float | None:
    return _good_ms(record, record.e2e_s)


def _good_ms(record: Record, seconds: float | None) -> float | None:
    return None if seconds is None or record.error is not None else seconds * 1000
