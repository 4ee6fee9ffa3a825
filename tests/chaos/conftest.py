"""The chaos suite runs on the event loop that the router runs on: its timers may fire a millisecond early."""

from typing import Any

import uvloop


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}
