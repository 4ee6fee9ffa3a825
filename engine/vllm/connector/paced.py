"""NIXL agents with the settings that Baton's connector needs, made through vLLM's own start-up. Runs inside vLLM's
workers.

NIXL's Python agent writes ``pthrDelay = 0`` into its configuration and offers no option for it, so its progress thread
spins on a whole core while the engine is idle. It also asks for no locking, which two threads with one agent need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

PROGRESS_US: Final = 1000
"""The pause between two rounds of the progress thread. The thread must run: a read over shared memory or TCP may need
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

    def __init__(self, agent: Any, prove: Callable[[bytes], bytes]) -> None:
        """`prove` adds the proof to a notice."""
        self._agent = agent
        self._prove = prove
        self.kept: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes = b"", **more: Any) -> Any:
        """Prepare the transfer without the notice."""
        if notif_msg:
            self.kept.append(notif_msg)
        return self._agent.make_prepped_xfer(*args, **more)

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        """Send a notice that is not tied to a read."""
        self._agent.send_notif(agent_name, notif_msg=self._prove(notif_msg))
