"""Logs of two clusters with one state folder: neither writes into the other's, and `baton logs` tells them apart."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from baton import __version__, compiled
from baton.commands import logs
from baton.fleet import LocalFleet
from baton.plan import WantedEngine, with_ports
from baton.ports import HeldPorts
from baton.registry_child import RegistryElsewhere
from baton.router_child import LocalRouter
from baton.state import Running
from cluster.errors import UsageError
from cluster.instance import Role
from engine.vllm.placement import MachineShare

pytestmark = pytest.mark.sockets


class OwnRegistry:
    argv = ("registry",)
    say = "redis://127.0.0.1:1"

    def words(self) -> list[str]:
        return []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "baton" / "logs"


def written(cluster: str, ports: HeldPorts) -> set[Path]:
    """All logs of a cluster with one engine, as its programs are told to write them."""
    front = LocalRouter(title="chat", host="127.0.0.1", port=0, admin_host="127.0.0.1", admin_port=0)
    planned = with_ports(WantedEngine(name="both-0", role=Role.BOTH, model=None), MachineShare(), ports)
    registry = cast("RegistryElsewhere", OwnRegistry())
    fleet = LocalFleet(front, [planned], Running(cluster=cluster, pid=1, born="0"), registry, ports)
    (member,) = fleet.members
    assert fleet.registry_program is not None
    argv = member.program.argv
    engines = Path(argv[argv.index("--log-file") + 1])
    return {fleet.router.program.log, fleet.registry_program.log, member.program.log, engines}


def ask(*words: str) -> int:
    parser = argparse.ArgumentParser()
    logs.add_arguments(parser)
    return logs.run(parser.parse_args(words))


def test_two_clusters_write_no_log_together(folder: Path) -> None:
    with HeldPorts() as ports:
        usual, other, third = (written(name, ports) for name in ("default", "other", "router.log"))
    assert {each.parent for each in usual} == {folder}
    assert len(usual | other | third) == 12


def test_the_logs_of_a_cluster_are_listed_and_printed_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HeldPorts() as ports:
        for name in ("default", "other"):
            for path in written(name, ports):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"of {name}\n")
    for words, name in (((), "default"), (("--cluster", "other"), "other")):
        assert ask(*words, "--json") == 0
        listed = json.loads(capsys.readouterr().out)["logs"]
        assert sorted(listed) == ["both-0", "both-0.agent", "registry", "router"]
        assert ask(*words, "router") == 0
        assert capsys.readouterr().out == f"of {name}\n"
    with pytest.raises(
        UsageError,
        match=r"no log of `router` in .*; there are: none; other clusters' logs: --cluster default, --cluster other",
    ):
        ask("--cluster", "third", "router")


def test_the_first_line_of_a_routers_log_says_whether_it_runs_compiled(folder: Path) -> None:
    command = [sys.executable, "-m", "baton", "router", "http://127.0.0.1:9", "--port", "0", "--admin-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as router:
        assert router.stderr is not None
        first = router.stderr.readline()
        router.terminate()
        router.communicate(timeout=30)
    assert f"baton {__version__}, {compiled.told()}" in first
