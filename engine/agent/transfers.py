"""The agent's half of hand-overs: agents introduce engines to each other, without an open network port. A shell.

When its engine's socket answers, the agent posts the engine's metadata into the registry, sealed for each peer: each
instance that may hand over to it or pull from it (`kvtransfer.seal`). It opens what peers have sealed for it. Through
the socket it introduces them to its engine, and makes the engine forget peers that left. So a pair is introduced when
the second of the two has joined, and no request waits for it. Without the registry, every engine keeps the peers that
it knows. The producers that the engine shuns go out with the heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Collection
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import BEAT_EVERY_S, Member, Membership
from cluster.registry.registry import Author, Registry, RegistryDown, fold_members
from engine.agent.meetings import (
    Acquainted,
    EngineEndpoint,
    HandoffReport,
    Meetings,
    dtype_in,
    left_in,
    peers,
    read_engine,
    read_state,
    read_text,
)
from kvtransfer.seal import NONCE_BYTES, Identity

logger = logging.getLogger("baton.transfers")

CREDENTIALS = "/credentials"
"""The name of the posted item that every instance may read. No instance has a slash in its name."""
MEETING_EVERY_S = 0.2
"""Seconds between two questions whether the engine has met its new peers: a handshake takes about as long."""
MEETING_S = 10.0
"""How long these questions go on after a change. Also the longest time for which an instance that is ready waits to
meet peers before it takes work."""
LINE_BYTES_MAX = 16 << 20
"""Longest answer of a socket."""
DOOR_S = 5.0
"""Time limit of a socket's answer, which comes from memory."""


class DoorShut(Exception):
    """The engine's socket does not answer, or its answer is no JSON object."""


