"""A rule is a row of a table: from a state and a cause to the next state, and what is done on the way. Pure.

`prefill.table` and `decode.table` hold the rows of a hand-over. What has no row changes nothing: a peer may say
anything, twice, late, or about another life of an engine, and the machine that follows a table counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=StrEnum)
C = TypeVar("C", bound=StrEnum)
A = TypeVar("A", bound=StrEnum)


class Row(NamedTuple, Generic[S, A]):
    """What follows."""

    state: S
    acts: tuple[A, ...] = ()
    """In this order."""


Table = Mapping[S, Mapping[C, Row[S, A]]]
"""Every row there is, by state and cause. A state without rows is an end."""


def rows(of: Table[S, C, A]) -> Iterator[tuple[S, C, Row[S, A]]]:
    """All rows of a table, one by one."""
    for state, causes in of.items():
        for cause, row in causes.items():
            yield state, cause, row
