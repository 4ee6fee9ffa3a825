"""The output of commands: the contract that other programs rely on.

A reader that has gone away (a killed parent) must never keep a program from ending in order, so writing to a closed
pipe is no error here, nor is a line for people on a terminal that hung up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from typing import Any, TextIO


def announce_ready(name: str, endpoint: str, *, as_json: bool, **more: Any) -> None:
    """Print the one line that says a server is ready: ``ready NAME http://host:port``, or the same as a JSON object."""
    if as_json:
        emit({"event": "ready", "name": name, "endpoint": endpoint, **more})
    else:
        _show(sys.stdout, f"ready {name} {endpoint}\n")


def emit(event: dict[str, Any]) -> None:
    """Print one JSON object on a line of its own on stdout, and flush it."""
    _write(sys.stdout, json.dumps(event) + "\n")


def say(line: str) -> None:
    """Print a line for people on stderr."""
    _show(sys.stderr, line + "\n")


def show(text: str) -> None:
    """Print a part of a text for people on stdout, and flush it."""
    _show(sys.stdout, text)


def _show(stream: TextIO, text: str) -> None:
    try:
        _write(stream, text)
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.write(text)
        stream.flush()
