"""What goes to another process of ours comes back as it was, also where the classes are compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton import compiled
from baton.packing import packed, unpacked
from cluster.instance import Role
from engine.twin.config import TwinConfig, Version

VALUE = {"a": (TwinConfig(num_blocks=777, role=Role.DECODE), Version(async_scheduling=True)), "b": [1, None, "x"]}
READER = """\
import sys
from baton import compiled
assert sys.argv[1:] != ["compiled"] or not compiled.use()
from baton.packing import packed, unpacked
sys.stdout.buffer.write(packed(unpacked(sys.stdin.buffer.read())))
"""


def test_frozen_dataclasses_come_back_equal() -> None:
    assert unpacked(packed(VALUE)) == VALUE


def test_a_process_of_the_same_kind_reads_and_writes_them() -> None:
    words = [sys.executable, "-c", READER, *(["compiled"] if compiled.in_use() else [])]
    assert unpacked(subprocess.run(words, input=packed(VALUE), stdout=subprocess.PIPE, check=True).stdout) == VALUE


def test_a_value_that_cannot_be_packed_raises_in_the_sender() -> None:
    with pytest.raises(AttributeError, match="local"):
        packed(lambda: None)
