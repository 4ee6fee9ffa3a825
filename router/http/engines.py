"""How requests reach engines: connections, keys, tickets. A shell: it opens and closes connections."""

from __future__ import annotations

import asyncio
from typing import Final

from cluster.http.headers import lines
from cluster.instance import Instance
from router.http.credentials import Credentials
from router.http.legs import Legs
from router.http.questions import ask
from router.http.tickets import Tickets
from router.http.upstream import Answer, Upstream


class Engines:
    """The router's access to engines."""

    __slots__ = ("credentials", "legs", "loop", "tickets", "upstream")

    legs: Legs
    """The connections for generation and probes, open from `start` on."""
    loop: asyncio.AbstractEventLoop

    def __init__(self, upstream: Upstream, credentials: Credentials, tickets: Tickets) -> None:
        self.upstream: Final = upstream
        self.credentials: Final = credentials
        self.tickets: Final = tickets

    async def start(self) -> None:
        """Open the connection pools."""
        await self.upstream.start()
        self.loop = asyncio.get_running_loop()
        self.legs = Legs()

    async def ask(self, instance: Instance, path: str) -> Answer:
        """The instance's answer to a GET of ours (`router.http.questions`). Raises `EngineLost`."""
        return await ask(self.legs, instance, path, lines(self.credentials.own))

    async def close(self) -> None:
        """Close every connection."""
        self.legs.close()
        await self.upstream.close()
