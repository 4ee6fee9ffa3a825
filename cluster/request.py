"""What the router knows of one client request once its body is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.ids import RequestId


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client request, transfer fields already removed."""

    id: RequestId
    path: str
    """HTTP path, e.g. ``/v1/chat/completions``."""
    model: str
    stream: bool
    body: Mapping[str, Any]
    """The parsed JSON body."""
    raw: bytes = b""
    """The same as it is sent on: the client's own bytes where nothing had to be taken out of them."""
    arrived: float
    """Monotonic seconds."""
