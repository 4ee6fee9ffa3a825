"""Connections to one endpoint, kept open between answers. A shell: it opens sockets."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar, cast
from urllib.parse import urlsplit

KEEPALIVE_S: Final = 4.0
"""Idle connections are closed here before uvicorn closes them (5 s in vLLM), so a reused one is rarely dead."""


class Kept(Protocol):
    """A connection as its pool sees it."""

    idle_since: float
    """When it was given back, in seconds on its owner's clock."""

    @property
    def usable(self) -> bool:
        """Whether it can take a request."""

    def cut(self) -> None:
        """Close it at once."""


C = TypeVar("C", bound=Kept)


class Pool(Generic[C]):
    """The connections to one endpoint. The one used last is taken first, so that the others become idle and close."""

    def __init__(self, url: str, make: Callable[[Pool[C]], C]) -> None:
        """A pool without connections.

        Args:
            url: the endpoint's URL; its path goes before the path of each request.
            make: makes one connection's protocol.
        """
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.netloc = parts.netloc.rpartition("@")[2]
        self.base = parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._make = make
        self._idle: dict[C, None] = {}
        """In the order in which they were given back."""
        self.opened: set[C] = set()
        """All open connections. Each one adds itself once it is made."""

    def idle(self, now: float) -> C | None:
        """A free connection; None: there is none. `now`: on the clock of `Kept.idle_since`."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if now - connection.idle_since < KEEPALIVE_S and connection.usable:
                return connection
            connection.cut()
        return None

    async def connect(self) -> C:
        """A new connection. Raises OSError."""
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(self._new, self.host, self.port, ssl=self._ssl)
        except UnicodeError:  # getaddrinfo's, for an empty label or one that is too long
            raise OSError(errno.EINVAL, "no host has such a name") from None
        return cast("C", made)

    def _new(self) -> asyncio.Protocol:
        return cast("asyncio.Protocol", self._make(self))

    def give_back(self, connection: C) -> None:
        """Take back a connection that is free again."""
        self._idle[connection] = None

    def forget(self, connection: C) -> None:
        """Drop a connection that has closed."""
        self.opened.discard(connection)
        self._idle.pop(connection, None)  # a connection refers to its pool: a cycle, once the pool is swept away

    def sweep(self, now: float) -> None:
        """Close the connections that have been idle for `KEEPALIVE_S`. `now`: as in `idle`."""
        while self._idle and now - (oldest := next(iter(self._idle))).idle_since >= KEEPALIVE_S:
            del self._idle[oldest]
            oldest.cut()

    def close(self) -> None:
        """Cut every connection."""
        for connection in list(self.opened):
            connection.cut()
        self._idle.clear()
