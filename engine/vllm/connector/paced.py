"""NIXL agents with the settings that Baton's connector needs, made through vLLM's own start-up. Runs inside vLLM's
workers.

NIXL's Python agent writes ``pthrDelay = 0`` into its configuration and offers no option for this delay. So its progress
thread spins on a whole core while the engine is idle. It also asks for no locking, which two threads with one agent
need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from decode.reads import RankSource
from kvtransfer.hold_marks import Slot
from kvtransfer.notes import with_proof

PROGRESS_US: Final = 1000
"""The pause between two rounds of the progress thread, in microseconds; on CPU, `sitecustomize.PROGRESS_PAUSE_US` sets
the same one for agents that vLLM's own connector makes. The thread must run: a read over shared memory or TCP may need
the target's help, which would otherwise come only with the target's next step. Measured: 0 burns half a core and more,
1,000 about 2 % of one."""


@contextmanager
def paced(api: ModuleType, locking: Any) -> Iterator[None]:
    """Agents that NIXL's `_api` module makes in this context have a paced progress thread and the given locking.

    If NIXL's bindings have changed since this was written, nothing is changed.
    """
    bindings: Any = getattr(api, "nixlBind", None)
    plain: Any = getattr(bindings, "nixlAgentConfig", None)
    delay: Any = getattr(plain, "pthrDelay", None)
    sync: Any = getattr(plain, "syncMode", None)
    if not hasattr(delay, "__set__") or not hasattr(sync, "__set__"):
        yield
        return

    class PacedNixlConfig(plain):  # type: ignore[misc]
        """NIXL's agent configuration with two of Baton's settings."""

        @property
        def pthrDelay(self) -> Any:  # noqa: N802 - NIXL's own name
            return delay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:  # noqa: N802
            delay.__set__(self, value or PROGRESS_US)

        @property
        def syncMode(self) -> Any:  # noqa: N802
            return sync.__get__(self)

        @syncMode.setter
        def syncMode(self, value: Any) -> None:  # noqa: N802
            sync.__set__(self, locking)

    bindings.nixlAgentConfig = PacedNixlConfig
    try:
        yield
    finally:
        bindings.nixlAgentConfig = plain


class NoticesKept:
    """A NIXL agent that keeps back the notice that vLLM ties to a read; it is sent once the read is confirmed."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._slot: Slot | None = None
        self._sources: list[RankSource] = []
        self._kept: list[bytes] = []
        self._early = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    @contextmanager
    def pulling(self, slot: Slot | None) -> Iterator[list[RankSource]]:
        """In this context vLLM posts the reads of one request, whose hold has this slot (None: it has none). Notices
        carry the slot's proof. Gives the list that gets the ranks that are read from.
        """
        self._slot, self._sources = slot, []
        try:
            yield self._sources
        finally:
            self._slot = None

    @contextmanager
    def pulling_early(self) -> Iterator[None]:
        """In this context vLLM posts reads of blocks before their hold is there: no engine is notified."""
        self._early = True
        try:
            yield
        finally:
            self._early = False

    @contextmanager
    def reading(self, agent_name: str, place: Callable[[Slot], int]) -> Iterator[None]:
        """In this context vLLM posts the reads from one rank. `place` gives the address of a slot there."""
        self._kept.clear()
        yield
        for note in () if self._early else self._kept:
            assert self._slot is not None, "checked before anything was read"
            self._sources.append(RankSource(agent_name, place(self._slot), self._proved(note)))
        self._kept.clear()

    def _proved(self, note: bytes) -> bytes:
        return note if self._slot is None else with_proof(note, self._slot.proof)

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes = b"", **more: Any) -> Any:
        """Prepare the transfer without the notice."""
        if notif_msg:
            self._kept.append(notif_msg)
        return self._agent.make_prepped_xfer(*args, **more)

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        """Send a notice that is not tied to a read."""
        if self._early:
            return
        self._agent.send_notif(agent_name, notif_msg=self._proved(notif_msg))
