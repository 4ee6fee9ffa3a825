"""The folder of an engine's tier on disk: its own while the engine runs, and removed when nobody has it. A shell.

A process that has a folder holds a lock on it (`flock`), which the kernel frees with the process, however it ends. So
files that were left behind, by a machine that lost power or a container that was killed whole, show by their free lock:
the next engine that starts beside them removes them. On a file system without such locks nothing is removed but an
instance's own folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cluster.errors import UsageError
from engine.vllm.tiers import FOLDER_PREFIX

logger = logging.getLogger("baton.engine")

TRIES: Final = 5
"""How often a folder is made again that another engine's start removed before it was locked."""


def claim(folder: str) -> int | None:
    """Make this folder private, empty and this process's: files that an earlier start has left may be of other weights.

    Returns the lock, a file descriptor to close when the folder is removed; None: there are no locks here.

    Raises:
        UsageError: the folder's name does not begin with `FOLDER_PREFIX`.
        OSError: it cannot be made.
    """
    path = Path(folder)
    if not path.name.startswith(FOLDER_PREFIX):
        raise UsageError(f"{folder} would be emptied: its name does not begin with {FOLDER_PREFIX}")
    for _ in range(TRIES):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock(path)
        if lock is None:
            continue
        if _leads_to(path, lock):
            return lock
        os.close(lock)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return None


def remove_left(beside: str) -> None:
    """Remove the folders beside this one that belong to this user, and to no living process."""
    own = Path(beside)
    for folder in sorted(own.parent.glob(f"{FOLDER_PREFIX}*")):
        if folder == own or not _is_ours(folder):
            continue
        lock = _lock(folder)
        if lock is None:
            continue
        try:
            count = sum(1 for _ in _files(folder))
            shutil.rmtree(folder, ignore_errors=True)
            logger.info("%s: removed %d files of a KV cache that an engine has left there", folder, count)
        finally:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder. Returns the file descriptor that holds the lock; None: another process has it, or the folder is
    gone, or its file system has no locks on folders (NFS).
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _leads_to(path: Path, lock: int) -> bool:
    """Whether the path still leads to the folder that was locked."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(lock))
    return False


def _is_ours(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.lstat().st_uid == os.geteuid()
    return False


def _files(folder: Path) -> Iterator[str]:
    for _, _, files in os.walk(folder):
        yield from files
