"""Columns as numpy arrays: their types, and how they grow. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def grow(owner: object, names: Iterable[str], rows: int) -> None:
    """Extend these columns of `owner` to `rows` rows; new rows are zero."""
    for name in names:
        column: NDArray[Any] = getattr(owner, name)
        longer = np.zeros(rows, dtype=column.dtype)
        longer[: len(column)] = column
        setattr(owner, name, longer)
