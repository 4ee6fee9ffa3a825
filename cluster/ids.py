"""Identities that travel between processes.

A reference to held KV blocks must never match a producer that has restarted since (vLLM issue 52234: a stale reference
was answered with another prompt's text). `TransferId` therefore carries the producer's epoch. The router makes the id,
so that a release needs no answer from the producer.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, NewType

InstanceId = NewType("InstanceId", str)
"""Name of one instance, unique in a fleet, e.g. ``prefill-0``. A rank of a data parallel engine is an instance of its
own: ``prefill-0@1`` is rank 1 of the engine ``prefill-0``."""

RANK_MARK: Final = "@"
"""Stands between an engine's name and the number of its rank. No engine has it in its own name."""

RANKS_MAX: Final = 1024
"""Most data parallel ranks of one engine."""

RequestId = NewType("RequestId", str)
"""Name of one client request, made by the router. It stands in the response's ``id``, in log lines, and at engines."""

_RANKED = re.compile(r"([^@]+)@(0|[1-9][0-9]{0,3})")
_CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


def ranks_of(engine: InstanceId, ranks: int) -> tuple[InstanceId, ...]:
    """The instances that one engine is: itself, or each of its data parallel ranks."""
    if ranks == 1:
        return (engine,)
    return tuple(InstanceId(f"{engine}{RANK_MARK}{rank}") for rank in range(ranks))


def engine_of(instance: InstanceId) -> InstanceId:
    """The engine of an instance, which has the keys, the agent and the port: of ``prefill-0@1`` it is ``prefill-0``."""
    return InstanceId(instance.partition(RANK_MARK)[0])


def rank_of(instance: InstanceId) -> int | None:
    """The number of the data parallel rank that an instance is; None: a whole engine, or a malformed name."""
    if RANK_MARK not in instance:
        return None
    match = _RANKED.fullmatch(instance)
    return None if match is None else int(match[2])


class TransferId(NamedTuple):
    """One hand-over of one attempt of one request.

    `producer_epoch` counts the starts of the prefill engine that holds the blocks.
    """

    request: RequestId
    attempt: int
    producer_epoch: int

    def __str__(self) -> str:
        return f"{self.request}/{self.attempt}@{self.producer_epoch}"


def client_id_in(header: str | None) -> str:
    """The client's own name for its request if it has a valid form, else empty.

    Valid are 1 to 128 of ``A-Za-z0-9_.:-``, the first a letter or digit.

    vLLM makes this name the request's id. Baton repeats it in the answer, logs it, and finds it in ``/explain`` for the
    client's tenant. It is no `RequestId`: two clients may choose the same name, or a name that they have seen
    elsewhere.
    """
    return header if header is not None and _CLIENT_ID.fullmatch(header) else ""
