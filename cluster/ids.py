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
"""Name of one client request, made by the router; in the response's ``id``, in every log line about it, at engines."""

_CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class TransferId(NamedTuple):
    """One handoff of one attempt of one request.

    `producer_epoch` counts the starts of the prefill engine that holds the blocks.
    """

    request: RequestId
    attempt: int
    producer_epoch: int

    def __str__(self) -> str:
        return f"{self.request}/{self.attempt}@{self.producer_epoch}"


def client_id_in(header: str | None) -> str:
    """The client's own name for its request if it is fit to be one (1 to 128 of ``A-Za-z0-9_.:-``), else empty.

    vLLM makes it the request's id. Here it is told back, logged, and found by its tenant in ``/explain``; it is no
    `RequestId`, since two clients may choose the same, or one that they have seen elsewhere.
    """
    return header if header is not None and _CLIENT_ID.fullmatch(header) else ""
