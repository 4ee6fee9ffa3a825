"""Which machine this is: a name that all processes on it agree on, in containers, too."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""The kernel's own, new with each start: the same in all containers on it, where machine ids are an image's."""


def this_node(boot_id: Path = BOOT_ID) -> str:
    """Empty: there is no way to tell."""
    try:
        told = boot_id.read_text().strip()
    except OSError:
        return ""
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest() if told else ""
