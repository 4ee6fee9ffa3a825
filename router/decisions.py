"""The decision log: everything that changes what a router chooses by, and every choice. Pure: others open the file.

One JSON object a line, in the order in which it happened, so that the choices can be made again from nothing but the
log (`sim.replay`). The same view and the same policy, told the same, must say the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from cluster.ids import InstanceId
from cluster.instance import Instance, Load
from router.journey import Chosen
from router.policy import Policy
from router.policy.candidates import Wanted
from router.speeds import Make
from router.view import Fleet, Reported, View

Write = Callable[[bytes], Any]


class Added(msgspec.Struct, tag="added"):
    """An instance was named at the start."""

    instance: Instance


class Folded(msgspec.Struct, tag="folded"):
    """The registry was read."""

    reported: tuple[Reported, ...]


class Seen(msgspec.Struct, tag="seen"):
    """A probe succeeded."""

    instance: InstanceId
    models: tuple[dict[str, Any], ...] | None
    load: Load | None


class ProbeFailed(msgspec.Struct, tag="probe_failed"):
    """A probe failed."""

    instance: InstanceId


class Unreachable(msgspec.Struct, tag="unreachable"):
    """A leg could not connect."""

    instance: InstanceId


class LegStarted(msgspec.Struct, tag="leg_started"):
    """A leg went there."""

    instance: InstanceId


class LegEnded(msgspec.Struct, tag="leg_ended"):
    """That leg is over."""

    instance: InstanceId


class Decided(msgspec.Struct, tag="decided"):
    """The policy was asked, and said."""

    policy: str
    wanted: Wanted
    chosen: Chosen


Entry = Added | Folded | Seen | ProbeFailed | Unreachable | LegStarted | LegEnded | Decided


def line_of(entry: Entry) -> bytes:
    """An entry as a line of JSON, with its line feed."""
    return msgspec.json.encode(entry) + b"\n"


_DECODER: Final[msgspec.json.Decoder[Entry]] = msgspec.json.Decoder(Entry)


def entry_of(line: bytes) -> Entry:
    """An entry from its line.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _DECODER.decode(line)


class LoggedView(View):
    """A view that writes down what it is told."""

    def __init__(self, write: Write, makes: Callable[[Instance], Make | None] | None = None) -> None:
        super().__init__(makes)
        self._write: Final = write
        self._folding = False

    def add(self, instance: Instance) -> None:
        if not self._folding:
            self._write(line_of(Added(instance)))
        super().add(instance)

    def fold(self, reported: tuple[Reported, ...]) -> frozenset[InstanceId]:
        self._write(line_of(Folded(reported)))
        self._folding = True
        try:
            return super().fold(reported)
        finally:
            self._folding = False

    def seen(self, instance: InstanceId, models: tuple[dict[str, object], ...] | None, load: Load | None) -> None:
        self._write(line_of(Seen(instance, models, load)))
        super().seen(instance, models, load)

    def probe_failed(self, instance: InstanceId) -> bool:
        self._write(line_of(ProbeFailed(instance)))
        return super().probe_failed(instance)

    def unreachable(self, instance: InstanceId) -> bool:
        self._write(line_of(Unreachable(instance)))
        return super().unreachable(instance)

    def leg_started(self, instance: InstanceId) -> None:
        self._write(line_of(LegStarted(instance)))
        super().leg_started(instance)

    def leg_ended(self, instance: InstanceId) -> None:
        self._write(line_of(LegEnded(instance)))
        super().leg_ended(instance)


def logged(name: str, policy: Policy, write: Write) -> Policy:
    """A policy that writes down what it says."""

    def choose(fleet: Fleet, wanted: Wanted) -> Chosen:
        chosen = policy(fleet, wanted)
        write(line_of(Decided(name, wanted, chosen)))
        return chosen

    return choose


def apply(entry: Entry, view: View) -> None:
    """Tell a view what a log says. Choices change nothing by themselves: what they led to is in the log as well."""
    match entry:
        case Added(instance):
            view.add(instance)
        case Folded(reported):
            view.fold(reported)
        case Seen(instance, models, load):
            view.seen(instance, models, load)
        case ProbeFailed(instance):
            view.probe_failed(instance)
        case Unreachable(instance):
            view.unreachable(instance)
        case LegStarted(instance):
            view.leg_started(instance)
        case LegEnded(instance):
            view.leg_ended(instance)
        case Decided():
            pass
