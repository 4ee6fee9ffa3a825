"""Clients of a fleet that changes while it serves: streams, some each second, until told to stop."""

from __future__ import annotations

import asyncio

import aiohttp


class Streams:
    """Counts what was sent, what was served whole, and what was not."""

    def __init__(self, endpoint: str, model: str, *, tokens: int, every_s: float) -> None:
        self._url = f"{endpoint}/v1/completions"
        self._body = {"model": model, "prompt": "word " * 300, "max_tokens": tokens, "stream": True}
        self._every_s = every_s
        self.sent = self.served = 0
        self.faults: list[str] = []
        self.over = asyncio.Event()

    async def run(self) -> None:
        """Until `over`, and until the last of them has ended."""
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
