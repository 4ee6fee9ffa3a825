"""Changes of a fleet at given times, read from a file. Pure; `sim.provisioning` carries them out.

One JSON object a line, or one list of them: {"at_s": 30, "do": "start", "pool": "decode", "instance": "decode-2"}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from sim.entries import known_only, one_of, read_entries, seconds
from sim.provisioning import Timed

FORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "start": ("pool", "instance"),
    "drain": ("instance", "deadline_s", "leave"),
    "resume": ("instance",),
    "flip": ("instance", "role"),
    "stop": ("instance",),
}
"""By kind of change (`do`), its fields beside `at_s` and `because`."""


def read_changes(text: str, pools: Sequence[str]) -> tuple[Timed, ...]:
    """Changes, in the order of their times.

    Args:
        text: a JSON list of objects, or one object a line.
        pools: the names of the pools of which instances can be started.

    Raises:
        UsageError: an entry is no change; names the entry, the field, its value and what fits.
    """
    found = read_entries(text, "change", lambda fields: _change(fields, pools))
    return tuple(sorted(found, key=lambda each: each.at_s))


def _change(fields: Mapping[str, Any], pools: Sequence[str]) -> Timed:
    kind = one_of("do", fields.get("do"), FORMS)
    known_only(fields, {"at_s", "do", "because", *FORMS[kind]}, kind)
    return Timed(seconds("at_s", fields.get("at_s")), _MAKE[kind](fields, pools))


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r:.60}: must be a name")
    return value


def _because(fields: Mapping[str, Any]) -> str:
    return str(fields.get("because", ""))


def _named(fields: Mapping[str, Any]) -> InstanceId:
    return InstanceId(_text(fields, "instance"))


def _start(fields: Mapping[str, Any], pools: Sequence[str]) -> do.Action:
    pool = one_of("pool", fields.get("pool"), pools)
    return do.Start(instance=_named(fields), pool=pool, because=_because(fields))


def _drain(fields: Mapping[str, Any], _: Sequence[str]) -> do.Action:
    leave = fields.get("leave", True)
    if not isinstance(leave, bool):
        raise ValueError(f"leave is {leave!r:.60}: must be true or false")  # noqa: TRY004 - told as any wrong value
    deadline_s = seconds("deadline_s", fields.get("deadline_s", do.DRAIN_S))
    return do.Drain(instance=_named(fields), deadline_s=deadline_s, leave=leave, because=_because(fields))


def _flip(fields: Mapping[str, Any], _: Sequence[str]) -> do.Action:
    role = Role(one_of("role", fields.get("role"), [each.value for each in Role]))
    return do.Flip(instance=_named(fields), role=role, because=_because(fields))


_MAKE: Final[Mapping[str, Callable[[Mapping[str, Any], Sequence[str]], do.ScriptedAction]]] = {
    "start": _start,
    "drain": _drain,
    "resume": lambda fields, _: do.Resume(instance=_named(fields), because=_because(fields)),
    "flip": _flip,
    "stop": lambda fields, _: do.Stop(instance=_named(fields), because=_because(fields)),
}
