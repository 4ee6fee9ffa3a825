"""Three real vLLM engines, one of each role, behind the real router, started once for all tests that share them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from support import device
from support.cluster import Cluster, within
from support.kinds import Table


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    """The rows of docs/exactness.md by kind of model."""
    return Table(publish=bool(request.config.getoption("--publish-kinds")))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    state = tmp_path_factory.mktemp("state")
    file = state / "baton.yaml"
    connector = request.config.getoption("--connector")
    # The router hands over whenever it can, because these tests are about hand-overs (`support.hands_over`).
    words = f"transfer: {{connector: {connector}}}\nrouter: {{policy: least_load}}\n"
    file.write_text(f"{device.example()}{words}")
    running = Cluster.start(state, str(file))
    try:
        running.wait_ready()
        # Engines count the pulls of the router's own proofs, too: wait for the proofs of all three pairs.
        within(60, lambda: running.proven(3))
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(90)
