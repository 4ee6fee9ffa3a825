"""The end of a listening port on asyncio's own loop. A shell."""

from __future__ import annotations

import asyncio

_TURNS = 2
"""From a connection's acceptance to its protocol's ``connection_made``, in turns of the loop."""


def close_server(server: asyncio.Server) -> None:
    """Accept no more, and close the port a turn of the loop later.

    `Server.close` alone forgets what it has just accepted: a connection taken in the turn before is neither served
    nor closed, and its client waits until the garbage collector finds the socket (CPython 3.11: `Server._attach`
    asserts that the server is open, and `_accept_connection2` drops the transport that this ends).
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())  # uvloop, which knows no such reader, needs none of this
    loop.call_soon(server.close)


async def closed_server(server: asyncio.Server) -> None:
    """The same, until each connection that was accepted has reached its protocol."""
    close_server(server)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
