"""Asks an engine about itself on a connection of its legs, and waits for the whole answer. A shell.

Probes ask each engine once or twice a second. aiohttp's client takes five times the CPU for it (docs/decisions/0006).
"""

from __future__ import annotations

from cluster.bounded import WORD_BYTES_MAX
from cluster.http.headers import lines
from cluster.instance import Instance
from cluster.wire import RANK_HEADER
from router.http.collected import AwaitedAnswer
from router.http.legs import Legs
from router.http.upstream import Answer


async def ask(legs: Legs, instance: Instance, path: str, headers: bytes) -> Answer:
    """The engine's answer to a GET. `headers`: further lines of the head (`lines`). A rank is asked by its header.

    If the caller is cancelled, the connection is cut.

    Raises:
        EngineLost: no connection, it broke before the last byte, or the answer is encoded or longer than
            `WORD_BYTES_MAX`.
    """
    if instance.rank is not None:
        headers += lines({RANK_HEADER: str(instance.rank)})
    listener = AwaitedAnswer(WORD_BYTES_MAX, legs.loop.create_future())
    listener.http = leg = legs.ask(instance.url, path, headers, listener)
    try:
        return await listener.future
    finally:
        leg.close()
        listener.http = None
        del listener, leg  # an error's traceback refers to this frame: with these it would be a cycle
