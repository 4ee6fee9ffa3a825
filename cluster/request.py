"""What the router knows of one client request once its body is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.ids import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One client request, transfer fields already removed."""

    id: RequestId
    path: str
    """HTTP path, e.g. ``/v1/chat/completions``."""
    model: str
    stream: bool
    body: Mapping[str, Any]
    """The parsed JSON body."""
    arrived: float
    """Monotonic seconds."""
