"""An instance's API server: reads bodies, and refuses them or gives them to the engine. A shell: it writes to
connections.

Faults that leave the engine nothing to do strike here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import ApiError
from cluster.http.requests import Request
from cluster.wire import EARLY, RELEASE_MODEL
from engine.mock.answers import DONE, encode, event
from engine.mock.asked import MockLimits, MockRequest, UnknownToken, read_asked, read_body, streams
from engine.mock.faults import ON_REQUESTS, ON_TOKENS, FaultKind, FaultLeg, MockFault, MockFaults
from engine.mock.handoffs import MockHandoffs
from engine.mock.http import Exchange
from engine.mock.settings import MockSettings
from engine.mock.transfer import Reference, read_reference, wants_hold

Start = Callable[[MockRequest, Reference | None, Exchange, str, MockFault | None], None]
"""Gives a request to the engine (`engine.mock.serving.Serving.start`)."""


class Frontend:
    """The API server of one instance."""

    def __init__(self, settings: MockSettings, faults: MockFaults, handoffs: MockHandoffs, start: Start) -> None:
        self._faults = faults
        self._handoffs = handoffs
        self._start = start
        config = settings.config
        self._limits = MockLimits(
            model=settings.model, max_model_len=config.max_model_len, block_size=config.block_size
        )

    def generate(self, request: Request, exchange: Exchange, *, chat: bool) -> None:
        """Answer a request to one of OpenAI's two endpoints; `chat`: chat completions, else completions."""
        fields: Mapping[str, Any] = {}
        body: dict[str, Any] = {}
        base = request.headers.get("x-request-id") or uuid.uuid4().hex
        try:
            body = read_body(request.body, request.headers.get("content-type") or "")
            sent = body.get("kv_transfer_params")
            fields = sent if isinstance(sent, dict) else {}
            fault = self._faults.strike(ON_REQUESTS, leg_of(body, fields), base)
            if fault is not None and self._strikes_at_once(fault, exchange):
                return
            asked = read_asked(body, self._limits, chat=chat)
            reference = read_reference(fields)
        except ApiError as error:
            self._reject(fields)
            if isinstance(error, UnknownToken) and streams(body):
                exchange.begin()
                exchange.end(event(error.body()) + DONE)
            else:
                exchange.respond(error.status, encode(error.body()))
            return
        self._start(asked, reference, exchange, f"{'chatcmpl' if chat else 'cmpl'}-{base}", fault)

    def strikes_release(self, request: Request, exchange: Exchange) -> bool:
        """Apply a fault to a request that gives a hold up by its name. Returns whether one struck."""
        fault = self._faults.strike(ON_REQUESTS, FaultLeg.RELEASE, request.headers.get("x-request-id") or "")
        return fault is not None and self._strikes_at_once(fault, exchange)

    def _strikes_at_once(self, fault: MockFault, exchange: Exchange) -> bool:
        """Apply a fault that leaves the engine nothing to do. Returns false for a fault that strikes later."""
        if fault.fault is FaultKind.REFUSE:
            error = ApiError(fault.status, "ServiceUnavailableError", "Refused (a fault of the mock)")
            exchange.respond(error.status, encode(error.body()))
        elif fault.after_tokens or fault.fault is FaultKind.ERROR or fault.fault in ON_TOKENS:
            return False
        elif fault.fault is FaultKind.BREAK:
            exchange.drop()
        return True  # a hanging request keeps its connection until the client gives up

    def _reject(self, fields: Mapping[str, Any]) -> None:
        """Reject a leg before the engine sees it, and tell its producer (vLLM,
        entrypoints/generate/base/serving.py).
        """
        try:
            reference = read_reference(fields)
        except ApiError:
            return
        if reference is not None:
            self._handoffs.want(reference)
            self._handoffs.give_back(reference.source, FaultLeg.RELEASE)


def leg_of(body: Mapping[str, Any], fields: Mapping[str, Any]) -> FaultLeg:
    """The leg that a request is, by its body and its ``kv_transfer_params`` (`fields`)."""
    if body.get("model") == RELEASE_MODEL:
        return FaultLeg.RELEASE
    if wants_hold(fields):
        return FaultLeg.PREFILL
    return FaultLeg.DECODE if fields.get("do_remote_prefill") or EARLY in fields else FaultLeg.WHOLE
