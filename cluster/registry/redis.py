"""The registry in Redis (tested with 7.0; no command newer than Redis 3). A shell.

`cluster.registry.layout` has the keys; each key expires by itself, and no call scans the keyspace. `redis_names` takes
and keeps names and writes heartbeats, `redis_link` has the connections. A reading is two round trips: the set of
members, then all locks and heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from redis.asyncio.client import PubSub, Redis
from redis.exceptions import RedisError, WatchError

from cluster.errors import UsageError
from cluster.registry.layout import NUDGED, Keys, MemberKey
from cluster.registry.membership import TTL_S, Heartbeat, MemberKind, MemberState, next_epoch
from cluster.registry.proofs import Hearing, Proofs
from cluster.registry.redis_link import RACES_MAX, RedisAddress, RedisLink, cancelled, parse_place, text
from cluster.registry.redis_names import HeldNames
from cluster.registry.registry import (
    DEFAULT_CLUSTER,
    Author,
    Beaten,
    Claimed,
    NameRefused,
    RegistryDown,
    check_items,
)

logger = logging.getLogger("baton.registry")

TIMEOUT_S = 1.0
"""Longest time for one call, connecting included: a heartbeat that takes longer is better sent again."""

EPOCH_KEPT_S = 30 * 86400
"""How long the last epoch of a name is kept. A forgotten epoch does no harm (`next_epoch`)."""

EPOCH_DIGITS_MAX = 19
"""A longer number is no epoch of Baton's (`membership.EPOCH_MAX`)."""

NUDGES_MAX = 1000
"""Change messages taken off the connection for one reading: a whole fleet that starts is one change."""

NUDGES_AT_ONCE = 20
"""Messages between two turns of other tasks: a millisecond's work."""

_CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class RedisRegistry:
    """See `Registry`. Connects at its first call, and again after a connection breaks.

    Long, as `Registry` is one interface: a short method for each of its calls.
    """

    def __init__(
        self,
        place: RedisAddress,
        *,
        cluster: str = DEFAULT_CLUSTER,
        ttl_s: float = TTL_S,
        timeout_s: float = TIMEOUT_S,
        proofs: Proofs | None = None,
    ) -> None:
        if not _CLUSTER.fullmatch(cluster):
            raise UsageError(f"--cluster {cluster!r}: letters, digits, dot, dash and underscore, 64 at most")
        self.ttl_s = ttl_s
        self._keys = Keys(cluster)
        self._ttl_ms = int(ttl_s * 1000)
        self._link = RedisLink(place, timeout_s)
        self._redis = self._link.client
        self._names = HeldNames(self._link, self._keys, ttl_s, cluster, proofs)
        self._silent: dict[MemberKind, set[bytes]] = {kind: set() for kind in MemberKind}
        self._hearing = Hearing(cluster, proofs, logger.warning)
        self._nudges: PubSub | None = None
        self._notes: PubSub | None = None
        self._listening = False

    @classmethod
    def open(
        cls,
        url: str,
        *,
        cluster: str = DEFAULT_CLUSTER,
        password_file: Path | None = None,
        ca_file: Path | None = None,
        ttl_s: float = TTL_S,
        timeout_s: float = TIMEOUT_S,
        proofs: Proofs | None = None,
    ) -> Self:
        """A registry by its URL. Reads files, but does not use the network.

        Raises:
            UsageError: the URL or a file cannot be used.
        """
        place = parse_place(url, password_file, ca_file)
        return cls(place, cluster=cluster, ttl_s=ttl_s, timeout_s=timeout_s, proofs=proofs)

    def __repr__(self) -> str:
        return f"RedisRegistry({self._link.place}, {self._keys.prefix!r})"

    @property
    def takes_writes(self) -> bool:
        return self._link.takes_writes

    # --- agents ------------------------------------------------------------------------------------------------------

    async def claim(self, beat: Heartbeat) -> Claimed | NameRefused:
        return await self._names.put(beat) or Claimed()

    async def beat(self, beat: Heartbeat) -> Beaten | NameRefused:
        return await self._names.put(beat) or Beaten()

    async def leave(self, name: str, agent: str, kind: MemberKind = MemberKind.INSTANCE) -> bool:
        return await self._names.leave((kind, name, agent))

    async def next_epoch(self, name: str, above: int = 0) -> int:
        async with self._link.asking(writes=True):
            for _ in range(RACES_MAX):
                with contextlib.suppress(WatchError):
                    return await self._draw_epoch(self._keys.epoch(name), above)
        raise RegistryDown(f"the registry at {self._link.place}: the epoch of {name} is fought over")

    async def post(self, author: Author, items: Mapping[str, bytes]) -> None:
        check_items(items)
        key, fields = self._posts(author), dict[Any, Any](items)  # the library's type of a mapping is invariant
        async with self._link.asking(), self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            if items:
                pipe.hset(key, mapping=fields)
                pipe.pexpire(key, self._ttl_ms)
            await pipe.execute()

    async def keep(self, author: Author) -> bool:
        kept: Any = False
        async with self._link.asking():
            kept = await self._redis.pexpire(self._posts(author), self._ttl_ms)
        return bool(kept)

    async def unpost(self, author: Author) -> None:
        async with self._link.asking():
            await self._redis.delete(self._posts(author))

    # --- readers -----------------------------------------------------------------------------------------------------

    async def read(self, kind: MemberKind = MemberKind.INSTANCE) -> tuple[Heartbeat, ...]:
        silent = self._silent[kind]
        self._hearing.begin(kind)
        async with self._link.asking():
            async with self._redis.pipeline(transaction=False) as pipe:
                if silent:
                    pipe.srem(self._keys.members(kind), *silent)
                pipe.smembers(self._keys.members(kind))
                *_, found = await pipe.execute(raise_on_error=False)  # this user may not be allowed to remove members
            if isinstance(found, Exception):
                await self._heal(self._keys.members(kind), found)
                raise found
            entries = sorted(found)
            silent.clear()
            members = {entry: _member(kind, entry) for entry in entries}
            known = {entry: member for entry, member in members.items() if member is not None}
            silent.update(members.keys() - known.keys())
            if not known:
                return ()
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.mget([self._keys.lock(kind, name) for _, name, _ in known.values()])
                pipe.mget([self._keys.beat(*member) for member in known.values()])
                owners, payloads = await pipe.execute()
        silent.update(entry for entry, payload in zip(known, payloads, strict=True) if payload is None)
        return self._heard(list(zip(known.values(), owners, payloads, strict=True)))

    @property
    def all_proven(self) -> bool:
        return self._hearing.all_proven

    def unproven(self, kind: MemberKind) -> Mapping[str, str]:
        return self._hearing.unproven(kind)

    async def posted(self, authors: Sequence[Author], item: str) -> tuple[bytes | None, ...]:
        if not authors:
            return ()
        found: list[Any] = []
        async with self._link.asking(), self._redis.pipeline(transaction=False) as pipe:
            for author in authors:
                pipe.hmget(self._posts(author), [item])  # the stand-in answers HGET with a line; bytes may break it
            found = await pipe.execute(raise_on_error=False)  # one key that is no hash does not spoil the others
        return tuple(answer[0] if isinstance(answer, list) else None for answer in found)

    async def wait_changed(self, timeout_s: float) -> bool:
        """See `Registry`. Changes between two calls are kept. One caller at a time; a second one only sleeps."""
        until = asyncio.get_running_loop().time() + timeout_s
        if not self._listening:
            self._listening = True
            before = cancelled()
            try:
                return await self._nudged(until)
            except (RedisError, OSError, ValueError, RegistryDown):  # the next `read` raises the reason
                if cancelled() > before:
                    raise asyncio.CancelledError from None  # see `RedisLink.asking`
                await self._stop_listening()
            finally:
                self._listening = False
        await asyncio.sleep(max(0.0, until - asyncio.get_running_loop().time()))
        return False

    async def _nudged(self, until: float) -> bool:
        if self._nudges is None:
            self._nudges = await _subscribed(self._link, self._redis, *(self._keys.changed(kind) for kind in NUDGED))
        while (left_s := until - asyncio.get_running_loop().time()) > 0:
            if await self._nudge(left_s):
                for _ in range(NUDGES_MAX // NUDGES_AT_ONCE):
                    if not await self._some_nudges():
                        break
                    await asyncio.sleep(0)  # redis-py does not wait while more is there
                return True
        return False

    async def _some_nudges(self) -> bool:
        """Take `NUDGES_AT_ONCE` messages off the connection. Returns whether there may be more."""
        for _ in range(NUDGES_AT_ONCE):
            if not await self._nudge(0.0):
                return False
        return True

    async def _nudge(self, timeout_s: float) -> bool:
        assert self._nudges is not None
        return await self._link.next_message(self._nudges, timeout_s) is not None

    async def send_note(self, note: bytes) -> None:
        async with self._link.asking():
            await self._redis.publish(self._keys.notes, note)

    async def next_note(self, timeout_s: float, *, anew: bool = False) -> bytes | None:
        if anew:
            await self._stop_notes()
        before = cancelled()
        until, message = asyncio.get_running_loop().time() + timeout_s, None
        try:
            if self._notes is None:
                self._notes = await _subscribed(self._link, self._redis, self._keys.notes)
            while message is None and (left_s := until - asyncio.get_running_loop().time()) > 0:
                message = await self._link.next_message(self._notes, left_s)
        except (RedisError, OSError, ValueError) as error:
            if cancelled() > before:
                raise asyncio.CancelledError from None  # see `RedisLink.asking`
            await self._stop_notes()
            raise RegistryDown(f"the registry at {self._link.place} sends no notes: {type(error).__name__}") from None
        note = None if message is None else message.get("data")
        return note if isinstance(note, bytes) else None

    async def close(self) -> None:
        await self._stop_notes()
        await self._stop_listening()
        await self._link.close()

    async def _heal(self, key: str, fault: Exception) -> None:
        """Remove a key that is of another type: one command of one program would stop the fleet until then."""
        if str(fault).startswith("WRONGTYPE"):
            with contextlib.suppress(RedisError):  # this user may not be allowed to; another reader is
                await self._redis.delete(key)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _posts(self, author: Author) -> str:
        return self._keys.posted(author.name, author.agent, author.epoch)

    async def _draw_epoch(self, key: str, above: int) -> int:
        """Try once to count an epoch up.

        Raises:
            WatchError: another agent drew an epoch meanwhile.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(key)
            stored: Any = await pipe.get(key)
            clock_s, _microseconds = await pipe.time()
            digits = stored if stored and stored.isdigit() and len(stored) < EPOCH_DIGITS_MAX else None
            epoch = next_epoch(None if digits is None else int(digits), above, float(clock_s))
            pipe.multi()  # type: ignore[no-untyped-call] # the library's gap
            pipe.set(key, epoch, ex=EPOCH_KEPT_S)
            await pipe.execute()
        return epoch

    def _heard(self, found: Sequence[tuple[MemberKey, bytes | None, bytes | None]]) -> tuple[Heartbeat, ...]:
        """The heartbeats that a reading contributes: those of the locks' owners, and goodbyes.

        `found` has, for each member, the owner of its name's lock and its heartbeat as written.
        """
        heard: list[tuple[Heartbeat, str]] = []
        for (kind, name, agent), owner, payload in found:
            if payload is None:
                self._hearing.gone(kind, name, agent)
                continue
            beat = self._hearing.hear(kind, name, agent, payload)
            if beat is not None:
                heard.append((beat, text(owner)))
        told = {(beat.id, beat.agent) for beat, _ in heard if beat.state is not MemberState.GONE}
        # With a fleet's keys, a lock counts only together with its owner's proven heartbeat.
        proves = self._hearing.all_proven
        return tuple(
            beat
            for beat, owner in heard
            if beat.state is MemberState.GONE or owner == beat.agent or (proves and (beat.id, owner) not in told)
        )

    async def _stop_notes(self) -> None:
        notes, self._notes = self._notes, None
        if notes is not None:
            await _close(notes)

    async def _stop_listening(self) -> None:
        nudges, self._nudges = self._nudges, None
        if nudges is not None:
            await _close(nudges)


async def _subscribed(link: RedisLink, redis: Redis, *channels: str) -> PubSub:
    messages: PubSub = redis.pubsub()
    try:
        async with link.asking():
            await messages.subscribe(*channels)
    except BaseException:  # a cancellation too: no other call uses the connection until it is returned
        await _close(messages)
        raise
    return messages


async def _close(messages: PubSub) -> None:
    with contextlib.suppress(RedisError, OSError):
        await messages.aclose()  # type: ignore[no-untyped-call]


def _member(kind: MemberKind, entry: bytes) -> MemberKey | None:
    """Kind, name and agent of an entry of the set; None for an entry that Baton never wrote."""
    name, space, agent = text(entry).partition(" ")
    return (kind, name, agent) if space and name and agent else None
