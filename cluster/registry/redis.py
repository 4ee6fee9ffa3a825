"""The registry in Redis (tested with 7.0; no command newer than Redis 3): a shell that writes, arbitrates and reads.

`cluster.registry.layout` has the keys; each key expires by itself, and no call scans the keyspace.

One heartbeat is one MULTI, sent as one pipeline: take the lock if it is free, extend it, read its owner, write the
payload, join the set. A reading is two round trips: the set, then all locks and payloads.

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

A password stands in a file or in the URL; no message, no repr and no log shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import quote, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, RedisError, WatchError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cluster.errors import UsageError
from cluster.registry.layout import NUDGED, Keys
from cluster.registry.membership import TTL_S, Heartbeat, MemberKind, MemberState, decode, next_epoch
from cluster.registry.proofs import Hearing, Proofs, parted, printable, proven
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

TIMEOUT_S = 1.0
"""Longest time for one call, connecting included: a heartbeat that takes longer is better sent again."""

CONNECTIONS_MAX = 8
"""Connections of one process. A router reads with one and listens with another; the rest serves concurrent calls."""

EPOCH_KEPT_S = 30 * 86400
"""How long the last epoch of a name is kept. A forgotten epoch does no harm (`next_epoch`)."""

MEMBERS_KEPT_S = 86400
"""How long the set of members outlives the last heartbeat, if no reader empties it."""

EPOCH_DIGITS_MAX = 19
"""A longer number is no epoch of Baton's (`membership.EPOCH_MAX`)."""

RACES_MAX = 5
"""A watched transaction is given up after this many disturbances in a row; each one was another agent's success."""

NUDGES_MAX = 1000
"""Change messages taken off the connection at once: a whole fleet that starts is one change."""

_CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

Member = tuple[MemberKind, str, str]
"""Kind, name and agent: the key of one heartbeat's payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """Address and credentials of a Redis. Its text is fit for logs."""

    host: str
    port: int
    db: int = 0
    tls: bool = False
    ca_file: Path | None = None
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}" + (f"/{self.db}" if self.db else "")

    def redact(self, text: str) -> str:
        """`text` without the password, in case a server or a library quotes it."""
        for secret in (self.password, quote(self.password, safe="")) if self.password else ():
            text = text.replace(secret, "***")
        return text


def parse_place(url: str, password_file: Path | None = None, ca_file: Path | None = None) -> RedisAddress:
    """Read ``redis://[user[:password]@]host[:port][/db]`` or ``rediss://`` (TLS); the password is better kept in a
    file.

    Raises:
        UsageError: the URL or a file cannot be used. The message holds no password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        db = int(parts.path.strip("/") or 0)
    except ValueError as error:
        raise UsageError("--registry: not a URL of the form redis://HOST:PORT[/DB]") from error
    if parts.scheme not in {"redis", "rediss"} or not parts.hostname or parts.query or parts.fragment or db < 0:
        raise UsageError("--registry: expected redis://HOST:PORT, or rediss://HOST:PORT for TLS")
    if ca_file is not None and parts.scheme != "rediss":
        raise UsageError("--registry-ca-file is for TLS: the registry's URL must begin with rediss://")
    if ca_file is not None and not ca_file.is_file():
        raise UsageError(f"--registry-ca-file {ca_file}: no such file")
    if password_file is not None and parts.password is not None:
        raise UsageError("--registry-password-file and a password in the registry's URL: give one of them")
    password = read_password(password_file) if password_file is not None else unquote(parts.password or "") or None
    return RedisAddress(
        host=parts.hostname,
        port=port,
        db=db,
        tls=parts.scheme == "rediss",
        ca_file=ca_file,
        username=unquote(parts.username) if parts.username else None,
        password=password,
    )


