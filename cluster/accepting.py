"""Closes a listening port on asyncio's own loop. A shell."""

from __future__ import annotations

import asyncio

_TURNS = 2
"""Turns of the loop between the acceptance of a connection and its protocol's ``connection_made``."""


def close_server(server: asyncio.Server) -> None:
    """Stop accepting connections, and close the port one turn of the loop later.

    `Server.close` alone forgets the connections that it accepted in the turn before. They are neither served nor
    closed, and their clients wait until the garbage collector finds the sockets. In CPython 3.11, `Server._attach`
    asserts that the server is open, and `_accept_connection2` then drops the transport.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())  # uvloop has no such reader and does not need this
    loop.call_soon(server.close)


async def closed_server(server: asyncio.Server) -> None:
    """Close as `close_server` does, and return when each accepted connection has reached its protocol."""
    close_server(server)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
