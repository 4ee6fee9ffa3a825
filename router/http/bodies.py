"""Reads the body of an aiohttp request: within a size and a time, in its turn. A shell: clients take time."""

from __future__ import annotations

import asyncio
from io import BytesIO

import aiohttp
from aiohttp import web

from cluster.errors import ApiError, bad_request, body_timeout
from router.http.cold import UploadTurn
from router.http.uploads import Uploads, no_room_for_bodies


async def read_body(
    http: web.Request,
    bytes_max: int,
    timeout_s: float,
    too_long: ApiError,
    uploads: Uploads | None = None,
    client: str | None = None,
) -> bytes:
    """The whole body.

    Args:
        http: the request.
        bytes_max: the most bytes that are read.
        timeout_s: the time for the whole body, waiting for its turn included.
        too_long: raised for more than `bytes_max`.
        uploads: all bodies that are being read; None: this one does not count.
        client: the upload's client (`Uploads.add`).

    Raises:
        ApiError: `too_long`; 408 after `timeout_s`, or 503 if it waited for other uploads; 400 if it breaks off.
    """
    if (http.content_length or 0) > bytes_max:
        raise too_long
    body, turn = BytesIO(), None if uploads is None else UploadTurn(uploads, client)
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in http.content.iter_any():
                body.write(piece)
                if body.tell() > bytes_max:
                    raise too_long
                if turn is not None:
                    await turn.brought(len(piece))
    except TimeoutError:
        waited = turn is not None and turn.waited
        raise (no_room_for_bodies() if waited else body_timeout(timeout_s)) from None
    except (aiohttp.ClientPayloadError, web.RequestPayloadError, ValueError) as error:
        raise bad_request(f"The body could not be read: {error}") from None
    finally:
        if uploads is not None and turn is not None:
            uploads.end(turn)
    return body.getvalue()