def read_password(path: Path) -> str:
    """The one line of a password file.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    try:
        password = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--registry-password-file {path}: {getattr(error, 'strerror', None) or 'no text'}") from error
    if not password:
        raise UsageError(f"--registry-password-file {path}: the file is empty")
    return password


class RedisRegistry:
    """See `Registry`. Connects at its first call, and again after a connection breaks.

    The class is long because it is one protocol over one connection: every call of `Registry` is a few commands, and
    all of them share the names that this program holds and the heartbeats that it has read.
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
        self._place = place
        self._keys = Keys(cluster)
        self._ttl_ms = int(ttl_s * 1000)
        self._timeout_s = timeout_s
        self._redis = _connect(place, timeout_s)
        self._mine: dict[Member, Heartbeat] = {}
        self._left: set[Member] = set()
        self._silent: dict[MemberKind, set[bytes]] = {kind: set() for kind in MemberKind}
        self._hearing = Hearing(cluster, proofs, logger.warning)
        self._strange: dict[tuple[MemberKind, str], tuple[str, float]] = {}
        """Locks whose agent shows no heartbeat: by name, the agent and since when, on the loop's clock."""
        self._nudges: PubSub | None = None
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
        return f"RedisRegistry({self._place}, {self._keys.prefix!r})"

    # --- agents ------------------------------------------------------------------------------------------------------

    async def claim(self, beat: Heartbeat) -> Claimed | NameRefused:
        return await self._put(beat) or Claimed()

    async def beat(self, beat: Heartbeat) -> Beaten | NameRefused:
        return await self._put(beat) or Beaten()

    async def leave(self, name: str, agent: str, kind: MemberKind = MemberKind.INSTANCE) -> bool:
        self._left.add((kind, name, agent))
        last = self._mine.pop((kind, name, agent), None)
        async with self._asking():
            for _ in range(RACES_MAX):
                with contextlib.suppress(WatchError):
                    return await self._leave_once((kind, name, agent), last)
        raise RegistryDown(f"the registry at {self._place}: {name} is fought over, no goodbye could be written")

    async def next_epoch(self, name: str, above: int = 0) -> int:
        async with self._asking():
            for _ in range(RACES_MAX):
                with contextlib.suppress(WatchError):
                    return await self._draw_epoch(self._keys.epoch(name), above)
        raise RegistryDown(f"the registry at {self._place}: the epoch of {name} is fought over")

    async def post(self, author: Author, items: Mapping[str, bytes]) -> None:
        check_items(items)
        key, fields = self._posts(author), dict[Any, Any](items)  # the library's type of a mapping is invariant
        async with self._asking(), self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            if items:
                pipe.hset(key, mapping=fields)
                pipe.pexpire(key, self._ttl_ms)
            await pipe.execute()

    async def keep(self, author: Author) -> bool:
        kept: Any = False
        async with self._asking():
            kept = await self._redis.pexpire(self._posts(author), self._ttl_ms)
        return bool(kept)

    async def unpost(self, author: Author) -> None:
        async with self._asking():
            await self._redis.delete(self._posts(author))

    # --- readers -----------------------------------------------------------------------------------------------------

    async def read(self, kind: MemberKind = MemberKind.INSTANCE) -> tuple[Heartbeat, ...]:
        silent = self._silent[kind]
        self._hearing.begin(kind)
        async with self._asking():
            async with self._redis.pipeline(transaction=False) as pipe:
                if silent:
                    pipe.srem(self._keys.members(kind), *silent)
                pipe.smembers(self._keys.members(kind))
                entries = sorted((await pipe.execute())[-1])
            silent.clear()
            members = {entry: _member(kind, entry) for entry in entries}
            known = {entry: member for entry, member in members.items() if member is not None}
            silent.update(members.keys() - known.keys())
            if not known:
                return ()
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.mget([self._lock(member) for member in known.values()])
                pipe.mget([self._payload(member) for member in known.values()])
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
        async with self._asking(), self._redis.pipeline(transaction=False) as pipe:
            for author in authors:
                pipe.hmget(self._posts(author), [item])  # the stand-in answers HGET with a line; bytes may break it
            found = await pipe.execute(raise_on_error=False)  # one key that is no hash does not spoil the others
        return tuple(answer[0] if isinstance(answer, list) else None for answer in found)

    async def wait_changed(self, timeout_s: float) -> bool:
        """See `Registry`. Changes between two calls are kept. One caller at a time; a second one only sleeps."""
        until = asyncio.get_running_loop().time() + timeout_s
        if not self._listening:
            self._listening = True
            cancelled = _cancelled()
            try:
                return await self._nudged(until)
            except (RedisError, OSError, ValueError, RegistryDown):  # the next `read` raises the reason
                if _cancelled() > cancelled:
                    raise asyncio.CancelledError from None  # see `_asking`
                await self._stop_listening()
            finally:
                self._listening = False
        await asyncio.sleep(max(0.0, until - asyncio.get_running_loop().time()))
        return False

    async def _nudged(self, until: float) -> bool:
        if self._nudges is None:
            self._nudges = await self._listen()
        while (left_s := until - asyncio.get_running_loop().time()) > 0:
            if await self._nudge(left_s):
                for _ in range(NUDGES_MAX):
                    if not await self._nudge(0.0):
                        break
                return True
        return False

    async def _nudge(self, timeout_s: float) -> bool:
        assert self._nudges is not None
        message: object = await self._nudges.get_message(ignore_subscribe_messages=True, timeout=timeout_s)
        return message is not None

    async def close(self) -> None:
        await self._stop_listening()
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose(close_connection_pool=True)

    # --- parts -------------------------------------------------------------------------------------------------------

    def _posts(self, author: Author) -> str:
        return self._keys.posted(author.name, author.agent, author.epoch)

    def _lock(self, member: Member) -> str:
        kind, name, _ = member
        return self._keys.lock(kind, name)

    def _payload(self, member: Member) -> str:
        return self._keys.beat(*member)

    async def _put(self, beat: Heartbeat) -> NameRefused | None:
        """Write a heartbeat if the name is this agent's or free."""
        payload = self._written(beat)
        member = (beat.kind, str(beat.id), beat.agent)
        if member in self._left:
            return said_goodbye(beat)
        async with self._asking():
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

    async def _ask_for_name(self, member: Member) -> str:
        """Take the name if it is free; the name's owner."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._lock(member), member[2], nx=True, px=self._ttl_ms)
            pipe.get(self._lock(member))
            _, owner = await pipe.execute()
        return _text(owner)

    async def _write(self, member: Member, beat: Heartbeat, payload: bytes) -> str:
        """Send the one pipeline of a heartbeat; the name's owner."""
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
        return _text(owner)

    async def _take_back(self, member: Member) -> None:
        """Remove what was written under a name that turned out to be another agent's."""
        kind, name, agent = member
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._payload(member))
            pipe.srem(self._keys.members(kind), f"{name} {agent}")
            await pipe.execute()

    async def _refuse(self, beat: Heartbeat, owner: str, *, had_it: bool) -> NameRefused | None:
        """Why the name is another agent's; None: no living agent holds it, and its lock is this agent's now. `had_it`:
        the name was this agent's until now.
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
            what = ": it is taken back" if had_it else f"; it is taken over after {self.ttl_s:g} s"
            logger.warning(line, beat.id, printable(owner, 12), what)
        if not had_it and now - since < self.ttl_s:
            return refusal(beat, None, printable(owner))
        return None if await self._seize(beat, owner) else refusal(beat, None, printable(owner))

    def _holder(self, beat: Heartbeat, member: Member, payload: bytes) -> Heartbeat | None:
        """The heartbeat of the agent that holds the name that `beat` wants, if it counts against `beat`."""
        holder, _ = decode(payload)
        if holder is None or (holder.kind, holder.id, holder.agent) != member or holder.state is MemberState.GONE:
            return None
        proofs = self._hearing.proofs
        if proofs is None:
            return holder
        body, proof = parted(payload)
        # An agent with keys does not yield to a heartbeat without a proof.
        proves = proof or not proofs.prove(self._hearing.cluster, beat, b"{}")
        genuine = proves and not proofs.fault(self._hearing.cluster, holder, body, proof)
        # A claim draws an epoch above all before, so a copy of an earlier life's heartbeat has a lower epoch.
        return holder if genuine and (holder.epoch > beat.epoch or not self._has(beat)) else None

    def _has(self, beat: Heartbeat) -> bool:
        return (beat.kind, str(beat.id), beat.agent) in self._mine

    async def _seize(self, beat: Heartbeat, owner: str) -> bool:
        """Make the lock this agent's, if it still belongs to `owner`."""
        lock = self._lock((beat.kind, str(beat.id), beat.agent))
        async with self._redis.pipeline(transaction=True) as pipe:
            try:
                await pipe.watch(lock)
                if _text(await pipe.get(lock)) != owner:
                    return False
                pipe.multi()  # type: ignore[no-untyped-call] # as below
                pipe.set(lock, beat.agent, px=self._ttl_ms)
                await pipe.execute()
            except WatchError:
                return False
        return True

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

    async def _leave_once(self, member: Member, last: Heartbeat | None) -> bool:
        """Free the name and replace the payload with the goodbye, if the name is still this agent's. `last`: its last
        heartbeat.

        Raises:
            WatchError: the lock changed meanwhile; nothing was done.
        """
        kind, name, agent = member
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(self._lock(member))
            ours = _text(await pipe.get(self._lock(member))) == agent
            pipe.multi()  # type: ignore[no-untyped-call] # as above
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
        return proven(beat, self._hearing.cluster, self._hearing.proofs)

    def _heard(self, found: Sequence[tuple[Member, bytes | None, bytes | None]]) -> tuple[Heartbeat, ...]:
        """The heartbeats that a reading contributes: those of the locks' owners, and goodbyes. Each entry has its
        lock's owner and its payload.
        """
        heard: list[tuple[Heartbeat, str]] = []
        for (kind, name, agent), owner, payload in found:
            if payload is None:
                self._hearing.gone(kind, name, agent)
                continue
            beat = self._hearing.hear(kind, name, agent, payload)
            if beat is not None:
                heard.append((beat, _text(owner)))
        told = {(beat.id, beat.agent) for beat, _ in heard if beat.state is not MemberState.GONE}
        # With a fleet's keys, a lock counts only together with its owner's proven heartbeat.
        proves = self._hearing.all_proven
        return tuple(
            beat
            for beat, owner in heard
            if beat.state is MemberState.GONE or owner == beat.agent or (proves and (beat.id, owner) not in told)
        )

    async def _listen(self) -> PubSub:
        nudges: PubSub = self._redis.pubsub()
        try:
            async with self._asking():
                await nudges.subscribe(*(self._keys.changed(kind) for kind in NUDGED))
        except BaseException:  # a cancellation too: no other call uses the connection until it is returned
            await _close(nudges)
            raise
        return nudges

    async def _stop_listening(self) -> None:
        nudges, self._nudges = self._nudges, None
        if nudges is not None:
            await _close(nudges)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Wrap a call of the registry: a time limit, and one kind of failure."""
        cancelled = _cancelled()
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (
            RedisError,
            OSError,
            ValueError,
        ) as error:  # OSError: asyncio's TimeoutError too; ValueError: see `_down`
            if _cancelled() > cancelled:
                # Seen live: a reader, cancelled twice, that read on and kept its router alive. Where the cancellation
                # was lost was not seen; our guess is the library's clean-up failing in its place. Right in either case.
                raise asyncio.CancelledError from None
            self._down(error)

    def _down(self, error: Exception) -> NoReturn:
        said = self._place.redact(str(error))
        if isinstance(error, AuthenticationError | NoPermissionError) or said.startswith(("NOAUTH", "WRONGPASS")):
            fix = "check it" if self._place.password else "give one with --registry-password-file"
            because = f"wants another password or user: {fix} (it says: {said})"
        elif isinstance(error, TimeoutError | RedisTimeoutError):
            because = f"did not answer within {self._timeout_s:g} s"
        elif isinstance(error, RedisConnectionError | OSError):
            because = f"cannot be reached: {said}"
        elif isinstance(error, InvalidResponse | ValueError):  # asyncio's error for a line that does not end
            because = f"does not speak Redis' protocol: {said}"
        else:
            because = f"refuses to work: {said}"
        raise RegistryDown(f"the registry at {self._place} {because}") from None  # a chain might quote the password


def _connect(place: RedisAddress, timeout_s: float) -> Redis:
    """A client that is not connected yet. It retries once, at once: a connection closed by a restart is no outage."""
    tls: dict[str, Any] = {}
    if place.tls:
        tls = {"ssl_ca_certs": str(place.ca_file) if place.ca_file else None, "ssl_check_hostname": True}
    pool = BlockingConnectionPool(
        connection_class=SSLConnection if place.tls else Connection,
        max_connections=CONNECTIONS_MAX,
        timeout=timeout_s,
        host=place.host,
        port=place.port,
        db=place.db,
        username=place.username,
        password=place.password,
        protocol=2,  # no HELLO and no CLIENT SETINFO: one round trip less, and older servers and proxies know it
        driver_info=None,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        **tls,
    )
    return Redis(connection_pool=pool)


def _cancelled() -> int:
    """How often the running task has been asked to end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def _close(nudges: PubSub) -> None:
    with contextlib.suppress(RedisError, OSError):
        await nudges.aclose()  # type: ignore[no-untyped-call]


def _member(kind: MemberKind, entry: bytes) -> Member | None:
    """Kind, name and agent of an entry of the set; None for an entry that Baton never wrote."""
    name, space, agent = _text(entry).partition(" ")
    return (kind, name, agent) if space and name and agent else None


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""
