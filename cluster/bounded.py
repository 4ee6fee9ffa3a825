"""Reads a peer's HTTP answer: plain bytes only, and no more bytes than the caller allows. Tells whether this process is
to blame where there is none. A shell.

Every session to a peer sends `PLAIN` and does not decompress (``auto_decompress=False``), because a few kilobytes of
gzip hold a gigabyte. An answer that is encoded all the same is not read.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from typing import Final

import aiohttp

from cluster.http.headers import encoding

PLAIN: Final[Mapping[str, str]] = {"Accept-Encoding": "identity"}
"""Request header that asks for an answer without compression."""

WORD_BYTES_MAX: Final = 8 << 20
"""Limit for a peer's answer about itself (models, metrics, state): 8 MiB. vLLM's largest, ``/metrics``, has 300 KB."""


class Unfit(Exception):
    """The answer is not read. `why` is ``too_long`` or ``encoded``."""

    def __init__(self, because: str, why: str) -> None:
        super().__init__(because)
        self.why = why


async def whole_body(answer: aiohttp.ClientResponse, bytes_max: int = WORD_BYTES_MAX) -> bytes:
    """The whole body of a peer's answer. A connection that breaks raises what aiohttp raises.

    Raises:
        Unfit: the body is longer than `bytes_max`, or encoded.
    """
    encoded = encoding(answer.headers.get("Content-Encoding", ""))
    if encoded:
        answer.close()
        raise Unfit(f"its answer is encoded ({encoded[:40]!r}) although plain bytes were asked for", "encoded")
    found = bytearray()
    async for piece in answer.content.iter_any():
        found += piece
        if len(found) > bytes_max:
            answer.close()
            raise Unfit(f"its answer is longer than {bytes_max} bytes", "too_long")
    return bytes(found)


def no_descriptors(error: OSError) -> bool:
    """Whether no connection was made because this process, or the machine, has run out of file descriptors: the peer
    may be healthy. A host's name is looked up in files: without descriptors, `error` says that the host is unknown.
    """
    if isinstance(error, socket.gaierror):
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as instead:
            error = instead
    return error.errno in {errno.EMFILE, errno.ENFILE}
