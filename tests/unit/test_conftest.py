"""The guard that keeps pure tests off the network."""

from __future__ import annotations

import asyncio
import socket

import pytest


def test_a_connection_is_refused_with_its_address() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"127\.0\.0\.1"):
        socket.create_connection(("127.0.0.1", 9))


async def test_asyncio_is_refused_too() -> None:
    with pytest.raises(pytest.fail.Exception, match="reached for the network"):
        await asyncio.open_connection("127.0.0.1", 9)


@pytest.mark.sockets
def test_the_mark_lifts_the_guard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.getpeername() == server.getsockname()
