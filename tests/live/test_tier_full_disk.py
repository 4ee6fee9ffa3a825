"""The disk of a tier is full: requests are answered as without the tier, and no engine ends."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import cluster as clusters
from support.cluster import Cluster, within
from support.talks import ask, first_turns

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(900)]

FILE = """
models:
  - name: baton-tiny
    pools:
      both: {start: 1, engine_args: {num-gpu-blocks-override: 24}}
kv: {host_gib: 0.012, disk_gib: 0.5, disk_folder: FOLDER}
"""
TALKS = 8
DISK_BYTES = 4 << 20
"""The conversations have 20 MiB of keys and values; the tier believes that it may use half a GiB."""

FAILED = "vllm:kv_offload_tiering_cascade_job_failures_total{"
"""vLLM's counter of prompts that could not be written to disk."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("a small file system needs the right to mount one")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_nothing_but_its_tier(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "START_S", 600.0)
    with Cluster.of(tmp_path, FILE.replace("FOLDER", str(small_disk))) as cluster:
        epoch = cluster.status()["both-0"]["epoch"]
        talks = first_turns(TALKS)
        answers = [[ask(cluster.endpoint, each).text for each in talks] for _ in range(3)]
        alone = [ask(cluster.endpoint, each, cache_salt="alone").text for each in talks]
        lines = [each for each in cluster.metrics("both-0").splitlines() if each.startswith(FAILED)]
        assert sum(float(each.rsplit(" ", 1)[1]) for each in lines) >= 1, "the disk was full"
        assert answers == [alone] * 3
        within(30, cluster.idle)
        assert cluster.status()["both-0"]["epoch"] == epoch, "the engine has not ended"
