"""Numbers on the command line: what argparse reads and refuses. `float` alone takes `nan` and `inf`, which no clock
reaches.
"""

from __future__ import annotations

import argparse
import math
from typing import Final

from cluster.urls import PORT_MAX

LARGEST: Final = 1e12
"""A larger number is a slip of the hand, and what is computed of it may have no whole number of nanoseconds."""


def above_zero(text: str) -> float:
    """For argparse: a finite number above 0."""
    value = _number(text)
    if not 0 < value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0{_up_to(value)}")
    return value


def zero_or_more(text: str) -> float:
    """For argparse: a finite number, 0 or more."""
    value = _number(text)
    if not 0 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text} must be a number, 0 or more{_up_to(value)}")
    return value


def port(text: str) -> int:
    """For argparse: a port's number, or 0 for any that is free."""
    if not text.isdecimal() or len(text) > 5 or int(text) > PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text}: a port is a number from 0 to {PORT_MAX}")
    return int(text)


def shown(value: float) -> str:
    """A number for a message, however many digits it has."""
    return "of so many digits" if isinstance(value, int) and value > LARGEST else f"{value:g}"


def _up_to(value: float) -> str:
    return f", up to {LARGEST:g}" if value > LARGEST else ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
