"""Identifies this machine: a name that all processes on it agree on, in containers, too."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""The kernel's own id: new at each boot, and equal in all containers of a machine. (`/etc/machine-id` may come from a
container's image, and be equal on many machines.)"""


def this_node(boot_id: Path = BOOT_ID) -> str:
    """The id of this machine; empty: unknown."""
    try:
        told = boot_id.read_text().strip()
    except OSError:
        return ""
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest() if told else ""
