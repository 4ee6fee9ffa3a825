"""Notes between simulated routers about their load in flight (`router.core.load_notes`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from router.core.load_notes import LoadNote, tell_every_s
from router.fleet import events as d
from router.predict.load_updates import LoadUpdates
from sim.front import SimulatedRouter
from sim.kernel import NS, Kernel
from sim.settings import SimSettings


class PeerNotes:
    """The notes of all routers of one simulated fleet. A router alone writes none, nor does any if `notes_ms` is 0."""

    def __init__(self, kernel: Kernel, settings: SimSettings, fronts: Sequence[SimulatedRouter]) -> None:
        self._kernel: Final = kernel
        every_s = tell_every_s(len(fronts), settings.notes_ms / 1000.0) if settings.notes_ms else 0.0
        self._every_ns: Final = round(every_s * NS)
        self._takes_ns: Final = round(settings.note_ms * 1e6)
        told = fronts if len(fronts) > 1 and self._every_ns else ()
        self._updates: Final[list[tuple[SimulatedRouter, LoadUpdates]]] = [
            (front, front.scheduler.view.tell_peers(f"router-{number}", shares_names=True))
            for number, front in enumerate(told)
        ]
        self._busy: Callable[[], bool] = lambda: False

    def begin(self, busy: Callable[[], bool]) -> None:
        """Write notes from now on, for as long as `busy` answers True."""
        self._busy = busy
        for number, each in enumerate(self._updates):  # each at its own time
            self._kernel.at(self._kernel.now_ns + self._every_ns * number // len(self._updates), self._write, each)

    def _write(self, by: tuple[SimulatedRouter, LoadUpdates]) -> None:
        front, updates = by
        if updates.waiting:
            for note in updates.notes(self._kernel.now_s):
                self._kernel.at(self._kernel.now_ns + self._takes_ns, self._hear, (front, note))
        if self._busy():
            self._kernel.at(self._kernel.now_ns + self._every_ns, self._write, by)

    def _hear(self, sent: tuple[SimulatedRouter, LoadNote]) -> None:
        by, note = sent
        for front, _ in self._updates:
            if front is not by:
                front.fleet.handle(d.LoadNoted(note, self._kernel.now_ns / NS), self._kernel.now_s)
                if note.frees and front.scheduler.admission is not None:
                    front.tell(d.Roomy())
