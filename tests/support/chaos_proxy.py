"""A TCP proxy between a router and one engine that can be cut, as by a network that drops packets.

While it is cut, no byte passes. Open connections stay open without an error; new ones are accepted and stay silent.
"""

from __future__ import annotations

import asyncio
from typing import Self


class Proxy:
    """The proxy in front of one engine."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, port: int) -> Self:
        """Start a proxy in front of a port of this machine."""
        made = cls(port)
        made._server = await asyncio.start_server(made._accept, "127.0.0.1", 0)
        return made

    @property
    def port(self) -> int:
        assert self._server is not None
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        far: asyncio.StreamWriter | None = None
        try:
            await self._whole.wait()
            back, far = await asyncio.open_connection("127.0.0.1", self._target)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, far))
                pumps.create_task(self._pump(back, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the far end is gone, or the test is over
        except BaseExceptionGroup:
            pass  # one of the two pumps ended with an error: every connection ends so
        finally:
            for each in (writer, far):
                if each is not None:
                    each.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self._whole.wait()
            sink.write(data)
            await sink.drain()
        await self._whole.wait()
        raise ConnectionResetError  # one end has closed: end the other pump, too
