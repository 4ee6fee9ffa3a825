"""The engine processes of one `baton up`: which there are, how each was added, and its state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.local import Program
from baton.plan import PlacedEngine


@dataclass(slots=True, kw_only=True)
class LocalMember:
    """One engine of this cluster."""

    planned: PlacedEngine
    program: Program
    pool: str
    """Its pool of the cluster file: the stem of its name."""
    asked_s: float = field(default_factory=time.monotonic)
    later: bool = False
    """Whether it was started while the cluster served: if it fails, the cluster goes on without it."""
    model: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    """Whether it was told to drain and end, or to end."""
    failed: str = ""
    """Why it ended for good."""

    @property
    def name(self) -> str:
        """Its instance's."""
        return self.planned.wanted.name


class Members:
    """All engines by name, in the order in which they were added."""

    def __init__(self) -> None:
        self._found: dict[str, LocalMember] = {}

    def __iter__(self) -> Iterator[LocalMember]:
        return iter([*self._found.values()])

    def __len__(self) -> int:
        return len(self._found)

    def get(self, name: str) -> LocalMember | None:
        """The engine of this name."""
        return self._found.get(name)

    def add(self, member: LocalMember) -> None:
        """Add an engine."""
        self._found[member.name] = member

    def remove(self, member: LocalMember) -> None:
        """Remove an engine that has ended."""
        if self._found.get(member.name) is member:
            del self._found[member.name]

    @property
    def ports(self) -> set[int]:
        """That they listen on."""
        return {port for member in self._found.values() for port in member.planned.ports}


def pool_of(name: str) -> str:
    """``decode-3`` is the fourth of ``decode`` (`cluster.spec.plan.stems`)."""
    return name.rpartition("-")[0] or name
