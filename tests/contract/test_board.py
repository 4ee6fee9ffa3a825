"""The board of `baton up`: what it shows on a terminal, and on a stream that cannot be written."""

from __future__ import annotations

import errno
import io

from rich.console import Console

from baton.board import Board
from baton.fleet import LocalFleet, _fill_board
from baton.plan import PlacedEngine, WantedEngine
from baton.ports import HeldPorts
from baton.registry_child import RegistryElsewhere
from baton.router_child import LocalRouter
from baton.state import Running
from cluster.instance import Role
from engine.vllm.placement import MachineShare


def test_brackets_in_details_are_shown_as_they_are() -> None:
    board = Board("chat")
    board.add("decode-0", "http://[fd00::12]:8100 on GPU 0")
    board.update("decode-0", "failed", "OSError: [/models/x] is not one of [auto, half]")
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, no_color=True, width=160).print(board)
    assert "OSError: [/models/x] is not one of [auto, half]" in screen.getvalue()


def test_a_board_whose_disk_was_full_prints_its_later_lines_once() -> None:
    class Disk(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    disk = Disk()
    board = Board("chat")
    board.console.file = disk
    board.say("lost")
    disk.full = False
    board.say("kept")
    assert disk.getvalue() == "kept\n"


def test_without_a_terminal_the_gpus_of_each_engine_are_a_line() -> None:
    wanted = WantedEngine(name="decode-0", role=Role.DECODE, model="m")
    share = MachineShare(gpus=("2", "3"), gpu_memory_share=0.45)
    planned = PlacedEngine(wanted=wanted, port=1, agent_port=2, side_channel_port=3, placed=share)
    front = LocalRouter(title="chat", host="127.0.0.1", port=0, admin_host="127.0.0.1", admin_port=0)
    registry = RegistryElsewhere("chat", "redis://elsewhere", None, None)
    fleet = LocalFleet(front, [planned], Running(cluster="chat", pid=1, born="0"), registry, HeldPorts())
    fleet.board.console.file = log = io.StringIO()
    _fill_board(fleet)
    assert log.getvalue().split() == "0s decode-0 starting GPUs 2, 3 (45% of their memory)".split()
