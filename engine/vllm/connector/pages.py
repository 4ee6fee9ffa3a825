"""Memory by its address: whole pages of Baton's own, and views of other memory. A shell, of ctypes alone."""

from __future__ import annotations

import ctypes
import mmap


class PagedMemory:
    """Bytes of this process that NIXL may register: whole pages, outside Python's heap."""

    def __init__(self, size: int) -> None:
        self._pages = mmap.mmap(-1, size)
        self.size = size
        self.view = memoryview(self._pages)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))


def view(address: int, size: int) -> memoryview:
    """A view of these bytes in host memory. It is valid while their owner keeps them."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
