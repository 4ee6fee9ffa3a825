"""When a port closes, connections that it accepted a moment before are answered or ended, never forgotten."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from cluster.accepting import close_server
from cluster.http.requests import Request
from engine.mock.http import Exchange
from engine.mock.listener import MockListener


class Told(asyncio.Protocol):
    """Keeps the transport of each connection that asyncio gives to it."""

    def __init__(self, made: list[asyncio.BaseTransport]) -> None:
        self.made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(transport)


class Nothing:
    """A handler for a listener that must receive no request."""

    def handle(self, request: Request, exchange: Exchange) -> None:
        raise AssertionError((request, exchange))


async def ended(client: socket.socket) -> bool:
    """Whether the server ends this connection within 2 s. A connection left to the garbage collector does not end."""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(2):
            return await asyncio.get_running_loop().sock_recv(client, 1) == b""
    return True


@pytest.fixture
def nothing_collected() -> Iterator[None]:
    """Turns garbage collection off: it would close a forgotten socket and hide the fault."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("nothing_collected")
@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_in_the_turn_of_the_close_is_ended(turns: int) -> None:
    listener = MockListener("127.0.0.1", 0, Nothing())
    await listener.open()
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        listener.close()
        assert await ended(client)


@pytest.mark.usefixtures("nothing_collected")
@pytest.mark.parametrize("turns", range(5))
async def test_a_server_forgets_no_connection(turns: int) -> None:
    made: list[asyncio.BaseTransport] = []
    server = await asyncio.get_running_loop().create_server(lambda: Told(made), "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        close_server(server)
        for _ in range(5):
            await asyncio.sleep(0)
        for each in made:
            each.close()
        assert await ended(client)
