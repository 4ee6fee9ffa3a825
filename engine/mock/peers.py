"""How a mock reaches the producers of holds: in this process directly, elsewhere over HTTP. A shell.

A producer's id and address come from transfer fields. A client that can send these fields can make a mock call any
address. Routers remove them from clients' requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from cluster.urls import netloc
from engine.mock.handoffs import BlocksRead, MockHandoffs
from engine.mock.transfer import Producer
from engine.twin.request import HoldSource
from kvtransfer.early_notes import Ready
from kvtransfer.hold_marks import CLEAR, FIELD, mark_of
from prefill.callers import Callers

ANSWER_S = 5.0
"""A producer that has not answered by then counts as gone."""

LEARNS_S = 0.5
"""Seconds until an engine learns that another one has died: its agent reads the registry every second."""

GONE_MAX = 1_024
"""Holds of engines that have died, remembered by name for early legs that ask for them later."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An early leg that waits for its hold."""

    producer: str
    """The instance that computes its prompt."""
    told: Callable[[Ready], None]
    lost: Callable[[], None]


class HttpPeers:
    """The way from the instances of this process to all producers, and the early legs that wait in this process."""

    def __init__(self) -> None:
        self._near: dict[tuple[str, int], MockHandoffs] = {}
        self._session: aiohttp.ClientSession | None = None
        self._callers = Callers()
        """The early legs that ask this process's instances for holds, by the rules of Baton's connector."""
        self._early: dict[str, Waiting] = {}
        """Early legs of this process that wait for a hold, by its name."""
        self._gone: deque[str] = deque(maxlen=GONE_MAX)
        """Names of holds that have gone with their engines, the newest last."""

    def wait_for(self, name: str, producer: str, told: Callable[[Ready], None], lost: Callable[[], None]) -> None:
        """An early leg waits for the hold of this name: `told` is called once the hold is there, now if it is; `lost`
        if the producer, an instance, dies before, or has died with the hold.
        """
        ready = self._callers.wanted(name, name, asyncio.get_running_loop().time())
        if ready is not None:
            told(ready)
            return
        waits = self._early[name] = Waiting(producer, told, lost)
        if name in self._gone:
            self._lose_soon({name: waits})

    def wait_no_more(self, name: str) -> None:
        """The early leg that waited for this name is over."""
        self._early.pop(name, None)

    def ready(self, hold: str, ready: Ready) -> bool:
        """A hold is there. `hold`: unique in this process. Returns whether an early leg was told."""
        waiting = [self._early.pop(caller, None) for caller in self._callers.filled(hold, ready)]
        found = [each for each in waiting if each is not None]
        for each in found:
            each.told(ready)
        return bool(found)

    def over(self, hold: str) -> None:
        """The hold is over."""
        self._callers.over(hold)

    def left(self, producer: str, holds: Sequence[str]) -> None:
        """The engine of this instance has died, and these holds with it: legs that wait for it, and later ones that ask
        for one of the holds, learn that after `LEARNS_S`.
        """
        self._gone.extend(name for name in map(self._callers.over, holds) if name is not None)
        self._lose_soon({name: each for name, each in self._early.items() if each.producer == producer})

    def _lose_soon(self, waits: Mapping[str, Waiting]) -> None:
        if waits:
            asyncio.get_running_loop().call_later(LEARNS_S, self._lose, waits)

    def _lose(self, waits: Mapping[str, Waiting]) -> None:
        for name, each in waits.items():
            if self._early.get(name) is each:
                del self._early[name]
                each.lost()

    def add(self, host: str, port: int, handoffs: MockHandoffs) -> None:
        """Add an instance of this process, with its address."""
        self._near[host, port] = handoffs

    def remove(self, host: str, port: int) -> None:
        """The instance listens no more."""
        self._near.pop((host, port), None)

    def near(self, producer: Producer) -> MockHandoffs | None:
        """The producer itself, if it runs in this process."""
        return self._near.get((producer.host, producer.port))

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()

    async def read(self, producer: Producer, source: HoldSource, blocks: tuple[int, ...]) -> BlocksRead | None:
        """What a pull reads at the producer; None if it does not answer, or is in another life now."""
        slot = None if source.slot is None else source.slot.field()
        answer = await self._ask(producer, "read", {"request_id": source.request, "blocks": blocks, FIELD: slot}) or {}
        contents, vouched, said = answer.get("contents"), answer.get("vouched"), answer.get("said")
        if not isinstance(contents, list):
            return None
        told = tuple(vouched) if isinstance(vouched, list) else None
        return BlocksRead(tuple(contents), told, mark_of(said) or CLEAR if isinstance(said, str) else None)

    async def notify(self, producer: Producer, what: str, words: list[str]) -> bool:
        """Send a notice about holds; returns whether it arrived."""
        return await self._ask(producer, what, {"request_ids": words}) is not None

    async def _ask(self, producer: Producer, what: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))
        url = f"http://{netloc(producer.host, producer.port)}/mock/{what}"
        try:
            async with self._session.post(url, json={"engine_id": producer.engine_id, **body}) as response:
                answer = await response.json() if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None
