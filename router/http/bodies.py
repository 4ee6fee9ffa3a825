"""Reads the body of a request that aiohttp has: within a size and a time. A shell: it waits for a client."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from cluster.errors import ApiError, bad_request, body_timeout


async def read_body(http: web.Request, bytes_max: int, timeout_s: float, too_long: ApiError) -> bytes:
    """All of it. The application's `client_max_size` is to be `bytes_max`, too: that ends bodies of unknown length.

    Raises:
        ApiError: `too_long` for more than `bytes_max`; 408 after `timeout_s`; 400 for one that breaks off.
    """
    if (http.content_length or 0) > bytes_max:
        raise too_long
    try:
        async with asyncio.timeout(timeout_s):
            return await http.read()
    except TimeoutError:
        raise body_timeout(timeout_s) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_long from None
    except (aiohttp.ClientPayloadError, web.RequestPayloadError, ValueError) as error:
        raise bad_request(f"The body could not be read: {error}") from None
