"""One streamed completion through the router, shown on the user's terminal: the proof that the whole cluster works."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

import aiohttp

QUESTION = "What is Baton?"
TOKENS = 300
EXTERNAL = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*source="external_kv_transfer"[^}]*\}\s+(\S+)', re.MULTILINE
)


@dataclass(slots=True)
class Demo:
    """The results of one streamed answer."""

    text: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    pulled: int = 0
    """Prompt tokens whose KV the decode engines pulled from a prefill engine, by their own count."""
    proven: int = 0
    """The same before this answer: of the prompts by which the router proves pairs (docs/connector.md)."""


async def ask(endpoint: str, model: str, decode_urls: list[str], show: object) -> Demo:
    """Stream one chat answer from `endpoint`, calling `show(text)` as it comes.

    Raises:
        aiohttp.ClientError: the request failed.
    """
    demo = Demo()
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        before = demo.proven = await _pulled(session, decode_urls)
        started = time.monotonic()
        body = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
        }
        async with session.post(f"{endpoint}/v1/chat/completions", json=body) as response:
            async for line in response.content:
                piece = _piece(line)
                if piece:
                    demo.first_s = demo.first_s or time.monotonic() - started
                    demo.text += piece
                    show(piece)  # type: ignore[operator]
        demo.total_s = time.monotonic() - started
        demo.pulled = await _pulled(session, decode_urls) - before
    return demo


def _piece(line: bytes) -> str:
    """The text in one SSE line; empty for every other line."""
    if not line.startswith(b"data: {"):
        return ""
    choices = json.loads(line[6:]).get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


async def _pulled(session: aiohttp.ClientSession, urls: list[str]) -> int:
    total = 0.0
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            total += sum(float(count) for count in EXTERNAL.findall(await response.text()))
    return int(total)
