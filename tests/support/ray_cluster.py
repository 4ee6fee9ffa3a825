"""A Ray cluster of this machine, for tests: its head on a loopback address, logical CPUs, no dashboard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ray_cluster(cpus: int = 1) -> Iterator[Any]:
    """Started, and this process connected to it; ended with all its nodes.

    Ray rewrites 127.0.0.1 to the machine's own address, and a head on loopback then hangs its driver: 127.0.0.2 it
    leaves alone.
    """
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 are too few on a machine that is busy
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": cpus, "node_ip_address": "127.0.0.2", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
