"""One controller at a time: the registry's name `controller`, kept by heartbeats as an instance keeps its own. A shell.

Every controller of a fleet claims the same name. The one that has it leads; the others observe, claim it again every
`BEAT_EVERY_S`, and take over once it is free: at once after the leader's goodbye, a ttl after a dead leader's last
heartbeat. Without a goodbye the next leader waits for another ttl before it acts: a registry that lost its data (it was
started again, or failed over to a replica that lagged) gives the name away while the former leader may still act. So
does a controller that was just started, if there are instances already, and a leader that was cut off and gets the name
back: a registry without its data tells neither of them of another leader.

The lock is fenced on the leader's own clock: it acts only while its last answered heartbeat is younger than the ttl
less `MARGIN_S`, which is longer than any one action may take. A leader that was paused for a minute, or is cut off from
the registry, therefore stops before another one can have begun. `epoch` grows with each claim, so a later leader has a
higher one; readers of the registry then take heartbeats of a former leader for old.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Final

from cluster.ids import InstanceId
from cluster.registry.layout import CONTROLLER
from cluster.registry.membership import BEAT_EVERY_S, Heartbeat, MemberKind, MemberState
from cluster.registry.registry import NameRefused, Registry, RegistryDown

logger = logging.getLogger("baton.controller")

MARGIN_S: Final = 3.0
"""Seconds before the ttl ends at which a leader stops: an action (`ACTION_S`) and the drift between two clocks."""

ACTION_S: Final = 2.5
"""Longest time that one action may take, in seconds."""

FORMER: Final = "the controller before this one may still act, as it said no goodbye; this one acts in a few seconds"
"""The holder, in words, while a new leader waits."""


class LeaderClaim:
    """One controller's claim to lead."""

    def __init__(
        self,
        registry: Registry,
        url: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        said: Callable[[], str] = str,
    ) -> None:
        """`url`: where this controller answers commands; `said`: returns one line about it, for people."""
        self.registry: Final = registry
        self.url = url
        self.epoch = 0
        """The epoch of the last claim, its own or refused; 0: none yet."""
        self._holder = ""
        self._clock: Final = clock
        self._said: Final = said
        self._agent: Final = secrets.token_hex(8)
        self._seq = 0
        self._rival = ""
        """The controller that led when this one last asked for the name, in words; empty: none did."""
        self._since = self._until = -1.0
        """From when until when this controller may begin an action. `_until` is -1 before it leads for the first time,
        after a refusal and after a goodbye."""

    @property
    def held(self) -> bool:
        """Whether this controller may begin an action now."""
        return self._since <= self._clock() < self._until

    @property
    def holder(self) -> str:
        """The other controller that leads, or may still act, in words; empty: none is known."""
        waits = self._clock() < self._since
        return self._holder or (FORMER if waits else "")

    async def keep(self) -> None:
        """Claim the name and keep it, until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(BEAT_EVERY_S)

    async def turn(self) -> None:
        """One heartbeat, or one more claim."""
        asked = self._clock()
        led = asked < self._until
        try:
            if self.epoch == 0 or not led:
                self.epoch = await self.registry.next_epoch(CONTROLLER, self.epoch)
            answer = await self.registry.beat(self._beat())  # takes a free name, as `claim` does
        except RegistryDown as down:
            self._holder = ""
            if led and self._clock() >= self._until:
                logger.warning("%s; this controller does not act until it is heard again", down)
            return
        if isinstance(answer, NameRefused):
            self._until, self._holder = -1.0, answer.because
            self._rival = answer.because
            if led:
                logger.warning("another controller leads now: %s", answer.because)
            return
        if not led:
            lapsed = self._until >= 0  # it has led and was not refused since: it may not have heard of a successor
            wait_s = 0.0 if not lapsed and await self._is_gone(self._rival) else self.registry.ttl_s
            self._since, self._rival = asked + wait_s, ""
            logger.info("this controller leads, epoch %d%s", self.epoch, f", in {wait_s:g} s" if wait_s else "")
        self._until, self._holder = asked + self.registry.ttl_s - MARGIN_S, ""

    async def _is_gone(self, rival: str) -> bool:
        """Whether the leader before this one has said goodbye, or there is no fleet yet that one could have led."""
        try:
            last = await self.registry.read(MemberKind.CONTROLLER)
            if any(beat.state is MemberState.GONE and (not rival or beat.who in rival) for beat in last):
                return True
            return not rival and not await self.registry.read(MemberKind.INSTANCE)
        except RegistryDown:
            return False

    async def leave(self) -> None:
        """Say goodbye, so that another controller can lead at once."""
        self._until = -1.0
        try:
            await self.registry.leave(CONTROLLER, self._agent, MemberKind.CONTROLLER)
        except RegistryDown as down:
            logger.debug("no goodbye: %s", down)

    def _beat(self) -> Heartbeat:
        self._seq += 1
        return Heartbeat(
            id=InstanceId(CONTROLLER),
            agent=self._agent,
            where=f"{socket.gethostname()}:{os.getpid()}",
            kind=MemberKind.CONTROLLER,
            epoch=max(1, self.epoch),
            seq=self._seq,
            url=self.url,
            agent_url=self.url,
            state=MemberState.READY,
            detail=self._said()[:500],
            sent_at=time.time(),  # noqa: TID251 - informative
        )
