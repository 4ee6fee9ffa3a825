"""The folder of an engine's tier on disk: its own while the engine runs, and removed when no process has it. A shell.

An agent that has a folder holds a lock on it (`flock`), and so does its keeper, which removes the folder if the agent
was killed. The kernel frees the lock with the last of both, however they end. So files that were left behind, by a
machine that lost power or a container that was killed whole, show by their free lock: the next engine that starts
beside them removes them.

No process empties or removes a folder without the lock on that very folder. A path may lead to another folder by the
time that its former one is locked, so that is looked at first; and a folder in use is emptied, never replaced. On a
file system without such locks nothing is removed but an instance's own folder. Where each machine has locks of its
own (a shared disk), the machine's name in each folder's name keeps the machines apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cluster.errors import UsageError
from engine.vllm.keeper import empty, leads_to, remove
from engine.vllm.tiers import FOLDER_PREFIX, machine_part

logger = logging.getLogger("baton.engine")

WAIT_MAX_S: Final = 15.0
"""Seconds that a start waits for its folder: the keeper of a killed agent ends its engine and removes the files first
(`keeper.GRACE_S`, `keeper.SWEEP_MAX_S`)."""

LOOK_EVERY_S: Final = 0.05
"""Seconds between two looks meanwhile."""


def claim(folder: str, wait_max_s: float | None = None) -> int:
    """Make this folder private, empty and this process's: files that an earlier start has left may be of other weights.

    Args:
        folder: its path.
        wait_max_s: seconds to wait for another process that has it; None: `WAIT_MAX_S`.

    Returns:
        The file descriptor that holds it, to be closed once the folder is removed.

    Raises:
        UsageError: the folder's name does not begin with `FOLDER_PREFIX`, or another process has it all that time.
        OSError: it cannot be made, or belongs to another user.
    """
    path = Path(folder)
    if not path.name.startswith(FOLDER_PREFIX):
        raise UsageError(f"{folder} would be emptied: its name does not begin with {FOLDER_PREFIX}")
    held = _held(path, time.monotonic() + (WAIT_MAX_S if wait_max_s is None else wait_max_s))
    try:
        os.fchmod(held, 0o700)
    except OSError:
        os.close(held)
        raise
    empty(held)
    return held


def _held(path: Path, until: float) -> int:
    """Make the folder if it is missing, and hold it. `until`: how long another process that has it is waited for."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        try:
            return _hold(path)[0]
        except FileNotFoundError:  # another engine has removed it before it was locked
            if time.monotonic() >= until:
                raise
        except BlockingIOError:
            if time.monotonic() >= until:
                fix = "name another folder, --name or --port"
                raise UsageError(f"--kv-disk-folder {path.parent}: another engine has {path}: {fix}") from None
            time.sleep(LOOK_EVERY_S)


def remove_left(beside: str) -> None:
    """Remove the folders beside this one that belong to this machine and this user, and to no living process."""
    own = Path(beside)
    mine = machine_part(os.uname().nodename)
    for folder in sorted(own.parent.glob(f"{FOLDER_PREFIX}*")):
        if folder == own or not folder.name.endswith(mine) or not _is_ours(folder):
            continue
        try:
            held, locked = _hold(folder)
        except OSError:  # a living process has it, or it is gone
            continue
        try:
            if locked:
                _remove(folder, held)
        finally:
            os.close(held)


def _hold(folder: Path) -> tuple[int, bool]:
    """Open and lock the folder. Returns its file descriptor, and whether it is locked: some file systems have no locks
    on folders (NFS).

    Raises:
        BlockingIOError: another process has it.
        FileNotFoundError: there is none, or it was removed before it was locked.
        OSError: it is no folder, or cannot be opened.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    locked = True
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise
    except OSError:
        locked = False
    if leads_to(str(folder), held):
        return held, locked
    os.close(held)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


def _remove(folder: Path, held: int) -> None:
    count = sum(1 for _ in _files(folder))
    remove(str(folder), held)
    if folder.exists():
        logger.warning("%s: an engine has left its KV cache there, and not all of it can be removed", folder)
    elif count:
        logger.warning("%s: removed %d files of a KV cache that an engine has left there", folder, count)


def _is_ours(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return folder.lstat().st_uid == os.geteuid()
    return False


def _files(folder: Path) -> Iterator[str]:
    for _, _, files in os.walk(folder):
        yield from files
