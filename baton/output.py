"""What commands print on stdout: the contract other programs rely on."""

from __future__ import annotations

import json
import sys
from typing import Any


def announce_ready(name: str, endpoint: str, *, as_json: bool, **more: Any) -> None:
    """The one line that says a server is ready: ``ready NAME http://host:port``, or the same as a JSON object."""
    if as_json:
        emit({"event": "ready", "name": name, "endpoint": endpoint, **more})
    else:
        print(f"ready {name} {endpoint}", flush=True)


def emit(event: dict[str, Any]) -> None:
    """One JSON object on a line of its own, at once."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
