"""A Ray cluster of three nodes on this machine, in a process of its own, with commands and answers as lines of JSON.

`python -m support.ray_nodes [PORT]`; PORT is the port of its server for clients (`ray://`). The head has no GPU; two
nodes have three logical GPUs each, of different types by their labels. The separate process keeps Ray's warnings and
forks out of the test's process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from support.cluster import with_support, within

GPUS = {"L4": 3, "H100-SXM": 3}
STORE_BYTES = 80 << 20


class Nodes:
    """The cluster, in the process that has Ray. Its methods carry out the commands."""

    def __init__(self, client_port: int | None) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self._cluster = Cluster()
        # With a head on 127.0.0.1 the drivers hang: Ray replaces that address by another one.
        head: dict[str, Any] = {
            "num_cpus": 2,
            "num_gpus": 0,
            "node_ip_address": "127.0.0.2",
            "object_store_memory": STORE_BYTES,
        }
        if client_port is not None:
            head["ray_client_server_port"] = client_port
        self._cluster.add_node(**head, include_dashboard=False)
        self._nodes = {gpu: self._add(gpu, number) for number, gpu in enumerate(GPUS)}
        self.address = self._cluster.address
        ray.init(address=self.address, namespace="tests", log_to_driver=False)
        self._cluster.wait_for_nodes()

    def _add(self, gpu: str, number: int) -> Any:
        return self._cluster.add_node(
            num_cpus=8,
            num_gpus=GPUS[gpu],
            node_ip_address=f"127.0.0.{3 + number}",
            labels={"baton.io/gpu": gpu},
            object_store_memory=STORE_BYTES,
        )

    def groups(self, _: dict[str, Any]) -> dict[str, str]:
        table = self._ray.util.placement_group_table().values()
        return {row["name"]: row["state"] for row in table if row["state"] != "REMOVED"}

    def free(self, _: dict[str, Any]) -> dict[str, float]:
        found = self._ray.available_resources()
        return {name: found.get(name, 0.0) for name in ("GPU", "CPU")}

    def actor(self, said: dict[str, Any]) -> dict[str, Any]:
        """The state that an instance's actor reports."""
        found = self._ray.get_actor(said["instance"], namespace=f"baton-{said['cluster']}")
        told: dict[str, Any] = self._ray.get(found.state.remote(), timeout=10)
        return told

    def kill_raylet(self, said: dict[str, Any]) -> bool:
        """SIGKILL a node's raylet and wait for its end: with a zombie, its workers would live for another 90 s."""
        node = self._nodes[said["gpu"]]
        (started,) = node.all_processes["raylet"]
        os.kill(started.process.pid, signal.SIGKILL)
        started.process.wait()
        return True

    def kill_head(self, _: dict[str, Any]) -> bool:
        """SIGKILL all processes of the head, `gcs_server` first. The cluster takes no other command after that."""
        processes = self._cluster.head_node.all_processes
        for kind in sorted(processes, key=lambda each: each != "gcs_server"):
            for started in processes[kind]:
                os.kill(started.process.pid, signal.SIGKILL)
                started.process.wait()
        return True

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()


def main() -> None:
    nodes = Nodes(int(sys.argv[1]) if sys.argv[1:] else None)
    print(json.dumps({"address": nodes.address}), flush=True)
    known: dict[str, Callable[[dict[str, Any]], Any]] = {
        "groups": nodes.groups,
        "free": nodes.free,
        "actor": nodes.actor,
        "kill_raylet": nodes.kill_raylet,
        "kill_head": nodes.kill_head,
    }
    for line in sys.stdin:
        said = json.loads(line)
        try:
            told = {"answer": known[said["do"]](said)}
        except Exception as error:  # noqa: BLE001 - the test gets the error; later commands still work
            told = {"error": repr(error)}
        print(json.dumps(told), flush=True)
    nodes.close()


class RayNodes:
    """Starts such a process and sends it commands, for a test."""

    def __init__(self, client_port: int | None = None, **environ: str) -> None:
        port = [] if client_port is None else [str(client_port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.ray_nodes", *port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**with_support(), **environ},
            start_new_session=True,
        )
        try:
            self.address = str(self._read()["address"])
        except BaseException:  # also after an interrupt, so that no node stays behind
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            assert line, "the Ray cluster ended"
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found

    def ask(self, do: str, **said: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **said}) + "\n")
        self._process.stdin.flush()
        told = self._read()
        assert "error" not in told, told
        return told["answer"]

    def wait_for_groups(self, names: set[str], seconds: float = 30) -> float:
        """Wait until exactly these placement groups exist, all of them placed. Returns how many seconds that took."""

        def there() -> bool:
            found = self.ask("groups")
            return set(found) == names and set(found.values()) <= {"CREATED"}

        return within(seconds, there, lambda: self.ask("groups"))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


if __name__ == "__main__":
    main()
