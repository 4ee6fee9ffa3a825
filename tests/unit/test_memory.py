"""Memory of large bodies goes back to the kernel when they are gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEGABYTES_LEFT = """
import resource, sys
from baton.memory import map_large_blocks
if sys.argv[1] == "told" and not map_large_blocks():
    sys.exit(7)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6
first = bytearray(b"x" * 30_000_000)
del first  # from here on glibc takes blocks of this size from the heap, unless it is told not to
before, bodies, behind = resident(), [], []
for _ in range(5):
    bodies.append(bytearray(b"x" * 8_000_000))
    behind.append(bytearray(b"y" * 100_000))
bodies.clear()
print(resident() - before)
"""


def left(how: str) -> float:
    """Megabytes that a process keeps of five bodies of 8 MB, with a small block behind each."""
    done = subprocess.run(
        [sys.executable, "-c", MEGABYTES_LEFT, how], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode == 7:
        pytest.skip("this allocator cannot be told: it is not glibc's")
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_bodies_that_are_gone_leave_nothing_resident() -> None:
    assert left("told") < 5.0


def test_without_map_large_blocks_the_allocator_keeps_their_memory() -> None:
    """Where this fails, `map_large_blocks` is not needed any more."""
    if left("told") < 5.0:
        assert left("untold") > 20.0
