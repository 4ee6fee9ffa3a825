"""Keeps the router's view of the fleet in step with the registry: instances, their own reports, and the number of
routers.

A shell around `Membership`. While the registry cannot be reached, the router keeps serving with what it knows: no
instance expires, and the router's own probes still find the dead ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from cluster.credits import TenantDemand, local_shares
from cluster.ids import InstanceId
from cluster.registry.membership import (
    BEAT_EVERY_S,
    Change,
    ChangeKind,
    Heartbeat,
    Member,
    MemberKind,
    Membership,
    MemberState,
    Snapshot,
    encode,
)
from cluster.registry.proofs import PROOF_BYTES_MAX
from cluster.registry.registry import Registry, RegistryDown, fold_members, read_members
from router.core.values import Reported
from router.fleet.quarantine import Quarantine, Word

logger = logging.getLogger("baton.router")

READS_AT_ONCE = 20
READS_WITHIN_S = 0.5
"""No more readings within so many seconds: any program that reaches the registry may announce changes without end."""

READ_EVERY_S = 0.5
"""The longest time between two readings. An agent that drains waits four times as long before it believes that it is
idle."""

CONTROLLER_EVERY_S = 2.0
"""Time between two readings of the goodput controller's heartbeat."""

_LOUD = {ChangeKind.REFUSED, ChangeKind.STALE, ChangeKind.SKEWED, ChangeKind.EXPIRED}


class OwnWordSource(Protocol):
    """What this router says about itself in its heartbeat (`router.scheduler.demand.OwnWord`)."""

    @property
    def shares(self) -> Mapping[str, float]:
        """The tenants' weights."""

    def legs(self, goes_by: Mapping[InstanceId, tuple[int, int]], turn: int) -> dict[str, tuple[int, int, int]]:
        """By instance: legs in flight, and the heartbeat they were sent by."""

    def demand(self) -> tuple[TenantDemand, ...]:
        """The demand of the router's tenants for each pool."""

    def counters(self, now: float) -> dict[str, Any]:
        """The counters that the goodput controller reads. A heartbeat without room for them leaves them out: unknown is
        not zero.
        """


