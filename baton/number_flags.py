"""Numbers on the command line: what argparse reads and refuses. `float` alone takes `nan` and `inf`, which no clock
reaches.
"""

from __future__ import annotations

import argparse
import math


def above_zero(text: str) -> float:
    """For argparse: a finite number above 0."""
    value = _number(text)
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def zero_or_more(text: str) -> float:
    """For argparse: a finite number, 0 or more."""
    value = _number(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} must be a number, 0 or more")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
