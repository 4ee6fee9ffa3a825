"""Changes of a fleet at given times, read from a file. Pure; `sim.provisioning` carries them out.

One JSON object a line, or one list of them: {"at_s": 30, "do": "start", "pool": "decode", "instance": "decode-2"}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from sim.provisioning import Timed

FORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "start": ("pool", "instance"),
    "drain": ("instance", "deadline_s", "leave"),
    "resume": ("instance",),
    "flip": ("instance", "role"),
    "stop": ("instance",),
}
"""By what is to be done, the fields that say it, beside `at_s` and `because`."""


def read_changes(text: str, pools: Sequence[str]) -> tuple[Timed, ...]:
    """Changes, in the order of their times.

    Args:
        text: a JSON list of objects, or one object a line.
        pools: what there is to start.

    Raises:
        UsageError: something in it is no change; says which one, the field, its value and what fits.
    """
    try:
        listed = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else list(map(json.loads, filter(str.strip, text.splitlines())))
        )
    except ValueError as error:
        raise UsageError(f"not JSON: {error}") from None
    except RecursionError:
        raise UsageError("not a list of changes: nested too deep") from None
    found = []
    for number, fields in enumerate(listed, 1):
        try:
            found.append(_change(fields, pools))
        except ValueError as error:
            raise UsageError(f"change {number}: {error}") from None
    return tuple(sorted(found, key=lambda each: each.at_s))


def _change(fields: Any, pools: Sequence[str]) -> Timed:
    if not isinstance(fields, dict):
        raise ValueError(f"{fields!r:.60} is no object")  # noqa: TRY004 - told as any wrong value
    kind = fields.get("do")
    if not isinstance(kind, str) or kind not in FORMS:
        raise ValueError(f"do is {kind!r:.60}: must be one of {', '.join(FORMS)}")
    known = {"at_s", "do", "because", *FORMS[kind]}
    for name in fields:
        if name not in known:
            raise ValueError(f"{name!r:.60} is no field of a {kind}: it has {', '.join(sorted(known))}")
    return Timed(_number(fields, "at_s"), _MAKE[kind](fields, pools))


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r:.60}: must be a number of seconds, 0 or more")
    return float(value)


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
    pool = _text(fields, "pool")
    if pool not in pools:
        raise ValueError(f"pool is {pool!r:.60}: must be one of {', '.join(pools)}")
    return do.Start(instance=_named(fields), pool=pool, because=_because(fields))


def _drain(fields: Mapping[str, Any], _: Sequence[str]) -> do.Action:
    leave = fields.get("leave", True)
    if not isinstance(leave, bool):
        raise ValueError(f"leave is {leave!r:.60}: must be true or false")  # noqa: TRY004 - told as any wrong value
    deadline_s = _number(fields, "deadline_s", do.DRAIN_S)
    return do.Drain(instance=_named(fields), deadline_s=deadline_s, leave=leave, because=_because(fields))


def _flip(fields: Mapping[str, Any], _: Sequence[str]) -> do.Action:
    role = _text(fields, "role")
    if role not in set(Role):
        raise ValueError(f"role is {role!r:.60}: must be one of {', '.join(Role)}")
    return do.Flip(instance=_named(fields), role=Role(role), because=_because(fields))


_MAKE: Final[Mapping[str, Callable[[Mapping[str, Any], Sequence[str]], do.ScriptedAction]]] = {
    "start": _start,
    "drain": _drain,
    "resume": lambda fields, _: do.Resume(instance=_named(fields), because=_because(fields)),
    "flip": _flip,
    "stop": lambda fields, _: do.Stop(instance=_named(fields), because=_because(fields)),
}
