"""The actions on the fleet while a load runs, and their times: read from text, checked, and due in order. Pure.

One action a line, seconds since the start of the load first:

    30s kill prefill-0                          the instance's agent and engine, at once (of a `baton up` here)
    30s drain decode-1 deadline_s=20            its agent: no new work
    60s resume decode-1
    45s role prefill-1 decode                   its agent: another role
    20s slow decode-0 factor=3 seconds=10       a mock's fault, by its name (docs/mock.md)
    40s clear decode-0                          all faults of this mock
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from cluster.errors import ApiError
from cluster.instance import Role
from engine.mock.faults import FaultKind, read_faults

FAULTS_MAX: Final = 10_000

_TIME: Final = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>ms|s|m|h)?")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_OWN: Final = {"kill": (), "drain": ("deadline_s",), "resume": (), "clear": ()}
"""Actions that are not faults of a mock, and the settings that they take; `role` is read apart."""


class Asks(StrEnum):
    """The program that carries an action out."""

    AGENT = "agent"
    MOCK = "mock"
    KERNEL = "kernel"


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One action."""

    at_s: float
    """Seconds since the start of the load."""
    do: str
    """kill, drain, resume, role, clear, or a fault's name."""
    target: str
    """The instance that the action is for."""
    body: dict[str, Any] = {}
    """Settings that are sent with the action."""

    @property
    def asks(self) -> Asks:
        """The program that carries the action out."""
        if self.do == "kill":
            return Asks.KERNEL
        return Asks.AGENT if self.do in {"drain", "resume", "role"} else Asks.MOCK

    def __str__(self) -> str:
        """`at 30 s: kill prefill-0`."""
        return f"at {self.at_s:g} s: {self.do} {self.target}"


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """One action that was done, or that failed."""

    at_s: float
    """When the action was due, seconds since the start of the load."""
    done_s: float
    """When it was done or given up, seconds since the start of the load."""
    what: str
    """`kill prefill-0`."""
    error: str | None = None


class BadAction(ValueError):
    """An action cannot be read. The message says in one line what is wrong and what to write."""


def read_lines(lines: Iterable[str]) -> list[Action]:
    """A file's actions, in order of time; empty lines and lines that begin with # are skipped.

    Raises:
        BadAction: a line cannot be read; the message has its number.
    """
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            found.append(read(text))
        except BadAction as error:
            raise BadAction(f"line {number}: {error}") from None
    if len(found) > FAULTS_MAX:
        raise BadAction(f"{len(found)} actions; at most {FAULTS_MAX}")
    return in_order(found)


def read(text: str) -> Action:
    """One action from its line.

    Raises:
        BadAction: the line cannot be read.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadAction(f"{text!r}: {error}") from None
    if len(words) < 3:
        raise BadAction(f"{text!r}: write WHEN WHAT INSTANCE, like `30s kill prefill-0`")
    at_s, do, target, more = _time(words[0]), words[1], words[2], words[3:]
    if do == "role":
        return Action(at_s=at_s, do=do, target=target, body={"role": _role(more)})
    settings = dict(_setting(word) for word in more)
    if do in _OWN:
        for name in settings:
            if name not in _OWN[do]:
                raise BadAction(f"`{do}` takes no `{name}`")
        return Action(at_s=at_s, do=do, target=target, body=settings)
    if do not in set(FaultKind):
        raise BadAction(f"{do!r} is nothing that can be done; known are role, {', '.join((*_OWN, *FaultKind))}")
    body = {"fault": do, **settings}
    try:
        read_faults(body)
    except ApiError as error:
        raise BadAction(error.message) from None
    return Action(at_s=at_s, do=do, target=target, body=body)


def in_order(actions: Iterable[Action]) -> list[Action]:
    """Sort actions by time; actions of one moment keep their order."""
    return sorted(actions, key=lambda each: each.at_s)


def _time(text: str) -> float:
    found = _TIME.fullmatch(text)
    seconds = float(found["number"]) * _SECONDS[found["unit"]] if found else math.nan
    if found is None or not math.isfinite(seconds):
        raise BadAction(f"{text!r} is no moment; write 30s, 1.5s, 500ms or 2m")
    return seconds


def _role(more: Sequence[str]) -> str:
    roles = [role.value for role in Role]
    if len(more) != 1 or more[0] not in roles:
        raise BadAction(f"`role` takes one of {', '.join(roles)}, like `45s role prefill-1 decode`")
    return more[0]


def _setting(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not name or not equals:
        raise BadAction(f"{word!r}: write NAME=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


class FaultTimeline:
    """Actions in order. `handle` gives those that are due now, each once; `next_wakeup` gives the next moment."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self._left = in_order(actions)

    def next_wakeup(self) -> float | None:
        """Seconds from the start of the load to the next action; None after the last one."""
        return self._left[0].at_s if self._left else None

    def handle(self, now: float) -> tuple[Action, ...]:
        """The actions that are due by now."""
        due = tuple(each for each in self._left if each.at_s <= now)
        del self._left[: len(due)]
        return due
