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
    """Limits here are about a second, and in a whole test run the collector walks what all tests before have imported:
    pauses of 0.6 s were seen, in which nothing answers. What is alive before the suite is not looked at during it.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
