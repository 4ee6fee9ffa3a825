"""The output of `baton profile`: progress on stderr, then each point beside the fit, and warnings."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from baton.output import emit, say
from baton.profiling import ProfileResults
from costs.profile import Profile
from costs.step import StepWork
from loadgen.measure import Point

OFF = 0.15
"""Relative error beyond which a point does not lie on the fit."""


@dataclass(frozen=True, slots=True)
class FittedPoint:
    """A point beside the fit."""

    point: Point
    measured_ms: float
    fitted_ms: float

    @property
    def off(self) -> float:
        """The fit's relative error: above 0 where the fit is slower than what was measured."""
        return self.fitted_ms / self.measured_ms - 1


def fitted(profile: Profile, found: ProfileResults) -> list[FittedPoint]:
    """Every point beside its fitted value."""
    cost = profile.cost
    return [
        *(
            FittedPoint(point, row.ms, cost.step_ms(StepWork(new_tokens=round(row.new_tokens), area=round(row.area))))
            for point, row in found.prefills.items()
        ),
        *(
            FittedPoint(
                point, row.ms, cost.step_ms(StepWork(batch=round(row.batch), sum_context=round(row.sum_context)))
            )
            for point, row in found.decodes.items()
        ),
    ]


def misfits(profile: Profile, found: ProfileResults) -> list[Point]:
    """The points that do not lie on the fit."""
    return [each.point for each in fitted(profile, found) if abs(each.off) > OFF]


def notes_of(found: ProfileResults, budget_s: float, *, says_load: bool) -> list[str]:
    """Warnings about the measurements, for people."""
    notes = [f"{point}: nothing measured: {why}" for point, why in found.rejected.items()]
    if found.left_out:
        notes.append(f"--budget-s {budget_s:g} left no time for {len(found.left_out)} points")
    if found.disturbed:
        notes.append(
            f"the engine was busy with other requests at {len(found.disturbed)} points, first at the "
            f"{found.disturbed[0]}: what was measured is too slow; run it again on an idle engine"
        )
    if not says_load:
        notes.append("the engine's /metrics tell nothing: whether others used it is not known")
    return notes


def show_profile(profile: Profile, found: ProfileResults, notes: list[str], path: Path, *, as_json: bool) -> None:
    """Print the fit, its error, and the points that do not lie on it; `path` is where the profile was written."""
    rows = fitted(profile, found)
    off = [f"{each.point}: the fit is {each.off:+.0%} off" for each in rows if abs(each.off) > OFF]
    if as_json:
        points = [{"point": str(r.point), "measured_ms": r.measured_ms, "fitted_ms": r.fitted_ms} for r in rows]
        told: dict[str, Any] = {"file": str(path), "profile": profile.name, "cost": asdict(profile.cost)}
        errors = {"prefill": profile.prefill_error, "small_prefill": profile.small_error}
        told["error"] = {name: asdict(each) for name, each in {**errors, "decode": profile.decode_error}.items()}
        emit(
            {
                **told,
                "round_trip_ms": found.round_trip_ms,
                "server_ms": found.server_ms,
                "points": points,
                "notes": [*off, *notes],
            }
        )
        return
    _table(rows)
    cost = profile.cost
    start = f"{cost.start_ms:.3f} ms" if cost.start_ms >= 0 else f"−{-cost.start_ms:.3f} ms"
    print(f"prefill  {start} + {cost.token_ms * 1000:.3f} µs/token + {cost.area_ms * 1e6:.3f} ns/token², ", end="")
    print(f"at least {cost.floor_ms:.3f} ms: {profile.prefill_error}")
    crowd = f" (+{cost.crowd_ms * 1000:.1f} beyond {cost.crowd_from:.0f})" if cost.crowd_ms else ""
    print(f"decode   {cost.decode_ms:.3f} ms + {cost.context_ms * 1e6:.3f} ns/token of context ", end="")
    print(f"+ {cost.request_ms * 1000:.1f} µs/stream{crowd}: {profile.decode_error}")
    print(f"first token  {_way(found)}")
    say_notes([*off, *notes])
    print(f"written: {path}")


def _way(found: ProfileResults) -> str:
    """In words: what was subtracted from the time to the first token."""
    network = f"{found.round_trip_ms:.3f} ms for the network and HTTP"
    if found.server_ms is None:
        return f"{network} beside its step; the engine's metrics do not tell its server's part, which is in the prefill"
    return f"{found.server_ms:.3f} ms for the server's own work and {network} beside its step"


def say_notes(notes: list[str]) -> None:
    """Print notes on stderr."""
    for note in notes:
        say(f"• {note}")


def _table(rows: list[FittedPoint]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("point", "measured ms", "fitted ms", "off"):
        table.add_column(column, justify="left" if column == "point" else "right")
    for each in rows:
        marked = f"[red]{each.off:+.1%}[/]" if abs(each.off) > OFF else f"{each.off:+.1%}"
        table.add_row(str(each.point), f"{each.measured_ms:,.3f}", f"{each.fitted_ms:,.3f}", marked)
    Console(highlight=False).print(table)


class ProfileProgress:
    """A bar on a terminal, a line for each point in a log."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("measuring", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def told(self, number: int, total: int, point: Point) -> None:
        """Show that this point is measured next; `number` counts from 0."""
        if self._bar is not None:
            self._bar.update(self._task, completed=number, total=total, description=str(point))
        else:
            say(f"[{number + 1}/{total}] {point}")
