"""The output of commands: the contract that other programs rely on.

A reader that has gone away (a killed parent) must never keep a program from ending in order, so writing to a closed
pipe is no error here.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, TextIO


def announce_ready(name: str, endpoint: str, *, as_json: bool, **more: Any) -> None:
    """Print the one line that says a server is ready: ``ready NAME http://host:port``, or the same as a JSON object."""
    if as_json:
        emit({"event": "ready", "name": name, "endpoint": endpoint, **more})
    else:
        _write(sys.stdout, f"ready {name} {endpoint}\n")


def emit(event: dict[str, Any]) -> None:
    """Print one JSON object on a line of its own on stdout, and flush it."""
    _write(sys.stdout, json.dumps(event) + "\n")


def say(line: str) -> None:
    """Print a line for people on stderr."""
    _write(sys.stderr, line + "\n")


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.write(text)
        stream.flush()
