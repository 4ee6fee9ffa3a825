"""The controller's log: every event with its effects, one JSON object a line, to replay from. Pure.

The controller has no clock, no chance and no memory but its events, so the same events give the same effects, byte for
byte: `replay` reports where they do not. A line has the form's version, the event with its kind, and its effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cluster.machine import Machine
from goodput import actions as do
from goodput.decision import Answered, Checked, Effect, Event, Observed, Pause, Renewed, Resize

FORM: Final = 1

_ACTIONS: Final[dict[str, Any]] = {each.__name__: each for each in (do.Start, do.Drain, do.Flip, do.Stop)}
_EVENTS: Final[dict[str, Any]] = {each.__name__: each for each in (Observed, Checked, Resize, Pause, Renewed)}


class BadLine(ValueError):
    """A line that is no event of a controller's log."""


@dataclass(frozen=True, slots=True)
class DecisionEntry:
    """One line."""

    now: float
    event: Event
    effects: bytes
    """Their JSON, with sorted keys."""


def encode(now: float, event: Event, effects: tuple[Effect, ...]) -> bytes:
    """One line, without the line end. `now`: seconds of the controller's clock."""
    return msgspec.json.encode(
        {
            "form": FORM,
            "now": now,
            "event": type(event).__name__,
            "value": msgspec.to_builtins(_plain(event), str_keys=True),
            "effects": [[type(each).__name__, _effect(each)] for each in effects],
        },
        order="sorted",
    )


def _plain(event: Event) -> Any:
    if isinstance(event, Answered):
        said = {"action": [type(event.action).__name__, event.action], "refusal": event.refusal}
        return said | ({"unsure": True} if event.unsure else {})
    return event


def _effect(effect: Effect) -> Any:
    found = msgspec.to_builtins(effect, str_keys=True)
    action = getattr(effect, "action", None)
    if action is not None:
        found["kind"] = type(action).__name__
    decision = getattr(effect, "decision", None)
    if decision is not None:
        found["decision"]["actions"] = [
            {"kind": type(each).__name__, **msgspec.to_builtins(each)} for each in decision.actions
        ]
    return found


def decode(line: bytes) -> DecisionEntry:
    """Read one line.

    Raises:
        BadLine: it is no event, or of another form.
    """
    try:
        fields = msgspec.json.decode(line)
        _check_form(fields["form"])
        effects = msgspec.json.encode(fields["effects"], order="sorted")
        return DecisionEntry(float(fields["now"]), _event(fields["event"], fields["value"]), effects)
    except BadLine:
        raise
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise BadLine(f"not a line of a controller's log: {error}") from None


def _check_form(form: Any) -> None:
    if form != FORM:
        raise BadLine(f"form is {form!r}: this version reads {FORM}")


def _event(kind: str, value: Any) -> Event:
    if kind == Answered.__name__:
        name, action = value["action"]
        said = msgspec.convert(action, _ACTIONS[name])
        return Answered(said, str(value["refusal"]), unsure=value.get("unsure", False))
    found: Event = msgspec.convert(value, _EVENTS[kind], str_keys=True)
    return found


@dataclass(frozen=True, slots=True)
class DecisionDifference:
    """An event whose effects differ from those in the log."""

    line: int
    was: str
    now: str


def replay(lines: Iterable[bytes], controller: Machine[Event, Effect]) -> Iterator[DecisionDifference]:
    """Give a new controller the events of a log, and compare its effects with those in the log.

    Raises:
        BadLine: a line is no event; the message has its number.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = decode(line)
        except BadLine as error:
            raise BadLine(f"line {number}: {error}") from None
        effects = controller.handle(entry.event, entry.now)
        made = msgspec.json.decode(encode(entry.now, entry.event, effects))["effects"]
        again = msgspec.json.encode(made, order="sorted")
        if again != entry.effects:
            yield DecisionDifference(number, entry.effects.decode(), again.decode())
