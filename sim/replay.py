"""A live router's decision log, decided again by the simulator's view and policies: they are the same objects. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from router.decisions import Decided, Entry, apply
from router.journey import Chosen
from router.policy import POLICIES, Policy
from router.view import View


@dataclass(frozen=True, slots=True)
class Difference:
    """A choice that came out otherwise."""

    entry: int
    """Which entry of the log, from 0."""
    logged: Chosen
    here: Chosen


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a log came to."""

    entries: int
    choices: int
    differences: tuple[Difference, ...]


def replay(entries: Iterable[Entry], policies: Mapping[str, Policy] | None = None) -> Replayed:
    """Feed the log to a view of our own, make each choice again, and compare, its `because` included.

    A policy that keeps something between choices starts anew here, as the router's did where the log begins.
    """
    policies = POLICIES if policies is None else policies
    view, choices, differences, count = View(), 0, [], 0
    for number, entry in enumerate(entries):
        count += 1
        apply(entry, view)
        if isinstance(entry, Decided):
            choices += 1
            here = policies[entry.policy](view.all(), entry.wanted)
            if here != entry.chosen:
                differences.append(Difference(number, entry.chosen, here))
    return Replayed(count, choices, tuple(differences))
