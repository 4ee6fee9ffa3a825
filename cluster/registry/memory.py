"""A registry in this process' memory that behaves as the one in Redis: for fleets in one process, and for tests.

A shell only because its interface is `async`. Only `wait_changed` waits, and the clock is an argument.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.registry.membership import TTL_S, Heartbeat, MemberKind, MemberState, decode, next_epoch
from cluster.registry.proofs import Hearing, Proofs, parted, proven
from cluster.registry.registry import (
    DEFAULT_CLUSTER,
    Author,
    Beaten,
    Claimed,
    NameRefused,
    RegistryDown,
    check_items,
    goodbye,
    refusal,
    said_goodbye,
    worth_a_nudge,
)

logger = logging.getLogger("baton.registry")


@dataclass(slots=True)
class _Stored:
    beat: Heartbeat
    until: float
    payload: bytes
    """The bytes that Redis would hold."""


class MemoryRegistry:
    """See `Registry`. Epochs count from 1.

    `down` makes every call fail as if the registry could not be reached, `full` every call that writes; `forget` acts
    as a restart without its data.
    """

    def __init__(self, clock: Callable[[], float], ttl_s: float = TTL_S, proofs: Proofs | None = None) -> None:
        """An empty registry.

        Args:
            clock: gives seconds on a monotonic clock.
            ttl_s: seconds after which a silent owner's name is free.
            proofs: used for all programs that share the registry. With a fleet's keys they prove every heartbeat that
                is written, and judge every heartbeat that is read.
        """
        self.ttl_s = ttl_s
        self.down = self.full = False
        self._takes_writes = True
        self._hearing = Hearing(DEFAULT_CLUSTER, proofs, logger.warning)
        self._clock = clock
        self._owners: dict[tuple[MemberKind, str], _Stored] = {}
        self._goodbyes: dict[tuple[MemberKind, str, str], _Stored] = {}
        self._left: set[tuple[MemberKind, str, str]] = set()
        self._epochs: dict[str, int] = {}
        self._posted: dict[Author, tuple[dict[str, bytes], float]] = {}
        self._waiting: set[asyncio.Event] = set()
        self._missed = False
        self._notes: dict[asyncio.Task[object] | None, asyncio.Queue[bytes]] = {}
        """Notes by the task that takes them: each router has its own."""

    async def claim(self, beat: Heartbeat) -> Claimed | NameRefused:
        return self._put(beat) or Claimed()

    async def beat(self, beat: Heartbeat) -> Beaten | NameRefused:
        return self._put(beat) or Beaten()

    async def leave(self, name: str, agent: str, kind: MemberKind = MemberKind.INSTANCE) -> bool:
        now = self._reach(writes=True)
        self._left.add((kind, name, agent))
        owner = self._owners.get((kind, name))
        if owner is None or owner.beat.agent != agent:
            return False
        del self._owners[kind, name]
        last = goodbye(owner.beat)
        self._goodbyes[kind, name, agent] = _Stored(last, now + self.ttl_s, self._written(last))
        self._nudge()
        return True

    async def next_epoch(self, name: str, above: int = 0) -> int:
        self._reach(writes=True)
        self._epochs[name] = next_epoch(self._epochs.get(name), above, 0.0)
        return self._epochs[name]

    async def read(self, kind: MemberKind = MemberKind.INSTANCE) -> tuple[Heartbeat, ...]:
        self._reach()
        stored = [kept for key, kept in (*self._goodbyes.items(), *self._owners.items()) if key[0] is kind]
        if self._hearing.proofs is None:
            return tuple(kept.beat for kept in stored)
        self._hearing.begin(kind)
        said = ((kept.beat, kept.payload) for kept in stored)
        heard = (self._hearing.hear(kind, str(beat.id), beat.agent, payload) for beat, payload in said)
        return tuple(beat for beat in heard if beat is not None)

    @property
    def takes_writes(self) -> bool:
        return self._takes_writes

    @property
    def all_proven(self) -> bool:
        return self._hearing.all_proven

    def unproven(self, kind: MemberKind) -> Mapping[str, str]:
        return self._hearing.unproven(kind)

    async def post(self, author: Author, items: Mapping[str, bytes]) -> None:
        check_items(items)
        self._posted[author] = dict(items), self._reach(writes=True) + self.ttl_s

    async def keep(self, author: Author) -> bool:
        now = self._reach()
        if author not in self._posted:
            return False
        self._posted[author] = self._posted[author][0], now + self.ttl_s
        return True

    async def unpost(self, author: Author) -> None:
        self._reach()
        self._posted.pop(author, None)

    async def posted(self, authors: Sequence[Author], item: str) -> tuple[bytes | None, ...]:
        self._reach()
        return tuple(self._posted.get(author, ({}, 0.0))[0].get(item) for author in authors)

    async def wait_changed(self, timeout_s: float) -> bool:
        nudged = asyncio.Event()
        if self._missed:
            nudged.set()
        self._waiting.add(nudged)
        try:
            async with asyncio.timeout(timeout_s):
                await nudged.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(nudged)
        self._missed = False
        return True

    async def send_note(self, note: bytes) -> None:
        self._reach()
        for notes in self._notes.values():
            notes.put_nowait(note)

    async def next_note(self, timeout_s: float, *, anew: bool = False) -> bytes | None:
        self._reach()
        self._notes = {task: notes for task, notes in self._notes.items() if task is not None and not task.done()}
        notes = self._notes.setdefault(asyncio.current_task(), asyncio.Queue())
        try:
            async with asyncio.timeout(timeout_s):
                return await notes.get()
        except TimeoutError:
            return None

    async def close(self) -> None:
        self._waiting.clear()

    def forget(self) -> None:
        """Lose all data, as a registry without persistence does at a restart."""
        self._owners.clear()
        self._goodbyes.clear()
        self._posted.clear()
        self._epochs.clear()

    def plant(self, payload: bytes) -> None:
        """Replace an entry with bytes that any holder of the registry's password may write.

        Raises:
            ValueError: no reader would accept the bytes.
        """
        beat, fault = decode(payload)
        if beat is None:
            raise ValueError(fault)
        kept = _Stored(beat, self._reach() + self.ttl_s, payload)
        if beat.state is MemberState.GONE:
            self._goodbyes[beat.kind, beat.id, beat.agent] = kept
        else:
            self._owners[beat.kind, beat.id] = kept
        self._nudge()

    def _written(self, beat: Heartbeat) -> bytes:
        return proven(beat, self._hearing.cluster, self._hearing.proofs)

    def _put(self, beat: Heartbeat) -> NameRefused | None:
        now = self._reach(writes=True)
        payload = self._written(beat)
        kept, fault = decode(parted(payload)[0])  # as every reader of the real registry would read it
        assert kept is not None, fault
        if (beat.kind, beat.id, beat.agent) in self._left:
            return said_goodbye(beat)
        owner = self._owners.get((beat.kind, beat.id))
        if owner is not None and owner.beat.agent != beat.agent:
            return refusal(beat, owner.beat, owner.beat.agent)
        self._owners[beat.kind, beat.id] = _Stored(kept, now + self.ttl_s, payload)
        if worth_a_nudge(owner.beat if owner else None, beat):
            self._nudge()
        return None

    def _reach(self, *, writes: bool = False) -> float:
        """The current time, after entries past their ttl are removed."""
        refused = self.down or (writes and self.full)
        self._takes_writes = not refused if writes else self._takes_writes
        if refused:
            raise RegistryDown(f"the registry in memory is {'down' if self.down else 'full'}")
        now = self._clock()
        self._owners = {key: kept for key, kept in self._owners.items() if kept.until > now}
        self._goodbyes = {key: kept for key, kept in self._goodbyes.items() if kept.until > now}
        self._posted = {author: kept for author, kept in self._posted.items() if kept[1] > now}
        return now

    def _nudge(self) -> None:
        self._missed = not self._waiting
        for nudged in self._waiting:
            nudged.set()
