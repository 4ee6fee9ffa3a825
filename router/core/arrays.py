"""Columns as numpy arrays: their types, and how they grow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

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


class Mirror:
    """Numbers of objects, one object a row, as columns: changed numbers are copied when a column is read.

    For a few rows it is quicker to read the objects: compiled code reads an attribute without making a Python number.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: the attributes that have a column."""
        self._columns: Final[dict[str, Floats]] = {name: np.zeros(0) for name in names}
        self._stale: Final[set[int]] = set()

    def changed(self, row: int) -> None:
        """The object of this row has changed, or the row has another object."""
        self._stale.add(row)

    def read(self, rows: Sequence[object], name: str) -> Floats:
        """The column of this attribute."""
        if self._stale:
            self._copy(rows)
        return self._columns[name]

    def _copy(self, rows: Sequence[object]) -> None:
        columns = self._columns
        for name, column in columns.items():
            if len(column) < len(rows):
                columns[name] = np.concatenate([column, np.zeros(len(rows) - len(column))])
        for name, column in columns.items():
            for row in self._stale:
                column[row] = getattr(rows[row], name)
        self._stale.clear()
