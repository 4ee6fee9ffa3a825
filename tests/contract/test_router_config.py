"""`baton router --config`, as a process of its own: classes, tenants and settings come from the cluster file."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
from support.fake_engine import FakeEngine

from cluster.keys import key_line

FILE = """
models: [{name: fake, aliases: [gpt-4o], pools: {prefill: {}, decode: {}}}]
slo: {fast: {ttft_ms: 60000}, slow: {ttft_ms: 90000}}
tenants: {acme: {key_file: keys/acme, classes: [slow]}}
router: {port: 0, admin_port: 0}
"""
ASK = {"model": "fake", "prompt": "hello", "max_tokens": 5}


async def baton_router(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "baton",
        "router",
        "--json",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_classes_tenants_and_settings_come_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "acme").write_text(key_line("sk-baton-acme", "acme"))
    file = tmp_path / "baton.yaml"
    file.write_text(FILE)
    async with FakeEngine("prefill-0") as one, FakeEngine("decode-0") as two, aiohttp.ClientSession() as client:
        one.peers = two.peers = {"prefill-0": one, "decode-0": two}
        process = await baton_router("--config", str(file), "--prefill-url", one.url, "--decode-url", two.url)
        assert process.stdout is not None
        told = json.loads(await process.stdout.readline())
        async with asyncio.timeout(10):
            while (await client.get(told["admin"] + "/ready")).status != 200:
                await asyncio.sleep(0.02)
        url, mine = told["endpoint"] + "/v1/completions", {"Authorization": "Bearer sk-baton-acme", "X-Request-Id": "a"}
        assert (await client.post(url, json=ASK)).status == 401
        assert (await client.post(url, json=ASK, headers={**mine, "x-slo-class": "fast"})).status == 403
        assert (await client.post(url, json={**ASK, "model": "gpt-4o"}, headers=mine)).status == 200
        story = await (await client.get(told["admin"] + "/explain/a")).json()
        assert (story["tenant"], story["slo_class"]) == ("acme", "slow")
        assert story["slo"]["foretold"]["ttft_ms"] > 0, "the policy uses an estimate"
        assert "least load" not in story["turns"][0]["because"]
        process.terminate()
        assert await process.wait() == 0


async def test_a_tenant_without_a_key_file_is_an_error_that_tells_how_to_make_one(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(FILE)
    process = await baton_router("--config", str(file), "--both-url", "http://127.0.0.1:1")
    _, told = await process.communicate()
    assert process.returncode == 2
    assert b"tenant acme: no file" in told
    assert b"baton key new acme" in told
