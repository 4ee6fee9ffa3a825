"""A Ray cluster on this machine, for tests: its head on a loopback address, logical CPUs, no dashboard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ray_cluster(cpus: int = 1) -> Iterator[Any]:
    """Start a cluster and connect this process to it. At the end, stop the cluster with all its nodes.

    The head's address is 127.0.0.2: Ray replaces 127.0.0.1 by the machine's own address, and then the driver hangs.
    """
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 s are too few on a busy machine
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
