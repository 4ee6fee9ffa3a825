"""The heartbeats of a real engine with host memory and a disk below its KV cache announce how fast it loads from both.

`test_tiers.py` has the same figures from the engine's own metrics, without an agent.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from support import cluster as clusters
from support.cluster import Cluster
from support.engine_pair import COMPLETIONS, ask

from cluster.instance import TIER_GB_S_MAX, TIER_GB_S_MIN, Heartbeat
from cluster.registry.redis import RedisRegistry

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]

FILE = """
models:
  - name: baton-tiny
    pools:
      both: {start: 1, engine_args: {num-gpu-blocks-override: 24}}
transfer: {connector: baton}
kv: {host_gib: 0.01, disk_gib: 0.25}
"""
TOKENS = 1800
"""Of a prompt: 3.7 MB of KV. The KV cache has room for one such prompt, host memory for little more than two."""
PROMPTS, TURNS = 5, 3
KV_BYTES = 2048


async def beat_of(cluster: Cluster, instance: str) -> Heartbeat:
    """This instance's newest heartbeat in the registry."""
    record = json.loads(next((cluster.state / "baton" / "clusters").glob("*.json")).read_text())
    registry = RedisRegistry.open(record["registry"], password_file=Path(record["registry_password_file"]))
    try:
        return next(each for each in await registry.read() if each.id == instance)
    finally:
        await registry.close()


async def test_a_heartbeat_announces_the_speed_of_host_memory_and_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "START_S", 600.0)
    chance = random.Random(41)
    prompts = [[chance.randrange(97, 123) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    with Cluster.of(tmp_path, FILE) as cluster:
        assert (await beat_of(cluster, "both-0")).kept_gb_s == {}, "nothing was loaded yet"
        for _ in range(TURNS):  # each prompt was evicted by the others from the cache, and from host memory
            for each in prompts:
                body = {"model": cluster.model, "prompt": each, "max_tokens": 1, "temperature": 0}
                assert (await asyncio.to_thread(ask, cluster.urls["both-0"], COMPLETIONS, body))[0] == 200
        async with asyncio.timeout(60):
            while len((beat := await beat_of(cluster, "both-0")).kept_gb_s) < 2:
                await asyncio.sleep(0.2)
        print(f"GB/s: {beat.kept_gb_s}; tokens kept: {beat.kept}")
        assert set(beat.kept_gb_s) == set(beat.kept) == {"host", "disk"}
        assert TIER_GB_S_MIN <= beat.kept_gb_s["disk"] < beat.kept_gb_s["host"] <= TIER_GB_S_MAX
        assert beat.kv_token_bytes == KV_BYTES