class Discovery:
    """One router's reader of the registry. It has many attributes: of each thing that is read the former value is kept,
    to tell changes.
    """

    def __init__(self, registry: Registry, on_fleet: Callable[[tuple[Reported, ...], int], None]) -> None:
        self._registry = registry
        self._on_fleet = on_fleet
        self._instances = Membership(registry.ttl_s)
        self._routers = Membership(registry.ttl_s)
        self._memberships = {MemberKind.INSTANCE: self._instances, MemberKind.ROUTER: self._routers}
        self._id = secrets.token_hex(8)
        self._name = InstanceId(f"router-{self._id[:8]}")
        self._seq = 0
        self._mute = False
        self.own: OwnWordSource | None = None
        """The source of the legs, demand and counters to announce; None: the agents give this router no grants of its
        own."""
        self.controller: Heartbeat | None = None
        """The goodput controller's last heartbeat; None: there is none, or this router may not read it."""
        self._controllers = Membership(registry.ttl_s)
        self._controllers_at = -CONTROLLER_EVERY_S
        self.heard = False
        """Whether the last reading succeeded."""
        self.heard_at: float | None = None
        """The time of the last successful reading, in monotonic seconds; None: never."""
        self._told_down = False
        """Whether the log already says that the registry cannot be reached."""
        self._full_since: float | None = None
        """Since when readings succeed and heartbeats do not, in monotonic seconds."""
        self._told_full = False
        """Whether the log already says so."""
        self._refusal = ""
        """Why a heartbeat of this router did not come to the registry."""
        self._began_at = time.monotonic()
        self.quarantine = Quarantine(self._name)
        self.on_quarantine: Callable[[], None] = lambda: None
        """Called when other routers announce a change of the quarantine."""
        self._peer_names: frozenset[str] = frozenset()
        self._closed = False
        self._read_at: deque[float] = deque(maxlen=READS_AT_ONCE)
        """When the last readings began, on the monotonic clock."""

    @property
    def name(self) -> InstanceId:
        """This router's name in the registry."""
        return self._name

    def peers(self) -> tuple[Heartbeat, ...]:
        """The other routers' last heartbeats, also while the registry cannot be reached."""
        return tuple(member.beat for member in self._routers.snapshot() if member.id != self._name)

    @property
    def peer_names(self) -> frozenset[str]:
        """The names of the other routers, also while the registry cannot be reached."""
        return self._peer_names

    @property
    def number(self) -> int:
        """This router's number among the routers, from 0, in the order of their names."""
        return sum(name < self._name for name in self._peer_names)

    def unproven(self) -> dict[str, str]:
        """Names that the last reading left out for want of a valid proof, and why."""
        return {name: because for kind in MemberKind for name, because in self._registry.unproven(kind).items()}

    def stale_s(self, now: float) -> float:
        """How long the registry has not been read, or has taken no heartbeats, in seconds; 0 if neither."""
        if self.heard:
            return 0.0 if self._full_since is None else now - self._full_since
        return now - (self._began_at if self.heard_at is None else self.heard_at)

    def snapshot(self) -> Snapshot:
        """The fleet as last read."""
        return self._instances.snapshot()

    async def read_forever(self) -> None:
        """Read, update the view and report, again and again: on a change, or after a while."""
        while not self._closed:  # not by cancellation alone: a library may swallow a cancellation
            self._read_at.append(time.monotonic())
            await self.read()
            if await self._registry.wait_changed(READ_EVERY_S) and len(self._read_at) == READS_AT_ONCE:
                await asyncio.sleep(self._read_at[0] + READS_WITHIN_S - time.monotonic())  # at once if it is over

    async def read(self) -> None:
        """Read once."""
        now = time.monotonic()
        try:
            members = await read_members(self._registry, self._memberships)
        except RegistryDown as down:
            if self.heard:
                logger.warning("%s; serving on with what is known", down)
            elif not self._told_down:
                logger.warning("%s; no instance is known before it answers", down)
            self.heard, self._told_down, self._full_since = False, True, None
            return
        if self.heard and self.heard_at is not None and now - self.heard_at >= self._registry.ttl_s:
            logger.warning("this router stood still for %.0f s, perhaps the whole machine", now - self.heard_at)
            for membership in self._memberships.values():
                membership.deaf()  # agents may have stood still with it, and need a moment for their next heartbeats
        if not self.heard:
            logger.info("the registry is heard")
        self.heard, self.heard_at = True, now
        self._hear_quarantine(members[MemberKind.ROUTER])
        self._tell_full(now)
        wall = time.time()  # noqa: TID251 - only to tell whose clock is off
        self._log(self._instances.fold(members[MemberKind.INSTANCE], now, wall))
        self._routers.fold(members[MemberKind.ROUTER], now, wall)
        self._peer_names = frozenset(str(beat.id) for beat in self.peers())
        await self._hear_controller(now)
        reported = tuple(_reported(member, self._name) for member in self.snapshot())
        self._on_fleet(reported, max(1, len(self._routers.snapshot())))

    def _tell_full(self, now: float) -> None:
        """Note, and write to the log, since when the registry is read but takes no heartbeats."""
        if self._registry.takes_writes:
            if self._told_full:
                logger.info("the registry takes heartbeats again")
            self._full_since, self._told_full = None, False
            return
        if self._full_since is None:
            self._full_since = now
        elif not self._told_full and now - self._full_since > 2 * BEAT_EVERY_S:  # not just one heartbeat
            self._told_full = True
            logger.warning("%s; it is read, but takes no heartbeats: serving on with what is known", self._refusal)

    async def _hear_controller(self, now: float) -> None:
        """Read the controller's heartbeat, for the UI and the metrics alone. An access list older than controllers may
        forbid it.
        """
        if now - self._controllers_at < CONTROLLER_EVERY_S:
            return
        self._controllers_at = now
        with contextlib.suppress(RegistryDown):
            await fold_members(self._registry, self._controllers, now, MemberKind.CONTROLLER)
        self.controller = next((member.beat for member in self._controllers.snapshot()), None)

    def _hear_quarantine(self, routers: Iterable[Heartbeat]) -> None:
        """Take the quarantine from other routers, also from those that have just left: their last heartbeat informs the
        next router.
        """
        heard = [
            self.quarantine.hear({InstanceId(name): Word(*word) for name, word in beat.quarantined.items()})
            for beat in routers
            if beat.id != self._name
        ]
        if any(heard):
            self.on_quarantine()

    @staticmethod
    def _log(changes: tuple[Change, ...]) -> None:
        for change in changes:
            logger.log(logging.WARNING if change.what in _LOUD else logging.DEBUG, "%s", change.because)

    def local_shares(self) -> dict[str, float]:
        """The tenants' weights at this router: each tenant's weight, times this router's part of that tenant's whole
        demand.
        """
        by_router = [(member.id, _by_tenant(member.beat)) for member in self._routers.snapshot()]
        mine = dict(by_router).get(self._name, {})
        return local_shares(mine, [wants for _, wants in by_router], self.own.shares if self.own is not None else {})

    async def announce_forever(self, url: str, admin_url: str) -> None:
        """Tell agents and the other routers that this router shares the fleet's credits, and how many it could use."""
        while not self._closed:
            await self.announce(url, admin_url)
            await asyncio.sleep(BEAT_EVERY_S)

    async def announce(self, url: str, admin_url: str) -> None:
        """Send one heartbeat. `read` reports an outage."""
        try:
            await self._registry.beat(self.announcement(url, admin_url))
        except RegistryDown as down:
            self._refusal = str(down)

    def announcement(self, url: str, admin_url: str) -> Heartbeat:
        """The next heartbeat. Its legs, and the heartbeats they were sent by, are from one moment."""
        self._seq += 1
        beat = Heartbeat(
            id=self._name,
            agent=self._id,
            where=f"{socket.gethostname()}:{os.getpid()}",
            kind=MemberKind.ROUTER,
            seq=self._seq,
            url=url,
            agent_url=admin_url,
            state=MemberState.READY,
            quarantined={name: (*word,) for name, word in self.quarantine.words.items()},
            sent_at=time.time(),  # noqa: TID251 - informative
        )
        return self._readable(beat)

    def _readable(self, beat: Heartbeat) -> Heartbeat:
        """`beat` with as much as readers accept beside its proof: with legs, demand and counters; without the demand if
        a tenant's or a model's name cannot be announced; without the quarantine if one of its words cannot.
        """
        fuller = [beat, replace(beat, quarantined={})]
        own = self.own
        if own is not None:
            goes_by = {member.id: member.beat.order for member in self.snapshot()}
            legs = replace(beat, legs=own.legs(goes_by, self._seq))
            shares = replace(legs, demand=own.demand())
            fuller = [replace(shares, **own.counters(time.monotonic())), shares, legs, *fuller]
        fault = ""
        for told in fuller:
            try:
                encode(told, spare=PROOF_BYTES_MAX)
            except ValueError as error:
                fault = fault or str(error)
            else:
                break
        if fault:
            logger.log(logging.DEBUG if self._mute else logging.WARNING, "not all of it is announced: %s", fault)
        self._mute = bool(fault)
        return told

    def stop(self) -> None:
        """End the loops at their next turn."""
        self._closed = True

    async def close(self) -> None:
        """Announce that this router leaves."""
        with contextlib.suppress(RegistryDown):
            await self._registry.leave(self._name, self._id, MemberKind.ROUTER)
        await self._registry.close()


def _reported(member: Member, router: InstanceId) -> Reported:
    beat = member.beat
    return Reported(
        instance=member.instance,
        state=beat.state.value,
        accepting=member.takes_work,
        credits=beat.credits,
        grant=_grant(beat, router),
        load=beat.load,
        models=beat.models,
        shuns=tuple(InstanceId(name) for name in beat.shuns),
        peers=beat.peers,
        evicted=beat.evicted,
        kept={str(tier): tokens for tier, tokens in beat.kept.items()},
        kept_gb_s={str(tier): gb_s for tier, gb_s in beat.kept_gb_s.items()},
        kv_token_bytes=beat.kv_token_bytes,
        adapters=beat.adapters,
    )


def _grant(beat: Heartbeat, router: InstanceId) -> int | None:
    """The instance's grant to a router. If it grants to others and does not know this router yet: one, so that a first
    request gets through.
    """
    return beat.grants.get(router, min(1, beat.credits)) if beat.grants else None


def _by_tenant(beat: Heartbeat) -> dict[str, float]:
    found: dict[str, float] = {}
    for pool in beat.demand:
        for tenant, (legs, _) in pool.tenants.items():
            found[tenant] = found.get(tenant, 0.0) + legs
    return found
