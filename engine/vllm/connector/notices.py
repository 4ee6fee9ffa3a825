"""The notice channel between the scheduler halves of introduced engines. It carries short texts, and reads no memory.

Runs inside vLLM's engine core. It is a NIXL agent of its own, with no memory registered, so a notice does not wait for
a worker's step. It has no progress thread: notices arrive when `heard` is called, which the engine's thread does at
every step while a leg waits here or a hold stands. A look takes a microsecond, but gives other threads of the process
Python's lock: 0.1 ms and more of a step on two slow cores. An idle channel costs nothing. One thread uses it.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

logger = logging.getLogger("vllm.baton.channel")

AGAIN_S = 2.0
"""Seconds between two tries to connect with the same engine: they take time of the engine's steps."""


class NoticeChannel:
    """The agent, and the engines at its other ends, by their engine ids."""

    def __init__(self, agent: Any) -> None:
        """`agent`: NIXL's Python agent, or one like it."""
        self._agent = agent
        self.payload: bytes = agent.get_agent_metadata()
        """What another engine needs in order to send notices here."""
        self._payloads: dict[str, bytes] = {}
        """By engine that was met: what it needs to be connected anew."""
        self._again_at: dict[str, float] = {}
        self._names: dict[str, str] = {}
        self._engines: dict[str, str] = {}

    def __contains__(self, engine: str) -> bool:
        return engine in self._names

    def meet(self, engine: str, payload: bytes) -> None:
        """Notices can be sent to this engine, and taken from it, from now on. Never raises."""
        if engine not in self._names:
            self._payloads[engine] = payload
            self._connect(engine)

    def _connect(self, engine: str) -> None:
        self._again_at[engine] = time.monotonic() + AGAIN_S
        try:
            name = self._agent.add_remote_agent(self._payloads[engine])
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._names[engine], self._engines[name] = name, engine
            self._agent.make_connection(name)
        except Exception:  # NIXL raises classes of its own, some from C++
            logger.exception("%s: no channel", engine)
            self._disconnect(engine)

    def part(self, engine: str) -> None:
        """The engine is gone. Never raises."""
        self._disconnect(engine)
        self._payloads.pop(engine, None)
        self._again_at.pop(engine, None)

    def _disconnect(self, engine: str) -> None:
        name = self._names.pop(engine, None)
        if name is None:
            return
        self._engines.pop(name, None)
        try:
            self._agent.remove_remote_agent(name)
        except Exception:  # noqa: BLE001 - as above
            logger.debug("%s: its channel was gone", engine)

    def tell(self, engine: str, note: bytes) -> bool:
        """Send a notice. Returns whether it is on its way. Never raises.

        NIXL sends nothing more on a connection that broke, and says so at the next notice. That notice is sent again on
        a new connection, which is made once in `AGAIN_S` at most.
        """
        if self._send(engine, note):
            return True
        if engine not in self._payloads or time.monotonic() < self._again_at[engine]:
            return False
        self._disconnect(engine)
        self._connect(engine)
        return self._send(engine, note)

    def _send(self, engine: str, note: bytes) -> bool:
        name = self._names.get(engine)
        if name is None:
            return False
        try:
            self._agent.send_notif(name, note)
        except Exception:  # noqa: BLE001 - as above
            logger.debug("%s cannot be told", engine)
            return False
        return True

    def heard(self) -> list[tuple[str, bytes]]:
        """The notices that have come, each with the engine that sent it; without those of unknown engines."""
        if not self._names:
            return []
        try:
            notes = self._agent.get_new_notifs()
        except Exception:  # noqa: BLE001 - as above
            logger.debug("the channel cannot be read")
            return []
        found = []
        for name, told in notes.items():
            engine = self._engines.get(name.decode(errors="replace") if isinstance(name, bytes) else name)
            found += [(engine, note) for note in told] if engine is not None else []
        return found


def open_channel() -> NoticeChannel | None:
    """This engine's channel; None if NIXL cannot make one: then the engine takes no early legs."""
    try:
        from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config  # noqa: PLC0415 - loads NIXL

        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        return NoticeChannel(NixlWrapper(f"baton-channel-{uuid.uuid4()}", config))
    except Exception:  # as above; and without a channel the engine still serves
        logger.exception(
            "No notice channel to other engines: decode legs are taken only after their prompt is computed"
        )
        return None