async def ask_door(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Send one question to an engine's socket.

    Raises:
        DoorShut: there is no answer within `DOOR_S`, or it is no JSON object.
    """
    try:
        async with asyncio.timeout(DOOR_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
            try:
                writer.write(json.dumps(question).encode() + b"\n")
                await writer.drain()
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, ValueError, RecursionError) as error:  # a line too long is a ValueError, a timeout an OSError
        raise DoorShut(str(error) or type(error).__name__) from None
    if not isinstance(answer, dict):
        raise DoorShut("an answer that is no object")
    return answer


class Transfers:
    """One instance's introductions. One `look` does all of it; `run` repeats it.

    It has many attributes: what it asks (socket, registry, heartbeat), what it has read, and what it has posted.
    """

    def __init__(
        self,
        door: Path,
        registry: Registry,
        me: InstanceId,
        identities: Callable[[], Identity],
        agent: str,
        *,
        epoch: Callable[[], int],
        role: Callable[[], Role],
        models: Callable[[], Collection[str]],
        shares: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`identities` gives the engine's identity, which changes when the fleet's keys do. `epoch`, `role` and
        `models` give what the agent's heartbeat says at that moment. `shares`: the engine was started to share
        prompts' beginnings. `on_change` is called when `acquainted` changes.
        """
        self.me = me
        self.meetings = Meetings()
        self.handoffs = HandoffReport()
        """The engine's last report of the blocks that come and go."""
        self.early = False
        """Whether the engine takes early legs (`decode.early`)."""
        self.dtype = ""
        """The engine's number format (`Instance.dtype`); empty: unknown. A socket that does not answer for a moment
        changes nothing: to routers, another format is another engine."""
        self.counts = {"introduced": 0, "forgotten": 0, "not_opened": 0, "refused_by_engine": 0}
        self.left = ""
        """Why vLLM's own connector hands over the engine's KV cache; empty: Baton's does."""
        self.acquainted = Acquainted()
        self._on_change = on_change
        self._settles_until = 0.0
        self._turn = asyncio.Event()
        """Set at the end of the next look."""
        self._door, self._registry, self._agent = door, registry, agent
        self._identities: Final = identities
        self._identity = identities().of_rank(me)
        self._epoch, self._role, self._models = epoch, role, models
        self._shares: Final = shares
        self._members = Membership(registry.ttl_s)
        self._posted: tuple[Author, dict[str, tuple[str, bytes]]] | None = None
        """What the registry holds of this agent: by item, its source and its bytes."""
        self._told: set[str] = set()
        self._met: dict[Author, EngineEndpoint] = {}
        """The engines of the last look, by the life of the instance that posted them."""

    @property
    def shares(self) -> bool:
        """Whether the engine shares prompts' beginnings: not where vLLM's own connector has its KV cache."""
        return self._shares and not self.left

    async def run(self) -> None:
        """Look again and again until cancelled. Waits for a socket or registry that is down."""
        try:
            while True:
                now = asyncio.get_running_loop().time()
                with contextlib.suppress(RegistryDown):  # the heartbeat reports the outage
                    await self.look(now)
                settles = self.acquainted.shuns and now < self._settles_until
                await self._registry.wait_changed(MEETING_EVERY_S if settles else BEAT_EVERY_S)
        finally:
            if self._posted is not None:
                with contextlib.suppress(RegistryDown):
                    await self._registry.unpost(self._posted[0])

    async def look(self, now: float) -> None:
        """Post this engine's metadata, read what peers have sealed for it, tell the engine.

        Raises:
            RegistryDown: the registry cannot be reached. No peer is forgotten for that, and the engine has been
                introduced to those of the last look.
        """
        self._identity = self._identities().of_rank(self.me)
        ours = await self._our_engine()
        try:
            await fold_members(self._registry, self._members, now)
        except RegistryDown:
            if ours is not None:  # an engine that has started again meanwhile must meet those that are known
                await self._meet(self._known(), tuple(self._members.snapshot()), now)
            raise
        snapshot = tuple(self._members.snapshot())
        models = tuple(self._models())
        met = peers(snapshot, self.me, self._role(), models, shares=self.shares)
        authors = tuple(Author(each.id, each.beat.agent, each.beat.epoch) for each in met)
        shown = dict(zip(authors, await self._registry.posted(authors, CREDENTIALS), strict=True))
        found = await self._found(shown) if ours is not None or self.left else {}
        if ours is not None:
            await self._meet(found, snapshot, now)
        if (
            self.acquainted.look_as_vllms(self._role(), met, found)
            if self.left
            else self.acquainted.look(self.me, self._role(), met, found, self.handoffs, shares=self.shares)
        ):
            self._settles_until = now + MEETING_S
            self._on_change()
        # The socket opens before the engine lists its models, and until then the engine cannot meet peers.
        if (ours is None and not self.left) or not models:
            self.acquainted.enough = False
        # Posted last: once a peer reads this, the next heartbeat says whether the engine can pull from that peer.
        await self._post(ours, shown)
        self._turn.set()
        self._turn = asyncio.Event()

    async def looked(self) -> None:
        """Wait until the next look is over."""
        await self._turn.wait()

    async def _our_engine(self) -> EngineEndpoint | None:
        try:
            answer = await ask_door(self._door, {"ask": "metadata"})
            self.handoffs = read_state(await ask_door(self._door, {"ask": "state"}))
        except DoorShut:
            self.meetings.ended()
            self.handoffs, self.left = HandoffReport(), ""
            return None
        ours, self.left = read_engine(answer), left_in(answer)
        if self.left:
            self.meetings.ended()
            self._say_once(f"{self.me}: its KV cache is handed over by vLLM's own connector: {self.left}")
        elif ours is None:
            self._say_once(f"{self.me}: its engine's door has no metadata: {str(answer.get('error'))[:200]}")
        else:
            self.meetings.began(ours)
        self.early = ours is not None and ours.early
        if ours is not None or self.left:
            self.dtype = dtype_in(answer)
        return ours

    # --- this engine, for others ---

    async def _post(self, ours: EngineEndpoint | None, shown: dict[Author, bytes | None]) -> None:
        """Post the credentials for all, and the engine sealed for each peer; writes only if something is new.

        What was sealed for a peer that shows no credentials now is posted again: the registry may have lost its data.
        """
        author = Author(self.me, self._agent, self._epoch())
        former = self._posted[1] if self._posted is not None and self._posted[0] == author else {}
        credentials = self._identity.credentials()
        items = {CREDENTIALS: ("", credentials)}
        own = blake2b(credentials, digest_size=16).hexdigest()
        for peer, theirs in shown.items() if ours is not None else ():
            life = f"{ours.digest}/{peer.agent}/{peer.epoch}/{own}/" if ours is not None else ""
            kept = former.get(peer.name)
            if theirs is None:
                if kept is not None and kept[0].startswith(life):
                    items[peer.name] = kept
                continue
            of = f"{life}{theirs.hex()}"
            sealed = kept[1] if kept is not None and kept[0] == of else self._sealed(ours, author, peer, theirs)
            if sealed is not None:
                items[peer.name] = of, sealed
        if items == former and await self._registry.keep(author):
            return
        if self._posted is not None and self._posted[0] != author:
            await self._registry.unpost(self._posted[0])
        await self._registry.post(author, {name: value for name, (_, value) in items.items()})
        self._posted = author, items

    def _sealed(self, ours: EngineEndpoint | None, author: Author, peer: Author, theirs: bytes) -> bytes | None:
        if ours is None:
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = self._identity.seal(ours.text(), InstanceId(peer.name), theirs, life=_life(author), nonce=nonce)
        if sealed is None:
            self._say_once(f"{peer.name} shows credentials that the fleet's key has not signed: it is not introduced")
        return sealed

    # --- others, for this engine ---

    async def _found(self, shown: dict[Author, bytes | None]) -> dict[InstanceId, EngineEndpoint]:
        """The engines of the peers that have sealed something for this instance.

        A peer that shows nothing at all has lost its posts with the registry's data, and is about to write them again:
        its engine stays the one of the last look.
        """
        authors = tuple(author for author, theirs in shown.items() if theirs is not None)
        found = {author: engine for author, engine in self._met.items() if author in shown and shown[author] is None}
        for author, sealed in zip(authors, await self._registry.posted(authors, self.me), strict=True):
            if sealed is None:
                continue  # the peer has not seen this instance's credentials yet
            engine = self._opened(author, shown[author] or b"", sealed)
            if engine is not None:
                found[author] = engine
        self._met = found
        return self._known()

    def _known(self) -> dict[InstanceId, EngineEndpoint]:
        """The engines of the last look that reached the registry."""
        return {InstanceId(author.name): engine for author, engine in self._met.items()}

    async def _meet(self, found: dict[InstanceId, EngineEndpoint], snapshot: tuple[Member, ...], now: float) -> None:
        """Introduce new peers to the engine, make it forget those that are gone, and repeat where there is no link."""
        for ask in self.meetings.due(found, [member.id for member in snapshot]):
            await self._tell(ask, found)
        if self._role().decodes or self.shares:  # other engines read from no peer, and have no link to report
            for ask in self.meetings.again(found, self.handoffs, now):
                await self._tell(ask, found)

    def _opened(self, author: Author, theirs: bytes, sealed: bytes) -> EngineEndpoint | None:
        text = self._identity.unseal(sealed, InstanceId(author.name), theirs, life=_life(author))
        engine = read_text(text) if text is not None else None
        if engine is None:
            self.counts["not_opened"] += 1
            self._say_once(f"what {author.name} has sealed for {self.me} does not open: it is not introduced")
        return engine

    async def _tell(self, ask: dict[str, Any], found: dict[InstanceId, EngineEndpoint]) -> None:
        try:
            answer = await ask_door(self._door, ask)
        except DoorShut:
            return  # the next look asks again, whatever engine answers then
        if answer.get("ok") is not True:
            self.counts["refused_by_engine"] += 1
            self._say_once(f"{self.me}'s engine does not {ask['ask']} {ask['engine_id']}: {str(answer)[:200]}")
            return
        self.meetings.told(ask, found)
        self.counts["introduced" if ask["ask"] == "introduce" else "forgotten"] += 1

    def _say_once(self, line: str) -> None:
        if line not in self._told and len(self._told) < 1000:
            self._told.add(line)
            logger.warning("%s", line)


def _life(author: Author) -> str:
    return f"{author.agent}/{author.epoch}"
