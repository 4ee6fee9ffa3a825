"""Hears the KV events of one engine (`engine.vllm.evictions`). A shell: ZeroMQ, by which vLLM publishes them."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from engine.vllm.evictions import Evictions

logger = logging.getLogger("baton.agent")


def make_room(path: Path) -> None:
    """A folder for the socket that nobody else looks into.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)


def leave_nothing(path: Path) -> None:
    """Of both; what else somebody has put there stays."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


async def follow(path: Path, heard: Evictions) -> None:
    """Hear what the engine publishes, for ever; it may come and go. The engine has ended before this does."""
    import zmq.asyncio  # noqa: PLC0415 - vLLM brings it; nobody else needs it

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    told = False
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.subscribe(b"")
        socket.connect(f"ipc://{path}")
        while True:
            parts = await socket.recv_multipart()
            try:
                heard.hear(parts[-1])
            except msgspec.DecodeError as error:
                if not told:
                    told = True
                    logger.warning("KV events that nobody here can read are left out: %s", error)
    finally:
        socket.close(0)
        context.term()
        leave_nothing(path)
