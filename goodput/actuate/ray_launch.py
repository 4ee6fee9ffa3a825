"""Starts a command that ends with its Ray actor, however the actor ends. Runs beside Ray. Standard library only.

    python -I -S ray_launch.py LOG KEEPER COMMAND...

Its standard input is a pipe that the actor holds: the lifeline. It forks twice and ends; the grandchild becomes
`engine/vllm/keeper.py` in a session of its own, so the keeper is no child of the actor. A Ray worker that ends SIGKILLs
its direct children; a killed keeper could not end the processes below it. The keeper ends the whole tree below it once
the lifeline closes, and the kernel closes it however the actor dies.

The first line of standard output is the keeper's process id. Descriptor 3, where there is one, stays open in the whole
tree: its other end is readable once nothing of the tree is left.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> None:
    """Fork the keeper and end."""
    log, keeper, *command = argv
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(1, f"{os.getpid()}\n".encode())
    os.makedirs(os.path.dirname(log), exist_ok=True)  # noqa: PTH103, PTH120 - pathlib would double the start-up
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(said, number)
    os.execv(sys.executable, [sys.executable, "-I", "-S", keeper, *command])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
