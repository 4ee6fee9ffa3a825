"""Where live tests' engines compute."""

from __future__ import annotations

import os

import pytest
from support import device


def test_a_cluster_of_live_tests_sees_the_one_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """`baton up` spreads its engines over all GPUs that it sees."""
    monkeypatch.setattr(device, "_gpus", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    device.use_gpu("2")
    assert (device.gpus(), os.environ["CUDA_VISIBLE_DEVICES"]) == (("2",), "2")
