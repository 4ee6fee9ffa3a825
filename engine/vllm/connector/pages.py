"""Memory by its address: whole pages of Baton's own, and views of other memory. A shell that uses ctypes alone."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from kvtransfer.block_digests import Region


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


def regions(
    bases: Sequence[int], strides: Sequence[int], lengths: Sequence[int], *, blocks: int, parts: int
) -> list[Region]:
    """The tensors of a KV cache in host memory. The n-th begins at address ``bases[n]`` and has `blocks` times `parts`
    pieces of ``lengths[n]`` bytes, whose beginnings are ``strides[n]`` bytes apart.
    """
    return [
        Region(view(base, (blocks * parts - 1) * stride + length), stride, length, parts)
        for base, stride, length in zip(bases, strides, lengths, strict=True)
    ]
