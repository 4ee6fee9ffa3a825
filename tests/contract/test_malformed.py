"""Thousands of malformed requests: each gets a 4xx with a message, and the router goes on serving."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

import pytest
from support.malformed import KINDS, Malformed, malformed
from support.mock import mock_settings
from support.mocked_router import mocked_router

from cluster.instance import Role

CONNECTIONS = 8


class Sender:
    """One connection, which is opened again if the router has closed it."""

    def __init__(self, endpoint: str) -> None:
        address = urlsplit(endpoint)
        self._address = (address.hostname, address.port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: Malformed) -> tuple[int, bytes]:
        """Status and body of the answer."""
        async with asyncio.timeout(10):
            if self._streams is None:
                self._streams = await asyncio.open_connection(*self._address)
            reader, writer = self._streams
            writer.write(request.head() + request.body)
            head = await reader.readuntil(b"\r\n\r\n")
            lowered = head.lower()
            if b"transfer-encoding: chunked" in lowered:
                body = b"".join([chunk async for chunk in _chunks(reader)])
            else:
                body = await reader.readexactly(int(lowered.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]))
            if b"connection: close" in lowered or request.kind == "wrong length":
                await self.close()
            return int(head.split(b" ", 2)[1]), body

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of an answer's body."""
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


async def _all_refused(requests: Sequence[Malformed]) -> None:
    settings = [mock_settings("prefill-0", Role.PREFILL), mock_settings("decode-0", Role.DECODE)]
    async with mocked_router(settings, body_timeout_s=5.0) as router:
        wrong: list[tuple[str, object]] = []
        kinds: Counter[str] = Counter()

        async def send(part: Sequence[Malformed]) -> None:
            sender = Sender(router.endpoint)
            for request in part:
                try:
                    status, body = await sender.send(request)
                    error = json.loads(body)["error"]
                    right = 400 <= status < 500 and error["message"] and error["code"] == status
                except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as fault:
                    status, body, right = 0, repr(fault).encode(), False
                    await sender.close()
                kinds[request.kind] += 1
                if not right:
                    wrong.append((request.kind, (request, status, body[:300])))
            await sender.close()

        async with asyncio.TaskGroup() as group:
            for number in range(CONNECTIONS):
                group.create_task(send(requests[number::CONNECTIONS]))
        assert not wrong, (Counter(kind for kind, _ in wrong), [each for _, each in wrong[:3]])
        assert set(kinds) == set(KINDS)
        assert sum(kinds.values()) == len(requests)
        status, answer, _ = await router.ask({"model": "fake", "prompt": "hello", "max_tokens": 3})
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        async with asyncio.timeout(5):  # the last one's hold may still be on its way back
            while (await router.metrics())["baton_open_requests"]:
                await asyncio.sleep(0.01)


async def test_two_thousand_malformed_bodies() -> None:
    await _all_refused(list(malformed(seed=1, count=2_000)))


@pytest.mark.long
async def test_ten_thousand_malformed_bodies() -> None:
    await _all_refused(list(malformed(seed=2, count=10_000)))
