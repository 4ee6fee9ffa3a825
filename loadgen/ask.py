"""Asks an endpoint, before a load, which model it serves and how many tokens a text has there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from cluster.errors import UsageError
from loadgen.body import Asking
from loadgen.prompts import Fit, fit, text_of

ASK_S = 60.0
"""Time limit of a probe, which may wait in a busy server's queue."""

PROBE_CHARS = (200, 1200)
"""Lengths of the two probes in characters: long enough to tell the ratio from the chat template's tokens, short enough
for a context of 2,048 tokens of one byte each."""


async def model_of(url: str, headers: Mapping[str, str]) -> str:
    """The name of the first model that the endpoint lists.

    Raises:
        UsageError: the endpoint does not answer, or lists no model.
    """
    try:
        async with (
            asyncio.timeout(ASK_S),
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{url}/v1/models") as answer,
        ):
            if answer.status != 200:
                raise UsageError(f"{url}/v1/models answers {answer.status}; name the model with --model")
            listed = await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UsageError(f"{url} does not answer: {str(error) or type(error).__name__}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{url}/v1/models does not answer with JSON; name the model with --model") from None
    try:
        return str(listed["data"][0]["id"])
    except (LookupError, TypeError):
        raise UsageError(f"{url}/v1/models lists no model; name it with --model") from None


async def fit_of(url: str, headers: Mapping[str, str], asking: Asking) -> Fit | None:
    """How characters become prompt tokens there, from two requests of one token each; None if `usage` is missing."""
    try:
        async with asyncio.timeout(ASK_S), aiohttp.ClientSession(headers=headers) as session:
            points = [(chars, await _prompt_tokens(session, url, asking, chars)) for chars in PROBE_CHARS]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError, LookupError, TypeError):
        return None
    return fit(points[0], points[1])


async def _prompt_tokens(session: aiohttp.ClientSession, url: str, asking: Asking, chars: int) -> int:
    """Prompt tokens of one probe, as `usage` counts them."""
    text = text_of(f"probe {asking.salt} {chars}".encode(), chars)
    body: dict[str, Any] = {"model": asking.model, "max_tokens": 1, **asking.extra}
    body |= {"messages": [{"role": "user", "content": text}]} if asking.chat else {"prompt": text}
    body.pop("stream", None)
    async with session.post(f"{url}{asking.path}", json=body) as answer:
        found = await answer.json(content_type=None)
    return int(found["usage"]["prompt_tokens"])
