"""Answers of engines that are read only once they are complete. A shell.

They come on the connections of `router.http.legs`: answers to prefill legs and to sources, and to questions
(`router.http.questions`).
"""

from __future__ import annotations

import asyncio
from typing import Final

from router.http.legs import EngineLeg
from router.http.upstream import Answer, EngineLost, too_long


class CollectedAnswer:
    """An answer that is read only once it is complete: all of a `LegListener` but its end."""

    __slots__ = ("_bytes", "_bytes_max", "_content_type", "_flag", "_pieces", "_status", "http")

    def __init__(self, bytes_max: int, flag: str = "--answer-bytes-max") -> None:
        """`bytes_max`: the most bytes that are kept. `flag`: the router's flag for it; empty: there is none."""
        self._bytes_max: Final = bytes_max
        self._flag: Final = flag
        self._status, self._content_type = 0, ""
        self._pieces: list[bytes] = []
        self._bytes = 0
        self.http: EngineLeg | None = None

    @property
    def answer(self) -> Answer:
        """What has arrived."""
        return Answer(self._status, self._content_type, b"".join(self._pieces))

    def opened(self, status: int, content_type: str, cache_control: str) -> None:
        self._status, self._content_type = status, content_type

    def body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._bytes += len(data)
        if self._bytes > self._bytes_max and self.http is not None:
            self._pieces.clear()
            self.http.refuse(too_long(self._bytes_max, self._flag))

    def chunk(self, framed: bytes, begin: int) -> None:
        self.body(framed[begin:-2])

    def happened(self, found: object) -> None:
        """Never called."""


class AwaitedAnswer(CollectedAnswer):
    """A complete answer for a task that waits for it."""

    __slots__ = ("future",)

    def __init__(self, bytes_max: int, future: asyncio.Future[Answer]) -> None:
        """`bytes_max`: as above. `future`: gets the answer, or the loss."""
        super().__init__(bytes_max, "")
        self.future: Final = future

    def ended(self) -> None:
        if not self.future.done():
            self.future.set_result(self.answer)

    def lost(self, lost: EngineLost) -> None:
        if not self.future.done():
            self.future.set_exception(lost)
