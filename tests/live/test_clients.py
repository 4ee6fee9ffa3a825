"""Programs of others against the router, unchanged: OpenAI's client, vLLM's own benchmark, curl from the README."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import aiohttp
import openai
import pytest
from support.cluster import Cluster, within

from engine.tiny import model_path

README = Path(__file__).parents[2] / "README.md"


def test_official_client(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [cluster.model]
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "What is Baton?"}]
        whole = client.chat.completions.create(model=cluster.model, messages=messages, temperature=0, max_tokens=60)
        text = whole.choices[0].message.content
        assert text
        chunks = client.chat.completions.create(
            model=cluster.model, messages=messages, temperature=0, max_tokens=60, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        completion = client.completions.create(model=cluster.model, prompt="Once upon a time", max_tokens=8)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 8
        with pytest.raises(openai.NotFoundError, match="Served here"):
            client.completions.create(model="nosuch", prompt="x")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=cluster.model, prompt="x" * 5000, max_tokens=5)


def test_vllm_bench_serve(cluster: Cluster) -> None:
    target = ["--base-url", cluster.endpoint, "--model", cluster.model, "--tokenizer", str(model_path())]
    load = ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "16", "--seed", "1"]
    words = ["bench", "serve", *target, *load, "--num-prompts", "12", "--max-concurrency", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Successful requests:\s+12\b", done.stdout), done.stdout[-3000:]


def test_curl_from_the_readme(cluster: Cluster) -> None:
    commands = re.findall(r"^curl (?:\\\n|[^\n])+", README.read_text(), re.MULTILINE)
    assert commands, "the README shows a curl line"
    for command in commands:
        words = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", cluster.endpoint))
        done = subprocess.run(
            [*words, "--fail", "--silent", "--show-error"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        assert "choices" in done.stdout or "data" in done.stdout, command


async def _stream(session: aiohttp.ClientSession, cluster: Cluster, number: int) -> str:
    body = {"model": cluster.model, "prompt": f"Story {number}. Once upon a time", "max_tokens": 32, "stream": True,
            "ignore_eos": True}  # fmt: skip
    async with session.post(f"{cluster.endpoint}/v1/completions", json=body) as response:
        assert response.status == 200
        return await response.text()


async def test_sixty_four_streams(cluster: Cluster) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        texts = await asyncio.gather(*(_stream(session, cluster, number) for number in range(64)))
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert all(json.loads(text.split("\n\n")[-3][6:])["choices"][0]["finish_reason"] == "length" for text in texts)
    within(2.0, cluster.idle, cluster.loads)


LONG = {"prompt": "Once upon a time " * 100, "max_tokens": 300, "ignore_eos": True}


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_before_the_first_byte(cluster: Cluster, after_s: float, stream: bool) -> None:
    body = {**LONG, "model": cluster.model, "prompt": f"{after_s}{stream}" + str(LONG["prompt"]), "stream": stream}
    async with aiohttp.ClientSession() as session:
        posting = asyncio.ensure_future(session.post(f"{cluster.endpoint}/v1/completions", json=body))
        await asyncio.wait({posting}, timeout=after_s)  # when the client leaves: the test's subject
        posting.cancel()
        await asyncio.wait({posting})
        if not posting.cancelled():
            posting.result().close()  # the answer began just before the client left
    assert await asyncio.to_thread(within, 2.0, cluster.idle, cluster.loads) < 2.0


async def test_client_that_leaves_after_the_first_byte(cluster: Cluster) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{cluster.endpoint}/v1/completions", json={**LONG, "model": cluster.model, "stream": True}
        ) as answer,
    ):
        assert await answer.content.readany()
        answer.close()
    assert await asyncio.to_thread(within, 2.0, cluster.idle, cluster.loads) < 2.0
