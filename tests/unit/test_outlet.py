"""The outlet of one answer: bytes that come at one moment go out in one write, and none stay behind."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from router.http.outlet import Outlet

HEAD = b"Content-Type: text/event-stream\r\n"


class Written:
    """A transport that keeps what is written to it, call by call."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def is_closing(self) -> bool:
        return self.closing


def made() -> tuple[Outlet, Written, list[bool]]:
    transport, over = Written(), []
    outlet = Outlet(cast("Any", transport), lambda _, keep: over.append(keep), chunked=True, keep=True)
    return outlet, transport, over


@pytest.fixture(autouse=True)
async def loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def test_a_stream_that_comes_whole_is_one_write() -> None:
    outlet, transport, over = made()
    outlet.cork()
    outlet.begin(HEAD)
    outlet.write(b"data: 1\n\n")
    outlet.write(b"data: 2\n\n")
    assert not outlet.passes and not transport.calls
    outlet.end(b": it is over\n\n")
    (call,) = transport.calls
    assert call.startswith(b"HTTP/1.1 200 OK\r\n")
    assert call.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\ne\r\n: it is over\n\n\r\n0\r\n\r\n")
    assert over == [True]


async def test_corked_bytes_go_out_when_no_end_comes() -> None:
    outlet, transport, over = made()
    outlet.begin(HEAD)
    outlet.write(b"data: 1\n\n")
    outlet.cork()
    outlet.write(b"data: 2\n\n")
    assert len(transport.calls) == 1
    outlet.uncork()
    assert transport.calls[1:] == [b"9\r\ndata: 2\n\n\r\n"]
    assert outlet.passes and not over
    outlet.uncork()
    outlet.write(b"data: 3\n\n")
    assert len(transport.calls) == 3


async def test_a_client_that_has_left_gets_no_write() -> None:
    outlet, transport, over = made()
    outlet.begin(HEAD)
    outlet.cork()
    outlet.write(b"data: 1\n\n")
    transport.closing = True
    outlet.uncork()
    assert not transport.calls and not over and not outlet.passes
