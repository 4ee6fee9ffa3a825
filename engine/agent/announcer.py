"""An engine's part in the registry: the names of its ranks, their heartbeats, and what routers announce. A shell.

While the registry is down an agent serves on, by its last reading of the routers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from cluster.errors import UsageError
from cluster.ids import engine_of
from cluster.registry.membership import BEAT_EVERY_S, Heartbeat, Member, MemberKind, Membership
from cluster.registry.registry import Beaten, NameRefused, Registry, RegistryDown, fold_members
from engine.agent.rank import Rank

logger = logging.getLogger("baton.agent")

ROUTERS_MAX = 128
"""Most routers that share an instance's credits: their names and grants take a third of a heartbeat. If there are more,
the routers whose names sort first get credits."""

CLAIM_ATTEMPTS_S = 2.5
"""A taken name is claimed again for this many ttls: the name of a killed agent is free after one."""

BEATS_AT_ONCE: Final = 4
"""Heartbeats of one engine's ranks that are under way at a time."""


class Announcer:
    """Claims the names of an engine's ranks, sends their heartbeats, and reads the routers' heartbeats."""

    def __init__(
        self,
        registry: Registry,
        agent: str,
        ranks: Sequence[Rank],
        *,
        beat: Callable[[Rank], Heartbeat],
        heard: Callable[[list[Member]], None],
        lost: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        """Nothing is claimed or sent yet.

        Args:
            registry: the registry.
            agent: the id of the agent's process.
            ranks: the engine's ranks.
            beat: makes a rank's next heartbeat.
            heard: takes the routers of each reading, at most `ROUTERS_MAX`.
            lost: takes the reason when a name belongs to another agent now.
            say: takes lines for people.
        """
        self.routers: Final = Membership(registry.ttl_s)
        self._registry, self._agent, self._ranks = registry, agent, ranks
        self._beat, self._heard, self._lost, self._say = beat, heard, lost, say
        self._nudge = asyncio.Event()
        self._over = False
        self._refused = False
        """A name has gone to another agent, and `lost` was told."""

    def nudge(self) -> None:
        """Something that heartbeats say has changed: send the next ones at once."""
        self._nudge.set()

    def stop(self) -> None:
        """Send no heartbeat any more."""
        self._over = True

    async def claim(self, ended: asyncio.Future[int]) -> None:
        """Claim the names. The name of an agent that has just died is free after a ttl, so try for `CLAIM_ATTEMPTS_S`
        ttls, or until `ended`.

        Raises:
            UsageError: a name is another agent's, or the registry is down.
        """
        deadline = time.monotonic() + CLAIM_ATTEMPTS_S * self._registry.ttl_s
        for rank in self._ranks:
            await self._claim_one(rank, deadline, ended)

    async def _claim_one(self, rank: Rank, deadline: float, ended: asyncio.Future[int]) -> None:
        told = False
        while not ended.done():
            try:
                # The name may have been another agent's: the epoch must be one that the name never had.
                rank.machine.epoch = rank.epoch = await self._registry.next_epoch(rank.id, rank.epoch)
                claimed = await self._registry.claim(self._beat(rank))
            except RegistryDown as down:
                if time.monotonic() > deadline:
                    raise UsageError(f"--registry: {down}") from None
                logger.warning("%s", down)
                await asyncio.sleep(BEAT_EVERY_S)
                continue
            if not isinstance(claimed, NameRefused):
                return
            if time.monotonic() > deadline:
                choose = "choose another name, or another --cluster if it is of another fleet"
                raise UsageError(f"--name {engine_of(rank.id)}: {claimed.because}; {choose}")
            if not told:
                self._say(f"{rank.id}: {claimed.because}; waiting for it to be free")
                told = True
            await asyncio.sleep(BEAT_EVERY_S)

    async def draw_epoch(self, rank: Rank) -> None:
        """Give a rank the next epoch that its name never had; while the registry is down, the one after its last."""
        above, rank.epoch = rank.epoch, rank.epoch + 1
        with contextlib.suppress(RegistryDown):
            rank.epoch = await self._registry.next_epoch(rank.id, above)

    async def run(self) -> None:
        """Send heartbeats and read those of the routers, until cancelled or `stop`."""
        down = False
        while not self._over:  # not by cancellation alone: a library may swallow one
            await self._hear_routers()
            answers, failures = await self._beat_all()
            if failures and not down:
                logger.warning("%s; serving on", failures[0])
            elif down and not failures:
                logger.info("the registry is back")
            down = bool(failures)
            refused = next((answer for answer in answers if isinstance(answer, NameRefused)), None)
            if refused is not None and not self._refused:
                self._refused = True  # told twice to leave, the agent would cut its streams off
                self._lost(refused.because)
            self._nudge.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_EVERY_S):
                    await self._nudge.wait()

    async def _beat_all(self) -> tuple[list[Beaten | NameRefused], list[RegistryDown | ValueError]]:
        """Send a heartbeat of each rank, some at a time: on a slow registry the last of many would come too late. One
        that fails keeps no other back. Returns the registry's answers, and the failures.
        """
        at_once, failures = asyncio.Semaphore(BEATS_AT_ONCE), list[RegistryDown | ValueError]()
        answers: list[Beaten | NameRefused] = []

        async def beat(rank: Rank) -> None:
            async with at_once:
                try:
                    answers.append(await self._registry.beat(self._beat(rank)))
                except (RegistryDown, ValueError) as failure:  # ValueError: its heartbeat is too long
                    failures.append(failure)

        async with asyncio.TaskGroup() as group:
            for rank in self._ranks:
                group.create_task(beat(rank))
        return answers, failures

    async def _hear_routers(self) -> None:
        """Read which routers share the credits, and how many each one wants."""
        now = asyncio.get_running_loop().time()
        try:
            await fold_members(self._registry, self.routers, now, MemberKind.ROUTER)
        except RegistryDown:  # the heartbeat reports the outage
            return
        self._heard(list(self.routers.snapshot())[:ROUTERS_MAX])

    async def say_goodbye(self) -> None:
        """Leave the registry: the names are free at once."""
        for rank in self._ranks:
            with contextlib.suppress(RegistryDown):
                await self._registry.leave(rank.id, self._agent)
        await self._registry.close()
