"""File descriptors: as many as this machine lets a process have."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files to the hard one. 1,024, the usual soft limit, is for programs that `select`;
    a router needs two for each request. Children inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
