"""Ports that Baton chooses before a program takes them: no two processes of Baton choose the same one, and an engine
that loses one to another program begins anew with others.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.cluster import Cluster

from baton.board import Board
from baton.members import Members
from baton.plan import WantedEngine, with_ports
from baton.ports import LOOPBACK, HeldPorts, is_free
from cluster.instance import Role
from engine.vllm.placement import MachineShare

pytestmark = pytest.mark.sockets

FIRST = 19300
"""A port near which no cluster of the machine chooses any meanwhile."""

WANTED = WantedEngine(name="decode-0", role=Role.DECODE, model="m")


def test_a_port_that_one_process_chose_is_chosen_by_no_other() -> None:
    with HeldPorts() as first, HeldPorts() as second:
        mine = first.take(FIRST)
        theirs = second.take(FIRST)
        assert first.take(FIRST) not in {mine, theirs}
        assert is_free("127.0.0.1", mine), "the program that it was chosen for can listen there"
        first.give_back(mine)
        assert second.take(FIRST) == mine
    with HeldPorts() as third:
        assert third.take(FIRST) == mine, "the end of a process frees its ports"


def test_a_port_is_not_free_while_an_engine_starts_that_will_listen_there() -> None:
    with HeldPorts() as started_by_hand, HeldPorts() as ports:
        port = ports.take(FIRST)
        ports.give_back(port)
        assert started_by_hand.serve(LOOPBACK, port)
        assert not is_free(LOOPBACK, port)
        assert ports.take(FIRST) != port
    assert is_free(LOOPBACK, port)


def test_side_channels_leave_room_for_ranks() -> None:
    with HeldPorts() as ports:
        first = ports.take(5600, step=32)
        assert (ports.take(5600, step=32) - first) % 32 == (first - 5600) % 32 == 0


def _members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ports: HeldPorts) -> Members:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return Members([], Board("chat", quiet=True), ports, tmp_path)


def test_an_engine_moves_only_if_it_lost_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HeldPorts() as ports:
        members = _members(tmp_path, monkeypatch, ports)
        member = members.add(with_ports(WANTED, MachineShare(), ports))
        planned, argv = member.planned, member.program.argv
        assert members.move(member) == ""
        assert (member.planned, member.program.argv) == (planned, argv)
        with socket.create_server(("127.0.0.1", planned.agent_port)):
            assert f"another program has taken port {planned.agent_port}" in members.move(member)
        assert str(member.planned.agent_port) in member.program.argv
        assert str(planned.agent_port) not in member.program.argv
        members.remove(member)
        assert ports.take(member.planned.agent_port) == member.planned.agent_port, "it was given back"


@pytest.mark.timed  # thieves and engines race for ports, and the cluster has a time limit to be ready
def test_a_cluster_serves_though_other_programs_take_its_engines_ports(tmp_path: Path) -> None:
    words = ("--engine", "mock", "--prefill", "1", "--decode", "2", "--", "--speed", "10")
    cluster = Cluster.start(tmp_path, *words, program=("-m", "support.thieving_up"))
    try:
        cluster.wait_ready()
        assert {each["state"] for each in cluster.status().values()} == {"ready"}
    finally:
        assert cluster.stop() == 0
