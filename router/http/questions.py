"""Asks an engine about itself on a connection of its legs, and waits for the whole answer. A shell.

Probes ask each engine once or twice a second. aiohttp's client takes five times the CPU for it (docs/decisions/0006).
"""

from __future__ import annotations

import asyncio
from typing import Final

from cluster.bounded import WORD_BYTES_MAX
from cluster.http.headers import lines
from cluster.instance import Instance
from cluster.wire import RANK_HEADER
from router.http.legs import EngineLeg, Legs
from router.http.upstream import Answer, EngineLost


class _WholeAnswer:
    """Collects an answer. A `LegListener`."""

    def __init__(self, answer: asyncio.Future[Answer]) -> None:
        self.leg: EngineLeg | None = None
        self.answer: Final = answer
        self._status = 0
        self._content_type = ""
        self._pieces: Final[list[bytes]] = []
        self._bytes = 0

    def opened(self, status: int, content_type: str, cache_control: str) -> None:
        self._status, self._content_type = status, content_type

    def body(self, data: bytes) -> None:
        self._bytes += len(data)
        self._pieces.append(data)
        if self._bytes > WORD_BYTES_MAX and self.leg is not None:
            because = f"its answer is longer than {WORD_BYTES_MAX} bytes"
            self.leg.refuse(EngineLost(because, reached=True, unfit="too_long"))

    def chunk(self, framed: bytes, begin: int) -> object:
        self.body(framed[begin:-2])
        return None

    def happened(self, found: object) -> None:
        raise AssertionError("chunk() finds nothing")

    def ended(self) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer(self._status, self._content_type, b"".join(self._pieces)))

    def lost(self, lost: EngineLost) -> None:
        if not self.answer.done():
            self.answer.set_exception(lost)


async def ask(legs: Legs, instance: Instance, path: str, headers: bytes) -> Answer:
    """The engine's answer to a GET. `headers`: further lines of the head (`lines`). A rank is asked by its header.

    If the caller is cancelled, the connection is cut.

    Raises:
        EngineLost: no connection, it broke before the last byte, or the answer is encoded or longer than
            `WORD_BYTES_MAX`.
    """
    if instance.rank is not None:
        headers += lines({RANK_HEADER: str(instance.rank)})
    listener = _WholeAnswer(asyncio.get_running_loop().create_future())
    listener.leg = leg = legs.ask(instance.url, path, headers, listener)
    try:
        return await listener.answer
    finally:
        leg.close()
        listener.leg = None
        del listener, leg  # an error's traceback refers to this frame: with these it would be a cycle
