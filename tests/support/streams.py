"""Clients of a fleet that changes while it serves. They send streams at a fixed rate until a test stops them."""

from __future__ import annotations

import asyncio

import aiohttp


class Streams:
    """Sends requests; counts those sent and those served completely, and keeps the errors of the others."""

    def __init__(self, endpoint: str, model: str, *, tokens: int, every_s: float) -> None:
        self._url = f"{endpoint}/v1/completions"
        self._body = {"model": model, "prompt": "word " * 300, "max_tokens": tokens, "stream": True}
        self._every_s = every_s
        self.sent = self.served = 0
        self.faults: list[str] = []
        self.over = asyncio.Event()

    async def run(self) -> None:
        """Send a request every `every_s` seconds until `over` is set, then wait for the last answer."""
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            while not self.over.is_set():
                group.create_task(self._one(session))
                self.sent += 1
                await asyncio.sleep(self._every_s)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        async with session.post(self._url, json=self._body) as answer:
            text = await answer.text()
        if answer.status == 200 and text.endswith("data: [DONE]\n\n") and '"error"' not in text:
            self.served += 1
        else:
            self.faults.append(f"{answer.status} {text[-300:]}")
