"""Makes glibc give large blocks of memory back to the kernel as soon as they are freed."""

from __future__ import annotations

import ctypes
from typing import Final

LARGE_BYTES: Final = 1 << 20

_M_MMAP_THRESHOLD: Final = -3
"""``malloc.h`` of glibc."""


def map_large_blocks() -> bool:
    """Give each block from `LARGE_BYTES` on a mapping of its own, always. False: the allocator did not accept that.

    glibc does this only up to the first such block that is freed. Then it raises its threshold to that block's size, up
    to 32 MiB, and the next large bodies come from the heap. There, growing copies them, and the blocks behind them keep
    their memory from going back (mallopt(3), `M_MMAP_THRESHOLD`: setting it ends that). Other allocators have no such
    call, or ignore it.
    """
    try:
        told = ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    except (AttributeError, OSError):
        return False
    return bool(told)
