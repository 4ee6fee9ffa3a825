"""Identities that travel between processes.

A reference to held KV blocks must never match a producer that has restarted since (vLLM issue 52234: a stale reference
was answered with another prompt's text). `TransferId` therefore carries the producer's epoch, and is made by the
router, so that a release needs nothing the producer has not answered yet.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

InstanceId = NewType("InstanceId", str)
"""Name of one instance, unique in a fleet, e.g. ``prefill-0``."""

RequestId = NewType("RequestId", str)
"""Name of one client request; appears in the response's ``id`` and in every log line about it."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class TransferId(NamedTuple):
    """One handoff of one attempt of one request.

    `producer_epoch` counts the starts of the prefill engine that holds the blocks.
    """

    request: RequestId
    attempt: int
    producer_epoch: int

    def __str__(self) -> str:
        return f"{self.request}/{self.attempt}@{self.producer_epoch}"


def accept_request_id(header: str | None) -> RequestId | None:
    """The client's own request id if it is fit to be an id (1 to 128 of ``A-Za-z0-9_.:-``), else None.

    vLLM honours ``X-Request-Id``; we do too, but never let a header put line breaks or megabytes into our logs.
    """
    if header is not None and _REQUEST_ID.fullmatch(header):
        return RequestId(header)
    return None
