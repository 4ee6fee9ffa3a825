"""The content of one request's legs: heads, its body with the router's fields, tickets. A shell: a ticket has a
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from cluster import wire
from cluster.http.headers import Headers, lines
from cluster.ids import RANK_MARK, InstanceId, RequestId, TransferId
from cluster.instance import Instance
from cluster.request import Request
from router.request.body import closing, opened
from router.request.parts import Parts
from router.request.trace import RequestTrace


class Outgoing:
    """The outgoing content of one request."""

    __slots__ = ("_head", "_onward", "_open", "_parts", "_request", "_trace")

    def __init__(self, parts: Parts, request: Request, headers: Headers, trace: RequestTrace) -> None:
        """`headers`: as the client sent them."""
        self._parts: Final = parts
        self._request: Final = request
        self._trace: Final = trace
        if headers.onward is None:
            onward = {**parts.engines.credentials.headers_for(headers), "content-type": "application/json"}
            headers.onward = onward, lines(onward)
        self._onward, start = headers.onward
        self._head = b"%bx-request-id: %b\r\n%b" % (start, request.id.encode(), trace.untraced)
        """The headers of its legs, as lines."""
        if trace.unsampled is not None:
            self._head = lines(trace.unsampled.passed_on(self.headers))
        self._open: tuple[bytes | memoryview, ...] = ()
        """Its body without its end, while legs are still to be sent."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its legs."""
        return {**self._onward, "x-request-id": self._request.id}

    def lines(self, stage: str, target: Instance) -> bytes:
        """A leg is sent: returns its headers, as lines."""
        self._trace.sends(stage, target)
        return self.early_lines(stage, target)

    def early_lines(self, stage: str, target: Instance) -> bytes:
        """The headers of an early leg, as lines. Its stage begins later: the router still waits for another leg."""
        recorded = self._trace.recorded
        return _at_rank(lines(self._trace.traced(stage, target, self.headers)) if recorded else self._head, target)

    def early_over(self, because: str) -> None:
        """An early leg is closed before it became the decode leg."""
        self._trace.early_over(because)

    def asks_source(self) -> None:
        """The leg whose headers were made last waits for a source leg."""
        self._trace.asks_source()

    def source_over(self) -> None:
        """The leg that has waited for a source leg is sent."""
        self._trace.source_over()

    def body(self, fields: Mapping[str, Any]) -> tuple[bytes | memoryview, ...]:
        """The client's body with these fields of the router's."""
        if not fields:
            return (self._request.raw,)
        if not self._open:
            self._open = opened(self._request.raw)
        return (*self._open, closing(fields))

    def untraced(self, target: Instance) -> bytes:
        """The headers of a leg that gets no span of its own, as lines."""
        return _at_rank(self._head, target)

    def source_body(self, instance: InstanceId, attempt: int) -> tuple[bytes | memoryview, ...]:
        """The client's body with a source leg's fields."""
        fields = wire.source_fields(self._request.body, transfer=self.transfer_id(instance, attempt))
        return self.body(self.stamped(fields, instance, instance, attempt))

    def prefill_body(
        self, instance: InstanceId, attempt: int, *, token_ids: bool, source: wire.TransferFields | None = None
    ) -> tuple[bytes | memoryview, ...]:
        """The client's body with a prefill leg's fields. `token_ids`, `source`: see `wire.prefill_fields`."""
        request, transfer = self._request, self.transfer_id(instance, attempt)
        if source is not None or self._parts.engines.tickets.signs:
            fields = wire.prefill_fields(request.body, token_ids=token_ids, transfer=transfer, source=source)
            return self.body(self.stamped(fields, instance, instance, attempt))
        body = request.body
        named = "stream_options" in body, "max_completion_tokens" in body, bool(body.get("min_tokens"))
        start, end = _prefill_ending(*named, token_ids)
        if not self._open:
            self._open = opened(request.raw)
        return (*self._open, b"%b%b%b" % (start, str(transfer).encode(), end))

    def forget_body(self) -> None:
        """An instance has begun to answer: the body will not be sent again soon."""
        self._open = ()

    def transfer_id(self, producer: InstanceId, attempt: int) -> TransferId:
        """The name of this request's hold on that instance, made or not."""
        view = self._parts.view
        epoch = view.get(producer).instance.epoch if view.knows(producer) else 0
        return TransferId(self._request.id, attempt, epoch)

    def stamped(self, body: Mapping[str, Any], to: InstanceId, producer: InstanceId, attempt: int) -> Mapping[str, Any]:
        """The body of a leg to `to` about the hold of `producer`, with the ticket that a guarded engine needs."""
        tickets = self._parts.engines.tickets
        if not tickets.signs:
            return body
        return tickets.stamp(body, to, self.transfer_id(producer, attempt), producer=producer)


def _at_rank(head: bytes, target: Instance) -> bytes:
    if RANK_MARK not in target.id or target.rank is None:
        return head
    return b"%b%b: %d\r\n" % (head, _RANK, target.rank)


_RANK: Final = wire.RANK_HEADER.encode()
_ANY_TRANSFER: Final = TransferId(RequestId("any"), 0, 0)


@lru_cache(maxsize=16)
def _prefill_ending(options: bool, limit: bool, least: bool, token_ids: bool) -> tuple[bytes, bytes]:  # noqa: FBT001
    """The router's fields of a prefill leg's body, as JSON: the parts before and after the hold's name.

    `options`, `limit`, `least`: the body has ``stream_options``, ``max_completion_tokens``, ``min_tokens``.
    `wire.prefill_fields` reads no other fields, so requests with the same of these differ in the hold's name alone.
    """
    has = {"stream_options": options, "max_completion_tokens": limit, "min_tokens": least}
    fields = wire.prefill_fields(
        {name: 1 for name, there in has.items() if there}, token_ids=token_ids, transfer=_ANY_TRANSFER
    )
    start, _, end = closing(fields).partition(str(_ANY_TRANSFER).encode())
    return start, end
