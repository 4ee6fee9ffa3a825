"""The chaos suite runs on the event loop that the router runs on: its timers may fire a millisecond early."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True, scope="session")
def no_long_pauses() -> Iterator[None]:
    """Keep the garbage collector off all objects that were alive before this suite. The limits here are about a second.
    In a whole test run the collector visits what all earlier tests imported: pauses of 0.6 s were measured.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
