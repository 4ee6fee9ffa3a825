"""File descriptors: as many as this machine lets a process have."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files to the hard one; children inherit it.

    The usual soft limit, 1,024, is for programs that call `select`; a router needs two files for each request.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
