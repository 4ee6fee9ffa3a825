"""Two real vLLM engines behind the real router, started once for all live tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny.yaml"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    running = Cluster.start(tmp_path_factory.mktemp("state"), str(EXAMPLE))
    try:
        running.wait_ready()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(90)
