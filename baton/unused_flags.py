"""Refuses flags that would have no effect: if a flag is silently ignored, the result is not what was asked for."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from cluster.errors import UsageError


def refuse_given(args: argparse.Namespace, names: Iterable[str], because: str) -> None:
    """Refuse each of these flags if it was given.

    Args:
        args: the command's.
        names: as in `args`, such as ``trial_s`` for ``--trial-s``. A flag that is not given is None, False, [] or {}.
        because: the rest of the message after the flag's name: why it has no effect, and what to do.

    Raises:
        UsageError: one was given.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False and value not in ([], {}):
            raise UsageError(f"--{name.replace('_', '-')} {because}")
