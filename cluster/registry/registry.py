"""The interface of a registry, whatever stores it: agents and routers are written against this protocol.

The registry holds heartbeats and arbitrates names; it decides nothing else. `membership` gives heartbeats their
meaning.

    agent:   epoch = await registry.next_epoch(name, last)    before each start of the engine, and before each claim
             await registry.claim(beat)                       Claimed, or Refused: another agent has the name
             await registry.beat(beat)                        about every second, and at once when the state changes
             await registry.post(author, items)               items for other members; lost a ttl after the last `keep`
             await registry.leave(name, agent)                last of all
    reader:  changes = await fold_members(registry, membership, now)          RegistryDown: it knows what it knew
             await registry.wait_changed(0.5)
             await registry.send_note(note)                   to the other routers; they take it with `next_note`

A refused agent may claim again later, with a newly drawn epoch: readers accept a freed name's next owner only with an
epoch above the last owner's.

Every call ends within the time limit that the registry was made with. If the registry cannot be reached, a call raises
`RegistryDown`, and the caller goes on with what it knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from cluster.errors import BatonError
from cluster.registry.membership import Change, Heartbeat, MemberKind, Membership, MemberState

DEFAULT_CLUSTER = "default"

ITEM_BYTES_MAX = 8 << 20
"""Largest posted item: the metadata of an engine of hundreds of ranks."""

ITEMS_MAX = 4096
"""Most items of one author: one for each instance that may meet it."""


class RegistryDown(BatonError):
    """The registry cannot be reached, or refuses to work. The message says which of both and why, and holds no
    password.
    """


@dataclass(frozen=True, slots=True)
class Claimed:
    """The name is this agent's; its heartbeat is written."""


@dataclass(frozen=True, slots=True)
class Beaten:
    """The heartbeat is written and the name is still this agent's."""


@dataclass(frozen=True, slots=True)
class NameRefused:
    """The name is another agent's, and readers see nothing of this agent. The message names both agents."""

    because: str


class Author(NamedTuple):
    """The author of posted items: one life of an instance, by its agent."""

    name: str
    agent: str
    epoch: int


class Registry(Protocol):
    """Where a fleet's heartbeats are kept. Safe to use from several tasks of one event loop."""

    @property
    def ttl_s(self) -> float:
        """Seconds after which the name of a silent owner is free again."""

    @property
    def all_proven(self) -> bool:
        """Whether every heartbeat that is read has a proven sender. False: any holder of the registry's password may
        have written it.
        """

    @property
    def takes_writes(self) -> bool:
        """Whether the last heartbeat or epoch that this program asked for could be written, or it has asked for none.

        False: other programs' heartbeats may not be written either, so no member's silence says anything. A Redis that
        is a replica, lacks replicas, or whose disk is full, answers readers all the same.
        """

    async def claim(self, beat: Heartbeat) -> Claimed | NameRefused:
        """Take the name, if it is free or already this agent's, and write the heartbeat."""

    async def beat(self, beat: Heartbeat) -> Beaten | NameRefused:
        """Write a heartbeat and keep the name for another ttl.

        Takes a free name as `claim` does: the next heartbeats of all agents fill a registry that lost its data. Refused
        to an agent that has said goodbye.
        """

    async def leave(self, name: str, agent: str, kind: MemberKind = MemberKind.INSTANCE) -> bool:
        """Say goodbye: readers hear `MemberState.GONE`, and the name is free at once. False if the name was another
        agent's.
        """

    async def next_epoch(self, name: str, above: int = 0) -> int:
        """An epoch that was never given out for this name, and is above `above` (the caller's own last one)."""

    async def read(self, kind: MemberKind = MemberKind.INSTANCE) -> tuple[Heartbeat, ...]:
        """The last heartbeat of each name's owner, and goodbyes. Unreadable entries are logged and left out."""

    def unproven(self, kind: MemberKind) -> Mapping[str, str]:
        """By name, why the heartbeat at the last reading did not prove its sender. Empty without keys."""

    async def post(self, author: Author, items: Mapping[str, bytes]) -> None:
        """Replace what this author posted before with these items, for a ttl. Only readers know what the items mean.

        Items of an earlier life of the instance stay beside these, for as long as that life's author keeps them.

        Raises:
            ValueError: an item is larger than `ITEM_BYTES_MAX`, or there are more than `ITEMS_MAX`.
        """

    async def keep(self, author: Author) -> bool:
        """Keep the posted items for another ttl. False: they are gone, and must be posted again."""

    async def unpost(self, author: Author) -> None:
        """Remove all items of this author."""

    async def posted(self, authors: Sequence[Author], item: str) -> tuple[bytes | None, ...]:
        """For each author, its item of that name; None: it has none. Any program that reaches the registry may have
        written the item.
        """

    async def wait_changed(self, timeout_s: float) -> bool:
        """Wait until something other than load changes (True) or `timeout_s` passes; sleep while the registry is down.

        A change between two calls ends the second call at once. A change before the first call, or while the registry
        is down, is found by `read` only. So a True is a reason to read early, never the only reason to read.
        """

    async def send_note(self, note: bytes) -> None:
        """Send a note to every router that takes notes now. It is kept for none that does not, and may be lost."""

    async def next_note(self, timeout_s: float, *, anew: bool = False) -> bytes | None:
        """The next note from any router, this one included; None: none has come in time. Any program that reaches the
        registry may have sent it. One caller at a time. Notes from before the first call are lost.

        Args:
            timeout_s: the longest wait.
            anew: listen over a new connection: the present one brings nothing any more.
        """

    async def close(self) -> None:
        """Close all connections, without a goodbye."""


