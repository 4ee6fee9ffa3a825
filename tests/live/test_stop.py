"""How a cluster ends: nothing of it stays behind, however its parent dies."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.cluster import Cluster, alive, descendants, within


def test_killed_up_leaves_no_orphan(tmp_path: Path, cluster: Cluster) -> None:
    """SIGKILL while its engines start: vLLM's own children are there, and nobody is left to stop them."""
    other = Cluster.start(tmp_path)
    try:
        within(60, lambda: any(b"EngineCore" in _name(pid) for pid in descendants(other.process.pid)))
        family = descendants(other.process.pid)
        assert len(family) >= 6, "router, two agents, two keepers, two servers, ..."
        other.process.send_signal(signal.SIGKILL)
        other.process.wait(5)
        assert within(10, lambda: not alive(family)) < 10
    finally:
        other.process.kill()


def test_ctrl_c_stops_everything(cluster: Cluster) -> None:
    """Must be the last test of all: it ends the shared cluster."""
    family = descendants(cluster.process.pid)
    assert cluster.stop(signal.SIGINT) == 0
    assert not alive(family)


def _name(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
def _long_enough(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.timeout(200))
