"""Asks a router that has just started for an answer, as a client does."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen


def tokens_of(router: dict[str, Any], model: str, *, count: int = 4, limit_s: float = 120.0) -> int:
    """Wait until the router is ready; return how many tokens it answers. `router`: the object of its `ready` line."""
    until = time.monotonic() + limit_s
    while not _is_ready(router["admin"]):
        assert time.monotonic() < until, "it is not ready"
        time.sleep(0.1)
    body = json.dumps({"model": model, "prompt": "one two three", "max_tokens": count}).encode()
    head = {"Content-Type": "application/json"}
    with urlopen(Request(f"{router['endpoint']}/v1/completions", body, head), timeout=limit_s) as answer:
        return int(json.loads(answer.read())["usage"]["completion_tokens"])


def _is_ready(admin: str) -> bool:
    try:
        with urlopen(f"{admin}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except (HTTPError, URLError, OSError):
        return False
