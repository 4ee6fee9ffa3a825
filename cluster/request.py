"""What the router knows of one client request once its body is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.ids import RequestId


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client request, transfer fields already removed."""

    id: RequestId
    """Ours: random, and what everything inside is named by."""
    client_id: str = ""
    """What the client calls it (``X-Request-Id``); empty: nothing. Others may use the same: it names nothing."""
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

    @property
    def told_id(self) -> str:
        """What its client is told in ``X-Request-Id``: its own name for it, where it gave one."""
        return self.client_id or self.id

    @property
    def label(self) -> str:
        """Its names in a line of the log."""
        return f"{self.id} (its client's {self.client_id})" if self.client_id else self.id
