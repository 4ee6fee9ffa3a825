"""What the router knows of one client request after its body is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.ids import RequestId


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client request, transfer fields already removed."""

    id: RequestId
    """The router's own random name for the request; everything inside Baton uses this one."""
    client_id: str = ""
    """The client's name for it (``X-Request-Id``); empty: none. Another client may use the same name, so it identifies
    nothing."""
    path: str
    """HTTP path, e.g. ``/v1/chat/completions``."""
    model: str
    stream: bool
    body: Mapping[str, Any]
    """The parsed JSON body."""
    raw: bytes = b""
    """The body as sent on: the client's own bytes, if nothing had to be removed from them."""
    arrived: float
    """When the request arrived, on the monotonic clock, seconds."""

    @property
    def told_id(self) -> str:
        """The ``X-Request-Id`` that the client gets back: its own name for the request, if it gave one."""
        return self.client_id or self.id

    @property
    def label(self) -> str:
        """The request's names in a line of the log."""
        return f"{self.id} (its client's {self.client_id})" if self.client_id else self.id
