"""The names that one program holds in Redis: its claims, its heartbeats, its goodbyes. A shell.

One heartbeat is one MULTI, sent as one pipeline: take the lock if it is free, extend it, read its owner, write the
payload, join the set.

Why no script is needed, though the pipeline extends a lock before it knows the owner:

- Only the holder of a name sends that pipeline. Every other agent (a newcomer, or a refused one) first asks with ``SET
  NX`` + ``GET``, which changes nothing of another agent's.
- A holder that was paused past its ttl may have lost the name without knowing. Its next pipeline extends the new
  owner's lock, once, by at most a ttl; then it reads the owner and never extends again. The owner's own heartbeats
  extend that lock anyway. Whether the owner lives shows in its payload, which no other agent writes.
- Two newcomers race on ``SET NX``, which is atomic. Each writes under its own agent id, so neither can overwrite the
  other, and readers take only what the lock's owner wrote.
- A goodbye frees a lock only while it is still this agent's: a watched transaction, which happens once in an agent's
  life.
- A lock alone proves nothing: a living holder has a heartbeat beside it. A lock whose agent shows no heartbeat (with
  ticket keys: none that is proven, or one of an earlier life) was written by another holder of the password, or by a
  newcomer that died at once. An agent that has the name takes such a lock back and says so; a newcomer does so after a
  ttl. Readers with a fleet's keys go by proven heartbeats.
- After Redis lost its data, the first of two agents that want a name gets it: the old owner, if its heartbeat comes
  before the other agent's next claim. The other agent learns it from its own next call, and readers keep the member
  that they know until it falls silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

from redis.exceptions import WatchError

from cluster.registry.layout import Keys, MemberKey
from cluster.registry.membership import Heartbeat, MemberKind, MemberState, decode
from cluster.registry.proofs import Proofs, parted, printable, proven
from cluster.registry.redis_link import RACES_MAX, RedisLink, text
from cluster.registry.registry import NameRefused, RegistryDown, goodbye, refusal, said_goodbye, worth_a_nudge

logger = logging.getLogger("baton.registry")

MEMBERS_KEPT_S = 86400
"""How long the set of members outlives the last heartbeat, if no reader empties it."""


class HeldNames:
    """Names that this program's agents hold, or ask for."""

    def __init__(self, link: RedisLink, keys: Keys, ttl_s: float, cluster: str, proofs: Proofs | None) -> None:
        """`proofs`: proves this program's heartbeats, and judges those of others that stand in their way."""
        self._link: Final = link
        self._redis: Final = link.client
        self._keys: Final = keys
        self._ttl_s: Final = ttl_s
        self._ttl_ms: Final = int(ttl_s * 1000)
        self._cluster: Final = cluster
        self._proofs: Final = proofs
        self._mine: Final[dict[MemberKey, Heartbeat]] = {}
        self._left: Final[set[MemberKey]] = set()
        self._strange: Final[dict[tuple[MemberKind, str], tuple[str, float]]] = {}
        """Locks whose agent shows no heartbeat: by name, the agent and since when, on the loop's clock."""

    async def put(self, beat: Heartbeat) -> NameRefused | None:
        """Write a heartbeat if the name is this agent's or free."""
        payload = self._written(beat)
        member = (beat.kind, str(beat.id), beat.agent)
        if member in self._left:
            return said_goodbye(beat)
        async with self._link.asking(writes=True):
            had_it = member in self._mine
            if not had_it:
                owner = await self._ask_for_name(member)
                if owner != beat.agent:
                    refused = await self._refuse(beat, owner, had_it=False)
                    if refused is not None:
                        return refused
            owner = await self._write(member, beat, payload)
            if owner != beat.agent:
                refused = await self._refuse(beat, owner, had_it=had_it)
                if refused is not None:
                    self._mine.pop(member, None)
                    await self._take_back(member)
                    return refused
        self._strange.pop(member[:2], None)
        self._mine[member] = beat
        return None

    async def _ask_for_name(self, member: MemberKey) -> str:
        """Take the name if it is free. Returns the name's owner."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._lock(member), member[2], nx=True, px=self._ttl_ms)
            pipe.get(self._lock(member))
            _, owner = await pipe.execute()
        return text(owner)

    async def _write(self, member: MemberKey, beat: Heartbeat, payload: bytes) -> str:
        """Send the one pipeline of a heartbeat. Returns the name's owner."""
        kind, name, agent = member
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._lock(member), agent, nx=True, px=self._ttl_ms)
            pipe.pexpire(self._lock(member), self._ttl_ms)
            pipe.get(self._lock(member))
            pipe.set(self._payload(member), payload, px=self._ttl_ms)
            pipe.sadd(self._keys.members(kind), f"{name} {agent}")
            pipe.expire(self._keys.members(kind), MEMBERS_KEPT_S)
            if worth_a_nudge(self._mine.get(member), beat):
                pipe.publish(self._keys.changed(kind), name)
            _, _, owner, *_ = await pipe.execute()
        return text(owner)

    async def _take_back(self, member: MemberKey) -> None:
        """Remove what was written under a name that turned out to be another agent's."""
        kind, name, agent = member
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._payload(member))
            pipe.srem(self._keys.members(kind), f"{name} {agent}")
            await pipe.execute()

    async def _refuse(self, beat: Heartbeat, owner: str, *, had_it: bool) -> NameRefused | None:
        """Refuse `beat`, or take the lock over. None: no living agent held the name; its lock is this agent's now.

        `had_it`: whether the name was this agent's until now.
        """
        member = (beat.kind, str(beat.id), owner)
        payload: Any = await self._redis.get(self._payload(member))
        holder = self._holder(beat, member, payload) if payload else None
        if holder is not None:
            self._strange.pop(member[:2], None)
            return refusal(beat, holder, printable(owner))
        now = asyncio.get_running_loop().time()
        agent, since = self._strange.get(member[:2], ("", now))
        if agent != owner:
            since = now
            self._strange[member[:2]] = owner, now
            line = "the lock of %s is held by agent %s, which shows no heartbeat that counts%s"
            what = ": it is taken back" if had_it else f"; it is taken over after {self._ttl_s:g} s"
            logger.warning(line, beat.id, printable(owner, 12), what)
        if not had_it and now - since < self._ttl_s:
            return refusal(beat, None, printable(owner))
        return None if await self._seize(beat, owner) else refusal(beat, None, printable(owner))

    def _holder(self, beat: Heartbeat, member: MemberKey, payload: bytes) -> Heartbeat | None:
        """The heartbeat of the agent that holds the name that `beat` wants, if it counts against `beat`."""
        holder, _ = decode(payload)
        if holder is None or (holder.kind, holder.id, holder.agent) != member or holder.state is MemberState.GONE:
            return None
        proofs = self._proofs
        if proofs is None:
            return holder
        body, proof = parted(payload)
        # An agent with keys does not yield to a heartbeat without a proof.
        proves = proof or not proofs.prove(self._cluster, beat, b"{}")
        genuine = proves and not proofs.fault(self._cluster, holder, body, proof)
        # A claim draws an epoch above all before. So a later owner has a higher epoch than this agent had when it last
        # had the name, and a copy of an earlier life's heartbeat has a lower one. `beat.epoch` does not tell: it may be
        # drawn since.
        had = self._mine.get((beat.kind, str(beat.id), beat.agent))
        return holder if genuine and (had is None or holder.epoch > had.epoch) else None

    async def _seize(self, beat: Heartbeat, owner: str) -> bool:
        """Make the lock this agent's, if it still belongs to `owner`."""
        lock = self._lock((beat.kind, str(beat.id), beat.agent))
        async with self._redis.pipeline(transaction=True) as pipe:
            try:
                await pipe.watch(lock)
                if text(await pipe.get(lock)) != owner:
                    return False
                pipe.multi()  # type: ignore[no-untyped-call] # the library's gap
                pipe.set(lock, beat.agent, px=self._ttl_ms)
                await pipe.execute()
            except WatchError:
                return False
        return True

    async def leave(self, member: MemberKey) -> bool:
        """Say goodbye for good. False: the name was another agent's."""
        self._left.add(member)
        last = self._mine.pop(member, None)
        async with self._link.asking():
            for _ in range(RACES_MAX):
                with contextlib.suppress(WatchError):
                    return await self._leave_once(member, last)
        raise RegistryDown(
            f"the registry at {self._link.place}: {member[1]} is fought over, no goodbye could be written"
        )

    async def _leave_once(self, member: MemberKey, last: Heartbeat | None) -> bool:
        """Free the name and replace the payload with the goodbye, if the name is still this agent's. `last`: its last
        heartbeat.

        Raises:
            WatchError: the lock changed meanwhile; nothing was done.
        """
        kind, name, agent = member
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(self._lock(member))
            ours = text(await pipe.get(self._lock(member))) == agent
            pipe.multi()  # type: ignore[no-untyped-call] # the library's gap
            if ours:
                pipe.delete(self._lock(member))
            if ours and last is not None:
                pipe.set(self._payload(member), self._written(goodbye(last)), px=self._ttl_ms)
            else:
                pipe.delete(self._payload(member))
                pipe.srem(self._keys.members(kind), f"{name} {agent}")
            pipe.publish(self._keys.changed(kind), name)
            await pipe.execute()
        return ours

    def _written(self, beat: Heartbeat) -> bytes:
        return proven(beat, self._cluster, self._proofs)

    def _lock(self, member: MemberKey) -> str:
        kind, name, _ = member
        return self._keys.lock(kind, name)

    def _payload(self, member: MemberKey) -> str:
        return self._keys.beat(*member)
