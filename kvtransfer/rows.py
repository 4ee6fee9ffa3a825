"""Rules as rows of a table: from a state and a cause to the next state, and the acts on the way. Pure.

`prefill.table` and `decode.table` hold the rows of a hand-over. A pair without a row changes nothing: a peer may send a
message twice, late, or about another life of an engine, and the machine that follows the table counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=StrEnum)
C = TypeVar("C", bound=StrEnum)
A = TypeVar("A", bound=StrEnum)


class TransitionRow(NamedTuple, Generic[S, A]):
    """The next state, and the acts on the way."""

    state: S
    acts: tuple[A, ...] = ()
    """The acts, in order."""


Table = Mapping[S, Mapping[C, TransitionRow[S, A]]]
"""All rows, by state and cause. A state without rows is final."""


def rows(of: Table[S, C, A]) -> Iterator[tuple[S, C, TransitionRow[S, A]]]:
    """All rows of a table, one by one."""
    for state, causes in of.items():
        for cause, row in causes.items():
            yield state, cause, row