async def fold_members(
    registry: Registry, membership: Membership, now: float, kind: MemberKind = MemberKind.INSTANCE
) -> tuple[Change, ...]:
    """Read the members of a kind, and fold them in at `now`, on the reader's clock. See `read_members`.

    Raises:
        RegistryDown: the registry cannot be read.
    """
    heard = await read_members(registry, {kind: membership})
    return membership.fold(heard[kind], now)


async def read_members(
    registry: Registry, memberships: Mapping[MemberKind, Membership]
) -> dict[MemberKind, tuple[Heartbeat, ...]]:
    """Read the members of each kind, for the caller to fold in. Their silence counts only while the registry answers
    and takes heartbeats: a reading that fails or is cancelled makes all memberships deaf, and so does a registry that
    takes no heartbeats.

    Raises:
        RegistryDown: the registry cannot be read.
    """
    silence_counts = False
    try:
        heard = {kind: await registry.read(kind) for kind in memberships}
        silence_counts = registry.takes_writes
    finally:
        if not silence_counts:
            for membership in memberships.values():
                membership.deaf()
    return heard


def refusal(beat: Heartbeat, holder: Heartbeat | None, holder_agent: str) -> NameRefused:
    """Refuse `beat`: its name belongs to `holder_agent`, whose last heartbeat (if there is one) is `holder`."""
    if holder is None:
        owner = f"agent {holder_agent[:12]}"
    else:
        owner = f"{holder.who} ({holder.state.value}, epoch {holder.epoch})"
    return NameRefused(
        f"the name {beat.id} belongs to {owner}; this is {beat.who}. Give one of them another name, "
        "or wait: the name of an agent that fell silent is free after a few seconds"
    )


def said_goodbye(beat: Heartbeat) -> NameRefused:
    """Refuse an agent that has left: a late heartbeat of it must not undo the goodbye."""
    return NameRefused(f"{beat.who} has said goodbye as {beat.id}")


def goodbye(last: Heartbeat) -> Heartbeat:
    """The heartbeat that stays in the registry for a ttl after `last`, so that readers learn of the leave."""
    return replace(last, state=MemberState.GONE, seq=last.seq + 1, detail="")


def check_items(items: Mapping[str, bytes]) -> None:
    """Check posted items against the limits.

    Raises:
        ValueError: there are too many items, or one is too large.
    """
    if len(items) > ITEMS_MAX or any(len(value) > ITEM_BYTES_MAX for value in items.values()):
        raise ValueError(f"at most {ITEMS_MAX} items of at most {ITEM_BYTES_MAX} bytes can be posted")


def worth_a_nudge(before: Heartbeat | None, beat: Heartbeat) -> bool:
    """Whether readers should read now and not at their next turn."""
    return before is None or (before.state, before.epoch, before.role) != (beat.state, beat.epoch, beat.role)
