"""The board of `baton up`: what it shows on a terminal, and on a stream that cannot be written."""

from __future__ import annotations

import errno
import io

from rich.console import Console

from baton.board import Board


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
