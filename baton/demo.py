"""One streamed completion through the router, shown on the user's terminal: the proof that the whole cluster works."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from baton.board import Board
from baton.output import emit, show

QUESTION = "What is Baton?"
TOKENS = 300
"""Most tokens of the answer."""
EXTERNAL = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*source="external_kv_transfer"[^}]*\}\s+(\S+)', re.MULTILINE
)
"""vLLM's counter of prompt tokens whose KV came from another engine."""


@dataclass(slots=True)
class Demo:
    """The results of one streamed answer."""

    text: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    """Tokens of the question, by the engine's count."""
    pulled: int = 0
    """Prompt tokens of the question that the decode engines pulled from a prefill engine, by their own count."""
    proven: int = 0
    """Tokens that they pulled besides: the router's prompts that prove pairs of engines (docs/connector.md)."""
    because: str = ""
    """The router's reason for its choice; empty if it says none."""


async def demonstrate(
    router: tuple[str, str], model: str, decode_urls: list[str], board: Board, *, as_json: bool
) -> None:
    """Ask one question; show the answer as it comes, and how it was served. `router`: the URLs of its two sides, for
    clients and for administrators. `as_json`: one JSON object at the end.

    Raises:
        aiohttp.ClientError: the request failed.
        ValueError: the answer cannot be read.
    """
    board.say(f"\n> {QUESTION}")
    demo = await ask(router, model, decode_urls, (lambda _: None) if as_json else show)
    if as_json:
        emit({"event": "demo", "text": demo.text, "first_token_s": demo.first_s, "pulled_tokens": demo.pulled})
        return
    show("\n")
    board.say(
        f"\nfirst token after {demo.first_s * 1000:.0f} ms, whole answer after {demo.total_s:.1f} s; {_way(demo)}"
    )


async def ask(router: tuple[str, str], model: str, decode_urls: list[str], on_text: Callable[[str], None]) -> Demo:
    """Stream one chat answer from the router, calling `on_text` with each piece as it comes.

    Raises:
        aiohttp.ClientError: the request failed.
        ValueError: a line of the stream is not JSON.
    """
    demo, (endpoint, admin) = Demo(), router
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        before = await _pulled(session, decode_urls)
        started = time.monotonic()
        body = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with session.post(f"{endpoint}/v1/chat/completions", json=body) as response:
            name = response.headers.get("X-Baton-Request-Id", "")
            async for line in response.content:
                piece, prompt_tokens = _read(line)
                demo.prompt_tokens = prompt_tokens or demo.prompt_tokens
                if piece:
                    demo.first_s = demo.first_s or time.monotonic() - started
                    demo.text += piece
                    on_text(piece)
        demo.total_s = time.monotonic() - started
        _count(demo, before, await _pulled(session, decode_urls))
        demo.because = await _because(session, f"{admin}/explain/{name}")
    return demo


async def _because(session: aiohttp.ClientSession, url: str) -> str:
    """The router's reason for its last choice of this request; empty if it has none (any more)."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(5.0)) as response:
            turns = (await response.json())["turns"]
        return next((str(turn["because"]) for turn in reversed(turns) if turn["turn"] == "choice"), "")
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        return ""  # the answer itself has come: the demo has shown what it is for


def _count(demo: Demo, before: int, after: int) -> None:
    """Say what was pulled for the question, and what for proofs: one may end while the answer comes."""
    own = after - before
    demo.pulled = own if own <= demo.prompt_tokens else 0
    demo.proven = after - demo.pulled


def _read(line: bytes) -> tuple[str, int]:
    """The text in one SSE line, and the prompt's tokens; empty and 0 for lines without them."""
    if not line.startswith(b"data: {"):
        return "", 0
    event = json.loads(line[6:])
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or ""), int(
        (event.get("usage") or {}).get("prompt_tokens", 0)
    )


async def _pulled(session: aiohttp.ClientSession, urls: list[str]) -> int:
    """Prompt tokens that these engines have pulled since their start."""
    total = 0.0
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            total += sum(float(count) for count in EXTERNAL.findall(await response.text()))
    return int(total)


def how_to_use(endpoint: str, model: str) -> str:
    """Two ways to ask the same question: by `curl`, and by OpenAI's client."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{QUESTION}"}}], "stream": true}}'
    curl = f"curl -N {endpoint}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    python = (
        f'OpenAI(base_url="{endpoint}/v1", api_key="none").chat.completions.create('
        f'model="{model}", messages=[{{"role": "user", "content": "{QUESTION}"}}]).choices[0].message.content'
    )
    return f"  {curl}\n\n  from openai import OpenAI; print({python})"


def _way(demo: Demo) -> str:
    """How the first answer was served."""
    if demo.pulled:
        return f"the KV cache of {demo.pulled} prompt tokens went from prefill to decode over NIXL"
    whole = "served whole by one engine (docs/policy.md)"
    if demo.because.startswith("whole on "):
        whole += f". The router's reason: {demo.because}"
    if not demo.proven:
        return whole
    proof = f"prefill handed {demo.proven} prompt tokens over to decode by NIXL, to prove that the text is the same"
    return f"{whole}.\nBefore that, {proof}"
