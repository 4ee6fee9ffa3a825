"""The engines of one `baton up` as processes: which there are, how each came, and how it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.local import Program
from baton.plan import Planned


@dataclass(slots=True, kw_only=True)
class Member:
    """One engine of this cluster."""

    planned: Planned
    program: Program
    pool: str
    """Which pool of the cluster file it is of: what its name begins with."""
    asked_s: float = field(default_factory=time.monotonic)
    later: bool = False
    """It was started while the cluster served: if it fails, the cluster goes on without it."""
    model: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    """It was told to drain and end, or to end."""
    failed: str = ""
    """Why it has ended for good."""

    @property
    def name(self) -> str:
        """Its instance's."""
        return self.planned.wanted.name


class Members:
    """All there are, by name, in the order of their coming."""

    def __init__(self) -> None:
        self._found: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter([*self._found.values()])

    def __len__(self) -> int:
        return len(self._found)

    def get(self, name: str) -> Member | None:
        """The one of this name."""
        return self._found.get(name)

    def add(self, member: Member) -> None:
        """One more."""
        self._found[member.name] = member

    def remove(self, member: Member) -> None:
        """It has ended."""
        if self._found.get(member.name) is member:
            del self._found[member.name]

    @property
    def ports(self) -> set[int]:
        """That they listen on."""
        return {port for member in self._found.values() for port in member.planned.ports}


def pool_of(name: str) -> str:
    """``decode-3`` is the fourth of ``decode`` (`cluster.spec.plan.stems`)."""
    return name.rpartition("-")[0] or name
