"""The start-up board of `baton up`: one row an instance, live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_COLOURS = {"ready": "green", "failed": "red", "restarting": "yellow", "stopping": "yellow", "stopped": "dim"}


@dataclass(slots=True)
class BoardRow:
    """The state of one program on the board."""

    name: str
    where: str
    state: str = "starting"
    detail: str = ""
    since: float = field(default_factory=time.monotonic)
    """When the program came into this state, monotonic seconds."""


class _Screen(Console):
    """A console that is silent from then on if its reader goes away (`baton up 2>&1 | tee up.log`, then Ctrl-C). rich's
    own would end the process, and nothing would drain.
    """

    def on_broken_pipe(self) -> None:
        """Print nothing any more."""
        self.quiet = True


class Board:
    """Shows the state of each program. Use as a context; call all methods in the thread of that context.

    A terminal that hung up, a pipe without a reader or a full disk loses what is shown, and stops no program.
    """

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.console: Console = _Screen(file=sys.stderr, highlight=False)
        self._title = title
        self._rows: dict[str, BoardRow] = {}
        self._quiet = quiet
        self._live: Live | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self._quiet:
            self._live = Live(self, console=self.console, refresh_per_second=4, transient=False)
            with contextlib.suppress(OSError):
                self._live.start()
        elif not self._quiet:
            self.say(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    def settle(self) -> None:
        """Stop the live display, leaving the last picture; later updates are plain lines."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def add(self, name: str, where: str) -> None:
        """Add a row for a program that is about to start; `where`: its address, or the part of the machine it gets."""
        self._rows[name] = BoardRow(name, where)

    def update(self, name: str, state: str, detail: str = "") -> None:
        """Show a program's new state. `add` must have added the program.

        Without a terminal, or after `settle`, each change is printed as a line.
        """
        row = self._rows[name]
        changed = (row.state, row.detail) != (state, detail)
        if state != row.state:
            row.since = time.monotonic()
        row.state, row.detail = state, detail
        if changed and self._live is None and not self._quiet:
            self.say(f"{self._elapsed():5.0f}s  {name:<10} {state:<10} {detail}".rstrip())

    def say(self, text: str) -> None:
        """Print a line for people, unless the board is quiet."""
        if self._quiet:
            return
        try:
            self.console.print(text, markup=False, soft_wrap=True)
        except OSError as error:
            self.console.quiet = True
            self.console.print()  # drops what the console has not written: it would come again with the next line
            self.console.quiet = error.errno == errno.EIO  # a terminal that hung up never comes back

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def __rich__(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, show_header=False)
        for column in ("", "name", "where", "state", "detail", "for"):
            table.add_column(column, no_wrap=column != "detail")
        for row in self._rows.values():
            colour = _COLOURS.get(row.state, "cyan")
            mark: RenderableType = {"ready": Text("●", "green"), "failed": Text("✗", "red")}.get(row.state) or Spinner(
                "dots"
            )
            seconds = "" if row.state == "ready" else f"{time.monotonic() - row.since:.0f} s"
            name, where, state = Text(row.name, "bold"), Text(row.where, "dim"), Text(row.state, colour)
            table.add_row(mark, name, where, state, Text(row.detail), seconds)  # a plain `[text]` would be markup
        return Group(Text(f"{self._title}   {self._elapsed():.0f} s", "bold"), table)
