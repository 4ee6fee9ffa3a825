"""Folders of one start of an engine: for the sockets between its processes, and for a tier of its KV cache. A shell.

vLLM puts these sockets where temporary files go, and never removes them, even if it ends in order (0.32:
`utils/network_utils.get_open_zmq_ipc_path`). In a folder of their own the keeper removes them at the end, whichever
process died first; `child` does so if the keeper was killed. `TMPDIR` stays unchanged: engines of one machine share it,
for locks on downloads and for weights that a daemon keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from typing import TypeVar

from engine.vllm.keeper import SCRATCH, remove
from engine.vllm.tier_folder import claim, remove_left

SOCKETS = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for their folder."""

PREFIX = "baton-engine-"

BASE_BYTES_MAX = 40
"""A socket's path has 107 bytes at most, and vLLM's are the base, this folder's name (22 with a slash) and 37 more."""


T = TypeVar("T")


class scratch:  # noqa: N801 - used as a function is: `async with scratch(env) as own`
    """Give `env` with a folder of its own for sockets, which is removed afterwards.

    If the usual folder's path is too long for sockets below it, or cannot be written to, `SOCKETS` stays as it is.
    With `async with` threads make and remove the folders: a tier may have a hundred thousand files. With `with` the
    caller does.

    Args:
        env: the environment.
        kept: the folder of a tier on disk, which is emptied before and removed afterwards; empty: none. Folders beside
            it that other engines have left are removed, too.

    Raises:
        UsageError: the name of `kept` does not begin with `FOLDER_PREFIX`, or another engine has this folder.
        OSError: `kept` cannot be made.
    """

    def __init__(self, env: dict[str, str], kept: str = "") -> None:
        self._env = env
        self._kept = kept
        self._own: dict[str, int | None] = {}
        """The folders, with the file descriptor that holds each."""

    def __enter__(self) -> dict[str, str]:
        if self._kept:
            self._own[self._kept] = claim(self._kept)
            with contextlib.suppress(OSError):
                remove_left(self._kept)
        folder = _sockets(self._env.get(SOCKETS) or self._env.get("TMPDIR") or tempfile.gettempdir())
        self._own |= {folder: None} if folder else {}
        paths = {SOCKETS: folder} if folder else {}
        return {**self._env, **paths, **({SCRATCH: json.dumps(self._own)} if self._own else {})}

    def __exit__(self, *_: object) -> None:
        while self._own:
            folder, lock = self._own.popitem()
            remove(folder, lock)
            if lock is not None:
                os.close(lock)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What holds the folders. The keeper inherits it, as it may outlive its parent."""
        return tuple(lock for lock in self._own.values() if lock is not None)

    async def __aenter__(self) -> dict[str, str]:
        return await in_thread(self.__enter__)

    async def __aexit__(self, *_: object) -> None:
        await in_thread(self.__exit__)


def _sockets(base: str) -> str:
    """Make a folder for sockets below this one. Empty: none can be there, or its path would be too long."""
    if len(os.fsencode(base)) <= BASE_BYTES_MAX:
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix=PREFIX, dir=base)
    return ""


async def in_thread(work: Callable[[], T]) -> T:
    """Do this in a thread, or here where no thread can be started now: the engine starts and ends all the same."""
    try:
        return await asyncio.to_thread(work)
    except RuntimeError:
        return work()
