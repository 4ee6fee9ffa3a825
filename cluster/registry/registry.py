"""What a registry does, whatever keeps it: the protocol that agents and routers are written against.

The registry holds heartbeats and arbitrates names; it decides nothing else. What heartbeats mean is `membership`.

    agent:   epoch = await registry.next_epoch(name, last)    before each start of the engine, and before each claim
             await registry.claim(beat)                       Claimed, or Refused: another agent has the name
             await registry.beat(beat)                        about every second, and at once when the state changes
             await registry.post(author, items)               for others by name; kept by asking again within a ttl
             await registry.leave(name, agent)                last of all
    router:  changes = membership.fold(await registry.read(), now, wall)      or, on RegistryDown, membership.deaf(now)
             await registry.wait_changed(0.5)

An agent that was refused may claim again later, with an epoch drawn again: readers take a freed name's next owner only
with an epoch above the last owner's.

Every call ends within the time limit the registry was made with. One that cannot be reached raises `RegistryDown`, and
the caller goes on with what it knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from cluster.errors import BatonError
from cluster.registry.membership import Heartbeat, Kind, State

DEFAULT_CLUSTER = "default"

ITEM_BYTES_MAX = 8 << 20
"""Largest posted item: the metadata of an engine of hundreds of ranks."""

ITEMS_MAX = 4096
"""Most items of one author: one for each instance that it may meet."""


class RegistryDown(BatonError):
    """The registry cannot be reached or refuses to work. The message says which and why, never a password."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The name is this agent's; its heartbeat is written."""


@dataclass(frozen=True, slots=True)
class Beaten:
    """The heartbeat is written and the name is still this agent's."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The name is another agent's, and nothing of ours is visible to readers. The message names both agents."""

    because: str


class Author(NamedTuple):
    """Who posts: one life of an instance, by its agent."""

    name: str
    agent: str
    epoch: int


class Registry(Protocol):
    """Where a fleet's heartbeats are kept. Safe to use from several tasks of one event loop."""

    @property
    def ttl_s(self) -> float:
        """Seconds after which a name whose owner fell silent is free again."""

    @property
    def all_proven(self) -> bool:
        """Whether what is read has proven whose it is. False: any holder of the registry's password may have written
        it.
        """

    async def claim(self, beat: Heartbeat) -> Claimed | Refused:
        """Take the name, if it is free or already ours, and write the heartbeat."""

    async def beat(self, beat: Heartbeat) -> Beaten | Refused:
        """Write a heartbeat and keep the name for another ttl.

        Takes a free name as `claim` does: a registry that lost its data is filled again by everybody's next heartbeat.
        Refused to an agent that has said goodbye.
        """

    async def leave(self, name: str, agent: str, kind: Kind = Kind.INSTANCE) -> bool:
        """Say goodbye: readers hear `State.GONE`, the name is free at once. False if the name was not ours."""

    async def next_epoch(self, name: str, above: int = 0) -> int:
        """An epoch that was never given out for this name, and is above `above` (the caller's own last one)."""

    async def read(self, kind: Kind = Kind.INSTANCE) -> tuple[Heartbeat, ...]:
        """The last heartbeat of everyone who owns a name, and goodbyes. What cannot be read is logged and left out."""

    def unproven(self, kind: Kind) -> Mapping[str, str]:
        """Names that the last reading found a heartbeat under which proves nothing, and why. None without keys."""

    async def post(self, author: Author, items: Mapping[str, bytes]) -> None:
        """Put these in the place of what this author posted before, for a ttl. What they are, only readers know.

        An author of a former life of the instance posts beside it, for as long as it keeps on.

        Raises:
            ValueError: an item larger than `ITEM_BYTES_MAX`, or more than `ITEMS_MAX`.
        """

    async def keep(self, author: Author) -> bool:
        """Keep what was posted for another ttl. False: it is not there any more, and must be posted anew."""

    async def unpost(self, author: Author) -> None:
        """Take it all away."""

    async def posted(self, authors: Sequence[Author], item: str) -> tuple[bytes | None, ...]:
        """The item of that name of each author. Anybody who reaches the registry may have written it."""

    async def wait_changed(self, timeout_s: float) -> bool:
        """Until something other than load changed (True) or `timeout_s` passed; sleeps while the registry is down.

        A change between two calls ends the second one at once; one before the first call, or while the registry is
        down, is for `read` to find. So it is a reason to read early, never the only one.
        """

    async def close(self) -> None:
        """Close what is open. Says no goodbye."""


def refusal(beat: Heartbeat, holder: Heartbeat | None, holder_agent: str) -> Refused:
    """The name that `beat` wants is `holder_agent`'s, whose last heartbeat (if there still is one) is `holder`."""
    if holder is None:
        owner = f"agent {holder_agent[:12]}"
    else:
        owner = f"{holder.who} ({holder.state.value}, epoch {holder.epoch})"
    return Refused(
        f"the name {beat.id} belongs to {owner}; this is {beat.who}. Give one of them another name, "
        "or wait: the name of an agent that fell silent is free after a few seconds"
    )


def said_goodbye(beat: Heartbeat) -> Refused:
    """An agent that left stays out: a heartbeat of its that comes late must not undo the goodbye."""
    return Refused(f"{beat.who} has said goodbye as {beat.id}")


def goodbye(last: Heartbeat) -> Heartbeat:
    """What stands in the registry for a ttl after `last`, so that readers hear of it."""
    return replace(last, state=State.GONE, seq=last.seq + 1, detail="")


def check_items(items: Mapping[str, bytes]) -> None:
    """Refuse what no registry should keep.

    Raises:
        ValueError: too many, or too large.
    """
    if len(items) > ITEMS_MAX or any(len(value) > ITEM_BYTES_MAX for value in items.values()):
        raise ValueError(f"at most {ITEMS_MAX} items of at most {ITEM_BYTES_MAX} bytes can be posted")


def worth_a_nudge(before: Heartbeat | None, beat: Heartbeat) -> bool:
    """Whether readers should look now and not at their next turn."""
    return before is None or (before.state, before.epoch, before.role) != (beat.state, beat.epoch, beat.role)
