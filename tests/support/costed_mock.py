"""A mock engine of known costs in its own process: `python -m support.costed_mock`, run in `tests/`, prints its URL."""

from __future__ import annotations

import asyncio

from cluster.instance import Role
from costs.step import StepCost
from costs.ticks import Ticks
from engine.mock.fleet import MockFleet
from engine.mock.settings import MockSettings
from engine.twin.config import TwinConfig

COST = StepCost(
    floor_ms=20.0,
    start_ms=10.0,
    token_ms=0.03,
    area_ms=4.0e-6,
    decode_ms=15.0,
    context_ms=2.5e-4,
    request_ms=0.2,
)
"""Much larger than the delays of HTTP on a busy machine; every term is large enough to be measured."""

FIRST_TOKEN_MS = 12.0
"""Milliseconds of the API server's own work, before the engine sees a request."""

SETTINGS = MockSettings(
    name="engine",
    role=Role.BOTH,
    model="tiny",
    config=TwinConfig(role=Role.BOTH, num_blocks=6000, max_model_len=4096),
    costs=Ticks.of(COST),
    transfer_ms=lambda _bytes, _sharers: 1.0,
    kv_bytes_per_token=1024,
    first_token_ms=FIRST_TOKEN_MS,
)


async def serve() -> None:
    async with MockFleet([SETTINGS]) as fleet:
        print(fleet.instances["engine"].url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
