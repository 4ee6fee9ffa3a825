"""Reads a controller's kept log for `baton explain --scaling`, and replays it for `baton plan --replay-decisions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from baton.clusterfile import read
from baton.file_kinds import is_file
from baton.scaling import MadePools, ScalingPlan, machine_of, plan_of, scaling_folder
from cluster.errors import UsageError
from goodput.actuate.journal import Line, lines
from goodput.decision import Renewed
from goodput.decisionlog import BadLine, replay


def log_of(named: str) -> Path:
    """The path of a log: given as a file's path, or as a cluster's name.

    Raises:
        UsageError: there is no such log.
    """
    for path in (Path(named), scaling_folder() / f"{named}.jsonl"):
        if is_file(path):
            return path
    raise UsageError(
        f"{named}: neither a file nor a cluster that was ever resized here ({scaling_folder()} has the logs)"
    )


class Shown(NamedTuple):
    """One decision of a log."""

    at: float
    """Unix time, s."""
    model: str
    decision: dict[str, Any]


def decisions(path: Path, *, held: bool = False) -> Iterator[Shown]:
    """All decisions of a log, oldest first; those that changed nothing only with `held`.

    Raises:
        UsageError: the file cannot be read, or is another's.
    """
    for line in _lines(path):
        for kind, effect in line.effects:
            if kind == "Told" and (held or effect["decision"]["what"] != "hold"):
                yield Shown(line.at, line.model, effect["decision"])


def _lines(path: Path) -> Iterator[Line]:
    """The lines of a log that a controller wrote; an empty file is one of a controller that has just begun.

    Raises:
        UsageError: it cannot be read, or is another file: none of its lines is a controller's.
    """
    some = False
    try:
        for line in lines(path):
            some = True
            yield line
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if not some and size:
        raise UsageError(
            f"{path}: no line of it is of a controller's log (`baton plan` and `baton explain` read those)"
        )


def words(shown: Shown) -> list[str]:
    """A decision for people: time, action, reason, and what was needed."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(shown.at))
    told = shown.decision
    named = [f"{each['kind'].lower()} {each['instance']}" for each in told["actions"]]
    dry = " (nothing was done)" if told["dry"] else ""
    found = [f"{at}  {shown.model + '  ' if shown.model else ''}{told['what']}: {', '.join(named) or 'nothing'}{dry}"]
    found.append(f"    because {told['because']}")
    for role, need in told["needs"].items():
        found.append(
            f"    {role}: {need['have']:g} there or coming, {need['ready']:g} ready; needed {need['now']} now, "
            f"{need['ahead']} in {told['horizon_s']:.0f} s; {need['keep']} kept"
        )
    if told["rate"] is not None:
        found.append(
            f"    {told['rate']:.3g} requests a second, {told['expected'] or 0:.3g} expected ({told['forecaster']})"
        )
    return found + [f"    ! {condition}" for condition in told["conditions"]]


class ReplayedDecisions(NamedTuple):
    """The result of deciding a log again."""

    controllers: int
    """Runs of a controller that were replayed: those that the log has from their first event on."""
    events: int
    different: tuple[str, ...]
    """A line for each event after which the decision differs."""


def decide_again(file: str, log: Path) -> ReplayedDecisions:
    """Give new controllers the events of a log, and say where they decide otherwise.

    They are made by the file. A controller whose targets were edited while it ran begins with the targets of the log:
    the file has later ones.

    Raises:
        UsageError: log or cluster file cannot be used.
    """
    spec = read(file).usable()
    lives, events = 0, 0
    different: list[str] = []
    for made, model, logged in _lives(log):
        plan = plan_of(
            spec,
            made.engine,
            made.gpu,
            list(made.vllm_args),
            dry=made.dry,
            resizes=made.resizes,
            by_hand=made.by_hand,
            start_max_s=made.start_max_s,
        )
        name = _name(plan, model)
        if name is None:
            there = ", ".join([*plan.kept, *plan.pools])
            raise UsageError(f"{log}: is of the model {model!r}, and {file} has {there}: give the file of that log")
        if made.promises is not None and any(each.event == Renewed.__name__ for each in logged):
            plan = replace(plan, promises=dict(made.promises))
        lives, events = lives + 1, events + len(logged)
        try:
            found = replay((each.raw for each in logged), machine_of(plan, name))
            different += [f"event {each.line} of life {lives}: was {each.was}, is {each.now}" for each in found]
        except BadLine as error:
            raise UsageError(f"{log}: {error}") from None
    return ReplayedDecisions(lives, events, tuple(different))


def _name(plan: ScalingPlan, model: str) -> str | None:
    """The model of the plan that a log names; None: none is. The log of a cluster with one model names no model."""
    if model:
        return model if model in plan.pools or model in plan.kept else None
    alone = plan.pools or plan.kept
    return next(iter(alone)) if len(alone) == 1 else None


def _lives(log: Path) -> Iterator[tuple[MadePools, str, list[Line]]]:
    """Each run of a controller, by model: its settings and its events, up to the first that is missing. A run whose
    beginning is not in the log is left out.
    """
    made: MadePools | None = None
    found: dict[str, list[Line]] = {}
    for line in _lines(log):
        if line.began is not None or line.lost:
            if made is not None:
                yield from ((made, model, logged) for model, logged in found.items())
            made, found = None if line.began is None else _made(line.began), {}
        elif made is not None:
            found.setdefault(line.model, []).append(line)
    if made is not None:
        yield from ((made, model, logged) for model, logged in found.items())


def _made(said: Mapping[str, Any]) -> MadePools | None:
    """The settings in the log; None if they are of another version."""
    try:
        return MadePools.read(said)
    except msgspec.ValidationError:
        return None
