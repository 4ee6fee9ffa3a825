"""Keeps the router's view in step with the registry: who is there, what they say of themselves, how many routers share.

A shell around `Membership`. While the registry is away the router serves on with what it knows: nobody expires, and its
own probes still tell the living from the dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable

from cluster.ids import InstanceId
from cluster.registry.membership import (
    BEAT_EVERY_S,
    Change,
    Heartbeat,
    Kind,
    Member,
    Membership,
    Snapshot,
    State,
    What,
)
from cluster.registry.registry import Registry, RegistryDown
from router.view import Reported

logger = logging.getLogger("baton.router")

READ_EVERY_S = 0.5
"""Longest time between two readings. An agent that drains waits four times as long before it believes it is idle."""

_LOUD = {What.REFUSED, What.STALE, What.SKEWED, What.EXPIRED}


class Watch:
    """One router's eye on the registry."""

    def __init__(self, registry: Registry, on_fleet: Callable[[tuple[Reported, ...], int], None]) -> None:
        self._registry = registry
        self._on_fleet = on_fleet
        self._instances = Membership(registry.ttl_s)
        self._routers = Membership(registry.ttl_s)
        self._id = secrets.token_hex(8)
        self._seq = 0
        self.heard = False
        """Whether the last reading succeeded."""
        self._closed = False

    def snapshot(self) -> Snapshot:
        """The fleet as last read."""
        return self._instances.snapshot()

    async def read_forever(self) -> None:
        """Read, fold, report; again when something changed, or after a while."""
        while not self._closed:  # not by cancellation alone: a library may swallow one
            await self.read()
            await self._registry.wait_changed(READ_EVERY_S)

    async def read(self) -> None:
        """One reading."""
        now = time.monotonic()
        try:
            beats = await self._registry.read()
            routers = await self._registry.read(Kind.ROUTER)
        except RegistryDown as down:
            if self.heard:
                logger.warning("%s; serving on with what is known", down)
            self.heard = False
            self._instances.deaf(now)
            self._routers.deaf(now)
            return
        if not self.heard:
            logger.info("the registry is heard")
        self.heard = True
        wall = time.time()  # noqa: TID251 - only to tell whose clock is off
        self._log(self._instances.fold(beats, now, wall))
        self._routers.fold(routers, now, wall)
        self._on_fleet(tuple(_reported(member) for member in self.snapshot()), max(1, len(self._routers.snapshot())))

    @staticmethod
    def _log(changes: tuple[Change, ...]) -> None:
        for change in changes:
            logger.log(logging.WARNING if change.what in _LOUD else logging.DEBUG, "%s", change.because)

    async def announce_forever(self, url: str, admin_url: str) -> None:
        """Tell the others that this router shares the fleet's credits."""
        while not self._closed:
            self._seq += 1
            beat = Heartbeat(
                id=InstanceId(f"router-{self._id[:8]}"),
                agent=self._id,
                where=f"{socket.gethostname()}:{os.getpid()}",
                kind=Kind.ROUTER,
                seq=self._seq,
                url=url,
                agent_url=admin_url,
                state=State.READY,
                sent_at=time.time(),  # noqa: TID251 - informative
            )
            with contextlib.suppress(RegistryDown):
                await self._registry.beat(beat)
            await asyncio.sleep(BEAT_EVERY_S)

    def stop(self) -> None:
        """Let the loops end at their next turn."""
        self._closed = True

    async def close(self) -> None:
        """Say goodbye."""
        with contextlib.suppress(RegistryDown):
            await self._registry.leave(f"router-{self._id[:8]}", self._id, Kind.ROUTER)
        await self._registry.close()


def _reported(member: Member) -> Reported:
    beat = member.beat
    return Reported(
        instance=member.instance,
        state=beat.state.value,
        accepting=member.takes_work,
        credits=beat.credits,
        load=beat.load,
        models=beat.models,
    )
