"""Finds the process that listens on a port of this machine, as the kernel reports. A shell.

An engine takes its port many seconds after its process has begun, and another program may have taken the port by then.
That program may well answer as an engine does: a health check alone cannot tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

LISTENS = "0A"
"""State of a socket that listens, in `/proc/net/tcp` (`TCP_LISTEN` of the kernel's `tcp_states.h`)."""


def listens(port: int, pids: Iterable[int]) -> bool:
    """Whether one of these processes has a socket that listens on the port. True if the kernel does not tell."""
    wanted = _inodes(port)
    if wanted is None:
        return True
    sockets = {f"socket:[{inode}]" for inode in wanted}
    return any(not sockets.isdisjoint(_open_files(pid)) for pid in pids)


def _inodes(port: int) -> set[str] | None:
    """Inodes of the sockets that listen on the port, on any address. None: the kernel does not tell."""
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
        except OSError:
            if name == "tcp":
                return None
            continue  # a machine without IPv6
        for fields in map(str.split, lines):
            if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _open_files(pid: int) -> list[str]:
    files: list[str] = []
    with contextlib.suppress(OSError):  # the process has ended, or is another user's
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                files.append(str(file.readlink()))
    return files
