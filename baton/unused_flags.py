"""Refuses flags that were given and that nothing would act on: a flag that is silently ignored is a wrong result."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from cluster.errors import UsageError


def refuse_given(args: argparse.Namespace, names: Iterable[str], because: str) -> None:
    """Refuse each of these flags if it was given.

    Args:
        args: the command's.
        names: as in `args`, such as ``trial_s`` for ``--trial-s``. Left out, they are None, False or empty.
        because: goes on after the flag's name, and names what it would go with, or what it does not.

    Raises:
        UsageError: one was given.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            raise UsageError(f"--{name.replace('_', '-')} {because}")
