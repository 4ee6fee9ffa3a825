"""Reads the KV events of one engine (`engine.vllm.evictions`). A shell: vLLM publishes them over ZeroMQ."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from engine.vllm.evictions import Evictions

logger = logging.getLogger("baton.agent")


def make_room(path: Path) -> None:
    """Make a folder for the socket that only this user can read.

    Raises:
        OSError: the folder cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)


def leave_nothing(path: Path) -> None:
    """Remove the socket and its folder; other files in the folder stay."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


async def follow(path: Path, heard: Evictions) -> None:
    """Read the engine's events into `heard` for ever; the engine may come and go. The caller removes the socket after
    the engine's end (`leave_nothing`): after an error here the engine may still have it open.

    Raises:
        zmq.ZMQError: the socket cannot be made, or its path is too long.
    """
    import zmq.asyncio  # noqa: PLC0415 - vLLM brings it; no other part needs it

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
                    logger.warning("unreadable KV events are left out: %s", error)
    finally:
        socket.close(0)
        context.term()
