"""Tells router peers of this router's load in flight, and hears of theirs, through the registry. A shell.

While the registry cannot be reached, peers' requests are not known: a router then chooses by its own requests and by
engines' reports. No choice waits for a note.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Final

from cluster.registry.registry import Registry, RegistryDown
from kvtransfer.sealed_notes import SEAL_BYTES_MAX, sealed, unsealed
from kvtransfer.ticket import SigningKey
from router.core.load_notes import ALIVE_S, NOTE_BYTES_MAX, note_bytes, note_of, tell_every_s
from router.fleet import events
from router.fleet.view import FleetView
from router.predict.peer_load import SILENT_S

logger = logging.getLogger("baton.router")

AGAIN_S: Final = 1.0
"""Seconds between two tries while the registry does not take or send notes; also the longest wait for one note."""

Handle = Callable[[events.FleetEvent], object]


class LoadSharing:
    """One router's notes to its peers and from them."""

    def __init__(
        self,
        name: str,
        registry: Registry,
        view: FleetView,
        *,
        peers: Callable[[], Collection[str]],
        keys: Callable[[], tuple[SigningKey, ...]] | None,
        handle: Handle,
        freed: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        """The notes of one router.

        Args:
            name: this router's, in the registry.
            registry: carries the notes.
            view: the router's view of the fleet.
            peers: the names of the routers that are there now, without this one.
            keys: the fleet's ticket keys, which prove notes. None, or a registry that accepts what is not proven: notes
                of any program that reaches the registry are believed.
            handle: passes an event to the view as a machine.
            freed: called when a queued request may find room, because a peer has told of an end or is lost.
            lost: called with ``refused`` for each note that is not proven, is unreadable or has impossible numbers, and
                with ``missing`` for each gap.
        """
        self._registry: Final = registry
        self._view: Final = view
        self._updates: Final = view.tell_peers(name, shares_names=keys is not None)
        self._peers: Final = peers
        self._keys: Final = keys
        self._handle: Final = handle
        self._freed: Final = freed
        self._lost: Final = lost
        self._told_s = self._heard_s = time.monotonic()
        """When this router sent notes last, and when any note came last, its own included."""
        self._silent = False
        """The log has said once that the registry carries no notes."""
        self._gaps = 0
        self._ended = False

    def stop(self) -> None:
        """End the loops at their next turn."""
        self._ended = True

    # --- to peers -----------------------------------------------------------------------------------------------------

    async def tell_forever(self) -> None:
        """Write notes while there are peers, and drop the bookings of silent ones, until `stop` or a cancellation."""
        alone = True
        while not self._ended:
            await asyncio.sleep(ALIVE_S if alone else tell_every_s(self._view.routers))
            peers, now = self._peers(), time.monotonic()
            for name in self._view.peer_load.silent(now, peers):
                self._handle(events.RouterPeerLost(name, now))
                self._freed()
            if not peers:
                self._updates.skip()
            elif alone or self._updates.waiting or now - self._told_s >= ALIVE_S:
                if alone:
                    self._updates.tell_all()
                await self._tell(now)
            alone = not peers

    async def _tell(self, now: float) -> None:
        self._told_s = now
        keys = () if self._keys is None else self._keys()
        try:
            for note in self._updates.notes(now):
                await self._registry.send_note(sealed(note_bytes(note), keys))
            self._silent = False
        except RegistryDown as down:  # peers notice that a note is missing, and ask for all
            await self._rest(down)

    # --- from peers ---------------------------------------------------------------------------------------------------

    async def hear_forever(self) -> None:
        """Read notes until `stop` or a cancellation."""
        while not self._ended:
            try:
                payload = await self._registry.next_note(AGAIN_S, anew=self._deaf())
            except RegistryDown as down:
                await self._rest(down)
            else:
                if payload is not None:
                    self._heard_s = time.monotonic()
                    self.hear(payload)
                    await asyncio.sleep(0)  # redis-py does not wait while more is there: a flood must not stop requests

    def _deaf(self) -> bool:
        """Whether not even this router's own notes have come for `SILENT_S`: a connection that only reads does not show
        that it is dead.
        """
        now = time.monotonic()
        deaf = self._told_s - self._heard_s > SILENT_S
        if deaf:
            self._heard_s = now  # give the new one as long
        return deaf

    def hear(self, payload: bytes) -> None:
        """Take one note, if it is a peer's."""
        if len(payload) > NOTE_BYTES_MAX + SEAL_BYTES_MAX:  # a MAC of it would take long
            self._lost("refused")
            return
        raw, proven = unsealed(payload, () if self._keys is None else self._keys())
        note = note_of(raw) if proven or not self._registry.all_proven else "not proven"
        if isinstance(note, str):
            self._lost("refused")
            return
        if note.router not in self._peers():
            return  # this router's own, or that of one whose first heartbeat is not read yet
        now = time.monotonic()
        try:
            self._handle(events.LoadNoted(note, now))
        except (ArithmeticError, ValueError):  # a peer's numbers must not end the loop that hears all peers
            self._lost("refused")
            return
        if self._view.peer_load.gaps > self._gaps:
            self._gaps = self._view.peer_load.gaps
            self._lost("missing")
        if note.frees:
            self._freed()

    async def _rest(self, down: RegistryDown) -> None:
        if not self._silent:
            self._silent = True
            logger.warning(
                "other routers' requests are not known for now, and this router's not to them: %s. With Redis' access "
                "control lists, a router needs the channel `router:notes` (docs/operations.md)",
                down,
            )
        await asyncio.sleep(AGAIN_S)
